"""Linear attention in plain PyTorch: the specification, chunks, steps and Fourier transforms.

    out_i = sum_j w_ij phi(q_i) . phi(k_j) v_j / sum_j w_ij phi(q_i) . phi(k_j)         log w_ij = log_weight_j + bias(j - i)

Every weight is the exponential of a difference to the largest one that its row sees (`fft`: that its head has), so that
neither features that are exponentials nor long slopes leave the range of a dtype. Those largest ones cancel in the output and are
constants for gradients.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from lagwise.lags import LagTable

# Tokens in a chunk, whose pairs are written out: sums over chunks hold as many numbers at about this size.
CHUNK = 128

# Features that `fft` transforms at once.
FEATURE_BLOCK = 8

# Near chunks whose pairs are kept for the backward pass; those of more are computed again there.
KEPT_CHUNKS = 4


class Keys(NamedTuple):
    """Keys as linear attention sees them."""

    features: Tensor  # [batch, heads, keys, features]
    plain: Tensor | None  # those of the denominator, where they are others
    values: Tensor  # [batch, heads, keys, value_dim]
    log_weight: Tensor | None  # [batch, heads or 1, keys]; -inf hides a key

    @property
    def denominator(self) -> Tensor:
        """The features that the denominator sums."""
        return self.features if self.plain is None else self.plain

    def weights(self) -> Tensor:
        """The logarithms of the weights, zeros if there are none, [batch or 1, heads or 1, keys]."""
        if self.log_weight is not None:
            return self.log_weight
        return self.features.new_zeros(1, 1, self.features.shape[2])

    def each(self, function: Callable[[Tensor], Tensor]) -> "Keys":
        """Applies a function to all tensors."""
        plain, log_weight = (None if x is None else function(x) for x in (self.plain, self.log_weight))
        return Keys(function(self.features), plain, function(self.values), log_weight)

    def between(self, start: int, end: int) -> "Keys":
        """Returns the keys from `start` to before `end`."""
        return self.each(lambda x: x[:, :, start:end])

    def into_chunks(self, size: int, chunks: int) -> "Keys":
        """Cuts the time axis into two, [chunks, size]; the weights are there, and hide the padding."""
        log_weight = into_chunks(self.weights()[..., None], size, chunks, -torch.inf)[..., 0]
        return self._replace(log_weight=None).each(lambda x: into_chunks(x, size, chunks))._replace(log_weight=log_weight)

    def then(self, others: "Keys") -> "Keys":
        """Returns these keys and others after them."""
        features, values = (torch.cat(pair, dim=2) for pair in ((self.features, others.features), (self.values, others.values)))
        plain = None if self.plain is None or others.plain is None else torch.cat([self.plain, others.plain], dim=2)
        log_weights = [keys.weights().expand(*features.shape[:2], -1) for keys in (self, others)]
        return Keys(features, plain, values, torch.cat(log_weights, dim=2))


class LinearCall(NamedTuple):
    """A call after the feature map, in the dtype of its sums."""

    q: Tensor  # features, [batch, heads, queries, features]
    plain_q: Tensor | None  # those of the denominator, where they are others
    keys: Keys
    bias: LagTable  # one column without slopes where there is none
    causal: bool
    scaled: bool  # whether the feature map gives each key a scale of its own, in its weight
    feature_map: nn.Module  # the map that made the features

    @property
    def denominator_q(self) -> Tensor:
        """The features of queries in the denominator."""
        return self.q if self.plain_q is None else self.plain_q

    def pieces(self, size: int) -> Iterator["LinearCall"]:
        """Cuts a call with as many queries as keys along its time."""
        for start in range(0, self.q.shape[2], size):
            end = start + size
            plain = None if self.plain_q is None else self.plain_q[:, :, start:end]
            yield self._replace(q=self.q[:, :, start:end], plain_q=plain, keys=self.keys.between(start, end))


class Origin(NamedTuple):
    """What a state was made with, to tell it from what a later call brings."""

    encoding: str | None  # its classes; None where terms were given in its place
    terms: tuple[str, ...]  # the names of those that it sets
    feature_map: str  # its class
    tensors: tuple[Tensor, ...]  # those of the feature map
    scale: float


@dataclass(frozen=True)
class State:
    """All that later tokens need of a sequence, of constant size.

        kv = sum_j w_j phi(k_j) v_j,   mass = sum_j w_j phi(k_j)           over all tokens but the recent ones

    Args:
        kv: The sum of features and values, [batch, heads, features, value_dim], divided by `exp(top)`.
        mass: The sum of features, [batch, heads, features], divided by `exp(top)`.
        top: The largest weight's logarithm, [batch, heads]; -inf before the first token.
        recent: The last tokens, those at lags where a bias table is not yet constant; none without a table. A table that never
            ends (Kerple, Sandwich) keeps all of them.
        length: Number of tokens so far, and the position of the next.
        seed: Where the random numbers of the encoding start.
        origin: The encoding and the feature map that it was made with.
    """

    kv: Tensor
    mass: Tensor
    top: Tensor
    recent: Keys
    length: int
    seed: Tensor | None = None
    origin: Origin | None = None

    def select(self, rows: Int[Tensor, " rows"]) -> "State":
        """Returns the state of some rows of the batch, in a new order and as often as they are named: a step of beam search."""
        recent = self.recent.each(lambda x: x[rows])
        return replace(self, kv=self.kv[rows], mass=self.mass[rows], top=self.top[rows], recent=recent)


def dense(call: LinearCall) -> Float[Tensor, "batch heads queries value_dim"]:
    """The specification: all pairs written out, [queries, keys]."""
    lags = torch.arange(call.keys.features.shape[2], device=call.q.device)
    lags = lags - torch.arange(call.q.shape[2], device=call.q.device)[:, None]
    log_weight = call.bias.at(lags)
    if call.keys.log_weight is not None:
        log_weight = log_weight + call.keys.log_weight[:, :, None, :]
    if call.causal:
        log_weight = log_weight.masked_fill(lags > 0, -torch.inf)
    largest = log_weight.detach().amax(-1, keepdim=True)
    weight = torch.exp(log_weight - largest.masked_fill(largest == -torch.inf, 0.0))
    numerator = (weight * (call.q @ call.keys.features.mT)) @ call.keys.values
    denominator = (weight * (call.denominator_q @ call.keys.denominator.mT)).sum(-1, keepdim=True)
    return numerator / denominator.masked_fill(denominator == 0.0, 1.0)


def recurrent(call: LinearCall) -> Float[Tensor, "batch heads queries value_dim"]:
    """Token by token, from one state to the next."""
    return advance(call, empty(call.keys), max(0, -call.bias.first - 1), 1)[0]


def chunked(call: LinearCall) -> Float[Tensor, "batch heads queries value_dim"]:
    """Sums over the keys; where weights depend on the lag, the pairs of near chunks and sums over the chunks beyond."""
    if call.bias.constant and not call.causal:
        return whole(call)
    queries, keys = call.q.shape[2], call.keys.features.shape[2]
    size = min(CHUNK, max(queries, keys))
    chunks = math.ceil(queries / size)
    q = into_chunks(call.q, size, chunks)
    plain_q = q if call.plain_q is None else into_chunks(call.plain_q, size, chunks)
    chunked_keys = call.keys.into_chunks(size, max(chunks, math.ceil(keys / size)))
    near, far = parts(call, chunked_keys, chunks)
    again = len(near) > KEPT_CHUNKS
    known = [None if again else pair_logs(call, chunked_keys, part) for part in near]
    with torch.no_grad():
        logs = (pair_logs(call, chunked_keys, part) if own is None else own for part, own in zip(near, known, strict=True))
        tops = (placed(own.amax(-1), part.here, chunks, -torch.inf) for part, own in zip(near, logs, strict=True))
        others = (placed(part.logs, part.here, chunks, -torch.inf) for part in far)
        top = finite(reduce(torch.maximum, chain(tops, others)))

    def pairs(part: Near, logs: Tensor | None) -> tuple[Tensor, Tensor]:
        here, there, _ = part
        logs = pair_logs(call, chunked_keys, part) if logs is None else logs
        weight = torch.exp(logs - top[:, :, here, :, None])
        scores = weight * (q[:, :, here] @ chunked_keys.features[:, :, there].mT)
        values = chunked_keys.values[:, :, there]
        if chunked_keys.plain is None:
            # The sum of the weights is one more column: summing by itself is two more passes over all pairs, and back.
            found = scores @ pad(values, (0, 1), value=1.0)
            numerator, denominator = found[..., :-1], found[..., -1:]
        else:
            numerator = scores @ values
            scores = weight * (plain_q[:, :, here] @ chunked_keys.plain[:, :, there].mT)
            denominator = scores.sum(-1, keepdim=True)
        return placed(numerator, here, chunks), placed(denominator, here, chunks)

    def beyond(part: Far) -> tuple[Tensor, Tensor]:
        here, kv, mass, logs = part
        weight = torch.exp(logs - top[:, :, here])[..., None]
        found = (weight * (q[:, :, here] @ kv), weight * (plain_q[:, :, here] @ mass))
        return placed(found[0], here, chunks), placed(found[1], here, chunks)

    products = (
        checkpoint(pairs, *each, use_reentrant=False, preserve_rng_state=False) if again else pairs(*each)
        for each in zip(near, known, strict=True)
    )
    # One after the other, so that none stays.
    numerator, denominator = reduce(lambda a, b: (a[0] + b[0], a[1] + b[1]), chain(products, map(beyond, far)))
    return ratio(numerator, denominator).flatten(2, 3)[:, :, :queries]


class Near(NamedTuple):
    """The chunks `here` of queries and as many chunks of keys, `there`, with the lags of their pairs."""

    here: slice
    there: slice
    lags: Tensor  # [size, size]


class Far(NamedTuple):
    """The chunks `here` of queries, and for each the sums over all keys beyond the near chunks, with the weights' logarithms."""

    here: slice
    kv: Tensor  # [batch, heads, chunks, features, value_dim]
    mass: Tensor  # [batch, heads, chunks, features, 1]
    logs: Tensor  # [batch or 1, heads or 1, chunks, size]


