"""`lagwise bench host`: what one eager call takes the host, how many kernels a step has, and how long the first call takes."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import lagwise
from lagwise.encodings import ENCODINGS, options_of
from lagwise.lab.bench.baselines import plain_attention
from lagwise.lab.bench.cases import Case, make_records
from lagwise.lab.bench.contenders import make_encoding, make_tensors
from lagwise.lab.bench.timing import Measured, measure, ratios, seconds_of

SHAPES = {"cpu": Case("none", 1, 4, 16, 64), "cuda": Case("none", 8, 12, 256, 64)}
"""So small that the device waits for the host."""

MAX_LAG = 128
PLAIN = "sdpa"

SCALARS = ("t5", "t5-free", "alibi", "kerple", "sandwich", "huang1", "huang2", "rotary", "xpos")
VECTORS = ("at5", "at5-free", "shaw", "huang3", "huang4", "xl")

GOALS: dict[str, tuple[float, float]] = {
    "none": (0.25, 0.10),
    **dict.fromkeys(SCALARS, (0.45, 0.15)),
    **dict.fromkeys(VECTORS, (0.65, 0.25)),
}
"""Milliseconds that we promise on a GPU: forward and backward, and forward without gradients."""

KERNEL_GOALS = {"t5": 12, "at5": 25, "huang4": 20}
"""The most kernels of a step, forward and backward."""

KERNELS = {"kernel", "gpu_memcpy", "gpu_memset"}
"""What counts as a kernel in a trace: copies and fills are launched like others."""

FIRST = ["t5", "alibi", "at5", "shaw", "huang3", "huang4"]
"""Encodings whose first call is timed unless others are named: it takes long."""

FIRST_GOALS = {torch.bfloat16: 5.0, torch.float16: 5.0, torch.float32: 10.0}
"""Seconds that the first call may take on a GPU, with an empty cache."""


def host_encodings() -> list[str]:
    """Returns the encodings that softmax attention takes."""
    return [name for name, kind in ENCODINGS.items() if not (kind.absolute or kind.linear_only)]


def host_case(encoding: str, device: torch.device) -> Case:
    """Returns the case of an encoding, whose table ends early where it can."""
    options = {"max_lag": MAX_LAG} if "max_lag" in options_of(encoding) else {}
    return replace(SHAPES[device.type], encoding=encoding, options=options)


def measure_host(
    *,
    device: torch.device,
    dtype: torch.dtype,
    repeats: int,
    encodings: list[str] | None = None,
    progress: Callable[[str], None] = lambda name: None,
) -> list[dict[str, Any]]:
    """Measures one eager call with each encoding and returns a record for each, torch's attention first.

    Args:
        encodings: Leave out all others.
    """
    q, k, v, dout = make_tensors(SHAPES[device.type], device, dtype)
    cases, calls = {PLAIN: SHAPES[device.type]}, {PLAIN: partial(plain_attention, q, k, v, causal=False)}
    leaves: dict[str, list[Tensor]] = {PLAIN: [q, k, v]}
    for name in encodings or host_encodings():
        case, title = host_case(name, device), f"lagwise, {name}"
        encoding = make_encoding(case, device)
        cases[title], calls[title] = case, partial(lagwise.attention, q, k, v, encoding)
        leaves[title] = [q, k, v, *encoding.parameters()]
    steps: dict[str, Callable[[], object]] = {name: partial(train, call, dout) for name, call in calls.items()}
    passes: dict[str, Callable[[], object]] = {name: partial(infer, call) for name, call in calls.items()}
    numbers = numbers_of(measure(steps, device, repeats, progress), measure(passes, device, repeats, progress))
    for name, case in cases.items():
        if "error" not in numbers[name]:
            gpu = device.type == "cuda"
            numbers[name]["kernels"] = count_kernels(steps[name], leaves[name]) if gpu else None
        numbers[name] |= goals_of("" if name == PLAIN else case.encoding, device)
    return make_records("host", cases, numbers, device, dtype, repeats)


def train(call: Callable[[], Tensor], dout: Tensor) -> None:
    """Calls forward and backward; gradients are added to those of the step before."""
    call().backward(dout)


@torch.no_grad()
def infer(call: Callable[[], Tensor]) -> None:
    """Calls forward without gradients."""
    call()


def numbers_of(training: dict[str, Measured], forward: dict[str, Measured]) -> dict[str, dict[str, Any]]:
    """Returns the milliseconds of each contender and their ratios to torch's attention in the same turn, or its error."""
    training_ratios, forward_ratios = ratios(training, PLAIN), ratios(forward, PLAIN)
    return {
        name: {"error": error}
        if (error := training[name].error or forward[name].error)
        else {
            "training_ms": 1000 * training[name].median,
            "forward_ms": 1000 * forward[name].median,
            "training_ratio": training_ratios.get(name),
            "forward_ratio": forward_ratios.get(name),
            "turns": len(training[name].seconds),
        }
        for name in training
    }


