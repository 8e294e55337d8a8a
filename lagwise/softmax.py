"""The public calls: check what is given, choose who computes it, call them."""

import os
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple, TypedDict, overload

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from typing_extensions import Unpack

from lagwise import noise
from lagwise.encodings import Encoding
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
    require_choice,
    require_probability,
    require_range,
    require_seed,
    require_sizes,
    require_switches,
    require_tensor,
    shown,
)
from lagwise.lags import LagTable, reachable_lags
from lagwise.ops import register, support, vendor
from lagwise.ops.dense import dense
from lagwise.ops.lowering import lower
from lagwise.ops.split.eager import is_plain, near_band
from lagwise.terms import Terms

# Measured crossover points. With few pairs and tables of scalars the matrix of pairs is the fastest; the far field pays once
# the keys outnumber the tables' lags by a factor, which a GPU's launches raise: less for vectors where there is much to compute.
DENSE_PAIRS = 128 * 128
SPLIT_PAYS_FROM = {"cpu": 1, "cuda": 30, "cuda, vectors": 15}
MANY_PAIRS = 2**31

# The most lags of a table of vectors whose scores `split` writes out on a GPU.
WIDEST_VECTORS = 1024

WATCHER: ContextVar[Callable[..., Terms] | None] = ContextVar("WATCHER", default=None)
"""While it is set, it is called with the tensors, the terms and the options of each call that is not compiled, and returns the
terms to compute with. `lagwise.lens` looks into models through it."""


class Choice(NamedTuple):
    """An implementation and the reason for it."""

    impl: str
    why: str


class Options(TypedDict, total=False):
    """The options of `attention`, which says what they mean, for the types of its calls."""

    causal: bool
    lengths: Int[Tensor, " batch"] | None
    key_mask: Bool[Tensor, "batch keys"] | None
    cu_seqlens: Int[Tensor, " ends"] | None
    max_seqlen: int | None
    window: tuple[int, int] | None
    query_start: int | Int[Tensor, "*batch"]
    scale: float | None
    dropout: float
    seed: Int[Tensor, ""] | None
    impl: str


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, encoding: Encoding | Terms | None = None, *, return_lse: Literal[False] = False,
    **options: Unpack[Options],
) -> Float[Tensor, "batch heads queries value_dim"]: ...  # fmt: skip


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, encoding: Encoding | Terms | None = None, *, return_lse: Literal[True],
    **options: Unpack[Options],
) -> tuple[Float[Tensor, "batch heads queries value_dim"], Float[Tensor, "batch heads queries"]]: ...  # fmt: skip


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, encoding: Encoding | Terms | None = None, *, return_lse: bool,
    **options: Unpack[Options],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip


