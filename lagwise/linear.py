"""Linear attention: one call for whole sequences, and a state of constant size for decoding."""

from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from typing_extensions import Unpack

from lagwise.call import LINEAR_OPTIONS, Call, LinearOptions, check_call, check_tensor, takes
from lagwise.encodings import Encoding, Sum
from lagwise.errors import refuse, require, require_choice
from lagwise.feature_maps import FeatureMap, named
from lagwise.lags import LagTable
from lagwise.ops.grouped import per_query_head
from lagwise.ops.linear_implementations import (
    CHUNK,
    IMPLEMENTATIONS,
    Keys,
    LinearCall,
    Origin,
    State,
    absorb,
    advance,
    chunked,
    empty,
    ratio,
)
from lagwise.ops.register import without_autocast
from lagwise.softmax import WATCHER, autocast, relative_only, seed_of
from lagwise.terms import Terms

__all__ = ["State", "linear_attention", "prefill", "recall", "step", "summary"]

# The lags of a table from which on Fourier transforms are taken. On a CPU "relu" is then as fast either way and "favor" still
# faster by pairs, but the memory of pairs grows with the square of the length.
FFT_PAYS_FROM = 8192


@takes(LinearOptions)
def linear_attention(
    q: Float[Tensor, "batch heads queries dim"],
    k: Float[Tensor, "batch kv_heads keys dim"],
    v: Float[Tensor, "batch kv_heads keys value_dim"],
    encoding: Encoding | Terms | None = None,
    *,
    feature_map: FeatureMap | str = "favor",
    impl: str = "auto",
    **options: Unpack[LinearOptions],
) -> Float[Tensor, "batch heads queries value_dim"]:
    """Computes attention whose weights are products of positive features, in time linear in the length.

        out_i = sum_j c(n) phi(q'_i) . phi(k'_j) v_j / sum_j c(n) phi(q'_i) . phi(k'_j)        n = j - i,   c(n) = exp(bias(n))

    Sums are taken in float32, in float64 for float64 inputs. A row that may attend to nothing gives zeros.

    Args:
        q: Queries; row r stands at position r.
        k: Keys; key j stands at position j. Fewer heads than q means that each serves a group of neighbouring query heads.
        v: Values, with the heads of k and any width.
        encoding: An encoding, its terms, or None. Bias tables, transforms of q and k (stochastic encodings, Rotary with
            "favor") and transforms of the features (PermuteFormer, Rotary with other maps) have a linear form; gain, query, key
            and value tables have none.
        feature_map: "favor" (with a fixed projection), "relu", "elu", or a `FeatureMap`, such as `Favor` with its own projection.
        causal: Let queries see no key of a later position; needs as many queries as keys.
        lengths: Number of keys that exist in each row of the batch; the others are padding on the right.
        key_mask: Which keys may be attended to, the general form of `lengths`.
        cu_seqlens: Ends of packed sequences, starting with 0 and ending with the time axis; batch 1, self-attention.
            Positions restart with each sequence and none attends to another.
        max_seqlen: The most tokens of a packed sequence; without it, it is read from `cu_seqlens`, for which a GPU is waited for.
        scale: Factor of the content product that "favor" estimates; `dim ** -0.5` unless given.
        seed: Where random numbers of the encoding start. By default a fresh one in training mode, and always the same one in
            evaluation mode.
        impl: "auto", "dense" (all pairs, the specification), "chunked", "recurrent" (token by token, causal) or "fft" (any bias
            table, but "favor" neither causal nor with slopes); "auto" is "chunked", and "fft" for long sequences whose bias table
            is as long.

    >>> import lagwise
    >>> q = k = v = torch.randn(1, 8, 100, 64)
    >>> lagwise.linear_attention(q, k, v, lagwise.make("t5", heads=8), feature_map="relu").shape
    torch.Size([1, 8, 100, 64])
    """
    q, k, v = autocast(q, k, v)
    call = check_call(linear_attention, q, k, v, options, LINEAR_OPTIONS)
    check_causal(q, k, call.causal)
    given, own, cu_seqlens = (q, k, v), call, call.cu_seqlens
    if cu_seqlens is not None:
        places, lengths = padded_places(cu_seqlens, q.shape[2], call.max_seqlen)
        own = replace(call, lengths=lengths, cu_seqlens=None, max_seqlen=None)
        q, k, v = (x[0].transpose(0, 1)[places].transpose(1, 2) for x in given)
    first, last = own.reachable_lags(q.shape[2], k.shape[2])
    terms, _ = linear_terms(encoding, q, v, first, last, call)
    terms = watched(*given, terms, call, feature_map=feature_map)
    with without_autocast(q):
        prepared = prepare(q, k, v, terms, feature_map, own)
        out = IMPLEMENTATIONS[choose(prepared, impl, first, last)](prepared).to(q.dtype)
    if cu_seqlens is None:
        return out
    tokens = torch.arange(given[0].shape[2], device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens, tokens, right=True) - 1
    return out.transpose(1, 2)[sequence, tokens - cu_seqlens[sequence]].transpose(0, 1)[None]