def parts(call: LinearCall, keys: Keys, chunks: int) -> tuple[list[Near], list[Far]]:
    """Divides the keys of each chunk of queries: near chunks, beyond which all lags are in the table's tails, and the rest."""
    bias, log_weight = call.bias, keys.weights()
    key_chunks, size = log_weight.shape[2:]
    past = min(max(0, math.ceil((-bias.first - 1) / size)), chunks - 1)
    future = 0 if call.causal else min(max(0, math.ceil((bias.last - 1) / size)), key_chunks - 1)
    row = torch.arange(size, device=log_weight.device)
    near, far = [], []
    for offset in range(-past, future + 1):
        here = slice(max(0, -offset), min(chunks, key_chunks - offset))
        there = slice(here.start + offset, here.stop + offset)
        near.append(Near(here, there, offset * size + row - row[:, None]))
    # Sums count as one key at their position that is nearest to the queries.
    uniform, slopes = call.keys.log_weight is None and bias.slopes is None, bias.slopes or (None, None)
    if chunks > past + 1:
        here, there = slice(past + 1, chunks), slice(0, chunks - past - 1)
        kv, mass, top = (x[:, :, there] for x in sums(keys, slopes[0], -1, uniform))
        far.append(Far(here, kv, mass, top[..., None] + bias.at(-past * size - 1 - row)[:, None]))
    if not call.causal and key_chunks > future + 1:
        here = slice(0, min(chunks, key_chunks - future - 1))
        there = slice(future + 1, here.stop + future + 1)
        kv, mass, top = (x[:, :, there] for x in sums(keys, slopes[1], 1, uniform))
        far.append(Far(here, kv, mass, top[..., None] + bias.at((future + 1) * size - row)[:, None]))
    return near, far


