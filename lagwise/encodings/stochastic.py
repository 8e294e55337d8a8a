"""Stochastic positional encoding: random features whose products average to a learned function of the lag."""

import math
from abc import abstractmethod

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lagwise import noise
from lagwise.encodings.base import Encoding, require_sizes
from lagwise.lags import LagTable
from lagwise.noise import Stream
from lagwise.terms import Terms


class StochasticEncoding(Encoding):
    """Replaces queries and keys by R random features whose product estimates attention with a gain per channel.

        q'_m[r] = sum_d q_md Q_d(m)[r] / sqrt(R),   k'_n[r] = sum_d k_nd K_d(n)[r] / sqrt(R)
        E[q'_m . k'_n] = sum_d q_md P_d(m - n) k_nd                    where E[Q_d(m)[r] K_d(n)[r]] = P_d(m - n)

    Q_d and K_d are Gaussian sequences, independent over the channels d and the realizations r, the same for the whole batch. With
    a gate, P becomes `delta + (1 - delta) P`, delta = sigmoid(gate) per channel: the gate's noise is constant over positions.
    Liutkus et al. (2021). `exact_terms` is the limit of infinitely many realizations.
    """

    random = True

    def __init__(self, *, heads: int, head_dim: int, realizations: int, gated: bool):
        super().__init__()
        require_sizes(heads=heads, head_dim=head_dim, realizations=realizations)
        self.heads, self.head_dim, self.realizations = heads, head_dim, realizations
        self.gate = nn.Parameter(torch.randn(heads, head_dim)) if gated else None

    @abstractmethod
    def codes(self, positions: Tensor, seed: Tensor, side: int, dtype: torch.dtype) -> Tensor:
        """Returns Q (side 0) or K (side 1) at the positions, [heads, head_dim, realizations, *positions.shape]."""

    @abstractmethod
    def kernel(self, first: int, last: int) -> tuple[Float[Tensor, "heads lags head_dim"], int]:
        """Returns P at the lags that matter of `first..last`, and the first of them."""

    def terms(self, first: int, last: int, *, scale: float, seed: Tensor | None = None) -> Terms:
        if seed is None:
            raise ValueError(f"seed must be given to draw the codes of {type(self).__name__}, but is None")

        def transform(q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor) -> tuple[Tensor, Tensor]:
            return self._features(q, q_positions, seed, 0), self._features(k, k_positions, seed, 1)

        return Terms(transform=transform)

    def exact_terms(self, first: int, last: int, *, scale: float) -> Terms:
        """Returns the expected kernel as a `gain` table: what `terms` estimates, exactly and in quadratic time."""
        values, first = self.kernel(first, last)
        if self.gate is not None:
            delta = torch.sigmoid(self.gate)[:, None]
            values = delta + (1.0 - delta) * values
        return Terms(gain=LagTable(values, first))

    def _features(self, x: Tensor, positions: Tensor, seed: Tensor, side: int) -> Tensor:
        # Queries have all the heads; keys may be grouped.
        fits = x.shape[1] == self.heads if side == 0 else self.heads % x.shape[1] == 0
        if not fits or x.shape[3] != self.head_dim:
            raise ValueError(
                f"{type(self).__name__} is made for heads={self.heads} and head_dim={self.head_dim}, "
                f"but {'q' if side == 0 else 'k'} has {x.shape[1]} heads of width {x.shape[3]}"
            )
        compute = torch.promote_types(x.dtype, torch.float32)
        codes = self.codes(positions, seed, side, compute)
        if self.gate is not None:
            delta = torch.sigmoid(self.gate)[..., None].to(compute)
            constant = noise.normal(
                seed, Stream.GATE, *counters(x.device, self.heads, self.head_dim, self.realizations), dtype=compute
            )
            over_time = (..., *[None] * positions.ndim)
            codes = (1.0 - delta).sqrt()[over_time] * codes + (delta.sqrt() * constant)[over_time]
        # Each query head has its own codes, so that grouped keys become one per query head.
        per_head = x.repeat_interleave(self.heads // x.shape[1], dim=1).to(compute)
        batch = "b" if positions.ndim == 2 else ""
        features = torch.einsum(f"bhtd,hdr{batch}t->bhtr", per_head, codes)
        return (features / math.sqrt(self.realizations)).to(x.dtype)


class SineSPE(StochasticEncoding):
    """Stochastic positional encoding by random mixtures of learned sinusoids.

        P_d(m - n) = 1 / (2K) sum_k lambda_kd^2 cos(2 pi f_kd (m - n) + theta_kd)
        f = sigmoid(freq) / 2,   theta = offset,   lambda = softplus(gain)            m the query's, n the key's position

    Liutkus et al. (2021), with the first values of their code. Phases are taken in float64: position one million is as
    exact as position one.

    Args:
        heads: Number of query heads.
        head_dim: Width of a head.
        sines: Number K of sinusoids per channel.
        realizations: Number R of random features that queries and keys become.
        gated: Mix each channel with position-free attention.

    >>> encoding = SineSPE(heads=2, head_dim=8, realizations=32)
    >>> q = torch.randn(1, 2, 5, 8)
    >>> transform = encoding.terms(-4, 4, scale=1.0, seed=torch.tensor(0)).transform
    >>> transform(q, q, torch.arange(5), torch.arange(5))[0].shape
    torch.Size([1, 2, 5, 32])
    """

    def __init__(self, *, heads: int, head_dim: int, sines: int = 10, realizations: int = 64, gated: bool = True):
        super().__init__(heads=heads, head_dim=head_dim, realizations=realizations, gated=gated)
        require_sizes(sines=sines)
        shape = (heads, head_dim, sines)
        self.freq = nn.Parameter(torch.randn(shape) - 4.0)
        self.offset = nn.Parameter(torch.randn(shape))
        gain = torch.randn(shape)
        self.gain = nn.Parameter(2.0 * gain / gain.norm(dim=-1, keepdim=True).sqrt())

    def codes(self, positions: Tensor, seed: Tensor, side: int, dtype: torch.dtype) -> Tensor:
        cycles = self._frequency().view(*self.freq.shape, *[1] * positions.ndim) * positions
        if side == 0:
            cycles = cycles + (self.offset.double() / (2.0 * math.pi)).view(*self.offset.shape, *[1] * positions.ndim)
        angles = 2.0 * math.pi * (cycles - cycles.detach().floor())
        waves = torch.stack([angles.cos(), angles.sin()], dim=3).to(dtype)
        sines = self.gain.shape[-1]
        heads, channels, components, pair, realizations = counters(
            positions.device, self.heads, self.head_dim, sines, 2, self.realizations
        )
        weights = noise.normal(seed, Stream.CODE, heads, channels, components, pair, realizations, dtype=dtype)
        weights = weights * nn.functional.softplus(self.gain)[..., None, None].to(dtype) / math.sqrt(2 * sines)
        batch = "b" if positions.ndim == 2 else ""
        return torch.einsum(f"hdkp{batch}t,hdkpr->hdr{batch}t", waves, weights)

    def kernel(self, first: int, last: int) -> tuple[Float[Tensor, "heads lags head_dim"], int]:
        lags = torch.arange(first, last + 1, device=self.freq.device)
        # The paper's argument is query minus key, the negative of the lag.
        angles = -2.0 * math.pi * self._frequency() * lags[:, None, None, None] + self.offset
        power = nn.functional.softplus(self.gain) ** 2 / (2 * self.gain.shape[-1])
        return (power * angles.cos()).sum(-1).transpose(0, 1).to(self.gain.dtype), first

    def _frequency(self) -> Tensor:
        return torch.sigmoid(self.freq.double()) / 2.0


class ConvSPE(StochasticEncoding):
    """Stochastic positional encoding by two learned filters of the same noise.

        P_d(m - n) = sum_p phi_q(p) phi_k(p + m - n)           zero from lag `kernel_size` on

    Liutkus et al. (2021), with the first values of their code. The noise is a function of the absolute position, so that
    chunks and offsets see the same.

    Args:
        heads: Number of query heads.
        head_dim: Width of a head.
        kernel_size: Number of taps of the filters.
        realizations: Number R of random features that queries and keys become.
        gated: Mix each channel with position-free attention.

    >>> encoding = ConvSPE(heads=2, head_dim=8, kernel_size=16)
    >>> encoding.exact_terms(-99, 99, scale=1.0).gain.values.shape
    torch.Size([2, 33, 8])
    """

    def __init__(self, *, heads: int, head_dim: int, kernel_size: int = 128, realizations: int = 64, gated: bool = True):
        super().__init__(heads=heads, head_dim=head_dim, realizations=realizations, gated=gated)
        require_sizes(kernel_size=kernel_size)
        # The filters of the queries, then those of the keys.
        self.taps = nn.Parameter(torch.rand(2, heads, head_dim, kernel_size) / math.sqrt(kernel_size / 2))

    def codes(self, positions: Tensor, seed: Tensor, side: int, dtype: torch.dtype) -> Tensor:
        taps = self.taps[side].flatten(0, 1)[:, None].to(dtype)
        lowest, highest = int(positions.min()), int(positions.max())
        heads, channels, realizations, times = counters(
            positions.device, self.heads, self.head_dim, self.realizations, highest - lowest + taps.shape[-1]
        )
        white = noise.normal(seed, Stream.CODE, heads, channels, realizations, times + lowest, dtype=dtype)
        filtered = nn.functional.conv1d(white.flatten(0, 1).transpose(0, 1), taps, groups=taps.shape[0])
        filtered = filtered.transpose(0, 1).unflatten(0, (self.heads, self.head_dim))
        return filtered[..., positions - lowest]

    def kernel(self, first: int, last: int) -> tuple[Float[Tensor, "heads lags head_dim"], int]:
        size = self.taps.shape[-1]
        # Row o of the windows holds phi_k(p + o - size), so that o - size is query minus key, from -size to size.
        windows = nn.functional.pad(self.taps[1], (size, size)).unfold(-1, size, 1)
        by_distance = torch.einsum("hdp,hdop->hod", self.taps[0], windows)
        return by_distance.flip(1), -size


def counters(device: torch.device, *sizes: int) -> list[Tensor]:
    """Returns one counter per size, each along its own axis, for `noise` to broadcast."""
    return [torch.arange(size, device=device).view(-1, *[1] * (len(sizes) - axis - 1)) for axis, size in enumerate(sizes)]
