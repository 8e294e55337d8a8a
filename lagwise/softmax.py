"""Softmax attention: the public calls check what is given, choose who computes it, and call them."""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, Literal, overload

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import Unpack

from lagwise import noise
from lagwise.call import Call, Options, check_call, checked_call, keep, takes
from lagwise.encodings import Encoding
from lagwise.errors import require_switches, shown
from lagwise.ops import vendor
from lagwise.ops.dense import dense_attention
from lagwise.ops.dispatch import Choice, choose
from lagwise.ops.implementations import compute
from lagwise.ops.lowering import lower
from lagwise.ops.merge import is_plain
from lagwise.ops.register import autocasts, forward_mode_is_active, transforms_are_active, without_autocast
from lagwise.terms import Terms

WATCHER: ContextVar[Callable[..., Terms] | None] = ContextVar("WATCHER", default=None)
"""While it is set, it is called with the tensors, the terms and the `Call` of each call that is not compiled, and returns the
terms to compute with. `lagwise.lens` looks into models through it."""


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, encoding: Encoding | Terms | None = None, *, return_lse: Literal[False] = False,
    impl: str = "auto", **options: Unpack[Options],
) -> Float[Tensor, "batch heads queries value_dim"]: ...  # fmt: skip


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, encoding: Encoding | Terms | None = None, *, return_lse: Literal[True],
    impl: str = "auto", **options: Unpack[Options],
) -> tuple[Float[Tensor, "batch heads queries value_dim"], Float[Tensor, "batch heads queries"]]: ...  # fmt: skip


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, encoding: Encoding | Terms | None = None, *, return_lse: bool,
    impl: str = "auto", **options: Unpack[Options],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip


@takes(Options)
def attention(
    q: Float[Tensor, "batch heads queries dim"],
    k: Float[Tensor, "batch kv_heads keys dim"],
    v: Float[Tensor, "batch kv_heads keys value_dim"],
    encoding: Encoding | Terms | None = None,
    *,
    return_lse: bool = False,
    impl: str = "auto",
    **options: Unpack[Options],
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
    if type(return_lse) is not bool:
        require_switches(return_lse=return_lse)
    q, k, v = autocast(q, k, v)
    call = checked_call(attention, q, k, v, options)
    terms = terms_of(encoding, q, k, call)
    watcher = None if torch.compiler.is_compiling() else WATCHER.get()
    if watcher is not None:
        terms = watcher(q, k, v, terms, call)
    choice = kept_choice(q, k, v, terms, call, impl)
    if call.dropout > 0.0 and call.seed is None:
        call = replace(call, seed=noise.draw_seed(True, q.device))
    if choice.impl == "dense":
        out, lse = dense_attention(q, k, v, terms, call)
    else:
        lowered = lower(q, k, v, terms, call)
        if choice.impl == "split" and is_plain(lowered) and not return_lse:
            return vendor.plain(lowered.q, lowered.k, lowered.v, causal=call.causal, scale=call.scale)
        out, lse = compute(choice.impl, lowered)
    return (out, lse) if return_lse else out


@takes(Options)
def which_impl(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    encoding: Encoding | Terms | None = None,
    *,
    return_lse: bool = False,
    impl: str = "auto",
    **options: Unpack[Options],
) -> Choice:
    """Says which implementation `attention` takes for the same arguments, and why.

    >>> import lagwise
    >>> q = k = v = torch.randn(1, 8, 4096, 64)
    >>> lagwise.which_impl(q, k, v, lagwise.make("t5", heads=8)).impl
    'split'
    """
    require_switches(return_lse=return_lse)
    q, k, v = autocast(q, k, v)
    call = check_call(which_impl, q, k, v, options)
    if call.seed is None:
        # The answer does not depend on it, and asking should not change the random numbers that follow.
        call = replace(call, seed=noise.draw_seed(False, q.device))
    return choose(q, k, v, terms_of(encoding, q, k, call), call, impl)


KEPT_CHOICES: dict[Any, Choice] = {}
"""Choices for calls on a GPU, by kind; at most MOST_KEPT, then it starts anew."""


def kept_choice(q: Tensor, k: Tensor, v: Tensor, terms: Terms, call: Call, impl: str) -> Choice:
    """Does what `choose` does, on a GPU once for all calls of a kind."""
    if torch.compiler.is_compiling() or not q.is_cuda or transforms_are_active() or forward_mode_is_active():
        return choose(q, k, v, terms, call, impl)
    options = (
        call.causal, call.window, call.query_start if not call.per_row else None, call.dropout > 0.0,
        call.lengths is None, call.key_mask is None, call.cu_seqlens is None or len(call.cu_seqlens), call.max_seqlen,
    )  # fmt: skip
    key = (q.shape, k.shape, v.shape, q.dtype, q.device, terms.kind, options, impl)
    choice = KEPT_CHOICES.get(key)
    if choice is None:
        choice = choose(q, k, v, terms, call, impl)
        keep(KEPT_CHOICES, key, choice)
    return choice


def terms_of(encoding: Encoding | Terms | None, q: Tensor, k: Tensor, call: Call) -> Terms:
    """Returns the terms of an encoding for the lags that a call can reach."""
    relative = relative_only(encoding)
    if not isinstance(relative, Encoding):
        return relative
    first, last = call.reachable_lags(q.shape[2], k.shape[2])
    seed = seed_of(relative, call.seed, q.device)
    if not autocasts(q):
        return relative.terms(first, last, scale=call.scale, seed=seed)
    with without_autocast(q):
        return relative.terms(first, last, scale=call.scale, seed=seed)


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


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Casts as `scaled_dot_product_attention` does under autocast: all floating-point types but float64."""
    if not isinstance(tensors[0], Tensor) or not autocasts(tensors[0]) or not all(isinstance(x, Tensor) for x in tensors):
        return tensors
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)
