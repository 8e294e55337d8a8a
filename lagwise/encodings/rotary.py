"""Encodings that rotate queries and keys by their positions."""

import math

import torch
from torch import Tensor

from lagwise.encodings.absolute import check_positions, inverse_frequencies
from lagwise.encodings.base import Encoding
from lagwise.errors import require_even, require_positive, require_switches
from lagwise.kept import over_lags, range_of
from lagwise.ops.rotation import turn
from lagwise.terms import FeatureTransform, Terms


class Rotary(Encoding):
    """Rotates pairs of channels of queries and keys, so that their product depends on the lag alone.

        q'_t = R(t) q_t,   k'_t = R(t) k_t           R(t) turns channel pair c by t / base^(2c / head_dim)

    Su et al. (2021), equation 15. Phases are taken in float64: position one million is as exact as position one. In linear
    attention with features that estimate softmax ("favor") it is the same; it turns others instead of q and k, by their own
    width and in the numerator alone (their equation 19).

    Args:
        head_dim: Width of a head; even.
        base: The longest wavelength is about `2 pi base`.
        interleaved: Pair channels 2c and 2c + 1, as in the paper; otherwise c and c + head_dim / 2, as Llama's weights expect.

    >>> transform = Rotary(head_dim=4).terms(-1, 1, scale=0.5).transform
    >>> q = torch.ones(1, 1, 1, 4)
    >>> transform(q, q, torch.tensor([0]), torch.tensor([0]))[0]
    tensor([[[[1., 1., 1., 1.]]]])
    """

    def __init__(self, *, head_dim: int, base: float = 10000.0, interleaved: bool = True):
        super().__init__()
        require_positive(base=base)
        require_switches(interleaved=interleaved)
        self.head_dim, self.base, self.interleaved = require_even("head_dim", head_dim), base, interleaved

    def terms(self, first: int, last: int, *, scale: float, seed: Tensor | None = None) -> Terms:
        return Terms(transform=self._transform)

    def linear_terms(self, first: int, last: int, *, scale: float, seed: Tensor | None = None) -> Terms:
        return Terms(features=FeatureTransform(self._turn_any, numerator_only=True, softmax_inputs=True))

    def _turn_any(self, q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor) -> tuple[Tensor, Tensor]:
        width = require_even("the number of features or channels", q.shape[-1])
        return self._turned(q, k, q_positions, k_positions, width)

    def _transform(self, q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor) -> tuple[Tensor, Tensor]:
        check_width(q, self.head_dim)
        return self._turned(q, k, q_positions, k_positions, self.head_dim)

    def _turned(self, q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor, width: int) -> tuple[Tensor, Tensor]:
        rows = kept_factors(q_positions, width, self.base, q.dtype)
        keys = None if k_positions is q_positions else kept_factors(k_positions, width, self.base, k.dtype)
        return turn(q, k, rows, keys, interleaved=self.interleaved)


class XPos(Encoding):
    """Rotates queries and keys, and lets their product decay with the distance into the past.

        q'_t = zeta^(t / unit) R(t) q_t,   k'_t = zeta^(-t / unit) R(t) k_t        zeta_c = (2c + 0.4 head_dim) / (1.4 head_dim)

    Sun et al. (2022). Meant for causal attention: into the future the product grows. The two scales leave a dtype's range at long
    sequences (about position 1,980 in float16, 17,800 in float32 and bfloat16 with the defaults); positions beyond raise.

    Args:
        head_dim: Width of a head; even.
        base: The longest wavelength is about `2 pi base`.
        unit: Number of lags over which channel c decays by the factor `zeta_c`.

    >>> transform = XPos(head_dim=4).terms(-1, 0, scale=0.5).transform
    >>> q = torch.ones(1, 1, 1, 4)
    >>> transform(q, q, torch.tensor([0]), torch.tensor([0]))[1]
    tensor([[[[1., 1., 1., 1.]]]])
    """

    def __init__(self, *, head_dim: int, base: float = 10000.0, unit: float = 512.0):
        super().__init__()
        require_positive(base=base, unit=unit)
        self.head_dim, self.base, self.unit = require_even("head_dim", head_dim), base, unit

    def terms(self, first: int, last: int, *, scale: float, seed: Tensor | None = None) -> Terms:
        return Terms(transform=self._transform)

    def linear_terms(self, first: int, last: int, *, scale: float, seed: Tensor | None = None) -> Terms:
        raise ValueError(
            "encoding XPos has no form for linear attention, where its decay per channel would act on features that are no "
            "channels: use Rotary, and add ALiBi for a decay"
        )

    def _transform(self, q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor) -> tuple[Tensor, Tensor]:
        return turn(q, k, self._factors(q, q_positions, 1.0), self._factors(k, k_positions, -1.0), interleaved=True)

    def _factors(self, x: Tensor, positions: Tensor, sign: float) -> tuple[Tensor, Tensor]:
        check_width(x, self.head_dim)
        pairs = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device=x.device)
        decay = torch.log((pairs + 0.4 * self.head_dim) / (1.4 * self.head_dim)) / self.unit
        # Half of the range is left to the numbers that are scaled.
        limit = int(-math.log(torch.finfo(x.dtype).tiny) / 2 * self.unit / math.log(1.4 / 0.4))

        def refusal(position: int) -> str:
            return (
                f"positions reach {position}, but beyond {limit} the scales of xPos leave the range of {x.dtype}: "
                "use a shorter sequence, a larger unit, or Rotary"
            )

        check_positions(positions, -limit, limit, refusal, wait=not self.training)
        scales = torch.exp(sign * per_head(positions)[..., None] * decay)
        return factors(positions, self.head_dim, self.base, x.dtype, scales)


def kept_factors(positions: Tensor, width: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the factors of positions, which are kept for the next call if these are a range."""
    found = range_of(positions)
    if found is None:
        return factors(positions, width, base, dtype)
    cos, sin = factors_of_range(*found, positions.device, width, base, dtype)
    return cos, sin


@over_lags
def factors_of_range(
    first: int, last: int, device: torch.device, width: int, base: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Returns the factors of the positions from `first` to `last`."""
    return factors(torch.arange(first, last + 1, device=device), width, base, dtype)


def factors(
    positions: Tensor, width: int, base: float, dtype: torch.dtype, scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns cosine and sine of the angles of all channel pairs at some positions, times scales, in float32 at least."""
    angles = per_head(positions)[..., None] * inverse_frequencies(width, positions.device, base)
    compute = torch.promote_types(dtype, torch.float32)
    found = (angles.cos(), angles.sin()) if scales is None else (angles.cos() * scales, angles.sin() * scales)
    return found[0].to(compute), found[1].to(compute)


def check_width(x: Tensor, head_dim: int) -> None:
    """Raises for a tensor of another width than an encoding was made for."""
    if x.shape[-1] != head_dim:
        raise ValueError(
            f"q and k must have the width that the encoding was made for, head_dim={head_dim}, but have {x.shape[-1]}"
        )


def per_head(positions: Tensor) -> Tensor:
    """Lets positions, [time] or [batch, time], broadcast against [batch, heads, time]."""
    return positions if positions.ndim == 1 else positions[:, None]
