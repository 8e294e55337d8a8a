"""What an encoding does to attention: five functions of the lag and a transform per token."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lagwise.errors import refuse, require_switches
from lagwise.lags import LagTable

Transform: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Maps `(q, k, q_positions, k_positions)` to `(q', k')`; positions are [time] or [batch, time]."""


@dataclass(frozen=True)
class FeatureTransform:
    """Maps the features of queries and keys in linear attention, token by token.

        out_i = sum_j phi'(q_i) . phi'(k_j) v_j / sum_j phi'(q_i) . phi'(k_j)

    Args:
        function: Maps `(phi_q, phi_k, q_positions, k_positions)` to `(phi'_q, phi'_k)`.
        numerator_only: Keep the features themselves in the denominator, for a function whose products may be negative.
        softmax_inputs: Map queries and keys in place of features that estimate softmax attention, such as those of "favor": the
            weights are then estimates of softmax attention's with the same map. Their features have no meaning one by one.
    """

    function: Transform
    numerator_only: bool = False
    softmax_inputs: bool = False

    def __post_init__(self):
        if not callable(self.function):
            refuse("function", "a function of (phi_q, phi_k, q_positions, k_positions)", self.function)
        require_switches(numerator_only=self.numerator_only, softmax_inputs=self.softmax_inputs)


TABLES = ("bias", "gain", "query", "key", "value")
"""The fields of `Terms` that are functions of the lag."""