def prefill(
    q: Float[Tensor, "batch heads time dim"],
    k: Float[Tensor, "batch kv_heads time dim"],
    v: Float[Tensor, "batch kv_heads time value_dim"],
    encoding: Encoding | Terms | None = None,
    *,
    feature_map: FeatureMap | str = "favor",
    key_mask: Bool[Tensor, "batch time"] | None = None,
    scale: float | None = None,
    seed: Int[Tensor, ""] | None = None,
) -> tuple[Float[Tensor, "batch heads time value_dim"], State]:
    """Computes causal linear attention of the start of a sequence, and the state from which `step` goes on.

    All rows of the batch have one length: pad shorter ones on the left, and hide the padding with `key_mask`.

    >>> import lagwise
    >>> q = k = v = torch.randn(1, 8, 100, 64)
    >>> out, state = lagwise.linear.prefill(q[:, :, :99], k[:, :, :99], v[:, :, :99])
    >>> out, state = lagwise.linear.step(q[:, :, 99:], k[:, :, 99:], v[:, :, 99:], state)
    >>> torch.allclose(out, lagwise.linear_attention(q, k, v, causal=True)[:, :, 99:], atol=1e-4)
    True
    """
    following = next_call(prefill, q, k, v, encoding, 0, feature_map, key_mask=key_mask, scale=scale, seed=seed)
    call = following.call
    with without_autocast(q):
        state = empty(call.keys, following.seed, kept(following.origin))
        return chunked(call).to(q.dtype), absorb(state, call.keys, q.shape[2], call.bias, following.keep)


def step(
    q: Float[Tensor, "batch heads time dim"],
    k: Float[Tensor, "batch kv_heads time dim"],
    v: Float[Tensor, "batch kv_heads time value_dim"],
    state: State,
    encoding: Encoding | Terms | None = None,
    *,
    feature_map: FeatureMap | str = "favor",
    key_mask: Bool[Tensor, "batch time"] | None = None,
    scale: float | None = None,
) -> tuple[Float[Tensor, "batch heads time value_dim"], State]:
    """Computes causal linear attention of the next tokens, one or more, and the state after them.

    The encoding, the feature map and the scale must be those of `prefill`; the seed is the state's. `key_mask` tells about the
    new keys alone.
    """
    require_state(state)
    following = next_call(step, q, k, v, encoding, state.length, feature_map, key_mask=key_mask, scale=scale, seed=state.seed)
    check_origin(following.origin, state.origin)
    check_state(following.call, state)
    with without_autocast(q):
        out, state = advance(following.call, state, following.keep, CHUNK)
    return out.to(q.dtype), state


def summary(
    k: Float[Tensor, "batch kv_heads keys dim"],
    v: Float[Tensor, "batch kv_heads keys value_dim"],
    *,
    feature_map: FeatureMap | str = "favor",
    key_mask: Bool[Tensor, "batch keys"] | None = None,
    scale: float | None = None,
) -> State:
    """Returns the sums over a context, from which `recall` computes linear attention to all of it, without positions.

    >>> import lagwise
    >>> q, k = torch.randn(1, 8, 3, 64), torch.randn(1, 8, 100, 64)
    >>> out = lagwise.linear.recall(q, lagwise.linear.summary(k, k))
    >>> torch.allclose(out, lagwise.linear_attention(q, k, k), atol=1e-5)
    True
    """
    check_tensor("k", k)
    k, v = autocast(k, v)
    call = check_call(summary, k, k, v, {"key_mask": key_mask, "scale": scale})
    with without_autocast(k):
        prepared = prepare(k, k, v, Terms(), feature_map, call)
        origin = kept(origin_of(None, Terms(), prepared.feature_map, call.scale))
        return absorb(empty(prepared.keys, origin=origin), prepared.keys, k.shape[2], prepared.bias, 0)


