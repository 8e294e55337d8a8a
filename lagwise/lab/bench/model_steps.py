"""`lagwise bench models`: training of a whole encoder with each position encoding, beside the same encoder without one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lagwise
from lagwise.encodings import ENCODINGS, options_of
from lagwise.lab.bench.cases import make_records
from lagwise.lab.bench.timing import Measured, error_words, measure, ratios

OPTIONS: dict[str, dict[str, Any]] = {
    "sine-spe": {"sines": 10, "realizations": 64},
    "conv-spe": {"kernel_size": 128, "realizations": 64},
}
"""Options of encodings that differ from their defaults: those of the paper on stochastic encodings."""

MAX_LAG = 128
"""Lags of tables in each direction, beyond which they stay as they are, or end as the encoding says."""


@dataclass(frozen=True)
class Shape:
    """One encoder and the batch that it is trained on.

    Args:
        attention: "softmax" or "linear", the latter with the features relu(x) + 0.001.
        batch: Sequences.
        time: Tokens of a sequence.
        dim: Width.
        layers: Number of layers.
        heads: Number of heads.
        symbols: Number of different tokens.
    """

    attention: Literal["softmax", "linear"]
    batch: int
    time: int
    dim: int
    layers: int
    heads: int
    symbols: int


SIZES = {
    "cpu": {"dim": 128, "layers": 2, "heads": 4, "symbols": 1024},
    "cuda": {"dim": 512, "layers": 6, "heads": 8, "symbols": 8192},
}
TIMES = {"cpu": (512,), "cuda": (512, 4096, 16384)}
TOKENS = {"cpu": 1024, "cuda": 65536}
"""Tokens of a batch, whatever its length."""


def shapes(device: torch.device, times: Sequence[int] | None = None) -> list[Shape]:
    """Returns what is measured on a device: both kinds of attention at each length, with equally many tokens."""
    return [
        Shape(attention, max(1, TOKENS[device.type] // time), time, **SIZES[device.type])
        for time in times or TIMES[device.type]
        for attention in ("softmax", "linear")
    ]


class TimedEncoder(nn.Module):
    """Tokens, an encoder, and a score for each token at each place."""

    def __init__(self, shape: Shape, encoding: str):
        super().__init__()
        width = shape.dim // shape.heads
        made = lagwise.make(
            encoding, dim=shape.dim, heads=shape.heads, head_dim=width, max_lag=MAX_LAG, **options_for(encoding, shape.time)
        )
        self.embedding = nn.Embedding(shape.symbols, shape.dim)
        self.encoder = lagwise.nn.Encoder(
            shape.dim, layers=shape.layers, heads=shape.heads, encoding=made, attention=shape.attention,
            feature_map="relu" if shape.attention == "linear" else None,
        )  # fmt: skip
        self.scores = nn.Linear(shape.dim, shape.symbols)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.scores(self.encoder(self.embedding(tokens)))


def options_for(encoding: str, time: int) -> dict[str, Any]:
    """Returns options of an encoding; a table of absolute positions has one entry for each."""
    return OPTIONS.get(encoding, {"length": time} if "length" in options_of(encoding) else {})


def measure_encoders(
    shape: Shape,
    *,
    device: torch.device,
    dtype: torch.dtype,
    repeats: int,
    encodings: Sequence[str] | None = None,
    progress: Callable[[str], None] = lambda name: None,
) -> list[dict[str, Any]]:
    """Measures training with each encoding, and returns a record for each, the encoder without positions first.

    Args:
        dtype: Of the products; weights are float32.
        encodings: Leave out all others, but for "none".
    """
    tokens = torch.randint(shape.symbols, (shape.batch, shape.time), device=device)
    names = [name for name in ENCODINGS if not encodings or name in ("none", *encodings)]
    steps: dict[str, Callable[[], object]] = {}
    facts: dict[str, dict[str, Any]] = {}
    for name in names:
        try:
            torch.manual_seed(0)
            model = TimedEncoder(shape, name).to(device)
        except ValueError as error:
            facts[name] = {"error": error_words(error)}
            continue
        steps[name] = training_step(model, tokens, dtype)
        facts[name] = {
            "parameters": sum(weight.numel() for weight in model.parameters()),
            "encoding_parameters": sum(weight.numel() for weight in encoding_weights(model)),
        }
    measured = measure(steps, device, repeats, progress)
    for name, numbers in numbers_of(shape, measured, {name: facts[name] for name in steps}).items():
        facts[name] |= numbers
    return make_records("models", dict.fromkeys(names, shape), facts, device, dtype, repeats)


def encoding_weights(model: TimedEncoder) -> list[nn.Parameter]:
    """Returns the weights of a model's encoding."""
    return [weight for module in model.modules() if isinstance(module, lagwise.Encoding) for weight in module.parameters()]


def training_step(model: TimedEncoder, tokens: Tensor, dtype: torch.dtype) -> Callable[[], object]:
    """Returns a training step: forward, backward, AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        with torch.autocast(tokens.device.type, dtype, enabled=dtype != torch.float32):
            loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def numbers_of(shape: Shape, measured: dict[str, Measured], facts: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns speed and memory of each encoding, with their ratios to the encoder without positions, or its error.

    The memory is the peak of a step with weights and the two moments of AdamW; gradients are part of the step.
    """
    relative = ratios(measured, "none")
    held = {name: 3 * 4 * facts[name]["parameters"] + result.peak for name, result in measured.items()}
    return {
        name: {"error": result.error}
        if result.error is not None
        else {
            "tokens_per_s": shape.batch * shape.time / result.median,
            "step_ms": 1000 * result.median,
            "speed_ratio": 1.0 / relative[name] if name in relative else None,
            "held_bytes": held[name],
            "memory_ratio": held[name] / held["none"] if name in relative else None,
            "turns": len(result.seconds),
        }
        for name, result in measured.items()
    }
