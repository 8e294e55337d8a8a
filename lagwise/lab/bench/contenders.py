"""Ways to compute the same on the same tensors, and the comparison of them in turns."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

import lagwise
from lagwise.encodings import Encoding
from lagwise.lab.bench.cases import Case
from lagwise.lab.bench.timing import measure, ratios


@dataclass(frozen=True)
class Contender:
    """A way to compute attention on tensors that it knows.

    Args:
        call: Returns the output.
        learned: What has a gradient beside q, k and v.
        facts: What its lines in the results tell beside the numbers.
        deterministic: Run it under `torch.use_deterministic_algorithms(True)`.
    """

    call: Callable[[], Tensor]
    learned: tuple[Tensor, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    deterministic: bool = False


Entry: TypeAlias = list[Contender] | str
"""Attempts, of which the first that runs is measured, or the reason for which a contender is left out."""


def make_tensors(case: Case, device: torch.device, dtype: torch.dtype, *, by_token: bool = False) -> list[Tensor]:
    """Returns q, k and v, and a gradient of the output, whose memory goes head by head or token by token."""
    generator = torch.Generator(device).manual_seed(0)
    sizes = (case.time, case.heads) if by_token else (case.heads, case.time)
    shape = (case.batch, *sizes, case.head_dim)
    made = [torch.randn(shape, generator=generator, device=device, dtype=dtype) for _ in range(4)]
    if by_token:
        made = [x.transpose(1, 2) for x in made]
    return [*(x.requires_grad_() for x in made[:3]), made[3]]


def make_encoding(case: Case, device: torch.device) -> Encoding:
    """Makes the encoding of a case."""
    torch.manual_seed(0)
    return lagwise.make(case.encoding, heads=case.heads, head_dim=case.head_dim, **case.options).to(device)


def compare_contenders(
    contenders: dict[str, Entry],
    inputs: list[Tensor],
    dout: Tensor,
    *,
    repeats: int,
    graph: bool,
    progress: Callable[[str], None],
) -> dict[str, dict[str, Any]]:
    """Measures contenders in turns, and returns for each its facts and its numbers, or the error in place of these.

    Ratios are to the first contender in the same turn. `peak_bytes` is what training takes beyond the inputs and the gradient of
    the output, `held_bytes` is with them, and `memory_ratio` is of the latter.
    """

    def forward(contender: Contender) -> Callable[[], None]:
        def call() -> None:
            with torch.no_grad(), determinism(contender.deterministic):
                contender.call()

        return call

    def training(contender: Contender) -> Callable[[], None]:
        def step() -> None:
            with determinism(contender.deterministic):
                # Not `backward`, whose gradients of the step before would be freed in this one and be missing from its memory.
                torch.autograd.grad(contender.call(), [*inputs, *contender.learned], dout, allow_unused=True)

        return step

    chosen: dict[str, Contender] = {}
    for name, attempts in contenders.items():
        if not isinstance(attempts, str):
            progress(name)
            chosen[name] = first_that_runs(attempts, training)
    device, anchor = dout.device, next(iter(contenders))
    held = sum(x.numel() * x.element_size() for x in [*inputs, dout])
    both = measure({name: training(c) for name, c in chosen.items()}, device, repeats, progress, graph=graph)
    # What does not train is not timed forward: the numbers of a line belong together.
    trained = {name: c for name, c in chosen.items() if both[name].error is None}
    ahead = measure({name: forward(c) for name, c in trained.items()}, device, repeats, progress, graph=graph)
    both_ratios = ratios(both, anchor)
    ahead_ratios = ratios(ahead, anchor) if anchor in ahead else {}
    # A contender that failed has no memory.
    anchor_held = both[anchor].peak + held if anchor in trained else None
    numbers: dict[str, dict[str, Any]] = {}
    for name, attempts in contenders.items():
        if isinstance(attempts, str):
            numbers[name] = {"error": attempts}
        elif error := both[name].error or ahead[name].error:
            numbers[name] = {**chosen[name].facts, "error": error}
        else:
            numbers[name] = {
                **chosen[name].facts, "forward_ms": 1000 * ahead[name].median, "training_ms": 1000 * both[name].median,
                "forward_ratio": ahead_ratios.get(name), "training_ratio": both_ratios.get(name), "peak_bytes": both[name].peak,
                "held_bytes": both[name].peak + held,
                "memory_ratio": (both[name].peak + held) / anchor_held if anchor_held else None,
                "turns": len(both[name].seconds),
            }  # fmt: skip
    return numbers


def first_that_runs(attempts: list[Contender], training: Callable[[Contender], Callable[[], None]]) -> Contender:
    """Returns the first attempt whose training step runs, else the last one, whose error then comes up when it is measured."""
    for contender in attempts[:-1]:
        try:
            training(contender)()
            return contender
        except Exception:
            continue
    return attempts[-1]


@contextmanager
def determinism(wanted: bool) -> Iterator[None]:
    """Switches torch's deterministic algorithms on, if wanted; if not, no call is made slower by a switch."""
    if not wanted:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