def goals_of(encoding: str, device: torch.device) -> dict[str, Any]:
    """Returns what we promise for an encoding on a device; None where we promise nothing."""
    gpu = device.type == "cuda"
    training, forward = GOALS.get(encoding, (None, None)) if gpu else (None, None)
    return {"training_goal_ms": training, "forward_goal_ms": forward, "kernels_goal": KERNEL_GOALS.get(encoding) if gpu else None}


def count_kernels(step: Callable[[], object], leaves: Sequence[Tensor]) -> int:
    """Returns how many kernels a step runs on the GPU, without those that add gradients to older ones."""
    for leaf in leaves:
        leaf.grad = None
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            step()
            torch.cuda.synchronize()
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return sum(event.get("cat") in KERNELS for event in events)


def measure_first_call(encoding: str, *, device: torch.device, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Times the first call, forward and backward, of a program that finds Triton's cache empty, and of a second one.

    Of both it is counted how many kernels they compile: the second should find all of them.
    """
    contender, case = f"lagwise, {encoding}", host_case(encoding, device)
    numbers: dict[str, Any] = {"first_goal_s": FIRST_GOALS.get(dtype) if device.type == "cuda" else None}
    with TemporaryDirectory() as cache:
        try:
            for name in ("first", "second"):
                told = in_a_fresh_process(case, device, dtype, cache)
                numbers |= {f"{name}_s": told["seconds"], f"{name}_kernels": told["kernels"]}
        except subprocess.CalledProcessError as error:
            numbers["error"] = error.stderr.strip().splitlines()[-1]
    return make_records("first call", {contender: case}, {contender: numbers}, device, dtype, 1)


def in_a_fresh_process(case: Case, device: torch.device, dtype: torch.dtype, cache: str) -> dict[str, Any]:
    """Returns what `first_call` finds in a new program, with a folder for what Triton compiles."""
    told = json.dumps({"case": asdict(case), "device": str(device), "dtype": str(dtype).removeprefix("torch.")})
    done = subprocess.run(
        [sys.executable, "-m", __name__, told], env={**os.environ, "TRITON_CACHE_DIR": cache}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def first_call(case: Case, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Returns the seconds of the first call, forward and backward, and on a GPU how many kernels it compiles.

    What torch itself does once is done before, and so are imports.
    """
    q, k, v, dout = make_tensors(case, device, dtype)
    encoding = make_encoding(case, device)
    train(partial(plain_attention, q, k, v, causal=False), dout)
    infer(partial(torch.matmul, q, k.mT))
    step = partial(train, partial(lagwise.attention, q, k, v, encoding), dout)
    if device.type != "cuda":
        return {"seconds": seconds_of(step, device), "kernels": None}
    from lagwise.ops import triton  # noqa: F401
    from lagwise.ops.kernels.ahead import counted_kernels
    from lagwise.ops.split import fused  # noqa: F401

    with counted_kernels() as kernels:
        seconds = seconds_of(step, device)
    return {"seconds": seconds, "kernels": len(kernels.made)}


def main(told: str) -> None:
    """Prints what `first_call` finds, as `in_a_fresh_process` has asked."""
    asked = json.loads(told)
    print(json.dumps(first_call(Case(**asked["case"]), torch.device(asked["device"]), getattr(torch, asked["dtype"]))))


if __name__ == "__main__":
    main(sys.argv[1])