def pair_logs(call: LinearCall, keys: Keys, part: Near) -> Float[Tensor, "batch heads chunks size size"]:
    """Returns the logarithms of the weights of pairs, one batch or head for all where they do not differ."""
    here, there, lags = part
    logs = call.bias.at(lags)[:, None] + keys.weights()[:, :, there, None, :]
    return logs.masked_fill(lags > 0, -torch.inf) if call.causal and here == there else logs


def fft(call: LinearCall) -> Float[Tensor, "batch heads queries value_dim"]:
    """Products with Toeplitz matrices by Fourier transforms, for any table. Luo et al. (2021).

    The transforms round relative to the largest numbers of a head, not of a row: rows with far smaller weights are less exact.
    Where the feature map gives scales to keys, they are so by at most `exp(largest - smallest bias)` as long as every row sees
    every key. In causal attention and beside slopes there is no such bound, and the caller must not ask for it.
    """
    queries, keys = call.q.shape[2], call.keys.features.shape[2]
    weight = relative_weights(call.keys.weights()).expand(*call.keys.values.shape[:3], 1)
    values = weight * call.keys.values
    lags = torch.arange(1 - queries, keys, device=call.q.device)
    logs = call.bias.window(1 - queries, keys - 1)
    if call.causal:
        logs = logs.masked_fill(lags > 0, -torch.inf)
    by_lag = torch.exp(logs - logs.detach().amax(-1, keepdim=True))
    # A length with small prime factors, around which query minus key wraps.
    step = 2 ** max(0, (queries + keys).bit_length() - 4)
    length = math.ceil((queries + keys) / step) * step
    past, future = by_lag[:, :queries].flip(1), by_lag[:, queries:].flip(1)
    spectrum = torch.fft.rfft(torch.cat([past, past.new_zeros(len(past), length - queries - keys + 1), future], dim=1))

    def block(q: Tensor, features: Tensor, values: Tensor, spectrum: Tensor) -> Tensor:
        products = features.mT[..., None, :] * values.mT[:, :, None]
        sums = torch.fft.irfft(torch.fft.rfft(products, length) * spectrum[:, None, None], length)[..., :queries]
        return torch.einsum("bhtm,bhmdt->bhtd", q, sums)

    def product(q: Tensor, features: Tensor, values: Tensor) -> Tensor:
        parts = zip(q.split(FEATURE_BLOCK, -1), features.split(FEATURE_BLOCK, -1), strict=True)
        return sum(checkpoint(block, *part, values, spectrum, use_reentrant=False) for part in parts)  # pyright: ignore

    if call.keys.plain is None:
        both = product(call.q, call.keys.features, torch.cat([values, weight], dim=-1))
        numerator, denominator = both[..., :-1], both[..., -1:]
    else:
        numerator = product(call.q, call.keys.features, values)
        denominator = product(call.denominator_q, call.keys.plain, weight)
    # The sums of rows that see nothing are not exactly zero.
    seen = (weight > 0.0).cumsum(2) > 0 if call.causal else (weight > 0.0).any(2, keepdim=True)
    return ratio(numerator.masked_fill(~seen, 0.0), denominator.masked_fill(~seen, 0.0))


