"""`lagwise bench attention`: attention with encodings beside plain attention, and beside what people run for them today."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import lagwise
from lagwise.encodings import T5, Encoding, options_of
from lagwise.lab.bench.baselines import baselines_of, dense_contender, plain_contenders
from lagwise.lab.bench.cases import Case, make_records
from lagwise.lab.bench.contenders import Contender, Entry, compare_contenders, determinism, make_encoding, make_tensors
from lagwise.lab.bench.ragged import make_ragged, options_for, plain_ragged

CPU_CASES = [
    Case("t5", 1, 8, 4096, 64, goal=1.5),
    Case("at5", 1, 8, 4096, 64, {"max_lag": 128}, goal=1.5),
    Case("huang4", 1, 8, 2048, 64, {"max_lag": 128}, goal=2.0),
    Case("shaw", 1, 8, 2048, 64, {"max_lag": 128, "values": False}, goal=2.0),
    Case("shaw", 1, 8, 2048, 64, {"max_lag": 128}),
    Case("huang2", 1, 8, 2048, 64, {"max_lag": 128}),
    Case("t5", 1, 8, 4096, 64, {"causal": True}, causal=True),
    Case("t5", 4, 8, 1024, 64, ragged="lengths"),
    Case("t5", 4, 8, 1024, 64, ragged="cu_seqlens"),
]


def cuda_cases(shape: Case, goals: list[float], wide_goals: list[float | None] | None = None) -> list[Case]:
    """Returns the cases of one shape, with one goal for each group of encodings.

    Args:
        goals: Of tables that end before the sequence does.
        wide_goals: Of tables as wide as the sequence. Groups for which there is no entry have no case.
    """
    wide = shape.time
    groups: list[list[tuple[str, dict[str, Any]]]] = [
        [("t5", {}), ("alibi", {}), ("huang1", {"max_lag": 128}), ("huang2", {"max_lag": 128})],
        [("at5", {"max_lag": 128})],
        [("shaw", {"max_lag": 128, "values": False})],
        [("huang4", {"max_lag": 128})],
        [("shaw", {"max_lag": 128})],
        [("huang3", {"max_lag": 128})],
    ]
    wide_groups: list[list[tuple[str, dict[str, Any]]]] = [
        [("t5-free", {"max_lag": wide}), ("at5", {"max_lag": None}), ("kerple", {})],
        [("shaw", {"max_lag": wide, "values": False})],
        [("huang4", {"max_lag": wide})],
    ]
    both = [*zip(groups, goals, strict=True), *zip(wide_groups, wide_goals or [], strict=False)]
    return [
        replace(shape, encoding=name, options=options | one_sided(name, shape.causal), goal=goal)
        for group, goal in both
        for name, options in group
    ]


def one_sided(encoding: str, causal: bool) -> dict[str, Any]:
    """Returns the option that keeps a causal case's table from having lags that no query sees, where there is one."""
    return {"causal": True} if causal and "causal" in options_of(encoding) else {}


CUDA_CASES = [
    *cuda_cases(Case("none", 64, 12, 128, 64, graph=True), [1.8, 2.2, 2.6, 3.6, 4.0, 6.0]),
    *cuda_cases(Case("none", 16, 12, 512, 64, graph=True), [1.6, 1.9, 2.3, 3.2, 3.5, 6.0], [2.5, None, 3.0]),
    *cuda_cases(Case("none", 4, 16, 2048, 64, graph=True), [1.4, 1.5, 1.7, 2.2, 2.4, 3.0], [2.5, None, None]),
    *cuda_cases(Case("none", 4, 16, 2048, 128, causal=True, graph=True), [1.6, 1.7, 1.8, 2.3, 2.5, 3.0]),
    *cuda_cases(Case("none", 2, 16, 8192, 64, graph=True), [1.35, 1.4, 1.5, 1.6, 1.9, 2.2], [2.5]),
    *cuda_cases(Case("none", 2, 16, 8192, 128), [1.35, 1.35, 1.5, 1.5, 2.0, 2.0], [2.5]),
    *cuda_cases(Case("none", 1, 16, 32768, 64), [1.15, 1.15, 1.2, 1.2, 1.4, 1.4], [2.5]),
    *cuda_cases(Case("none", 32, 12, 384, 64, eager=True), [1.8, 2.4, 2.6, 3.5, 4.0, 6.0]),
    *(
        Case(name, *sizes, 64, options, goal=goal, graph=graph, ragged=ragged)
        for sizes, graph in (((16, 12, 512), True), ((4, 16, 8192), False))
        for ragged in ("lengths", "cu_seqlens")
        for name, options, goal in (("t5", {}, 1.6), ("huang4", {"max_lag": 128}, None))
    ),
]

