"""Counter-based randomness: each number is a function of a seed and of where it is used.

The same seed and counters give the same number in every implementation and on every device, and nothing is stored
between the forward and the backward pass. Codes of encodings count absolute positions, so that chunks and offsets see
the same ones; dropout of attention weights counts the rows and keys of a call. The generator is SplitMix64 (Steele,
Lea, Flood 2014), with one stream per prefix of the counters:

    state(seed, c1, ..., cm) = mix(state(seed, c1, ..., c(m-1)) + GOLDEN * cm)         state(seed) = mix(seed)
"""

import math
from enum import IntEnum

import torch
from torch import Tensor

# The constants of SplitMix64 as signed 64-bit integers; torch's integer arithmetic wraps around.
GOLDEN = 0x9E3779B97F4A7C15 - 2**64
MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
MIX_2 = 0x94D049BB133111EB - 2**64

KEEP_BITS = 24


class Stream(IntEnum):
    """The first counter: who draws. It keeps the users of one seed independent of each other."""

    ATTENTION_DROPOUT = 1
    AT5 = 2
    CODE = 3
    GATE = 4
    LAYER = 5


def draw_seed(training: bool, device: torch.device) -> Tensor:
    """Returns the seed of one forward pass: fresh from the default generator in training, else always the same."""
    if training:
        return torch.randint(2**62, (), device=device)
    return torch.zeros((), dtype=torch.int64, device=device)


def bits(seed: Tensor, *counters: Tensor | int) -> Tensor:
    """Returns 64 random bits, as int64, for each combination of the counters, which are broadcast together."""
    state = _mix(seed.to(torch.int64))
    for counter in counters:
        state = _mix(state + GOLDEN * torch.as_tensor(counter, dtype=torch.int64, device=seed.device))
    return state


def keep(dropout: float, seed: Tensor, *counters: Tensor | int) -> Tensor:
    """Returns a dropout mask, true with probability `1 - dropout`, in steps of 2^-24."""
    return _shift(bits(seed, *counters), 64 - KEEP_BITS) >= round(dropout * 2**KEEP_BITS)


def normal(seed: Tensor, *counters: Tensor | int, dtype: torch.dtype) -> Tensor:
    """Returns standard normal numbers, by the transform of Box and Muller on the two halves of the bits."""
    word = bits(seed, *counters)
    radius = (_shift(word, 32).to(dtype) + 0.5) * 2.0**-32
    angle = (word & 0xFFFFFFFF).to(dtype) * 2.0**-32
    return (-2.0 * radius.log()).sqrt() * torch.cos(2.0 * math.pi * angle)


def _shift(x: Tensor, by: int) -> Tensor:
    """Shifts to the right and fills with zeros; `>>` alone would repeat the sign bit."""
    return (x >> by) & (2 ** (64 - by) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * MIX_1
    x = (x ^ _shift(x, 27)) * MIX_2
    return x ^ _shift(x, 31)
