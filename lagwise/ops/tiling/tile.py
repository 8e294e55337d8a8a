"""One tile of attention in lag coordinates: arrays [batch, heads, queries, lags] instead of [queries, keys].

A tile holds the queries of a block and the lags n0 .. n1 of each. In these coordinates every table is one row that all queries
share, a tail is a single number, and only the products with k and v, which live on the rectangle [queries, keys], need
to be read along diagonals; `diagonals` does that as a view.

    rectangle    keys j0 .. j0 + Q + N - 2               lag coordinates
    query 0      x x x x . .                              x x x x
    query 1      . x x x x .               <->            x x x x            Q queries, N lags
    query 2      . . x x x x                              x x x x
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lagwise import noise
from lagwise.lags import LagTable
from lagwise.noise import Stream
from lagwise.ops.grouped import per_key_head, per_query_head
from lagwise.ops.lowering import Gradients, Part
from lagwise.terms import Terms

# Lags at a time in products of keys with a table.
KEY_STEP = 64


def diagonals(rectangle: Tensor, lags: int) -> Tensor:
    """Views a contiguous rectangle [..., queries, keys] as [..., queries, lags]: entry (a, n) is the rectangle's (a, a + n)."""
    width = rectangle.shape[-1]
    shape = (*rectangle.shape[:-1], lags)
    return rectangle.as_strided(shape, (*rectangle.stride()[:-2], width + 1, 1))


def key_diagonals(columns: Tensor, queries: int, lags: int) -> Tensor:
    """Views a contiguous [..., keys, lags or 1] as [..., queries, lags]: entry (a, n) is row a + n, column n or 0."""
    width = columns.shape[-1]
    shape = (*columns.shape[:-2], queries, lags)
    return columns.as_strided(shape, (*columns.stride()[:-2], width, width + (1 if width > 1 else 0)))


