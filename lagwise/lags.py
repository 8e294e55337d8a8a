"""Functions of the lag, `n = key position - query position`, as small tables with known tails."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lagwise.errors import is_pair, is_whole, refuse, require_floats, require_integers, require_lags


@dataclass(frozen=True)
class LagTable:
    """A function of the lag: one column per lag from `first` to `last`, constant or linear beyond.

        f(n) = values[:, clip(n, first, last) - first] + slope * (n - end)      slope = 0 inside the table

    All index arithmetic on lags lives here. One head in `values` means that all heads share the table.

    Args:
        values: One row per head (or a single shared one), one column per lag, and channels for tables of vectors.
        first: The lag of the first column; negative lags are the past.
        slopes: Growth per lag before `first` and after `last`, one number per head each. The value beyond an end is
            `end value + slope * (n - end)`, so a bias that falls into the past has a positive past slope.

    >>> table = LagTable(torch.tensor([[1.0, 2.0, 3.0]]), first=-1)
    >>> table.at(torch.tensor([-9, -1, 0, 1, 9]))
    tensor([[1., 1., 2., 3., 3.]])
    """

    values: Float[Tensor, "heads lags *channels"]
    first: int
    slopes: tuple[Float[Tensor, " heads"], Float[Tensor, " heads"]] | None = None

    def __post_init__(self):
        require_floats("values", self.values, "[heads, lags] or [heads, lags, channels]")
        if not is_whole(self.first):
            refuse("first", "a whole number, the lag of the first column", self.first)
        shape = self.values.shape
        if len(shape) not in (2, 3):
            raise ValueError(f"values must be [heads, lags] or [heads, lags, channels], but has shape {tuple(shape)}")
        if 0 in shape:
            raise ValueError(f"values must have at least one head, lag and channel, but has shape {tuple(shape)}")
        if self.slopes is not None:
            if len(shape) != 2:
                raise ValueError(
                    "slopes need a table of scalars, values [heads, lags]: only `bias` may have them, "
                    f"but values has shape {tuple(shape)}"
                )
            if not is_pair(self.slopes, lambda slope: isinstance(slope, Tensor) and slope.is_floating_point()):
                refuse("slopes", "two tensors of floating-point numbers, of the past and of the future", self.slopes)
            for side, slope in zip(("past", "future"), self.slopes, strict=True):
                if slope.shape != shape[:1]:
                    raise ValueError(
                        f"the {side} slope must have one number per head, shape ({shape[0]},), but has shape {tuple(slope.shape)}"
                    )

    @property
    def last(self) -> int:
        """The lag of the last column."""
        return self.first + self.values.shape[1] - 1

    @property
    def heads(self) -> int:
        """The number of heads that `values` tells apart; 1 means shared."""
        return self.values.shape[0]

    @property
    def constant(self) -> bool:
        """Whether the function has the same value at every lag, by its shape alone."""
        return self.values.shape[1] == 1 and self.slopes is None

    def at(self, lags: Int[Tensor, "*shape"]) -> Float[Tensor, "heads ..."]:
        """Evaluates the function at any lags; the result is [heads, *lags.shape, *channels]."""
        require_integers("lags", lags, "of lags")
        columns = (lags - self.first).clamp(0, self.values.shape[1] - 1)
        # An embedding, because its gradient, unlike that of an index, is summed in the same order each time.
        rows = torch.nn.functional.embedding(columns, self.values.transpose(0, 1).flatten(1))
        result = rows.unflatten(-1, (self.heads, *self.values.shape[2:])).movedim(lags.ndim, 0)
        if self.slopes is not None:
            result = result + self._slope_share(lags).view(self.heads, *lags.shape)
        return result

    def window(self, first: int, last: int) -> Float[Tensor, "heads width *channels"]:
        """Evaluates the function at all lags from `first` to `last`."""
        require_lags(first, last)
        before, inside, after = self._cut(first, last)
        parts = (
            self.values[:, :1].expand(-1, before, *self.values.shape[2:]),
            self.values[:, inside],
            self.values[:, -1:].expand(-1, after, *self.values.shape[2:]),
        )
        result = torch.cat([part for part in parts if part.shape[1] > 0], dim=1)
        if self.slopes is not None:
            result = result + self._slope_share(torch.arange(first, last + 1, device=self.values.device))
        return result

    def fold(self, gradient: Float[Tensor, "heads width *channels"], first: int, into: "LagTable") -> None:
        """Adds to `into`, of this table's shape, the gradient of `window(first, ...)`: its transpose, without atomics."""
        if self.heads == 1 and len(gradient) > 1:
            gradient = gradient.sum(0, keepdim=True)
        before, inside, after = self._cut(first, first + gradient.shape[1] - 1)
        into.values[:, inside] += gradient[:, before : gradient.shape[1] - after]
        if before:
            into.values[:, 0] += gradient[:, :before].sum(1)
        if after:
            into.values[:, -1] += gradient[:, gradient.shape[1] - after :].sum(1)
        if into.slopes is not None:
            lags = torch.arange(first, first + gradient.shape[1], device=gradient.device)
            for slope, beyond in zip(into.slopes, self._beyond(lags), strict=True):
                slope += (gradient * beyond).sum(1)

    def spanning(self, first: int, last: int) -> "LagTable":
        """Returns the same function with columns for at least the lags from `first` to `last`."""
        first, last = min(first, self.first), max(last, self.last)
        return LagTable(self.window(first, last), first, self.slopes)

    def to(self, dtype: torch.dtype) -> "LagTable":
        """Returns the table in another floating-point type; gradients flow back in the old one."""
        slopes = self.slopes and (self.slopes[0].to(dtype), self.slopes[1].to(dtype))
        return LagTable(self.values.to(dtype), self.first, slopes)

    def zeros(self, dtype: torch.dtype) -> "LagTable":
        """Returns a contiguous table of zeros of the same shape, to accumulate gradients in."""

        def like(x: Tensor) -> Tensor:
            return torch.zeros(x.shape, dtype=dtype, device=x.device)

        slopes = self.slopes and (like(self.slopes[0]), like(self.slopes[1]))
        return LagTable(like(self.values), self.first, slopes)

    def __add__(self, other: "LagTable") -> "LagTable":
        self._require_fit(other, self.values.shape[2:] == other.values.shape[2:])
        a, b = self.spanning(other.first, other.last), other.spanning(self.first, self.last)
        slopes = None
        if a.slopes is not None and b.slopes is not None:
            slopes = (a.slopes[0] + b.slopes[0], a.slopes[1] + b.slopes[1])
        elif a.slopes is not None or b.slopes is not None:
            heads = torch.zeros_like(a.values[:, 0] + b.values[:, 0])
            past, future = a.slopes if a.slopes is not None else b.slopes  # pyright: ignore[reportGeneralTypeIssues]
            slopes = (past + heads, future + heads)
        return LagTable(a.values + b.values, a.first, slopes)

    def __mul__(self, other: "LagTable") -> "LagTable":
        if self.slopes is not None or other.slopes is not None:
            raise ValueError("tables with slopes cannot be multiplied: their product is not linear beyond its ends")
        one = 1 in (self.values.shape[-1], other.values.shape[-1])
        self._require_fit(
            other, self.values.ndim == other.values.ndim and (one or self.values.shape[2:] == other.values.shape[2:])
        )
        a, b = self.spanning(other.first, other.last), other.spanning(self.first, self.last)
        return LagTable(a.values * b.values, a.first)

    def _require_fit(self, other: "LagTable", channels: bool) -> None:
        if not channels or (self.heads != other.heads and 1 not in (self.heads, other.heads)):
            raise ValueError(
                "tables that are joined must have the same heads, or one, and the same channels, "
                f"but their values have shapes {tuple(self.values.shape)} and {tuple(other.values.shape)}"
            )

    def _slope_share(self, lags: Tensor) -> Float[Tensor, "heads lags"]:
        """What slopes add at lags of any shape, flattened; in float32 at least, since half precision cannot hold far lags."""
        assert self.slopes is not None
        compute = torch.promote_types(self.values.dtype, torch.float32)
        past, future = (slope.to(compute)[:, None] for slope in self.slopes)
        before, after = (distance.flatten() for distance in self._beyond(lags))
        return past * before + future * after

    def _beyond(self, lags: Tensor) -> tuple[Tensor, Tensor]:
        """How far each lag lies before the first (negative) and after the last column (positive)."""
        return (lags - self.first).clamp(max=0), (lags - self.last).clamp(min=0)

    def _cut(self, first: int, last: int) -> tuple[int, slice, int]:
        """Cuts the lags `first..last` into a number before the table, columns of it, and a number after it."""
        before = max(0, min(self.first, last + 1) - first)
        after = max(0, last - max(self.last, first - 1))
        start = max(first, self.first) - self.first
        return before, slice(start, start + last - first + 1 - before - after), after


def visible_lags(
    queries: int,
    keys: int,
    *,
    query_start: int | Tensor = 0,
    causal: bool = False,
    window: tuple[int, int] | None = None,
) -> tuple[int, int]:
    """Returns the first and the last lag that a call can reach; there is none if the last is smaller.

    Query row r stands at position `query_start + r`, key j at position j. Of a `query_start` that is a tensor only
    its allowed range, 0 to `keys`, is known.
    """
    if isinstance(query_start, Tensor):
        first, last = 1 - queries - keys, keys - 1
    else:
        first, last = 1 - queries - query_start, keys - 1 - query_start
    if causal:
        last = min(last, 0)
    if window is not None:
        first, last = max(first, -window[0]), min(last, window[1])
    return first, last


def reachable_lags(queries: int, keys: int, *, longest: int | None = None, **options: Any) -> tuple[int, int]:
    """Returns the lags to ask an encoding for, those of `visible_lags`: a call that reaches none still needs a table.

    Of packed sequences, those of the longest, where that is known.

    >>> reachable_lags(100, 100, longest=8)
    (-7, 7)
    """
    if longest is not None:
        queries, keys = min(queries, longest), min(keys, longest)
    first, last = visible_lags(queries, keys, **options)
    return min(first, last), last