def recall(
    q: Float[Tensor, "batch heads queries dim"],
    state: State,
    *,
    feature_map: FeatureMap | str = "favor",
    scale: float | None = None,
) -> Float[Tensor, "batch heads queries value_dim"]:
    """Computes linear attention to all keys of a `summary`, in a time that does not depend on their number.

    The feature map and the scale must be those of the summary.
    """
    require_state(state)
    (q,) = autocast(q)
    call = check_call(recall, q, q, q, {"scale": scale})
    heads, width, scale = q.shape[1], q.shape[3], call.scale
    none = q[:, :, :0]
    watched(q, none, none, Terms(), call, feature_map=feature_map, from_state=True)
    phi = named(feature_map, width, q.device)
    check_origin(origin_of(None, Terms(), phi, scale), state.origin)
    with without_autocast(q):
        factor = phi.factor(width=width, head_dim=width, scale=scale)
        features = phi.queries(factor * q.to(torch.promote_types(q.dtype, torch.float32)))
        batch, kv_heads, known = state.kv.shape[:3]
        if batch != q.shape[0] or heads % kv_heads or known != features.shape[3]:
            raise ValueError(
                f"state must have kv [batch, kv_heads, features, value_dim] for q of shape {tuple(q.shape)} with "
                f"{features.shape[3]} features, but has shape {tuple(state.kv.shape)}: use the feature map of its summary"
            )
        kv, mass = (per_query_head(x, heads) for x in (state.kv, state.mass))
        return ratio(features @ kv, features @ mass[..., None]).to(q.dtype)


class Following(NamedTuple):
    """The call of tokens that follow others."""

    call: LinearCall
    seed: Tensor | None
    keep: int  # how many keys a state must keep after it
    origin: Origin


def next_call(
    function: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, encoding: Encoding | Terms | None, start: int,
    feature_map: FeatureMap | str, **options: Unpack[LinearOptions],
) -> Following:  # fmt: skip
    """Returns the call of tokens that follow `start` others, for a function with these options."""
    q, k, v = autocast(q, k, v)
    call = check_call(function, q, k, v, {**options, "causal": True})
    check_causal(q, k, True)
    length = start + q.shape[2]
    terms, seed = linear_terms(encoding, q, v, 1 - length, 0, call)
    terms = watched(q, k, v, terms, call, feature_map=feature_map, from_state=start > 0)
    with without_autocast(q):
        prepared = prepare(q, k, v, terms, feature_map, call, start=start)
    keep = 0
    if terms.bias is not None:
        # A table that covers the whole sequence may grow with it, so that no key is known to have left it.
        keep = length if terms.bias.first <= 1 - length else max(0, -terms.bias.first - 1)
    return Following(prepared, seed, keep, origin_of(encoding, terms, prepared.feature_map, call.scale))


def origin_of(encoding: Encoding | Terms | None, terms: Terms, feature_map: nn.Module, scale: float) -> Origin:
    """Returns what later calls are compared with; the tensors of the feature map are its own."""
    names = *terms.tables(), *(name for name in ("transform", "features") if getattr(terms, name) is not None)
    tensors = tuple(x.detach() for x in chain(feature_map.buffers(), feature_map.parameters()))
    classes = class_name(encoding) if isinstance(encoding, Encoding) else None
    return Origin(classes, names, type(feature_map).__name__, tensors, scale)


def class_name(encoding: Encoding) -> str:
    """Returns the name of an encoding's class, of a sum those of its parts."""
    if isinstance(encoding, Sum):
        return f"{class_name(encoding.left)} + {class_name(encoding.right)}"
    return type(encoding).__name__