@dataclass
class Tile:
    """The queries `row .. row + queries - 1` of a part at the lags `first .. first + lags - 1`."""

    part: Part
    row: int
    queries: int
    first: int
    lags: int

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + self.queries)

    @cached_property
    def key(self) -> int:
        """The first key of the rectangle; it may lie before the first key there is."""
        return self.part.query_start + self.row + self.first

    @cached_property
    def keys(self) -> tuple[slice, slice]:
        """The keys of the rectangle that exist, as a slice of the part and as a slice of the rectangle."""
        start = min(max(self.key, 0), self.part.k.shape[2])
        stop = min(max(self.key + self.queries + self.lags - 1, start), self.part.k.shape[2])
        return slice(start, stop), slice(start - self.key, stop - self.key)

    def columns(self, first: int) -> slice:
        """The tile's lags as columns of an array whose columns start with the lag `first`."""
        return slice(self.first - first, self.first - first + self.lags)

    def of_queries(self, x: Tensor) -> Tensor:
        return x[:, :, self.rows].to(self.part.compute)

    def of_keys(self, x: Tensor) -> Tensor:
        """Returns the rectangle's rows of k or v, with zeros where there is no key, or one that nobody sees."""
        there, here = self.keys
        found = x[:, :, there].to(self.part.compute)
        if self.part.call.key_mask is not None:
            # What is hidden may hold anything, and a weight of zero times NaN is NaN.
            found = found.masked_fill(~self.part.call.key_mask[:, None, there, None], 0.0)
        width = self.queries + self.lags - 1
        if found.shape[2] == width:
            return found
        return torch.nn.functional.pad(found, (0, 0, here.start, width - here.stop))

    def window(self, table: LagTable) -> Tensor:
        """Returns the table at the tile's lags: [heads, lags, ...], or a single column where it is constant over the tile."""
        last = self.first + self.lags - 1
        if table.slopes is None and (last <= table.first or self.first >= table.last):
            last = self.first
        return table.window(self.first, last).to(self.part.compute)

    def visible(self) -> Tensor | None:
        """Returns which pairs may be seen, broadcastable to [batch, heads, queries, lags], or None for all."""
        whole = self.keys[1] == slice(0, self.queries + self.lags - 1)
        if whole and self.part.call.key_mask is None:
            return None
        there, here = self.keys
        mask = torch.zeros(1, self.queries + self.lags - 1, dtype=torch.bool, device=self.part.q.device)
        if self.part.call.key_mask is None:
            mask[:, here] = True
        else:
            mask = mask.repeat(self.part.call.key_mask.shape[0], 1)
            mask[:, here] = self.part.call.key_mask[:, there]
        return mask.unfold(-1, self.lags, 1)[:, None]

    def kept(self) -> Tensor | None:
        """Returns the factors of dropout, [batch, heads, queries, lags], or None without dropout."""
        dropout, seed = self.part.call.dropout, self.part.call.seed
        if dropout == 0.0:
            return None
        assert seed is not None
        device = self.part.q.device
        batch, row, key = self.part.origin
        batches = batch + torch.arange(self.part.q.shape[0], device=device)[:, None, None, None]
        heads = torch.arange(self.part.q.shape[1], device=device)[:, None, None]
        rows = self.row + torch.arange(self.queries, device=device)[:, None]
        keys = self.part.query_start + rows + self.first + torch.arange(self.lags, device=device)
        mask = noise.keep(dropout, seed, Stream.ATTENTION_DROPOUT, batches, heads, row + rows, key + keys)
        return mask.to(self.part.compute) / (1.0 - dropout)

    @cached_property
    def scaled_q(self) -> Tensor:
        return self.of_queries(self.part.q) * self.part.call.scale

    @cached_property
    def scaled_raw_q(self) -> Tensor:
        return self.of_queries(self.part.raw_q) * self.part.call.scale

    @cached_property
    def k(self) -> Tensor:
        return self.of_keys(self.part.k)

    @cached_property
    def raw_k(self) -> Tensor:
        return self.k if self.part.raw_k is self.part.k else self.of_keys(self.part.raw_k)

    @cached_property
    def v(self) -> Tensor:
        return self.of_keys(self.part.v)

    @cached_property
    def gains(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gain as one of three: the same over the whole tile, varying scalars, or varying vectors."""
        if self.part.tables.gain is None:
            return None, None, None
        gain = self.window(self.part.tables.gain)
        if gain.shape[1] == 1:
            return gain, None, None
        return (None, gain, None) if gain.shape[2] == 1 else (None, None, gain)

    @cached_property
    def content_q(self) -> Tensor:
        """The scaled queries, times a gain that is the same over the whole tile."""
        constant, _, _ = self.gains
        return self.scaled_q if constant is None else self.scaled_q * constant

    def product(self) -> Tensor:
        """Returns the scaled content product, [batch, heads, queries, lags], which the caller may write over.

        A gain is in it, unless it is varying scalars.
        """
        _, _, vectors = self.gains
        if vectors is not None:
            rows = [self._gained_keys(a, vectors) @ self.scaled_q[:, :, a, :, None] for a in range(self.queries)]
            return torch.cat(rows, dim=-1).mT
        return diagonals(grouped_product(self.content_q, self.k), self.lags)

    @cached_property
    def content(self) -> Tensor:
        """The product, kept for the gradient of a gain of varying scalars."""
        return self.product()

    def _gained_keys(self, a: int, gain: Tensor) -> Tensor:
        """Returns the keys that query a sees times the gain at their lags, [batch, heads, lags, channels]."""
        return per_query_head(self.k[:, :, a : a + self.lags], self.part.q.shape[1]) * gain

    def logits(self, scratch: "Scratch", out: Tensor | None = None) -> Tensor:
        """Returns the logits, [batch, heads, queries, lags], in `out` if given; minus infinity where nothing may be seen."""
        tables = self.part.tables
        _, scalars, _ = self.gains
        logits = self.product() if scalars is None else self.content * scalars.mT
        out = logits if out is None else out
        if tables.query is not None:
            logits = torch.add(logits, self.scaled_raw_q @ self.window(tables.query).mT, out=out)
        elif out is not logits:
            logits = out.copy_(logits)
        if tables.key is not None:
            for lags, keys, window in self._key_steps():
                shape = (*logits.shape[:2], keys.shape[2], window.shape[1])
                product = torch.matmul(keys, window.mT, out=scratch.zeros(f"key product {shape[3]}", keys, shape))
                logits[..., lags] += key_diagonals(product, self.queries, lags.stop - lags.start)
        if tables.bias is not None:
            logits += self.window(tables.bias)[:, None]
        visible = self.visible()
        return logits if visible is None else logits.masked_fill_(~visible, -torch.inf)

    def _key_steps(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yields a few lags at a time, the keys that meet them in query heads, and the scaled table at these lags.

        Of all keys times all lags only a diagonal strip is needed; small steps leave out most of the rest.
        """
        assert self.part.tables.key is not None
        window = self.window(self.part.tables.key) * self.part.call.scale
        keys = per_query_head(self.raw_k, self.part.q.shape[1])
        # Steps of about the same size: a step of a single lag would cost as much as a whole one.
        steps = max(1, round(self.lags / KEY_STEP)) if window.shape[1] > 1 else 1
        step = -(-self.lags // steps)
        for start in range(0, self.lags, step):
            stop = min(start + step, self.lags)
            yield slice(start, stop), keys[:, :, start : stop + self.queries - 1], window[:, start:stop]

    def output(self, rectangle: Tensor) -> Tensor:
        """Returns the weighted sum of values, [batch, heads, queries, value_dim], for weights on the rectangle's diagonals."""
        weights = diagonals(rectangle, self.lags)
        out = grouped_sum(rectangle, self.v)
        if self.part.tables.value is not None:
            window = self.window(self.part.tables.value)
            out += per_column(weights, window) @ window
        return out

    def backward(
        self, logits: Tensor, lse: Tensor, delta: Tensor, dout: Tensor, gradients: Gradients, scratch: "Scratch"
    ) -> None:
        """Adds the tile's share to the gradients.

        p = exp(logit - lse),   dlogit = p * (dout . (v_j + value(n)) - delta),   delta = dout . out - dlse
        """
        tables, there, here = self.part.tables, *self.keys
        # Weights and gradients are written to the diagonals of rectangles right away, for the products with k, v and dout.
        rectangle, drectangle = scratch.rectangle("weights", logits), scratch.rectangle("dlogits", logits)
        weights, dlogits = diagonals(rectangle, self.lags), diagonals(drectangle, self.lags)
        torch.sub(logits, lse, out=weights).exp_()
        dweights = diagonals(grouped_product(dout, self.v), self.lags)
        if tables.value is not None:
            dweights += dout @ self.window(tables.value).mT
        kept = self.kept()
        if kept is not None:
            dweights *= kept
        torch.sub(dweights, delta, out=dlogits).mul_(weights)
        if kept is not None:
            weights *= kept
        gradients.v[:, :, there] += grouped_transpose(rectangle, dout, self.v.shape[1])[:, :, here]
        if tables.value is not None:
            self._add(scratch, "value", over_batch(per_column(weights, self.window(tables.value)).mT @ dout))
        if tables.bias is not None:
            self._add(scratch, "bias", per_column(dlogits, self.window(tables.bias)).sum((0, 2)))
        if tables.query is not None:
            window = self.window(tables.query)
            columns = per_column(dlogits, window)
            gradients.raw_q[:, :, self.rows] += self.part.call.scale * (columns @ window)
            self._add(scratch, "query", over_batch(columns.mT @ self.scaled_raw_q))
        if tables.key is not None:
            self._key_backward(dlogits, gradients, scratch)
        _, _, vectors = self.gains
        if vectors is not None:
            self._channel_backward(dlogits, vectors, gradients, scratch)
        else:
            self._content_backward(drectangle, gradients, scratch)

    def _key_backward(self, dlogits: Tensor, gradients: Gradients, scratch: "Scratch") -> None:
        there, here = self.keys
        dk = torch.zeros_like(self.raw_k)
        for lags, keys, window in self._key_steps():
            columns = per_column(scratch.columns(dlogits[..., lags]), window)
            dk[:, :, lags.start : lags.start + keys.shape[2]] += per_key_head(columns @ window, dk.shape[1])
            self._add(scratch, "key", self.part.call.scale * over_batch(columns.mT @ keys), lags.start)
        gradients.raw_k[:, :, there] += dk[:, :, here]

    def _content_backward(self, rectangle: Tensor, gradients: Gradients, scratch: "Scratch") -> None:
        there, here = self.keys
        constant, scalars, _ = self.gains
        if scalars is not None:
            dlogits = diagonals(rectangle, self.lags)
            self._add(scratch, "gain", (dlogits * self.content).sum((0, 2))[..., None])
            dlogits *= scalars.mT
        dq = self.part.call.scale * grouped_sum(rectangle, self.k)
        gradients.k[:, :, there] += grouped_transpose(rectangle, self.content_q, self.k.shape[1])[:, :, here]
        if constant is not None:
            dgain = (dq * self.of_queries(self.part.q)).sum((0, 2))[:, None]
            self._add(scratch, "gain", dgain if constant.shape[2] > 1 else dgain.sum(-1, keepdim=True))
            dq = dq * constant
        gradients.q[:, :, self.rows] += dq

    def _channel_backward(self, dlogits: Tensor, gain: Tensor, gradients: Gradients, scratch: "Scratch") -> None:
        there, here = self.keys
        dk = torch.zeros_like(self.k)
        dgain = dlogits.new_zeros(self.part.q.shape[1], *gain.shape[1:])
        for a in range(self.queries):
            dlogit, seen = dlogits[:, :, a, :, None], slice(a, a + self.lags)
            gradients.q[:, :, self.row + a] += self.part.call.scale * (dlogit * self._gained_keys(a, gain)).sum(2)
            outer = dlogit * self.scaled_q[:, :, a, None]
            dk[:, :, seen] += per_key_head(outer * gain, self.k.shape[1])
            dgain += over_batch(outer * per_query_head(self.k[:, :, seen], outer.shape[1]))
        gradients.k[:, :, there] += dk[:, :, here]
        self._add(scratch, "gain", dgain)

    def _add(self, scratch: "Scratch", name: str, window: Tensor, start: int = 0) -> None:
        """Adds the gradient of a table at the tile's lags from number `start` on."""
        scratch.add(name, self.first + start, window)


class Scratch:
    """Arrays that one tile after the other writes to while their shape stays: fresh memory costs more than the arithmetic.

    Of the zeroed ones, only certain diagonals are ever written.
    """

    def __init__(self):
        self.buffers: dict[str, Tensor] = {}
        self.sums: dict[str, list[tuple[int, Tensor]]] = {}

    def rectangle(self, name: str, like: Tensor) -> Tensor:
        """Returns a rectangle [queries, keys] for an array in lag coordinates, zero beside the diagonals."""
        return self.zeros(name, like, (*like.shape[:3], like.shape[2] + like.shape[3] - 1))

    def columns(self, x: Tensor) -> Tensor:
        """Returns x, in lag coordinates, by key and lag, [keys, lags]."""
        shape = (*x.shape[:2], x.shape[2] + x.shape[3] - 1, x.shape[3])
        buffer = self.zeros(f"columns {x.shape[3]}", x, shape)
        key_diagonals(buffer, *x.shape[2:]).copy_(x)
        return buffer

    def add(self, name: str, first: int, window: Tensor) -> None:
        """Adds up the gradient of a table over tiles with the same lags, as all tiles of a band have."""
        for known, total in self.sums.setdefault(name, []):
            if known == first and total.shape == window.shape:
                total += window
                return
        self.sums[name].append((first, window))

    def fold(self, gradients: Gradients, tables: Terms) -> None:
        """Moves what was added up into the gradients of the tables."""
        for name, found in self.sums.items():
            for first, window in found:
                getattr(tables, name).fold(window, first, getattr(gradients.tables, name))
        self.sums.clear()

    def zeros(self, name: str, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Returns the named array: zeros at first, then with whatever was written to it."""
        if name not in self.buffers or self.buffers[name].shape != shape:
            self.buffers[name] = like.new_zeros(shape)
        return self.buffers[name]


def per_column(x: Tensor, window: Tensor) -> Tensor:
    """Sums x over its lags where the window has a single column for all of them."""
    return x.sum(-1, keepdim=True) if window.shape[1] == 1 else x


def over_batch(x: Tensor) -> Tensor:
    return x[0] if x.shape[0] == 1 else x.sum(0)


def grouped_product(x: Tensor, y: Tensor) -> Tensor:
    """Returns x y^T, [batch, heads, queries, keys], where y may have fewer heads, each for a group of neighbouring ones of x."""
    heads = y.shape[1]
    product = x.unflatten(1, (heads, -1)).flatten(2, 3) @ y.mT
    return product.unflatten(2, (-1, x.shape[2])).flatten(1, 2)


def grouped_sum(weights: Tensor, y: Tensor) -> Tensor:
    """Returns weights y, [batch, heads, queries, channels], with heads as in `grouped_product`."""
    result = weights.unflatten(1, (y.shape[1], -1)).flatten(2, 3) @ y
    return result.unflatten(2, (-1, weights.shape[2])).flatten(1, 2)


def grouped_transpose(weights: Tensor, x: Tensor, heads: int) -> Tensor:
    """Returns weights^T x summed over the groups, [batch, heads, keys, channels]."""
    left = weights.unflatten(1, (heads, -1)).flatten(2, 3)
    return left.mT @ x.unflatten(1, (heads, -1)).flatten(2, 3)
