"""`lagwise bench attention`: attention with encodings beside plain attention, and beside what people run for them today."""

import json
import platform
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lagwise
from lagwise.bench.baselines import Contender, Entry, baselines_of, dense_contender, plain_contenders
from lagwise.bench.timing import measure, ratios
from lagwise.encodings import T5, Encoding


@dataclass(frozen=True)
class Case:
    """One shape and one encoding.

    Args:
        goal: The ratio to plain attention, in training, that we promise for it.
        graph: Time CUDA graphs of all contenders: at short lengths launches would hide the kernels.
    """

    encoding: str
    batch: int
    heads: int
    time: int
    head_dim: int
    options: dict[str, Any] = field(default_factory=dict)
    causal: bool = False
    goal: float | None = None
    graph: bool = False

    @property
    def words(self) -> str:
        options = "".join(f", {name}={value}" for name, value in self.options.items())
        return f"{self.encoding}{options}{', causal' if self.causal else ''}"

    def at(self, time: int) -> "Case":
        """Returns the case at another length, without its goal; a table as wide as the sequence stays so.

        >>> Case("t5-free", 1, 8, 512, 64, {"max_lag": 512}).at(64).options
        {'max_lag': 64}
        """
        wide = {"max_lag": time} if self.options.get("max_lag") == self.time else {}
        return replace(self, time=time, options=self.options | wide, goal=None)


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


def run(
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
    q, k, v, dout = tensors(case, device, dtype)
    encoding = make(case, device)
    contenders = plain_contenders(q, k, v, causal=case.causal)
    contenders["lagwise"] = ours(q, k, v, encoding, causal=case.causal, impl=impl)
    if deterministic:
        contenders["lagwise, deterministic"] = ours(q, k, v, encoding, causal=case.causal, impl=impl, deterministic=True)
    if not quick:
        contenders |= baselines_of(q, k, v, encoding, causal=case.causal)
    numbers = compare(contenders, [q, k, v], dout, repeats=repeats, graph=case.graph, progress=progress)
    return records("attention", dict.fromkeys(contenders, case), numbers, device, dtype, repeats)


def run_sweep(
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
    q, k, v, dout = tensors(t5, device, dtype)
    contenders = plain_contenders(q, k, v, causal=False)
    cases = {name: replace(t5, encoding="none") for name in contenders} | cases
    for name, case in cases.items():
        if name not in contenders:
            contenders[name] = ours(q, k, v, make(case, device), causal=False, impl=impl)
    if not quick:
        encoding = make(t5, device)
        assert isinstance(encoding, T5)
        cases["dense bias"] = t5
        contenders["dense bias"] = dense_contender(q, k, v, encoding, causal=False)
    numbers = compare(contenders, [q, k, v], dout, repeats=repeats, graph=False, progress=progress)
    return records("sweep", cases, numbers, device, dtype, repeats)


def tensors(case: Case, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Returns q, k and v, and a gradient of the output."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (case.batch, case.heads, case.time, case.head_dim)
    made = [torch.randn(shape, generator=generator, device=device, dtype=dtype) for _ in range(4)]
    return [*(x.requires_grad_() for x in made[:3]), made[3]]


def make(case: Case, device: torch.device) -> Encoding:
    """Makes the encoding of a case."""
    torch.manual_seed(0)
    return lagwise.make(case.encoding, heads=case.heads, head_dim=case.head_dim, **case.options).to(device)


def ours(q: Tensor, k: Tensor, v: Tensor, encoding: Encoding, *, causal: bool, impl: str, deterministic: bool = False) -> Entry:
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


def compare(
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
    the output, `held_bytes` is with them.
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
                "held_bytes": both[name].peak + held, "turns": len(both[name].seconds),
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
    """Switches torch's deterministic algorithms on, if wanted."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(wanted or before)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def records(
    bench: str,
    cases: dict[str, Case],
    numbers: dict[str, dict[str, Any]],
    device: torch.device,
    dtype: torch.dtype,
    repeats: int,
) -> list[dict[str, Any]]:
    """Returns one record per contender, with its case, its numbers, and all that they depend on."""
    common = {"dtype": str(dtype).removeprefix("torch."), "repeats": repeats, **machine(device)}
    return [{"bench": bench, "contender": name, **asdict(case), **numbers[name], **common} for name, case in cases.items()]


def machine(device: torch.device) -> dict[str, Any]:
    """Returns what a number depends on beside the code: device, versions, commit and date."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "lagwise": lagwise.__version__,
        "python": platform.python_version(),
        "commit": commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }


def processor() -> str:
    """Returns the name of the CPU."""
    info = Path("/proc/cpuinfo")
    names = (
        [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        if info.exists()
        else []
    )
    return names[0] if names else platform.machine()


def commit() -> str | None:
    """Returns the commit that the package lies in, marked where it has been changed, or None outside a checkout."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=Path(__file__).parent, capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


def save(records: list[dict[str, Any]], path: Path) -> None:
    """Appends records to a file of JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        for record in records:
            file.write(json.dumps(record) + "\n")