def attention(
    q: Float[Tensor, "batch heads queries dim"],
    k: Float[Tensor, "batch kv_heads keys dim"],
    v: Float[Tensor, "batch kv_heads keys value_dim"],
    encoding: Encoding | Terms | None = None,
    *,
    causal: bool = False,
    lengths: Int[Tensor, " batch"] | None = None,
    key_mask: Bool[Tensor, "batch keys"] | None = None,
    cu_seqlens: Int[Tensor, " ends"] | None = None,
    max_seqlen: int | None = None,
    window: tuple[int, int] | None = None,
    query_start: int | Int[Tensor, "*batch"] = 0,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: Int[Tensor, ""] | None = None,
    return_lse: bool = False,
    impl: str = "auto",
    **unknown: Any,
) -> (
    Float[Tensor, "batch heads queries value_dim"]
    | tuple[Float[Tensor, "batch heads queries value_dim"], Float[Tensor, "batch heads queries"]]
):
    """Computes softmax attention with a position encoding.

        logit(i, j) = scale * (sum_c gain_c(n) q'_ic k'_jc + q_i . query(n) + k_j . key(n)) + bias(n)      n = j - i
        out(i)      = sum_j softmax_j(logit(i, j)) * (v_j + value(n))

    Sums are taken in float32, in float64 for float64 inputs. A row that may attend to nothing, or whose logits are all minus
    infinity, gives zeros. Keys and values that `lengths` or `key_mask` hide may hold anything, NaN included. Under autocast q, k
    and v are cast as `torch.nn.functional.scaled_dot_product_attention` does, and the encoding's tables are not.

    Args:
        q: Queries; row r stands at position `query_start + r`.
        k: Keys; key j stands at position j. Fewer heads than q means that each serves a group of neighbouring query heads.
        v: Values, with the heads of k and any width.
        encoding: An encoding, its terms, or None for attention without positions. Absolute encodings act on the model's
            input and are refused here.
        causal: Let queries see no key of a later position.
        lengths: Number of keys that exist in each row of the batch; the others are padding on the right.
        key_mask: Which keys may be attended to, the general form of `lengths`.
        cu_seqlens: Ends of packed sequences, starting with 0 and ending with the time axis; batch 1, self-attention.
            Positions restart with each sequence and none attends to another.
        max_seqlen: The most tokens of a packed sequence, for encodings whose tables cover the sequence: without it their tables
            cover all sequences together.
        window: How many lags into the past and into the future a query may see, `(left, right)`.
        query_start: Position of the first query, a number, or a tensor (one for all, or one per row) from 0 to the
            number of keys.
        scale: Factor of the content product; `dim ** -0.5` unless given. T5 uses 1.
        dropout: Probability of dropping an attention weight.
        seed: Where random numbers start. By default a fresh one for dropout and for encodings in training mode, and always the
            same one for encodings in evaluation mode.
        return_lse: Also return the natural log-sum-exp of the logits, [batch, heads, queries], -inf for empty rows.
        impl: "auto", "dense", "blockwise", "split" or "triton"; a named one that cannot do the job raises. See `which_impl`.

    >>> import lagwise
    >>> q = k = v = torch.randn(1, 8, 100, 64)
    >>> lagwise.attention(q, k, v, lagwise.make("t5", heads=8), causal=False).shape
    torch.Size([1, 8, 100, 64])
    """
    refuse_keywords(unknown, attention)
    require_switches(causal=causal, return_lse=return_lse)
    q, k, v = autocast(q, k, v)
    scale = check_call(q, k, v, lengths, key_mask, cu_seqlens, window, query_start, scale, dropout, seed)
    check_longest(cu_seqlens, max_seqlen)
    terms = terms_of(
        encoding, q, k, causal=causal, window=window, query_start=query_start, scale=scale, seed=seed, max_seqlen=max_seqlen
    )
    watcher = None if torch.compiler.is_compiling() else WATCHER.get()
    if watcher is not None:
        terms = watcher(
            q, k, v, terms, scale=scale, causal=causal, lengths=lengths, key_mask=key_mask, cu_seqlens=cu_seqlens, window=window,
            query_start=query_start,
        )  # fmt: skip
    chosen = choose(
        q, k, v, terms, impl=impl, causal=causal, lengths=lengths, key_mask=key_mask, cu_seqlens=cu_seqlens, window=window,
        query_start=query_start, dropout=dropout,
    )  # fmt: skip
    if dropout > 0.0 and seed is None:
        seed = noise.draw_seed(True, q.device)
    if lengths is not None:
        within = torch.arange(k.shape[2], device=k.device) < lengths[:, None]
        key_mask = within if key_mask is None else key_mask & within
    options: dict[str, Any] = dict(
        scale=scale, causal=causal, window=window, query_start=query_start, key_mask=key_mask, cu_seqlens=cu_seqlens,
        dropout=dropout, seed=seed,
    )  # fmt: skip
    if chosen.impl == "dense":
        out, lse = dense(q, k, v, terms, **options)
    else:
        call = lower(q, k, v, terms, **options)
        if chosen.impl == "split" and is_plain(call) and not return_lse:
            return vendor.plain(call.q, call.k, call.v, causal=causal, scale=scale)
        out, lse = register.run(chosen.impl, call)
    return (out, lse) if return_lse else out