@dataclass(frozen=True)
class Terms:
    """The terms that a relative encoding adds to attention. A missing field is neutral.

        logit(i, j) = scale * (sum_c gain_c(n) q'_ic k'_jc + q_i . query(n) + k_j . key(n)) + bias(n)     n = j - i
        out(i)      = sum_j softmax_j(logit(i, j)) * (v_j + value(n))

    `q'` and `k'` are q and k after `transform`; `query` and `key` read the raw q and k, so that they stay relative
    beside a rotation. `a + b` adds `bias`, `query`, `key` and `value`, multiplies `gain`, and applies a's transform first.

    Args:
        bias: Scalars, [heads, lags]; the only table that may have slopes.
        gain: Factors of the content product, [heads, lags, 1] or one per channel, [heads, lags, head_dim].
        query: Vectors that meet the query, [heads, lags, head_dim].
        key: Vectors that meet the key, [heads, lags, head_dim].
        value: Vectors that are added to the values, [heads, lags, value_dim].
        transform: Maps q and k token by token; the product of its outputs takes the place of q . k.
        features: Maps the features of linear attention, which softmax attention does not have and refuses.
    """

    bias: LagTable | None = None
    gain: LagTable | None = None
    query: LagTable | None = None
    key: LagTable | None = None
    value: LagTable | None = None
    transform: Transform | None = None
    features: FeatureTransform | None = None

    def __post_init__(self):
        for name in TABLES:
            table = getattr(self, name)
            if table is None:
                continue
            if not isinstance(table, LagTable):
                refuse(name, "a LagTable or None", table)
            rank = 2 if name == "bias" else 3
            if table.values.ndim != rank:
                shape = "[heads, lags]" if name == "bias" else "[heads, lags, channels]"
                raise ValueError(f"{name} must be a table {shape}, but its values have shape {tuple(table.values.shape)}")
        if self.transform is not None and not callable(self.transform):
            refuse("transform", "a function of (q, k, q_positions, k_positions) or None", self.transform)
        if self.features is not None and not isinstance(self.features, FeatureTransform):
            refuse("features", "a FeatureTransform or None", self.features)
        if self.gain is not None and self.gain.values.shape[2] > 1 and self.transform is not None:
            raise ValueError(
                "a gain per channel cannot be combined with a transform, whose outputs have other channels than q: "
                "use a gain with one channel, [heads, lags, 1]"
            )

    def tables(self) -> dict[str, LagTable]:
        """The tables that are there, by name."""
        return {name: table for name in TABLES if (table := getattr(self, name)) is not None}

    @property
    def kind(self) -> tuple[Any, ...]:
        """What tells terms apart, whatever the numbers in their tables: a choice of who computes depends on no more."""
        tables = (self.bias, self.gain, self.query, self.key, self.value)
        kinds = (None if x is None else (x.values.shape, x.first, x.values.device, x.slopes is None) for x in tables)
        return *kinds, self.transform is None, self.features is None

    def vector_tables(self) -> list[LagTable]:
        """The tables with more than one channel."""
        return [table for table in self.tables().values() if table.values.ndim == 3 and table.values.shape[2] > 1]

    def check_fit(self, q: Tensor, v: Tensor) -> None:
        """Raises for tables that do not fit queries and values."""
        heads, widths = q.shape[1], {"gain": q.shape[3], "query": q.shape[3], "key": q.shape[3], "value": v.shape[3]}
        for name, table in self.tables().items():
            # Not `in`, which takes symbolic sizes of a compiler for different.
            if table.heads != 1 and table.heads != heads:
                raise ValueError(f"the {name} table must have {heads} heads, those of q, or 1, but has {table.heads}")
            if table.values.device != q.device:
                raise ValueError(f"the {name} table must be on {q.device}, where q is, but is on {table.values.device}")
            width = table.values.shape[2] if name in widths else None
            if width is not None and width != widths[name] and not (name == "gain" and width == 1):
                raise ValueError(f"the {name} table must have {widths[name]} channels, but has {width}")

    def to(self, dtype: torch.dtype) -> "Terms":
        """Returns the terms with all tables in another floating-point type."""
        return replace(self, **{name: table.to(dtype) for name, table in self.tables().items()})

    def content(self, q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the operands of the content product: q and k, through the transform if there is one."""
        if self.transform is None:
            return q, k
        return fitting(q, k, *self.transform(q, k, q_positions, k_positions))

    def content_from(self, q: Tensor, k: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Returns the operands for tokens at consecutive positions from `start`; a transform may have a method `from_start`."""
        direct = getattr(self.transform, "from_start", None)
        if direct is not None:
            return fitting(q, k, *direct(q, k, start))
        if self.transform is None:
            return q, k
        return self.content(q, k, *(torch.arange(start, start + x.shape[2], device=x.device) for x in (q, k)))

    def __add__(self, other: "Terms") -> "Terms":
        if not isinstance(other, Terms):
            return NotImplemented
        if self.features is not None and other.features is not None:
            raise ValueError(
                "two encodings that both map the features of linear attention cannot be added: in general their maps do not "
                "commute, and the product would not depend on the lag alone. Use one of them"
            )
        mine, theirs = self.tables(), other.tables()
        both = {
            name: mine[name] * theirs[name] if name == "gain" else mine[name] + theirs[name]
            for name in mine.keys() & theirs.keys()
        }
        features = self.features or other.features
        return Terms(**{**mine, **theirs, **both}, transform=_chain(self.transform, other.transform), features=features)


def fitting(q: Tensor, k: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Returns what a transform made of q and k, and raises if it cannot take their place."""
    tokens = a.shape[:3] == q.shape[:3] and (b.shape[0], b.shape[2]) == (k.shape[0], k.shape[2])
    if not tokens or a.shape[3] != b.shape[3] or q.shape[1] % b.shape[1]:
        raise ValueError(
            "transform must return q' with the batch, heads and time of q, and k' with those of k (or the heads of q), "
            f"of one width, but from {tuple(q.shape)} and {tuple(k.shape)} it makes {tuple(a.shape)} and {tuple(b.shape)}"
        )
    return a, b


def _chain(first: Transform | None, second: Transform | None) -> Transform | None:
    if first is None or second is None:
        return first or second

    def both(q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor) -> tuple[Tensor, Tensor]:
        return second(*first(q, k, q_positions, k_positions), q_positions, k_positions)

    return both
