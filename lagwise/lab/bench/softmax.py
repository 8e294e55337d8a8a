"""`lagwise bench attention`: attention with encodings beside plain attention, and beside what people run for them today."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import lagwise
from lagwise.encodings import T5, Encoding
from lagwise.lab.bench.baselines import baselines_of, dense_contender, plain_contenders
from lagwise.lab.bench.cases import Case, make_records
from lagwise.lab.bench.contenders import Contender, Entry, compare_contenders, determinism, make_encoding, make_tensors

CPU_CASES = [
    Case("t5", 1, 8, 4096, 64, goal=1.5),
    Case("at5", 1, 8, 4096, 64, {"max_lag": 128}, goal=1.5),
    Case("huang4", 1, 8, 2048, 64, {"max_lag": 128}, goal=2.0),
    Case("shaw", 1, 8, 2048, 64, {"max_lag": 128, "values": False}, goal=2.0),
    Case("shaw", 1, 8, 2048, 64, {"max_lag": 128}),
    Case("huang2", 1, 8, 2048, 64, {"max_lag": 128}),
    Case("t5", 1, 8, 4096, 64, {"causal": True}, causal=True),
]


def cuda_cases(batch: int, heads: int, time: int, head_dim: int, goals: list[float], *, graph: bool = False) -> list[Case]:
    """Returns the cases of one shape, with one goal for each group of encodings."""
    groups: list[list[tuple[str, dict[str, Any]]]] = [
        [("t5", {}), ("at5", {"max_lag": 128}), ("huang1", {"max_lag": 128}), ("huang2", {"max_lag": 128})],
        [("shaw", {"max_lag": 128, "values": False}), ("huang4", {"max_lag": 128})],
        [("huang3", {"max_lag": 128}), ("shaw", {"max_lag": 128})],
        [("t5-free", {"max_lag": time}), ("at5", {"max_lag": None}), ("kerple", {})],
        [("huang4", {"max_lag": time})],
    ]
    return [
        Case(encoding, batch, heads, time, head_dim, options, goal=goal, graph=graph)
        # The last group has no goal at long sequences, and no case.
        for goal, group in zip(goals, groups, strict=False)
        for encoding, options in group
    ]


CUDA_CASES = [
    *cuda_cases(16, 12, 512, 64, [2.0, 2.5, 4.0, 2.5, 3.0], graph=True),
    *cuda_cases(2, 16, 8192, 64, [1.35, 1.5, 2.0, 2.5]),
    *cuda_cases(2, 16, 8192, 128, [1.35, 1.5, 2.0, 2.5]),
    *cuda_cases(1, 16, 32768, 64, [1.15, 1.2, 1.4, 2.5]),
]

SWEEP_TIMES = {
    "cpu": [512, 1024, 2048, 4096, 8192],
    "cuda": [512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072],
}
SWEEP_TOKENS = 65536
"""Tokens of a step on a GPU, where the batch shrinks as the length grows."""


def sweep_cases(time: int, device: torch.device) -> dict[str, Case]:
    """Returns what a sweep measures at one length on the same tensors, by the name of its line in the plot."""
    batch, heads = (max(1, SWEEP_TOKENS // time), 16) if device.type == "cuda" else (1, 4)
    return {
        "lagwise, t5": Case("t5", batch, heads, time, 64),
        "lagwise, shaw keys": Case("shaw", batch, heads, time, 64, {"max_lag": 128, "values": False}),
        "lagwise, huang4": Case("huang4", batch, heads, time, 64, {"max_lag": 128}),
        "lagwise, t5-free at every lag": Case("t5-free", batch, heads, time, 64, {"max_lag": time}),
    }


def measure_attention(
    case: Case,
    *,
    device: torch.device,
    dtype: torch.dtype,
    repeats: int,
    impl: str = "auto",
    quick: bool = False,
    deterministic: bool = False,
    progress: Callable[[str], None] = lambda name: None,
) -> list[dict[str, Any]]:
    """Measures one case and returns a record for each contender, plain attention first.

    Args:
        quick: Leave out all but plain attention and ours.
        deterministic: Also measure ours under `torch.use_deterministic_algorithms(True)`.
    """
    q, k, v, dout = make_tensors(case, device, dtype)
    encoding = make_encoding(case, device)
    contenders = plain_contenders(q, k, v, causal=case.causal)
    contenders["lagwise"] = our_contender(q, k, v, encoding, causal=case.causal, impl=impl)
    if deterministic:
        contenders["lagwise, deterministic"] = our_contender(q, k, v, encoding, causal=case.causal, impl=impl, deterministic=True)
    if not quick:
        contenders |= baselines_of(q, k, v, encoding, causal=case.causal)
    numbers = compare_contenders(contenders, [q, k, v], dout, repeats=repeats, graph=case.graph, progress=progress)
    return make_records("attention", dict.fromkeys(contenders, case), numbers, device, dtype, repeats)


def measure_sweep(
    time: int,
    *,
    device: torch.device,
    dtype: torch.dtype,
    repeats: int,
    impl: str = "auto",
    quick: bool = False,
    progress: Callable[[str], None] = lambda name: None,
) -> list[dict[str, Any]]:
    """Measures one length of the sweep and returns a record for each line of its plot, plain attention first."""
    cases = sweep_cases(time, device)
    t5 = cases["lagwise, t5"]
    q, k, v, dout = make_tensors(t5, device, dtype)
    contenders = plain_contenders(q, k, v, causal=False)
    cases = {name: replace(t5, encoding="none") for name in contenders} | cases
    for name, case in cases.items():
        if name not in contenders:
            contenders[name] = our_contender(q, k, v, make_encoding(case, device), causal=False, impl=impl)
    if not quick:
        encoding = make_encoding(t5, device)
        assert isinstance(encoding, T5)
        cases["dense bias"] = t5
        contenders["dense bias"] = dense_contender(q, k, v, encoding, causal=False)
    numbers = compare_contenders(contenders, [q, k, v], dout, repeats=repeats, graph=False, progress=progress)
    return make_records("sweep", cases, numbers, device, dtype, repeats)


def our_contender(
    q: Tensor, k: Tensor, v: Tensor, encoding: Encoding, *, causal: bool, impl: str, deterministic: bool = False
) -> Entry:
    """Returns `lagwise.attention` as a contender, or why the implementation that is named cannot do it."""
    try:
        with determinism(deterministic):
            chosen = lagwise.which_impl(q, k, v, encoding, causal=causal, impl=impl)
    except ValueError as error:
        return str(error)
    return [
        Contender(
            lambda: lagwise.attention(q, k, v, encoding, causal=causal, impl=impl),
            tuple(encoding.parameters()),
            {"impl": chosen.impl},
            deterministic,
        )
    ]
