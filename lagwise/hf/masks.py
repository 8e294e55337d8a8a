"""Masks as the few numbers that they are made of."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from transformers.masking_utils import causal_mask_function

from lagwise.call import hides_last_keys

NAME = "lagwise"
"""What transformers knows us by."""

LONG = 4096
"""From so many keys on, padding on the right becomes lengths: the far field takes these, and finding out is cheap beside it."""

OTHERWISE = "load the model with attn_implementation='sdpa' or 'eager', or call its set_attn_implementation"


@dataclass(frozen=True)
class Mask:
    """Who may attend to whom.

    Args:
        keys: The number of keys that it tells about; later ones do not exist yet.
        key_mask: Which keys may be attended to, all of them if None.
        lengths: How many keys there are in each row, in place of a mask of keys.
        query_start: Position of the first query, counted from the first key.
        causal: Let queries see no later key.
        window: How many lags into the past and into the future a query may see.
    """

    keys: int
    key_mask: Bool[Tensor, "batch keys"] | None = None
    lengths: Int[Tensor, " batch"] | None = None
    query_start: int | Int[Tensor, ""] = 0
    causal: bool = False
    window: tuple[int, int] | None = None

    # What transformers asks of a mask that it takes for finished.
    ndim: ClassVar[int] = 4

    def contiguous(self) -> "Mask":
        """Returns the mask itself."""
        return self

    def to(self, *args: Any, **options: Any) -> "Mask":
        """Returns the mask with its tensors on another device, which accelerate asks for between the layers of a split model."""
        return replace(self, **{name: x.to(*args, **options) for name, x in vars(self).items() if isinstance(x, Tensor)})


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | Mask | None = None,
    **options: Any,
) -> Mask:
    """Returns the mask of one kind of layer, for transformers' `AttentionMaskInterface`."""
    if isinstance(attention_mask, Mask):
        # `generate` makes it ahead of the model where the cache is static.
        return attention_mask
    band = band_of(mask_function)
    causal = band.last == 0
    window = None if band.first is None and band.last in (None, 0) else band.window(kv_length)
    # With causal attention the keys behind the mask's end are later ones, which need not be hidden.
    whole = causal or attention_mask is None or attention_mask.shape[1] >= kv_offset + kv_length
    # The difference is a tensor of its own, where the offset is one that the cache counts up in place.
    mask = Mask(kv_length, query_start=q_offset - kv_offset, causal=causal, window=window)
    # A graph that is compiled cannot depend on the values.
    known = not torch.compiler.is_compiling()
    if attention_mask is None or (whole and known and bool(attention_mask.all())):
        return mask
    key_mask = at_length(attention_mask[:, kv_offset : kv_offset + kv_length], kv_length)
    # A GPU has just been waited for, and is soon done with this.
    if known and q_length == kv_length >= LONG and hides_last_keys(key_mask):
        return replace(mask, lengths=key_mask.sum(1))
    return replace(mask, key_mask=key_mask)


def at_length(key_mask: Bool[Tensor, "batch given"], keys: int) -> Bool[Tensor, "batch keys"]:
    """Returns a mask of more keys, where those beyond its end do not exist."""
    return nn.functional.pad(key_mask, (0, keys - key_mask.shape[1])) if key_mask.shape[1] < keys else key_mask


def band_of(mask_function: Callable) -> "Band":
    """Returns the lags that a mask function of transformers lets through, by calling it with positions that are not known."""
    try:
        band = mask_function(Unknown(), Unknown(), Expression(query=1), Expression(key=1))
    except (TypeError, IndexError, AttributeError) as error:
        raise ValueError(
            "the model's mask must let through a band of lags (causal, bidirectional, a sliding window), beside padding, but it "
            f"depends on more, as those of packed sequences, of chunks and of blocks do: {OTHERWISE}"
        ) from error
    if (band.first or 0) > 0 or (band.last or 0) < 0:
        raise ValueError(f"the model's mask must let through lag 0, but lets through {band}: {OTHERWISE}")
    return band


@dataclass(frozen=True)
class Band:
    """The lags from `first` to `last`; None is no end. To a mask function it looks like a tensor of truth values."""

    first: int | None = None
    last: int | None = None

    device: ClassVar[None] = None

    def to(self, device: None) -> "Band":
        """Returns the band itself."""
        return self

    def window(self, keys: int) -> tuple[int, int]:
        """Returns how many lags of the past and of the future are in it, at most the number of keys if it has no end."""
        return keys if self.first is None else -self.first, keys if self.last is None else self.last

    def __and__(self, other: "Band") -> "Band":
        if not isinstance(other, Band):
            return NotImplemented
        firsts = [band.first for band in (self, other) if band.first is not None]
        lasts = [band.last for band in (self, other) if band.last is not None]
        return Band(max(firsts, default=None), min(lasts, default=None))

    def __bool__(self) -> bool:
        raise TypeError("whether a lag is in the band is not known")


class Unknown:
    """An index of which nothing is known."""

    def __eq__(self, other: object) -> bool:
        raise TypeError("whether an index equals something is not known")

    def __bool__(self) -> bool:
        raise TypeError("whether an index is 0 is not known")


@dataclass(frozen=True, eq=False)
class Expression(Unknown):
    """`key * key position + query * query position + constant`, of positions that are at least 0 and not known."""

    key: int = 0
    query: int = 0
    constant: int = 0

    def new_ones(self, *size: Any, **options: Any) -> Band:
        """Returns what a mask function starts with: all lags."""
        return Band()

    def __add__(self, other: "Expression | int") -> "Expression":
        if isinstance(other, int):
            return replace(self, constant=self.constant + other)
        if not isinstance(other, Expression):
            return NotImplemented
        return Expression(self.key + other.key, self.query + other.query, self.constant + other.constant)

    def __neg__(self) -> "Expression":
        return Expression(-self.key, -self.query, -self.constant)

    def __sub__(self, other: "Expression | int") -> "Expression":
        return self + -other if isinstance(other, int | Expression) else NotImplemented

    def __abs__(self) -> "Distance":
        return Distance(self)

    def __le__(self, other: "Expression | int") -> Band:
        if not isinstance(other, int | Expression):
            return NotImplemented
        left = self - other
        if (left.key, left.query) == (1, -1):
            return Band(last=-left.constant)
        if (left.key, left.query) == (-1, 1):
            return Band(first=left.constant)
        if max(left.key, left.query, left.constant) <= 0:
            return Band()
        raise TypeError("the comparison depends on more than the lag")

    def __lt__(self, other: "Expression | int") -> Band:
        return self + 1 <= other

    def __ge__(self, other: "Expression | int") -> Band:
        return -self <= -other if isinstance(other, int | Expression) else NotImplemented

    def __gt__(self, other: "Expression | int") -> Band:
        return self - 1 >= other


@dataclass(frozen=True)
class Distance:
    """The absolute value of an expression."""

    of: Expression

    def __le__(self, other: int) -> Band:
        return (self.of <= other) & (-self.of <= other)

    def __lt__(self, other: int) -> Band:
        return self <= other - 1