def which_impl(
    q: Tensor, k: Tensor, v: Tensor, encoding: Encoding | Terms | None = None, *,
    causal: bool = False, lengths: Tensor | None = None, key_mask: Tensor | None = None, cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None, window: tuple[int, int] | None = None, query_start: int | Tensor = 0,
    scale: float | None = None, dropout: float = 0.0, seed: Tensor | None = None, return_lse: bool = False, impl: str = "auto",
    **unknown: Any,
) -> Choice:  # fmt: skip
    """Says which implementation `attention` takes for the same arguments, and why.

    >>> import lagwise
    >>> q = k = v = torch.randn(1, 8, 4096, 64)
    >>> lagwise.which_impl(q, k, v, lagwise.make("t5", heads=8)).impl
    'split'
    """
    refuse_keywords(unknown, which_impl)
    require_switches(causal=causal, return_lse=return_lse)
    q, k, v = autocast(q, k, v)
    scale = check_call(q, k, v, lengths, key_mask, cu_seqlens, window, query_start, scale, dropout, seed)
    check_longest(cu_seqlens, max_seqlen)
    if seed is None:
        # The answer does not depend on it, and asking should not change the random numbers that follow.
        seed = noise.draw_seed(False, q.device)
    terms = terms_of(
        encoding, q, k, causal=causal, window=window, query_start=query_start, scale=scale, seed=seed, max_seqlen=max_seqlen
    )
    return choose(
        q, k, v, terms, impl=impl, causal=causal, lengths=lengths, key_mask=key_mask, cu_seqlens=cu_seqlens, window=window,
        query_start=query_start, dropout=dropout,
    )  # fmt: skip


def terms_of(
    encoding: Encoding | Terms | None, q: Tensor, k: Tensor, *,
    causal: bool, window: tuple[int, int] | None, query_start: int | Tensor, scale: float, seed: Tensor | None,
    max_seqlen: int | None = None,
) -> Terms:  # fmt: skip
    """Returns the terms of an encoding for the lags that a call can reach."""
    relative = relative_only(encoding)
    if not isinstance(relative, Encoding):
        return relative
    place: dict[str, Any] = dict(query_start=query_start, causal=causal, window=window)
    first, last = reachable_lags(q.shape[2], k.shape[2], longest=max_seqlen, **place)
    with register.without_autocast(q):
        return relative.terms(first, last, scale=scale, seed=seed_of(relative, seed, q.device))


def relative_only(encoding: Encoding | Terms | None) -> Encoding | Terms:
    """Returns what attention can use, no encoding as no terms; raises for the rest."""
    if encoding is None:
        return Terms()
    if isinstance(encoding, Terms):
        return encoding
    if not isinstance(encoding, Encoding):
        hint = f": make it with lagwise.make({encoding!r}, ...)" if isinstance(encoding, str) else ""
        if isinstance(encoding, Tensor):
            hint = ": a mask of keys is key_mask=, and a bias is one of the lag, Terms(bias=LagTable(...))"
        raise ValueError(f"encoding must be an Encoding, Terms or None, but is {shown(encoding)}{hint}")
    if encoding.absolute:
        raise ValueError(
            f"encoding {type(encoding).__name__} is absolute: it acts on the model's input, not on attention. Call its "
            "`embed` on the input and pass None here, or give it to a stack of lagwise.nn, which does both"
        )
    return encoding


def seed_of(encoding: Encoding, seed: Tensor | None, device: torch.device) -> Tensor | None:
    """Returns the seed that is given, or draws one for an encoding that is random."""
    return noise.draw_seed(encoding.training, device) if seed is None and encoding.random else seed


