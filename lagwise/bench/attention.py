"""`lagwise bench attention`: attention with encodings beside plain attention."""

import json
import platform
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import lagwise
from lagwise.bench.baselines import baselines_of, plain
from lagwise.bench.timing import measure, ratios

PLAIN = "plain"


@dataclass(frozen=True)
class Case:
    """One shape and one encoding; `goal` is the ratio to plain attention that we promise for it."""

    encoding: str
    batch: int
    heads: int
    time: int
    head_dim: int
    options: dict[str, Any] = field(default_factory=dict)
    causal: bool = False
    goal: float | None = None

    @property
    def words(self) -> str:
        options = "".join(f", {name}={value}" for name, value in self.options.items())
        return f"{self.encoding}{options}{', causal' if self.causal else ''}"


CPU_CASES = [
    Case("t5", 1, 8, 4096, 64, goal=1.5),
    Case("at5", 1, 8, 4096, 64, {"max_lag": 128}, goal=1.5),
    Case("huang4", 1, 8, 2048, 64, {"max_lag": 128}, goal=2.0),
    Case("shaw", 1, 8, 2048, 64, {"max_lag": 128, "values": False}, goal=2.0),
    Case("shaw", 1, 8, 2048, 64, {"max_lag": 128}),
    Case("huang2", 1, 8, 2048, 64, {"max_lag": 128}),
    Case("t5", 1, 8, 4096, 64, {"causal": True}, causal=True),
]

CUDA_CASES = [
    Case(encoding, batch, heads, time, head_dim, options)
    for batch, heads, time, head_dim in ((2, 16, 8192, 64), (2, 16, 8192, 128), (1, 16, 32768, 64))
    for encoding, options in (
        ("t5", {}),
        ("shaw", {"max_lag": 128, "values": False}),
        ("huang4", {"max_lag": 128}),
    )
]


def run(
    case: Case,
    *,
    device: torch.device,
    dtype: torch.dtype,
    repeats: int,
    impl: str = "auto",
    progress: Callable[[str], None] = lambda name: None,
) -> list[dict[str, Any]]:
    """Measures one case and returns a record for each contender, plain attention first."""
    torch.manual_seed(0)
    shape = (case.batch, case.heads, case.time, case.head_dim)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype).requires_grad_() for _ in range(3))
    dout = torch.randn(shape, device=device, dtype=dtype)
    encoding = lagwise.make(case.encoding, heads=case.heads, head_dim=case.head_dim, **case.options).to(device)
    chosen = lagwise.which_impl(q, k, v, encoding, causal=case.causal, impl=impl)
    contenders: dict[str, Callable[[], torch.Tensor]] = {
        PLAIN: lambda: plain(q, k, v, causal=case.causal),
        "lagwise": lambda: lagwise.attention(q, k, v, encoding, causal=case.causal, impl=impl),
    }
    for name, baseline in baselines_of(encoding, case.time).items():
        contenders[name] = lambda baseline=baseline: baseline(q, k, v, encoding, causal=case.causal)

    def training(function: Callable[[], torch.Tensor]) -> Callable[[], None]:
        def step() -> None:
            # Not `backward`, whose gradients of the step before would be freed in this one and be missing from its memory.
            torch.autograd.grad(function(), [q, k, v, *encoding.parameters()], dout, allow_unused=True)

        return step

    forward = measure({name: _without_gradient(f) for name, f in contenders.items()}, device, repeats, progress)
    both = measure({name: training(f) for name, f in contenders.items()}, device, repeats, progress)
    forward_ratios, both_ratios = ratios(forward, PLAIN), ratios(both, PLAIN)
    return [
        {
            "bench": "attention", "contender": name, **asdict(case), "impl": chosen.impl if name == "lagwise" else None,
            "dtype": str(dtype).removeprefix("torch."), "forward_ms": 1000 * forward[name].median,
            "training_ms": 1000 * both[name].median, "forward_ratio": forward_ratios[name],
            "training_ratio": both_ratios[name], "peak_bytes": both[name].peak, "repeats": repeats, **machine(device),
        }
        for name in contenders
    ]  # fmt: skip


def _without_gradient(function: Callable[[], torch.Tensor]) -> Callable[[], None]:
    def call() -> None:
        with torch.no_grad():
            function()

    return call


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
