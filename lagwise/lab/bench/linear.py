"""`lagwise bench linear`: linear attention with encodings beside linear attention without, softmax, and SPE as published."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import lagwise
from lagwise import linear
from lagwise.encodings import ConvSPE, Encoding, SineSPE
from lagwise.lab.bench.baselines import plain_linear, published_contender, softmax_contender
from lagwise.lab.bench.cases import Case, make_records
from lagwise.lab.bench.contenders import Contender, Entry, compare_contenders, make_encoding, make_tensors
from lagwise.lab.bench.timing import measure, ratios

# The feature map of all contenders.
FEATURES = "relu"

OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "sine-spe": {"sines": 5, "realizations": 64},
    "conv-spe": {"kernel_size": 128, "realizations": 64},
    "rotary": {},
    "permute": {},
}
"""The encodings that are measured, with their options."""

QUICK = ["none", "sine-spe", "conv-spe"]
DECODED = ["none", "sine-spe", "conv-spe", "rotary"]

GOALS: dict[str, dict[str, tuple[float, float | None]]] = {
    "cpu": {"sine-spe": (3.0, None), "conv-spe": (12.0, None)},
    "cuda": {"sine-spe": (2.0, 1.5), "conv-spe": (4.0, 1.5)},
}
"""What we promise for an encoding: time and memory of training, as ratios to linear attention without positions."""

SHAPES = {
    "cpu": [Case("none", 8, 8, 1024, 64)],
    "cuda": [Case("none", 8, 8, 4096, 64), Case("none", 4, 8, 16384, 64)],
}
SWEEP_TIMES = {"cpu": [1024, 4096, 16384], "cuda": [1024, 4096, 16384, 65536, 262144, 1048576]}
SWEEP_TOKENS = 65536
"""Tokens of a step on a GPU, where the batch shrinks as the length grows; beyond, it is one sequence."""

# A decoding step of one token, the tokens of the prompt before it, and the positions at which it is timed.
DECODE, PROMPT, POSITIONS = Case("none", 8, 8, 1, 64, causal=True), 64, [100, 1_000_000]


def sweep_shapes(device: torch.device, longest: int | None = None) -> list[Case]:
    """Returns the shapes of a sweep, up to a length."""
    tokens = SWEEP_TOKENS if device.type == "cuda" else 0
    times = [time for time in SWEEP_TIMES[device.type] if longest is None or time <= longest]
    return [Case("none", max(1, tokens // time), 8, time, 64) for time in times]


def our_case(shape: Case, encoding: str, device: torch.device) -> Case:
    """Returns the case of an encoding in a shape, with its goals where we have made a promise for the shape."""
    promised = shape in SHAPES[device.type]
    goal, memory_goal = GOALS[device.type].get(encoding, (None, None)) if promised else (None, None)
    return replace(shape, encoding=encoding, options=OPTIONS[encoding], goal=goal, memory_goal=memory_goal)


def measure_linear(
    shape: Case,
    *,
    device: torch.device,
    dtype: torch.dtype,
    repeats: int,
    encodings: list[str] | None = None,
    quick: bool = False,
    bench: str = "linear",
    progress: Callable[[str], None] = lambda name: None,
) -> list[dict[str, Any]]:
    """Measures one shape and returns a record for each contender, linear attention without positions first.

    Args:
        encodings: Leave out all others, but for "none".
        quick: Leave out all but linear attention without positions, as plain code and as ours, and ours with SPE.
        bench: The kind of the records, "linear" or "linear sweep".
    """
    q, k, v, dout = make_tensors(shape, device, dtype)
    cases: dict[str, Case] = {"plain": shape}
    contenders: dict[str, Entry] = {"plain": [Contender(lambda: plain_linear(q, k, v, causal=shape.causal))]}
    wanted = [name for name in (QUICK if quick else OPTIONS) if not encodings or name in ("none", *encodings)]
    for name in wanted:
        case = our_case(shape, name, device)
        encoding = make_encoding(case, device)

        def call(encoding: Encoding = encoding) -> Tensor:
            return lagwise.linear_attention(q, k, v, encoding, feature_map=FEATURES, causal=shape.causal)

        cases[f"lagwise, {name}"] = case
        contenders[f"lagwise, {name}"] = [Contender(call, tuple(encoding.parameters()))]
    if not quick:
        cases["softmax"] = shape
        contenders["softmax"] = softmax_contender(q, k, v, causal=shape.causal)
        for name in wanted:
            case = replace(our_case(shape, name, device), goal=None, memory_goal=None)
            encoding = make_encoding(case, device)
            if isinstance(encoding, SineSPE | ConvSPE):
                title = f"published, {name.removesuffix('-spe')}"
                cases[title] = case
                contenders[title] = published_contender(q, k, v, encoding, causal=shape.causal)
    numbers = compare_contenders(contenders, [q, k, v], dout, repeats=repeats, graph=False, progress=progress)
    return make_records(bench, cases, numbers, device, dtype, repeats)


def measure_decoding(
    *,
    device: torch.device,
    dtype: torch.dtype,
    repeats: int,
    encodings: list[str] | None = None,
    progress: Callable[[str], None] = lambda name: None,
) -> list[dict[str, Any]]:
    """Measures a decoding step near and far from the start of a sequence, and returns a record for each encoding and position.

    `step_ratio` is to the first position in the same turn.
    """
    found = []
    for name in (name for name in DECODED if not encodings or name in encodings):
        case, contender = our_case(DECODE, name, device), f"lagwise, {name}"
        steps = decoding_steps(make_encoding(case, device).eval(), device, dtype)
        measured = measure(steps, device, repeats, lambda position, name=name: progress(f"{name}, position {position}"))
        relative = ratios(measured, str(POSITIONS[0]))
        for position in POSITIONS:
            result = measured[str(position)]
            numbers = {"error": result.error}
            if result.error is None:
                numbers = {
                    "step_ms": 1000 * result.median, "step_ratio": relative.get(str(position)), "peak_bytes": result.peak,
                    "turns": len(result.seconds),
                }  # fmt: skip
            found += make_records(
                "linear decode", {contender: case}, {contender: {"position": position, **numbers}}, device, dtype, repeats
            )
    return found


def decoding_steps(encoding: Encoding, device: torch.device, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """Returns a decoding step by its position: the states differ in that alone."""
    (q, k, v, _), prompt = make_tensors(DECODE, device, dtype), make_tensors(replace(DECODE, time=PROMPT), device, dtype)
    with torch.no_grad():
        _, state = linear.prefill(prompt[0], prompt[1], prompt[2], encoding, feature_map=FEATURES)

    @torch.no_grad()
    def step(position: int) -> Tensor:
        return linear.step(q, k, v, replace(state, length=position), encoding, feature_map=FEATURES)[0]

    return {str(position): partial(step, position) for position in POSITIONS}