def choose(
    q: Tensor, k: Tensor, v: Tensor, terms: Terms, *,
    impl: str, causal: bool, lengths: Tensor | None, key_mask: Tensor | None, cu_seqlens: Tensor | None,
    window: tuple[int, int] | None, query_start: int | Tensor, dropout: float,
) -> Choice:  # fmt: skip
    """Returns the implementation that is named, or with "auto" the fastest that can do the job."""
    if terms.features is not None:
        raise ValueError(
            "the encoding maps the features of linear attention, which softmax attention does not have: "
            "call lagwise.linear_attention with it"
        )
    check_terms(terms, q, v)
    asked = features(
        q, k, v, terms, causal=causal, lengths=lengths, key_mask=key_mask, cu_seqlens=cu_seqlens, window=window,
        query_start=query_start, dropout=dropout,
    )  # fmt: skip
    if impl != "auto":
        require_choice("impl", impl, ("auto", *support.IMPLEMENTATIONS))
        reason = support.refusal(impl, asked)
        if reason is not None:
            raise ValueError(f"impl={impl!r} cannot do this: {reason}. impl='auto' takes one that can")
        return Choice(impl, "it was named")
    reason = support.refusal("blockwise", asked)
    if reason is not None:
        return Choice("dense", f"the others cannot do this: {reason}")
    vectors = asked & {"query", "key", "value", "channel gain"}
    # An exported program has one choice for all lengths: those at hand say nothing about others.
    any_length = torch.compiler.is_exporting()
    # Half-precision inputs are left to those who sum in float32.
    if not any_length and q.shape[2] * k.shape[2] <= DENSE_PAIRS and not vectors and asked & {"float32", "float64"}:
        few = f"{counted(q.shape[2])} queries and {counted(k.shape[2])} keys are few pairs"
        return Choice("dense", f"{few}, and the tables are scalars")
    # On a CPU the kernels would be interpreted.
    kernels = q.is_cuda and support.refusal("triton", asked) is None
    otherwise = "triton" if kernels else "blockwise"
    reason = support.refusal("split", asked)
    if reason is not None:
        return Choice(otherwise, f"split cannot do this: {reason}")
    if window is not None:
        return Choice(otherwise, "a window leaves no far field")
    band = near_band(terms)
    if band is None:
        return Choice("split", "no table depends on the lag: all of it is plain attention")
    many = vectors and q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] >= MANY_PAIRS
    needed = SPLIT_PAYS_FROM["cpu" if not q.is_cuda else "cuda, vectors" if many else "cuda"] * (band[1] - band[0] + 1)
    if any_length:
        return exported(needed, otherwise)
    keys, pays = counted(k.shape[2]), f"{counted(needed)}, from which on the far field of these tables pays"
    if k.shape[2] < needed:
        return Choice(otherwise, f"{keys} keys are fewer than {pays}")
    return Choice("split", f"{keys} keys are at least {pays}")


def exported(needed: int, otherwise: str) -> Choice:
    """Returns the implementation of a program that is exported for any length, by the keys from which on the far field pays."""
    from torch.fx.experimental.symbolic_shapes import has_static_value

    if has_static_value(needed):
        return Choice("split", "the program is exported for any length, and the far field pays for long ones")
    return Choice(otherwise, "the tables grow with the sequence and leave no far field")


def features(
    q: Tensor, k: Tensor, v: Tensor, terms: Terms, *,
    causal: bool, lengths: Tensor | None, key_mask: Tensor | None, cu_seqlens: Tensor | None,
    window: tuple[int, int] | None, query_start: int | Tensor, dropout: float,
) -> set[str]:  # fmt: skip
    """Returns what a call asks for, in the words of the support table."""
    per_row = isinstance(query_start, Tensor)
    asked = {
        "slopes": terms.bias is not None and terms.bias.slopes is not None,
        "channel gain": terms.gain is not None and terms.gain.values.shape[2] > 1,
        "query": terms.query is not None,
        "key": terms.key is not None,
        "value": terms.value is not None,
        "transform": terms.transform is not None,
        "causal": causal,
        "window": window is not None,
        "lengths": lengths is not None,
        "key_mask": key_mask is not None,
        "cu_seqlens": cu_seqlens is not None,
        "query_start": not per_row and query_start != 0,
        "query_start per row": per_row,
        "unequal lengths": q.shape[2] != k.shape[2],
        "grouped heads": q.shape[1] != k.shape[1],
        "value width": q.shape[3] != v.shape[3],
        "dropout": dropout > 0.0,
        "wide head": max(q.shape[3], v.shape[3]) > 256,
        "wide vectors": q.is_cuda and any(table.values.shape[1] > WIDEST_VECTORS for table in vector_tables(terms)),
        "no kernels": not kernels_run_on(q.device),
    }
    kinds = {"bias": "bias" if not asked["slopes"] else "slopes", "gain": "gain"}
    tables = {kinds.get(name, name) for name in terms.tables()}
    words = {q.device.type, str(q.dtype).removeprefix("torch.")}
    return {name for name, there in asked.items() if there} | tables | words | register.torch_transforms()


