"""The options of one call of attention: checked once against its tensors, then handed on as one value."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from inspect import Parameter, signature
from typing import Any, TypedDict, TypeVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lagwise.errors import (
    FLOATS,
    INTEGERS,
    LARGEST,
    counted,
    is_number,
    is_pair,
    is_whole,
    refuse,
    refuse_keywords,
    require,
    require_beside,
    require_probability,
    require_range,
    require_seed,
    require_sizes,
    require_switches,
    require_tensor,
)
from lagwise.lags import reachable_lags, visible_lags


class Masks(TypedDict, total=False):
    """Which keys there are, and which sequences; `lagwise.attention` says what each option means."""

    lengths: Int[Tensor, " batch"] | None
    key_mask: Bool[Tensor, "batch keys"] | None
    cu_seqlens: Int[Tensor, " ends"] | None
    max_seqlen: int | None


class LinearOptions(Masks, total=False):
    """The options of `lagwise.linear_attention`, which says what they mean."""

    causal: bool
    scale: float | None
    seed: Int[Tensor, ""] | None


class WeightOptions(LinearOptions, total=False):
    """The options of `lagwise.attention` that decide its weights, before dropout."""

    window: tuple[int, int] | None
    query_start: int | Int[Tensor, "*batch"]


class Options(WeightOptions, total=False):
    """The options of `lagwise.attention`, which says what they mean."""

    dropout: float


@dataclass(frozen=True)
class Call:
    """The options of a call, as `lagwise.attention` describes them, that have been checked; see `check_call`.

    The fields are those of `Options`. A new option is a field here and there, a check below, a row of the support table, and what
    `dispatch.requests` and `lowering.flat` say of it; tests/test_support.py names the one that is missing.
    """

    causal: bool = False
    lengths: Tensor | None = None
    key_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    max_seqlen: int | None = None
    window: tuple[int, int] | None = None
    query_start: int | Tensor = 0
    scale: float = 1.0
    dropout: float = 0.0
    seed: Tensor | None = None

    @property
    def per_row(self) -> bool:
        """Whether the position of the first query is a tensor, whose values are not known here."""
        return isinstance(self.query_start, Tensor)

    def visible_lags(self, queries: int, keys: int) -> tuple[int, int]:
        """Returns the first and the last lag that a pair can have; there is none if the last is smaller."""
        return visible_lags(queries, keys, query_start=self.query_start, causal=self.causal, window=self.window)

    def reachable_lags(self, queries: int, keys: int) -> tuple[int, int]:
        """Returns the lags to ask an encoding for; of packed sequences those of the longest, where that is known."""
        place: dict[str, Any] = dict(query_start=self.query_start, causal=self.causal, window=self.window)
        return reachable_lags(queries, keys, longest=self.max_seqlen, **place)

    def with_key_mask(self, keys: int) -> "Call":
        """Returns the same call with its lengths as a mask of keys."""
        return self if self.lengths is None else replace(self, lengths=None, key_mask=self.visible_keys(keys))

    def visible_keys(self, keys: int) -> Bool[Tensor, "batch keys"] | None:
        """Returns the mask that lengths and the mask of keys are together, or None."""
        return visible_keys(keys, self.lengths, self.key_mask)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the options that are tensors, with their names."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return ((name, value) for name, value in values if isinstance(value, Tensor))


def visible_keys(keys: int, lengths: Tensor | None, key_mask: Tensor | None) -> Tensor | None:
    """Returns the mask of keys, [batch, keys], that lengths and a mask are together, or None."""
    if lengths is None:
        return key_mask
    within = torch.arange(keys, device=lengths.device) < lengths[:, None]
    return within if key_mask is None else key_mask & within


def hides_last_keys(key_mask: Bool[Tensor, "batch keys"]) -> bool:
    """Says whether a mask hides the last keys of each row alone, as lengths do; on a GPU it waits for the answer."""
    return not bool((key_mask[:, 1:] & ~key_mask[:, :-1]).any())


OPTIONS, LINEAR_OPTIONS = frozenset(Options.__annotations__), frozenset(LinearOptions.__annotations__)
MASKS, WEIGHT_OPTIONS = frozenset(Masks.__annotations__), frozenset(WeightOptions.__annotations__)
"""The names of the options."""

DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(Call)} | {"scale": None}
"""The options that a caller may leave out."""

Function = TypeVar("Function", bound=Callable[..., Any])


def takes(options: type) -> Callable[[Function], Function]:
    """Shows the options of a function, which it takes as `**options`, one by one in its signature, for `help` and for errors."""
    kinds = options.__annotations__
    shown = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kinds[name])
        for name, default in DEFAULTS.items()
        if name in kinds
    ]

    return lambda function: showing(function, shown)


def showing(function: Function, more: Iterable[Parameter], *, rest: bool = False) -> Function:
    """Adds parameters to the signature that a function shows, in place of its keywords, or before them where there are others."""
    given = signature(function)
    own = [each for each in given.parameters.values() if each.kind is not Parameter.VAR_KEYWORD]
    others = [each for each in given.parameters.values() if each.kind is Parameter.VAR_KEYWORD and rest]
    names = {each.name for each in own}
    added = [each for each in more if each.name not in names]
    function.__signature__ = given.replace(parameters=[*own, *added, *others])  # pyright: ignore[reportFunctionMemberAccess]
    return function


def check_call(
    function: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, options: Mapping[str, Any], known: frozenset[str] = OPTIONS
) -> Call:
    """Returns the options of a public function as a call, with a scale; raises for those that do not fit together.

    Args:
        function: Who was called, for the words of an error.
        q: Queries.
        k: Keys.
        v: Values.
        options: The keywords that were given.
        known: The names of those that there are.
    """
    refuse_keywords([name for name in options if name not in known], function)
    call = Call(**{**DEFAULTS, **options})
    require_switches(causal=call.causal)
    check_tensors(q, k, v)
    check_masks(call, q, k)
    require_probability("dropout", call.dropout)
    require_seed(call.seed)
    if call.seed is not None:
        require_beside("seed", call.seed, "q", q.device)
    scale = check_scale(call.scale, q.shape[-1], q.dtype)
    check_longest(call.cu_seqlens, call.max_seqlen)
    return replace(call, scale=scale)


KEPT_CALLS: dict[Any, Call] = {}
"""Calls on a GPU that were checked, by kind; at most MOST_KEPT, then it starts anew."""
MOST_KEPT = 1024

# What tells options apart by value alone: a tensor's values are checked in each call, and True is not 1.
PLAIN_OPTIONS = {bool, int, float, type(None)}


def checked_call(function: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, options: Mapping[str, Any]) -> Call:
    """Does what `check_call` does, on a GPU once for all calls with equal sizes and options."""
    if torch.compiler.is_compiling() or not all(type(x) is Tensor and x.is_cuda for x in (q, k, v)):
        return check_call(function, q, k, v, options)
    if not all(type(value) in PLAIN_OPTIONS for value in options.values()):
        return check_call(function, q, k, v, options)
    shown = tuple((name, type(value), value) for name, value in options.items())
    key = (q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, shown)
    call = KEPT_CALLS.get(key)
    if call is None:
        call = check_call(function, q, k, v, options)
        keep(KEPT_CALLS, key, call)
    return call


def keep(kept: dict[Any, Any], key: Any, value: Any) -> None:
    """Adds to what is kept of calls, which starts anew where it would grow beyond MOST_KEPT."""
    if len(kept) >= MOST_KEPT:
        kept.clear()
    kept[key] = value


def check_scale(scale: float | None, width: int, dtype: torch.dtype = torch.float64) -> float:
    """Returns the factor of the content product, by default that of a width; sums of a dtype must be able to hold it."""
    if scale is None:
        return width**-0.5
    if not is_number(scale):
        refuse("scale", "a finite number or None", scale)
    largest = torch.finfo(torch.promote_types(dtype, torch.float32)).max
    if not -largest <= scale <= largest:
        refuse("scale", f"from {-largest:.3g} to {largest:.3g}, since sums are taken in float32", scale)
    return scale


def check_window(window: tuple[int, int] | None) -> tuple[int, int] | None:
    """Returns a window, which must be two numbers of lags."""
    if window is not None and not (is_pair(window, is_whole) and window[0] >= 0 and window[1] >= 0):
        refuse("window", "(left, right), two numbers of lags of at least 0", window)
    return window


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises for tensors that do not fit together."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"{name} must have the dtype and device of q, {q.dtype} on {q.device}, but is {x.dtype} on {x.device}"
            )
        if x.shape[0] != q.shape[0]:
            raise ValueError(f"{name} must have the batch of q, {q.shape[0]}, but has shape {tuple(x.shape)}")
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"k must have the width of q, {q.shape[3]}, but has shape {tuple(k.shape)}")
    if v.shape[1:3] != k.shape[1:3]:
        raise ValueError(f"v must have the heads and the length of k, {tuple(k.shape[1:3])}, but has shape {tuple(v.shape)}")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"the heads of q must be a multiple of those of k, but q has {q.shape[1]} and k has {k.shape[1]}")


def check_tensor(name: str, x: Tensor) -> None:
    """Raises for anything but a tensor that attention can read."""
    if not isinstance(x, Tensor):
        refuse(name, "a tensor [batch, heads, time, dim]", x)
    if x.ndim != 4:
        raise ValueError(f"{name} must be [batch, heads, time, dim], but has shape {tuple(x.shape)}")
    if x.dtype not in FLOATS:
        raise ValueError(f"{name} must be float64, float32, float16 or bfloat16, but is {x.dtype}")
    if 0 in x.shape:
        raise ValueError(f"{name} must not be empty, but has shape {tuple(x.shape)}")


def check_masks(call: Call, q: Tensor, k: Tensor) -> None:
    """Raises for options that do not fit the tensors."""
    batch, keys = k.shape[0], k.shape[2]
    check_keys(batch, keys, call.lengths, call.key_mask, k.device)
    check_window(call.window)
    check_start(call.query_start, batch, keys, k.device)
    if call.cu_seqlens is not None:
        check_ends(call.cu_seqlens, keys)
        require_beside("cu_seqlens", call.cu_seqlens, "k", k.device)
        if batch != 1 or q.shape[2] != keys:
            raise ValueError(
                "cu_seqlens packs sequences of self-attention into batch 1, "
                f"but q has shape {tuple(q.shape)} and k {tuple(k.shape)}"
            )
        for name, given in (("lengths", call.lengths), ("key_mask", call.key_mask)):
            if given is not None:
                raise ValueError(f"{name} cannot be combined with cu_seqlens: leave padding out of the packed sequences")
        if isinstance(call.query_start, Tensor) or call.query_start != 0:
            raise ValueError("query_start cannot be combined with cu_seqlens, where positions start with each sequence")


def check_start(query_start: int | Tensor, batch: int, keys: int, device: torch.device) -> None:
    """Raises for a position of the first query that does not fit the keys."""
    if isinstance(query_start, Tensor):
        if query_start.dtype not in INTEGERS:
            raise ValueError(f"query_start must be int64 or int32, but is {query_start.dtype}")
        if query_start.ndim > 1 or (query_start.ndim == 1 and query_start.shape[0] != batch):
            raise ValueError(
                f"query_start must be a number, or a tensor with one or with {batch} (the batch), "
                f"but has shape {tuple(query_start.shape)}"
            )
        if query_start.ndim == 1:
            require_beside("query_start", query_start, "k", device)
        require_range("query_start", query_start, 0, keys)
    elif not is_whole(query_start):
        refuse("query_start", "a whole number or a tensor of them", query_start)
    elif not -LARGEST <= query_start <= LARGEST:
        refuse("query_start", f"a whole number from {-LARGEST} to {LARGEST}", query_start)


def check_keys(
    batch: int, keys: int, lengths: Tensor | None, key_mask: Tensor | None, device: torch.device,
    names: tuple[str, str] = ("lengths", "key_mask"),
) -> None:  # fmt: skip
    """Raises for masks that do not fit the keys, which have names of their own in some calls."""
    if lengths is not None:
        require_tensor(names[0], lengths, (batch,), *INTEGERS)
        require_beside(names[0], lengths, "k", device)
        require_range(names[0], lengths, 0, keys)
    if key_mask is not None:
        require_tensor(names[1], key_mask, (batch, keys), torch.bool)
        require_beside(names[1], key_mask, "k", device)


def check_ends(cu_seqlens: Tensor, keys: int) -> None:
    """Raises for ends of packed sequences that do not fit the time axis."""
    if not isinstance(cu_seqlens, Tensor):
        refuse("cu_seqlens", "a tensor of integers, [sequences + 1]", cu_seqlens)
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2 or cu_seqlens.dtype not in INTEGERS:
        raise ValueError(
            "cu_seqlens must be a tensor of integers, [sequences + 1], "
            f"but is {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}"
        )
    right = (cu_seqlens[0] == 0) & (cu_seqlens[-1] == keys) & (cu_seqlens.diff() >= 0).all()
    require(right, f"cu_seqlens must start with 0, never fall, and end with the time axis, {counted(keys)}", cu_seqlens)


def check_longest(cu_seqlens: Tensor | None, max_seqlen: int | None) -> None:
    """Raises for a length that a packed sequence exceeds."""
    if max_seqlen is None:
        return
    if cu_seqlens is None:
        raise ValueError("max_seqlen is the length of the longest packed sequence, but cu_seqlens is missing: leave it out")
    require_sizes(max_seqlen=max_seqlen)
    fits = (cu_seqlens.diff() <= max_seqlen).all()
    require(fits, f"cu_seqlens must have no sequence longer than max_seqlen, {counted(max_seqlen)}", cu_seqlens)
