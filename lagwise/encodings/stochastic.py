"""Stochastic positional encoding: random features whose products average to a learned function of the lag."""

import math
from abc import abstractmethod

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lagwise.encodings.base import Encoding
from lagwise.errors import refuse, require_lags, require_numbers, require_sizes, require_switches
from lagwise.lags import LagTable
from lagwise.ops.grouped import per_query_head
from lagwise.ops.spe.operators import features
from lagwise.ops.spe.recipes import Filters, Recipe, Sines
from lagwise.terms import Terms


class StochasticEncoding(Encoding):
    """Replaces queries and keys by R random features whose product estimates attention with a gain per channel.

        q'_m[r] = sum_d q_md Q_d(m)[r] / sqrt(R),   k'_n[r] = sum_d k_nd K_d(n)[r] / sqrt(R)
        E[q'_m . k'_n] = sum_d q_md P_d(m - n) k_nd                    where E[Q_d(m)[r] K_d(n)[r]] = P_d(m - n)

    Q_d and K_d are nearly Gaussian sequences, independent over the channels d and the realizations r, the same for the whole
    batch. With a gate, P becomes `delta + (1 - delta) P`, delta = sigmoid(gate) per channel: the gate's noise is constant over
    positions. Liutkus et al. (2021). `exact_terms` is the limit of infinitely many realizations.

    With `fixed` the random numbers are drawn once and kept. Products are then no estimates that average out over the steps of a
    training, but functions of both positions, which a model can learn to read; `exact_terms` is not what it computes then. A seed
    that is given to a call does not change them.
    """

    fixed_seed: Tensor | None
    """Where the random numbers start if they are fixed."""

    gate_number: int = 0
    """Which of several gates beside the same codes this is: each has random numbers of its own."""

    def __init__(self, *, heads: int, head_dim: int, realizations: int, gated: bool, fixed: bool):
        super().__init__()
        require_sizes(heads=heads, head_dim=head_dim, realizations=realizations)
        require_switches(gated=gated, fixed=fixed)
        self.heads, self.head_dim, self.realizations = heads, head_dim, realizations
        self.gate = nn.Parameter(torch.randn(heads, head_dim)) if gated else None
        self.random = not fixed
        self.register_buffer("fixed_seed", torch.randint(2**62, ()) if fixed else None)

    @abstractmethod
    def recipe(self, seed: Tensor) -> Recipe:
        """Returns how Q and K are made, the gate included."""

    @abstractmethod
    def kernel(self, first: int, last: int) -> tuple[Float[Tensor, "heads lags head_dim"], int]:
        """Returns P at the lags that matter of `first..last`, and the first of them."""

    def terms(self, first: int, last: int, *, scale: float, seed: Tensor | None = None) -> Terms:
        seed = seed if self.fixed_seed is None else self.fixed_seed
        if seed is None:
            raise ValueError(f"seed must be given to draw the codes of {type(self).__name__}, but is None")

        return Terms(transform=Codes(self, seed))

    def exact_terms(self, first: int, last: int, *, scale: float) -> Terms:
        """Returns the expected kernel as a `gain` table: what `terms` estimates, exactly and in quadratic time."""
        require_lags(first, last)
        require_numbers(scale=scale)
        values, first = self.kernel(first, last)
        if self.gate is not None:
            delta = torch.sigmoid(self.gate)[:, None]
            values = delta + (1.0 - delta) * values
        return Terms(gain=LagTable(values, first))