def vector_tables(terms: Terms) -> list[LagTable]:
    """Returns the tables with more than one channel."""
    return [table for table in terms.tables().values() if table.values.ndim == 3 and table.values.shape[2] > 1]


def kernels_run_on(device: torch.device) -> bool:
    """Says whether the Triton kernels can run: on a CUDA device, or anywhere under Triton's interpreter."""
    return support.HAS_TRITON and (device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Casts as `scaled_dot_product_attention` does under autocast: all floating-point types but float64."""
    if not isinstance(tensors[0], Tensor) or not register.autocasts(tensors[0]):
        return tensors
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


def check_call(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, key_mask: Tensor | None, cu_seqlens: Tensor | None,
    window: tuple[int, int] | None, query_start: int | Tensor, scale: float | None, dropout: float, seed: Tensor | None,
) -> float:  # fmt: skip
    """Raises for arguments that do not fit together, and returns the scale."""
    check_shapes(q, k, v)
    check_masks(q, k, lengths, key_mask, cu_seqlens, window, query_start)
    require_probability("dropout", dropout)
    require_seed(seed)
    if seed is not None:
        require_beside("seed", seed, "q", q.device)
    return check_scale(scale, q.shape[-1], q.dtype)


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


def check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
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


def check_masks(
    q: Tensor, k: Tensor, lengths: Tensor | None, key_mask: Tensor | None, cu_seqlens: Tensor | None,
    window: tuple[int, int] | None, query_start: int | Tensor,
) -> None:  # fmt: skip
    """Raises for options that do not fit the tensors."""
    batch, keys = k.shape[0], k.shape[2]
    check_keys(batch, keys, lengths, key_mask, k.device)
    check_window(window)
    if isinstance(query_start, Tensor):
        if query_start.dtype not in INTEGERS:
            raise ValueError(f"query_start must be int64 or int32, but is {query_start.dtype}")
        if query_start.ndim > 1 or (query_start.ndim == 1 and query_start.shape[0] != batch):
            raise ValueError(
                f"query_start must be a number, or a tensor with one or with {batch} (the batch), "
                f"but has shape {tuple(query_start.shape)}"
            )
        if query_start.ndim == 1:
            require_beside("query_start", query_start, "k", k.device)
        require_range("query_start", query_start, 0, keys)
    elif not is_whole(query_start):
        refuse("query_start", "a whole number or a tensor of them", query_start)
    elif not -LARGEST <= query_start <= LARGEST:
        refuse("query_start", f"a whole number from {-LARGEST} to {LARGEST}", query_start)
    if cu_seqlens is not None:
        check_ends(cu_seqlens, keys)
        require_beside("cu_seqlens", cu_seqlens, "k", k.device)
        if batch != 1 or q.shape[2] != keys:
            raise ValueError(
                "cu_seqlens packs sequences of self-attention into batch 1, "
                f"but q has shape {tuple(q.shape)} and k {tuple(k.shape)}"
            )
        for name, given in (("lengths", lengths), ("key_mask", key_mask)):
            if given is not None:
                raise ValueError(f"{name} cannot be combined with cu_seqlens: leave padding out of the packed sequences")
        if isinstance(query_start, Tensor) or query_start != 0:
            raise ValueError("query_start cannot be combined with cu_seqlens, where positions start with each sequence")


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
    require(fits, f"cu_seqlens must have no sequence longer than max_seqlen={max_seqlen}", cu_seqlens)


def check_terms(terms: Terms, q: Tensor, v: Tensor) -> None:
    """Raises for tables that do not fit the tensors."""
    heads, widths = q.shape[1], {"gain": q.shape[3], "query": q.shape[3], "key": q.shape[3], "value": v.shape[3]}
    for name, table in terms.tables().items():
        # Not `in`, which takes symbolic sizes of a compiler for different.
        if table.heads != 1 and table.heads != heads:
            raise ValueError(f"the {name} table must have {heads} heads, those of q, or 1, but has {table.heads}")
        if table.values.device != q.device:
            raise ValueError(f"the {name} table must be on {q.device}, where q is, but is on {table.values.device}")
        width = table.values.shape[2] if name in widths else None
        if width is not None and width != widths[name] and not (name == "gain" and width == 1):
            raise ValueError(f"the {name} table must have {widths[name]} channels, but has {width}")