SWEEP_TIMES = {
    "cpu": [512, 1024, 2048, 4096, 8192],
    "cuda": [128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072],
}
SWEEP_TOKENS = 65536
"""Tokens of a step on a GPU, where the batch shrinks as the length grows."""
SWEEP_GRAPHS_UP_TO = 2048
"""Beyond this length the kernels of a sweep take so long that their launches do not show."""


def sweep_cases(time: int, device: torch.device) -> dict[str, Case]:
    """Returns what a sweep measures at one length on the same tensors, by the name of its line in the plot."""
    gpu = device.type == "cuda"
    batch, heads = (max(1, SWEEP_TOKENS // time), 16) if gpu else (1, 4)
    shape = Case("t5", batch, heads, time, 64, graph=gpu and time <= SWEEP_GRAPHS_UP_TO)
    return {
        "lagwise, t5": shape,
        "lagwise, shaw keys": replace(shape, encoding="shaw", options={"max_lag": 128, "values": False}),
        "lagwise, huang4": replace(shape, encoding="huang4", options={"max_lag": 128}),
        "lagwise, t5-free at every lag": replace(shape, encoding="t5-free", options={"max_lag": time}),
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
    encoding = make_encoding(case, device)
    if case.ragged:
        (q, k, v, dout), lengths = make_ragged(case, device, dtype)
        contenders, options = plain_ragged(q, k, v, lengths, case.ragged), options_for(lengths, case.ragged, device)
    else:
        q, k, v, dout = make_tensors(case, device, dtype)
        contenders, options = plain_contenders(q, k, v, causal=case.causal, eager=case.eager), {"causal": case.causal}
    contenders["lagwise"] = our_contender(q, k, v, encoding, impl=impl, **options)
    if deterministic:
        contenders["lagwise, deterministic"] = our_contender(q, k, v, encoding, impl=impl, deterministic=True, **options)
    if not quick and not case.ragged:
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
            contenders[name] = our_contender(q, k, v, make_encoding(case, device), impl=impl)
    if not quick:
        encoding = make_encoding(t5, device)
        assert isinstance(encoding, T5)
        cases["dense bias"] = t5
        contenders["dense bias"] = dense_contender(q, k, v, encoding, causal=False)
    numbers = compare_contenders(contenders, [q, k, v], dout, repeats=repeats, graph=t5.graph, progress=progress)
    return make_records("sweep", cases, numbers, device, dtype, repeats)


def our_contender(
    q: Tensor, k: Tensor, v: Tensor, encoding: Encoding, *, impl: str, deterministic: bool = False, **options: Any
) -> Entry:
    """Returns `lagwise.attention` with some options as a contender, or why the implementation that is named cannot do it."""
    try:
        with determinism(deterministic):
            chosen = lagwise.which_impl(q, k, v, encoding, impl=impl, **options)
    except ValueError as error:
        return str(error)
    return [
        Contender(
            lambda: lagwise.attention(q, k, v, encoding, impl=impl, **options),
            tuple(encoding.parameters()),
            {"impl": chosen.impl},
            deterministic,
        )
    ]