class Codes:
    """The transform of a stochastic encoding with one seed."""

    def __init__(self, encoding: StochasticEncoding, seed: Tensor):
        self.encoding, self.seed = encoding, seed

    def __call__(self, q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor) -> tuple[Tensor, Tensor]:
        return self._features(q, k, q_positions, k_positions)

    def from_start(self, q: Tensor, k: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Returns the features of tokens at consecutive positions: kernels that know this need not look at them."""
        return self._features(q, k, start=start)

    def _features(
        self, q: Tensor, k: Tensor, q_positions: Tensor | None = None, k_positions: Tensor | None = None, start: int = 0
    ) -> tuple[Tensor, Tensor]:
        heads, head_dim = self.encoding.heads, self.encoding.head_dim
        # Queries have all the heads; keys may be grouped.
        for name, x, fits in (("q", q, q.shape[1] == heads), ("k", k, heads % k.shape[1] == 0)):
            if not fits or x.shape[3] != head_dim:
                raise ValueError(
                    f"{type(self.encoding).__name__} is made for heads={heads} and head_dim={head_dim}, "
                    f"but {name} has {x.shape[1]} heads of width {x.shape[3]}"
                )
        # Each query head has its own codes, so that grouped keys become one per query head.
        recipe = self.encoding.recipe(self.seed)
        return features(recipe, q, per_query_head(k, heads), q_positions, k_positions, start=start)


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
        fixed: Draw the random numbers once and keep them, instead of anew in each forward pass in training.

    >>> encoding = SineSPE(heads=2, head_dim=8, realizations=32)
    >>> q = torch.randn(1, 2, 5, 8)
    >>> transform = encoding.terms(-4, 4, scale=1.0, seed=torch.tensor(0)).transform
    >>> transform(q, q, torch.arange(5), torch.arange(5))[0].shape
    torch.Size([1, 2, 5, 32])
    """

    def __init__(
        self, *, heads: int, head_dim: int, sines: int = 10, realizations: int = 64, gated: bool = True, fixed: bool = False
    ):
        super().__init__(heads=heads, head_dim=head_dim, realizations=realizations, gated=gated, fixed=fixed)
        require_sizes(sines=sines)
        shape = (heads, head_dim, sines)
        self.freq = nn.Parameter(torch.randn(shape) - 4.0)
        self.offset = nn.Parameter(torch.randn(shape))
        gain = torch.randn(shape)
        self.gain = nn.Parameter(2.0 * gain / gain.norm(dim=-1, keepdim=True).sqrt())

    def recipe(self, seed: Tensor) -> Recipe:
        gates = [] if self.gate is None else [self.gate]
        learned = [self.freq, self.offset, self.gain, *gates]
        return Sines(learned, self.realizations, seed, gated=bool(gates), gate_number=self.gate_number)

    def kernel(self, first: int, last: int) -> tuple[Float[Tensor, "heads lags head_dim"], int]:
        lags = torch.arange(first, last + 1, device=self.freq.device)
        # The paper's argument is query minus key, the negative of the lag.
        angles = -math.pi * torch.sigmoid(self.freq.double()) * lags[:, None, None, None] + self.offset
        power = nn.functional.softplus(self.gain) ** 2 / (2 * self.gain.shape[-1])
        return (power * angles.cos()).sum(-1).transpose(0, 1).to(self.gain.dtype), first


class ConvSPE(StochasticEncoding):
    """Stochastic positional encoding by two learned filters of the same noise.

        P_d(m - n) = sum_p phi_q(p) phi_k(p + m - n)           zero from lag `kernel_size` on

    Liutkus et al. (2021), with the first values of their code. The noise is a function of the absolute position, so that
    chunks and offsets see the same. On a grid (an image of rows and columns, read row by row) positions and taps have an
    axis each, and the lag is that of rows and of columns.

    Args:
        heads: Number of query heads.
        head_dim: Width of a head.
        kernel_size: Number of taps of the filters, on each axis.
        grid: For images: the extents of the axes but the first, `(columns,)` or `(rows, columns)` in a volume.
        realizations: Number R of random features that queries and keys become.
        gated: Mix each channel with position-free attention.
        fixed: Draw the random numbers once and keep them, instead of anew in each forward pass in training.

    >>> encoding = ConvSPE(heads=2, head_dim=8, kernel_size=16)
    >>> encoding.exact_terms(-99, 99, scale=1.0).gain.values.shape
    torch.Size([2, 33, 8])
    """

    def __init__(
        self, *, heads: int, head_dim: int, kernel_size: int | tuple[int, ...] = 128, grid: tuple[int, ...] = (),
        realizations: int = 64, gated: bool = True, fixed: bool = False,
    ):  # fmt: skip
        super().__init__(heads=heads, head_dim=head_dim, realizations=realizations, gated=gated, fixed=fixed)
        if not isinstance(grid, tuple | list):
            refuse("grid", "the extents of all axes but the first, (columns,) for an image", grid)
        self.grid = tuple(grid)
        sizes = kernel_size if isinstance(kernel_size, tuple | list) else (kernel_size,) * (len(self.grid) + 1)
        if len(sizes) != len(self.grid) + 1:
            raise ValueError(
                f"kernel_size must have one number per axis, {len(self.grid) + 1} with grid={self.grid}, but is {kernel_size}"
            )
        for size, extent in zip(sizes, (1, *self.grid), strict=True):
            require_sizes(kernel_size=size, grid=extent)
        # The filters of the queries, then those of the keys.
        self.taps = nn.Parameter(torch.rand(2, heads, head_dim, *sizes) / math.sqrt(math.prod(sizes) / 2))

    def recipe(self, seed: Tensor) -> Recipe:
        learned = [self.taps] if self.gate is None else [self.taps, self.gate]
        return Filters(learned, self.realizations, seed, grid=self.grid, gate_number=self.gate_number)

    def kernel(self, first: int, last: int) -> tuple[Float[Tensor, "heads lags head_dim"], int]:
        if self.grid:
            raise ValueError("exact_terms are functions of one lag: a kernel on a grid has one lag per axis, see grid_kernel")
        return self.grid_kernel().flip(1), -self.taps.shape[-1]

    def grid_kernel(self) -> Float[Tensor, "heads *distances head_dim"]:
        """Returns P at every distance of query minus key, from `-kernel_size` to `kernel_size` on each axis."""
        sizes = self.taps.shape[3:]
        # Entry o of an axis of the windows holds phi_k(p + o - size), so that o - size is query minus key.
        windows = nn.functional.pad(self.taps[1], [size for size in reversed(sizes) for _ in range(2)])
        for axis, size in enumerate(sizes):
            windows = windows.unfold(2 + axis, size, 1)
        taps = self.taps[0].view(*self.taps.shape[1:3], *[1] * len(sizes), *sizes)
        return (taps * windows).sum(tuple(range(-len(sizes), 0))).movedim(1, -1)