def kept(origin: Origin) -> Origin:
    """Returns an origin with copies of its tensors, which stay when the feature map is drawn anew."""
    return origin._replace(tensors=tuple(x.clone() for x in origin.tensors))


def watched(
    q: Tensor, k: Tensor, v: Tensor, terms: Terms, call: Call, *, feature_map: FeatureMap | str, from_state: bool = False
) -> Terms:
    """Tells the watcher, if there is one, of a call that is not compiled, and returns the terms to compute with.

    A call that goes on from a state has the new keys alone, since the others are sums, and says so by `from_state`.
    """
    watcher = None if torch.compiler.is_compiling() else WATCHER.get()
    return terms if watcher is None else watcher(q, k, v, terms, call, feature_map=feature_map, from_state=from_state)


def linear_terms(
    encoding: Encoding | Terms | None, q: Tensor, v: Tensor, first: int, last: int, call: Call
) -> tuple[Terms, Tensor | None]:
    """Returns the terms of an encoding for linear attention, and the seed that they were made with."""
    relative, seed = relative_only(encoding), call.seed
    if isinstance(relative, Encoding):
        seed = seed_of(relative, seed, q.device)
        with without_autocast(q):
            relative = relative.linear_terms(first, last, scale=call.scale, seed=seed)
    check_tables(relative)
    relative.check_fit(q, v)
    return relative, seed


def check_tables(terms: Terms) -> None:
    """Raises for tables without a linear form."""
    for name in terms.tables():
        if name != "bias":
            raise ValueError(
                f"the encoding has a {name} table, which does not factor into features of queries and of keys: linear attention "
                "takes bias tables and transforms alone. Use lagwise.attention, or for a gain a stochastic encoding"
            )