def whole(call: LinearCall) -> Float[Tensor, "batch heads queries value_dim"]:
    """Every query sees all keys alike: two sums over the keys."""
    keys = call.keys
    if keys.log_weight is None:
        kv, mass = keys.features.mT @ keys.values, keys.denominator.sum(2)[..., None]
    else:
        kv, mass = weighted_sums(keys, relative_weights(keys.log_weight))
    return ratio(call.q @ kv, call.denominator_q @ mass)


def empty(keys: Keys, seed: Tensor | None = None, origin: Origin | None = None) -> State:
    """Returns the state before the first token."""
    batch, heads, _, features = keys.features.shape
    kv = keys.features.new_zeros(batch, heads, features, keys.values.shape[3])
    top = keys.features.new_full((batch, heads), -torch.inf)
    return State(kv, kv.new_zeros(kv.shape[:3]), top, keys.between(0, 0), 0, seed, origin)


def advance(call: LinearCall, state: State, keep: int, size: int) -> tuple[Float[Tensor, "batch heads queries value_dim"], State]:
    """Returns the output of the tokens that follow a state, `size` at a time, and the state after them."""
    outs = []
    for piece in call.pieces(size):
        out, state = follow(piece, state, keep)
        outs.append(out)
    return torch.cat(outs, dim=2), state


def follow(call: LinearCall, state: State, keep: int) -> tuple[Float[Tensor, "batch heads queries value_dim"], State]:
    """Returns the output of the tokens that follow a state, all their pairs written out, and the state after them."""
    known = state.recent.features.shape[2]
    keys = state.recent.then(call.keys)
    row = torch.arange(call.q.shape[2], device=call.q.device)
    lags = torch.arange(keys.features.shape[2], device=call.q.device) - known - row[:, None]
    logs = (call.bias.at(lags) + keys.weights()[:, :, None]).masked_fill(lags > 0, -torch.inf)
    far = state.top[..., None] + call.bias.at(-known - 1 - row)
    top = finite(torch.maximum(logs.detach().amax(-1), far.detach()))
    weight, far = torch.exp(logs - top[..., None]), torch.exp(far - top)[..., None]
    scores = weight * (call.q @ keys.features.mT)
    numerator = scores @ keys.values + far * (call.q @ state.kv)
    if keys.plain is not None:
        scores = weight * (call.denominator_q @ keys.plain.mT)
    denominator = scores.sum(-1, keepdim=True) + far * (call.denominator_q @ state.mass[..., None])
    return ratio(numerator, denominator), absorb(state, keys, call.q.shape[2], call.bias, keep)


