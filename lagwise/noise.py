"""Counter-based randomness: each number is a function of a seed and of where it is used.

The same seed and counters give the same number in every implementation and on every device, and nothing is stored
between the forward and the backward pass. Codes of encodings count absolute positions, so that chunks and offsets see
the same ones; dropout of attention weights counts the rows and keys of a call. The generator is SplitMix64 (Steele,
Lea, Flood 2014), with one stream per prefix of the counters:

    state(seed, c1, ..., cm) = mix(state(seed, c1, ..., c(m-1)) + GOLDEN * cm)         state(seed) = mix(seed)
"""

from enum import IntEnum

import torch
from torch import Tensor

# The constants of SplitMix64 as signed 64-bit integers; torch's integer arithmetic wraps around.
GOLDEN = 0x9E3779B97F4A7C15 - 2**64
MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
MIX_2 = 0x94D049BB133111EB - 2**64

KEEP_BITS = 24
CACHED_WORDS = 2**17

# In each group of 2, 4, 8 or 16 bits the lower half.
ONES_OF_2, ONES_OF_4, ONES_OF_8, ONES_OF_16 = 0x5555555555555555, 0x3333333333333333, 0x0F0F0F0F0F0F0F0F, 0x00FF00FF00FF00FF


class Stream(IntEnum):
    """The first counter: who draws. It keeps the users of one seed independent of each other."""

    ATTENTION_DROPOUT = 1
    AT5 = 2
    CODE = 3
    GATE = 4
    LAYER = 5
    PERMUTATION = 6


def draw_seed(training: bool, device: torch.device) -> Tensor:
    """Returns the seed of one forward pass: fresh from the default generator in training, else always the same."""
    if training:
        return torch.randint(2**62, (), device=device)
    return torch.zeros((), dtype=torch.int64, device=device)


def bits(seed: Tensor, *counters: Tensor | int) -> Tensor:
    """Returns 64 random bits, as int64, for each combination of the counters, which are broadcast together."""
    state = _mix(seed.to(torch.int64))
    for counter in counters:
        # A number stays one: as a tensor it would have to be copied to the GPU, which waits for it.
        state = _mix(state + (GOLDEN * counter.to(torch.int64) if isinstance(counter, Tensor) else _wrap(GOLDEN * counter)))
    return state


def keep(dropout: float, seed: Tensor, *counters: Tensor | int) -> Tensor:
    """Returns a dropout mask, true with probability `1 - dropout`, in steps of 2^-24."""
    return _shift(bits(seed, *counters), 64 - KEEP_BITS) >= round(dropout * 2**KEEP_BITS)


def binomial(seed: Tensor, *counters: Tensor | int, size: int, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Returns nearly normal numbers along a new last axis: half of how many more than 8 of 16 random bits are ones.

    Mean 0, variance 1 and third moment 0 are exact, the fourth moment is 2.875 instead of 3. The numbers are multiples of 1/2
    between -4 and 4: they are the same on every device and exact in every floating-point type. A word of bits makes four. `out`
    is contiguous memory for them.
    """
    states = bits(seed, *counters)
    if out is None:
        out = torch.empty(*states.shape, size, dtype=dtype, device=seed.device)
    words = GOLDEN * torch.arange((size + 3) // 4, device=seed.device)
    # On a CPU as many at a time as stay in the cache.
    rows = max(1, CACHED_WORDS // len(words)) if seed.device.type == "cpu" else max(1, states.numel())
    for own, made in zip(states.reshape(-1).split(rows), out.view(-1, size).split(rows), strict=True):
        x = _mix(own[:, None] + words)
        # The sums of neighbouring bits, then of pairs, of groups of four and of eight; the masks drop repeated sign bits.
        x -= (x >> 1).bitwise_and_(ONES_OF_2)
        x = (x & ONES_OF_4).add_((x >> 2).bitwise_and_(ONES_OF_4))
        x = (x >> 4).add_(x).bitwise_and_(ONES_OF_8)
        x = (x >> 8).add_(x).bitwise_and_(ONES_OF_16)
        # The first of the four is in the lowest bits.
        made.copy_(x.view(torch.int16)[:, :size]).sub_(8.0).mul_(0.5)
    return out


def _wrap(x: int) -> int:
    """Returns an integer as torch's arithmetic has it, between -2^63 and 2^63."""
    return (x + 2**63) % 2**64 - 2**63


def _shift(x: Tensor, by: int) -> Tensor:
    """Shifts to the right and fills with zeros; `>>` alone would repeat the sign bit."""
    return (x >> by).bitwise_and_(2 ** (64 - by) - 1)


def _mix(x: Tensor) -> Tensor:
    x = _shift(x, 30).bitwise_xor_(x).mul_(MIX_1)
    x = _shift(x, 27).bitwise_xor_(x).mul_(MIX_2)
    return _shift(x, 31).bitwise_xor_(x)
