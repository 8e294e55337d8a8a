"""Learning rates as functions of the step."""

import math


def factor(schedule: str, step: int, *, steps: int, warmup: int) -> float:
    """Returns the learning rate of a step, counted from 0, by the largest one.

    >>> [round(factor("cosine", step, steps=8, warmup=2), 3) for step in range(8)]
    [0.5, 1.0, 1.0, 0.933, 0.75, 0.5, 0.25, 0.067]
    """
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    if schedule == "constant":
        return 1.0
    if schedule == "linear":
        return 1.0 - done
    if schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * done))
    if schedule == "rsqrt":
        return math.sqrt(max(1, warmup) / (step + 1))
    raise ValueError(f"schedule must be 'constant', 'linear', 'cosine' or 'rsqrt', but is {schedule!r}")
