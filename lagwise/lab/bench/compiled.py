"""`lagwise bench compiled`: training of a deep encoder eagerly, under `torch.compile`, and in CUDA graphs."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.utils import counters

import lagwise
from lagwise.encodings import options_of
from lagwise.lab.bench.cases import make_records
from lagwise.lab.bench.host import count_kernels
from lagwise.lab.bench.timing import error_words, measure, ratios

MODES: dict[str, dict[str, Any] | None] = {
    "eager": None,
    "compile": {},
    "dynamic": {"dynamic": True},
    "reduce-overhead": {"mode": "reduce-overhead"},
}
"""How the encoder is run: the options of `torch.compile`, None without it."""

ENCODINGS = ["none", "t5", "huang4"]
"""What is measured unless others are named; ratios are to the first, in the same mode."""

MAX_LAG = 128

MOST_GRAPHS = 64
"""torch compiles no more graphs of one function, and goes on eagerly: all encoders are one function to it."""


@dataclass(frozen=True)
class Depth:
    """One encoder, and how it is run.

    Args:
        options: Those of the encoding.
        layers: Number of layers.
        mode: A name in `MODES`.
    """

    encoding: str
    batch: int
    heads: int
    time: int
    head_dim: int
    layers: int
    mode: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def other_lengths(self) -> tuple[int, int]:
        """Two more lengths that an encoder is trained on, to see whether it is compiled again."""
        return self.time * 7 // 8, self.time * 3 // 4


SIZES = {
    "cpu": {"batch": 1, "heads": 4, "time": 256, "head_dim": 16, "layers": 12},
    "cuda": {"batch": 16, "heads": 12, "time": 512, "head_dim": 64, "layers": 12},
}


def modes_on(device: torch.device) -> list[str]:
    """Returns the modes that there are on a device: a CPU has no CUDA graphs."""
    return [mode for mode in MODES if device.type == "cuda" or mode != "reduce-overhead"]


def depth_of(encoding: str, mode: str, device: torch.device) -> Depth:
    """Returns the case of an encoding, whose table ends early where it can."""
    options = {"max_lag": MAX_LAG} if "max_lag" in options_of(encoding) else {}
    return Depth(encoding, mode=mode, options=options, **SIZES[device.type])


class Training:
    """An encoder in training.

    Args:
        case: Its sizes and its mode.
        device: Where it is.
        dtype: Of the products; weights are float32.
    """

    def __init__(self, case: Depth, device: torch.device, dtype: torch.dtype):
        torch.manual_seed(0)
        dim = case.heads * case.head_dim
        encoding = lagwise.make(case.encoding, heads=case.heads, head_dim=case.head_dim, **case.options)
        model = lagwise.nn.Encoder(dim, layers=case.layers, heads=case.heads, encoding=encoding).to(device)

        def encode(x: Tensor) -> Tensor:
            return model(x)

        options = MODES[case.mode]
        self.code, self.model, self.dtype = encode.__code__, model, dtype
        self.encode = encode if options is None else torch.compile(encode, **options)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self.graphed = case.mode == "reduce-overhead"
        self.inputs = {length: torch.randn(case.batch, length, dim, device=device) for length in (case.time, *case.other_lengths)}

    @property
    def weights(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def step(self, length: int) -> None:
        """Takes a training step on a batch of some length: forward, backward, AdamW."""
        x = self.inputs[length]
        if self.graphed:
            # What an earlier step has left in the memory of the graphs may be overwritten.
            torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(x.device.type, self.dtype, enabled=self.dtype != torch.float32):
            loss = self.encode(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def graphs(self) -> int:
        """Returns how many graphs of this function are compiled, whichever encoder they are of."""
        return len(_debug_get_cache_entry_list(self.code))


def measure_mode(
    mode: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    repeats: int,
    encodings: Sequence[str] | None = None,
    lengths: bool = True,
    progress: Callable[[str], None] = lambda name: None,
) -> list[dict[str, Any]]:
    """Measures training in one mode, and returns a record for each encoding, the encoder without positions first.

    Args:
        mode: A name in `MODES`.
        dtype: Of the products; weights are float32.
        encodings: Leave out all others, but for "none".
        lengths: Train on two more lengths, and count what is compiled again.
    """
    names = [ENCODINGS[0], *(name for name in encodings or ENCODINGS if name != ENCODINGS[0])]
    cases = {contender_of(name): depth_of(name, mode, device) for name in names}
    found: dict[str, dict[str, Any]] = {}
    ready: dict[str, Training] = {}
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=MOST_GRAPHS):
        for contender, case in cases.items():
            progress(f"{contender}, first steps")
            try:
                training = Training(case, device, dtype)
                found[contender] = first_steps(training, case.time)
                ready[contender] = training
            except Exception as error:
                found[contender] = {"error": error_words(error)}
        steps = {name: step_of(training, cases[name].time) for name, training in ready.items()}
        measured = measure(steps, device, repeats, progress)
        anchor = contender_of(ENCODINGS[0])
        relative = ratios(measured, anchor) if anchor in measured else {}
        for name, result in measured.items():
            if result.error is not None:
                found[name] = {"error": result.error}
                continue
            found[name] |= {
                "step_ms": 1000 * result.median, "layer_ms": 1000 * result.median / cases[name].layers,
                "step_ratio": relative.get(name), "turns": len(result.seconds),
                "kernels": count_kernels(steps[name], ready[name].weights) if device.type == "cuda" else None,
            }  # fmt: skip
            if lengths and MODES[mode] is not None:
                progress(f"{name}, other lengths")
                found[name] |= other_steps(ready[name], cases[name].other_lengths)
    return make_records("compiled", cases, found, device, dtype, repeats)


def contender_of(encoding: str) -> str:
    """Returns what a line is called."""
    return f"lagwise, {encoding}"


def step_of(training: Training, length: int) -> Callable[[], object]:
    """Returns a step on batches of one length."""
    return lambda: training.step(length)


def first_steps(training: Training, length: int) -> dict[str, Any]:
    """Takes the steps in which things are compiled and captured, and returns what became of them."""
    counters.clear()
    before, began = training.graphs(), time.perf_counter()
    training.step(length)
    seconds = time.perf_counter() - began
    # CUDA graphs are captured in the second step, and replayed from the third on.
    for _ in range(2):
        training.step(length)
    return {
        "first_step_s": seconds,
        "graphs": training.graphs() - before,
        "graph_breaks": sum(counters["graph_break"].values()),
        "cudagraph_skips": counters["inductor"]["cudagraph_skips"] if training.graphed else None,
    }


def other_steps(training: Training, lengths: Sequence[int]) -> dict[str, Any]:
    """Trains on other lengths, and returns how often that had to be compiled."""
    before = training.graphs()
    try:
        for length in lengths:
            training.step(length)
    except Exception as error:
        return {"error": error_words(error)}
    return {"recompiles": training.graphs() - before}