def absorb(state: State, keys: Keys, new: int, bias: LagTable, keep: int) -> State:
    """Returns the state after `new` more tokens: of the keys that are not in its sums the last ones are kept, others summed."""
    leaving, length = max(0, keys.features.shape[2] - keep), state.length + new
    # A copy, because a view would hold all keys.
    recent = keys.between(leaving, keys.features.shape[2]).each(torch.clone)
    if leaving == 0:
        return replace(state, recent=recent, length=length)
    old = keys.between(0, leaving)
    logs, before = old.weights(), state.top
    if bias.slopes is not None:
        # Sums count as one key at the position of the last key in them.
        slope = bias.slopes[0]
        logs = logs + slope[:, None] * torch.arange(1 - leaving, 1, device=slope.device)
        before = before - slope * leaving
    top = torch.maximum(logs.detach().amax(-1), before.detach())
    carry = torch.exp(before - finite(top))[..., None]
    kv, mass = weighted_sums(old, torch.exp(logs - finite(top)[..., None])[..., None])
    kv, mass = carry[..., None] * state.kv + kv, carry * state.mass + mass[..., 0]
    return replace(state, kv=kv, mass=mass, top=top, recent=recent, length=length)


def sums(keys: Keys, slope: Tensor | None, direction: int, uniform: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Returns for each chunk the sums over it and all chunks before it (direction -1) or after it (1), and their scale.

    The scale is a logarithm. The results are [batch, heads, chunks, features, value_dim or 1] and [batch or 1, heads or 1,
    chunks]. A slope weighs keys by their distance to the end of the chunk that is nearest to the queries. Uniform weights are 0
    and 1.
    """
    logs = keys.weights()
    chunks, size = logs.shape[2:]
    decay = 0.0
    if slope is not None:
        slope = slope[:, None]
        distance = torch.arange(size, device=slope.device)
        logs = logs + (slope * (distance if direction == 1 else distance - (size - 1)))[:, None]
        decay = direction * size * slope
    local = logs.detach().amax(-1)
    kv, mass = weighted_sums(keys, torch.exp(logs - finite(local)[..., None])[..., None])
    if direction == 1:
        kv, mass, local = (x.flip(2) for x in (kv, mass, local))
    with torch.no_grad():
        # The running maximum, which moves by the decay from chunk to chunk.
        drift = decay * torch.arange(chunks, device=local.device)
        top = (local - drift).cummax(-1).values + drift
    if uniform:
        kv, mass = kv.cumsum(2), mass.cumsum(2)
    else:
        fresh = torch.exp(local - finite(top))[..., None, None]
        carry = torch.exp(top[..., :-1] + decay - finite(top[..., 1:]))[..., None, None]
        kv, mass = running(fresh * kv, carry), running(fresh * mass, carry)
    if direction == 1:
        kv, mass, top = (x.flip(2) for x in (kv, mass, top))
    return kv, mass, top


def running(x: Tensor, carry: Tensor) -> Tensor:
    """Returns `y_c = carry_(c-1) y_(c-1) + x_c` along the third axis."""
    results = [x[:, :, 0]]
    for chunk in range(1, x.shape[2]):
        results.append(torch.addcmul(x[:, :, chunk], carry[:, :, chunk - 1], results[-1]))
    return torch.stack(results, dim=2)


def weighted_sums(keys: Keys, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns `sum_j weight_j phi(k_j) v_j`, [..., features, value_dim], and `sum_j weight_j phi(k_j)`, [..., features, 1]."""
    kv = keys.features.mT @ (weight * keys.values)
    return kv, keys.denominator.mT @ weight.expand(*keys.values.shape[:-1], 1)


def relative_weights(log_weight: Tensor) -> Tensor:
    """Returns the weights, [..., keys, 1], relative to the largest one."""
    return torch.exp(log_weight - finite(log_weight.detach().amax(-1, keepdim=True)))[..., None]


def into_chunks(x: Tensor, size: int, chunks: int, value: float = 0.0) -> Tensor:
    """Cuts [batch, heads, time, dim] into [batch, heads, chunks, size, dim], after padding on the right."""
    missing = size * chunks - x.shape[2]
    return (pad(x, (0, 0, 0, missing), value=value) if missing else x).unflatten(2, (chunks, size))


def placed(x: Tensor, here: slice, chunks: int, value: float = 0.0) -> Tensor:
    """Returns x, which has the chunks `here` along its third axis, with all chunks."""
    missing = (here.start, chunks - here.stop)
    return pad(x, (*[0, 0] * (x.ndim - 3), *missing), value=value) if any(missing) else x


def finite(top: Tensor) -> Tensor:
    """Returns the largest logarithms with 0 for those of rows that see nothing, whose weights are then exactly zero."""
    return top.masked_fill(top == -torch.inf, 0.0)


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Divides, and returns zeros for rows that see nothing."""
    return numerator / denominator.masked_fill(denominator == 0.0, 1.0)


IMPLEMENTATIONS = {"dense": dense, "chunked": chunked, "recurrent": recurrent, "fft": fft}