def choose(call: LinearCall, impl: str, first: int, last: int) -> str:
    """Returns the implementation that is named, or with "auto" the one that fits the bias table."""
    bias = call.bias
    exact_by_fft = not call.scaled or (not call.causal and bias.slopes is None)
    if impl == "auto":
        wide = min(bias.last, last) - max(bias.first, first) >= max(FFT_PAYS_FROM, (last - first) // 2)
        return "fft" if wide and exact_by_fft else "chunked"
    require_choice("impl", impl, ("auto", *IMPLEMENTATIONS))
    if impl == "recurrent" and not call.causal:
        raise ValueError("impl='recurrent' cannot do this: it goes from token to token, which needs causal=True")
    if impl == "fft" and not exact_by_fft:
        raise ValueError(
            "impl='fft' cannot do this: it rounds relative to the largest key of a head, and the feature map gives keys scales "
            "without bounds. Use it without causal=True and slopes, or with 'relu' or 'elu', or take impl='chunked'"
        )
    return impl


def prepare(
    q: Tensor, k: Tensor, v: Tensor, terms: Terms, feature_map: FeatureMap | str, call: Call, *, start: int = 0
) -> LinearCall:
    """Applies transforms and the feature map, in the dtype of the sums; the first tokens stand at position `start`."""
    heads, compute = q.shape[1], torch.promote_types(q.dtype, torch.float32)
    key_mask = call.visible_keys(k.shape[2])
    if key_mask is not None:
        # What is hidden may hold anything, and a weight of zero times NaN is NaN.
        k, v = (x.masked_fill(~key_mask[:, None, :, None], 0.0) for x in (k, v))
    content_q, content_k = terms.content_from(q, k, start)
    width = content_q.shape[-1]
    phi = named(feature_map, width, q.device)
    factor = phi.factor(width=width, head_dim=q.shape[-1], scale=call.scale)
    # A factor of one would be a pass over the memory.
    content_q, content_k = (x.to(compute) if factor == 1.0 else factor * x.to(compute) for x in (content_q, content_k))
    moved, positions = terms.features, ()
    if moved is not None:
        positions = tuple(torch.arange(start, start + x.shape[2], device=x.device) for x in (q, k))
    if moved is not None and moved.softmax_inputs and phi.estimates_softmax:
        content_q, content_k = moved.function(content_q, content_k, *positions)
        moved = None
    features_q = phi.queries(content_q)
    features_k, log_weight = phi.keys(content_k)
    if features_q.shape[-1] != features_k.shape[-1]:
        raise ValueError(
            "feature_map must make as many features of keys as of queries, "
            f"but {type(phi).__name__} makes {features_k.shape[-1]} and {features_q.shape[-1]}"
        )
    features_k, v = per_query_head(features_k, heads), per_query_head(v.to(compute), heads)
    scaled = log_weight is not None
    if log_weight is not None:
        log_weight = per_query_head(log_weight, heads)
    plain_q = plain_k = None
    if moved is not None:
        if moved.numerator_only:
            plain_q, plain_k = features_q, features_k
        features_q, features_k = moved.function(features_q, features_k, *positions)
    if key_mask is not None:
        visible = log_weight if log_weight is not None else features_k.new_zeros(1, 1, 1)
        log_weight = visible.masked_fill(~key_mask[:, None], -torch.inf)
    bias = LagTable(features_q.new_zeros(1, 1), 0) if terms.bias is None else terms.bias.to(compute)
    if call.causal and bias.last > 0:
        bias = LagTable(bias.window(min(bias.first, 0), 0), min(bias.first, 0), bias.slopes)
    return LinearCall(features_q, plain_q, Keys(features_k, plain_k, v, log_weight), bias, call.causal, scaled, phi)


def padded_places(cu_seqlens: Tensor, tokens: int, longest: int | None) -> tuple[Tensor, Tensor]:
    """Returns the packed token at each place of a padded batch, [sequences, longest], and the length of each sequence."""
    lengths = cu_seqlens.diff()
    longest = int(lengths.max()) if longest is None else min(longest, tokens)
    places = cu_seqlens[:-1, None] + torch.arange(longest, device=cu_seqlens.device)
    return places.clamp(max=tokens - 1), lengths


def check_causal(q: Tensor, k: Tensor, causal: bool) -> None:
    """Raises for causal attention between sequences of two lengths."""
    if causal and q.shape[2] != k.shape[2]:
        raise ValueError(
            f"causal=True needs as many queries as keys, but there are {q.shape[2]} and {k.shape[2]}: "
            "to go on with a sequence use lagwise.linear.prefill and lagwise.linear.step"
        )


def require_state(state: Any) -> None:
    """Raises for anything but a state."""
    if not isinstance(state, State):
        refuse("state", "a State, which lagwise.linear.prefill and lagwise.linear.summary return", state)


def check_origin(own: Origin, known: Origin | None) -> None:
    """Raises for a call with another encoding or feature map than the state's, as far as their classes and numbers tell."""
    if known is None:
        return
    if None not in (own.encoding, known.encoding) and own.encoding != known.encoding:
        raise ValueError(f"encoding must be that of the state, {known.encoding}, but is {own.encoding}")
    if own.terms != known.terms:
        words = [", ".join(each.terms) or "no terms" for each in (known, own)]
        raise ValueError(f"encoding must be that of the state, which sets {words[0]}, but sets {words[1]}")
    if own.feature_map != known.feature_map:
        raise ValueError(f"feature_map must be that of the state, {known.feature_map}, but is {own.feature_map}")
    if own.scale != known.scale:
        raise ValueError(f"scale must be that of the state, {known.scale}, but is {own.scale}")
    message = f"feature_map must be that of the state, but this {own.feature_map} has other numbers or another size"
    if [x.shape for x in own.tensors] != [x.shape for x in known.tensors]:
        raise ValueError(message)
    for x, y in zip(own.tensors, known.tensors, strict=True):
        require((x == y).all(), message)


def check_state(call: LinearCall, state: State) -> None:
    """Raises for a state that was made by other calls than those that go on with it."""
    expected = (*call.q.shape[:2], call.q.shape[3], call.keys.values.shape[3])
    if tuple(state.kv.shape) != expected:
        raise ValueError(
            f"state must have kv [batch, heads, features, value_dim] of shape {expected}, but has {tuple(state.kv.shape)}: "
            "use the feature map and the sizes that it was made with"
        )
    known = state.recent.features.shape[2]
    if known < min(state.length, -call.bias.first - 1):
        raise ValueError(
            f"state keeps the last {known} keys, but the bias table reaches {-call.bias.first} lags into the past: "
            "use the encoding that it was made with"
        )
