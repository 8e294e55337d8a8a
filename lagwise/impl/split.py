"""Attention of a clipped encoding as a near band and two far fields.

Beyond its last column each table is constant, so that a side with tail (bias b, gain g, query a, key c, value u) is plain attention with

    q_eff = g * q + c,     log-sum-exp shifted by scale q . a + b,     output shifted by u

and runs on the vendor's kernel. The band between the tails is swept in lag coordinates, and the three are merged by their
log-sum-exps. docs/mathematics.md derives the backward pass.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lagwise.impl import far, sweep
from lagwise.impl.lowering import Gradients, Lowered, Part, parts_of, tables_of
from lagwise.lags import LagTable
from lagwise.terms import Terms


@dataclass(frozen=True)
class Side:
    """One far field: the pieces of `key - row <= limit`, on time-reversed tensors where it is the future's."""

    tables: Terms
    limit: int
    mirrored: bool

    @property
    def index(self) -> int:
        """Which of the far fields this is: the past's comes first."""
        return 1 if self.mirrored else 0

    @property
    def column(self) -> int:
        """Which column of the tables is constant here."""
        return -1 if self.mirrored else 0

    def seen(self, x: Tensor) -> Tensor:
        """Returns a tensor [batch, heads, time, ...] in this side's order of time."""
        return x.flip(2) if self.mirrored else x

    def original(self, keys: slice, count: int) -> slice:
        """Returns a slice of this side's time in the call's order of time."""
        return slice(count - keys.stop, count - keys.start) if self.mirrored else keys

    def tail(self, name: str, dtype: torch.dtype) -> Tensor | None:
        """Returns the tail of a table, [heads, 1] or [heads, 1, channels]."""
        table: LagTable | None = getattr(self.tables, name)
        return None if table is None else table.values[:, self.column, None].to(dtype)

    def queries(self, part: Part) -> Tensor:
        """Returns the queries that make this side plain attention, rounded once from the type of the sums."""
        q = part.q.to(part.compute)
        gain, key = self.tail("gain", part.compute), self.tail("key", part.compute)
        if gain is not None:
            q = q * gain
        if key is not None:
            q = q + key
        return q.to(part.q.dtype)

    def shift(self, part: Part) -> Tensor:
        """Returns what the tails add to the log-sum-exp, broadcastable to [batch, heads, queries]."""
        query, bias = self.tail("query", part.compute), self.tail("bias", part.compute)
        shift = torch.zeros((), dtype=part.compute, device=part.q.device)
        if query is not None:
            shift = shift + part.scale * (part.raw_q.to(part.compute) * query).sum(-1)
        return shift if bias is None else shift + bias


def near_band(tables: Terms) -> tuple[int, int] | None:
    """Returns the first and the last lag of the tables' band, or None where every table is constant."""
    found = list(tables.tables().values())
    if all(table.constant for table in found):
        return None
    return min(table.first for table in found), max(table.last for table in found)


def layout(call: Lowered, part: Part) -> tuple[tuple[int, int], list[Side]]:
    """Returns the lags of the band, first and last, and the far fields on either side of it."""
    queries, keys = part.q.shape[2], part.k.shape[2]
    if call.window is not None:
        return (part.first, part.last), []
    band = near_band(part.tables)
    if band is None:
        # All pairs are one plain attention, and the band is empty.
        return (1, 0), [Side(part.tables, part.query_start + part.last, mirrored=False)]
    low, high = band
    # A causal call sees only part of a tail that starts in the past; its band goes on to the last lag instead.
    future = part.last + 1 if call.causal else max(high, low + 1)
    sides = [
        Side(part.tables, part.query_start + min(low, part.last), mirrored=False),
        Side(part.tables, keys - queries - part.query_start - future, mirrored=True),
    ]
    return (low + 1, min(future - 1, part.last)), sides[: far_sides(call)]


def forward(call: Lowered) -> list[Tensor]:
    """Returns output and log-sum-exp, then outputs and log-sum-exps of the far fields, without their values' tail."""
    ((_, _, part),) = parts_of(call)
    (first, last), sides = layout(call, part)
    out, lse = sweep.forward(part, first, last)
    far_out = torch.zeros(far_shape(call), dtype=call.q.dtype, device=call.q.device)
    far_lse = torch.full(far_shape(call)[:-1], -torch.inf, dtype=lse.dtype, device=lse.device)
    for side in sides:
        side_out, side_lse = _side_forward(part, side)
        far_out[side.index], far_lse[side.index] = side_out.to(far_out.dtype), side_lse
        value = side.tail("value", part.compute)
        out, lse = merge(out, lse, side_out if value is None else side_out + value, side_lse)
    return [out.to(call.q.dtype), lse, far_out, far_lse]


def _side_forward(part: Part, side: Side) -> tuple[Tensor, Tensor]:
    q, k, v = side.seen(side.queries(part)), side.seen(part.k), side.seen(part.v)
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=part.compute, device=q.device)
    lse = torch.full(q.shape[:3], -torch.inf, dtype=part.compute, device=q.device)
    for piece in far.pieces(q.shape[2], k.shape[2], side.limit):
        piece_out, piece_lse = far.attend(
            q[:, :, piece.rows], k[:, :, piece.keys], v[:, :, piece.keys], causal=piece.causal, scale=part.scale
        )
        rows = piece.rows
        out[:, :, rows], lse[:, :, rows] = merge(out[:, :, rows], lse[:, :, rows], piece_out, piece_lse)
    return side.seen(out), side.seen(lse[..., None]).squeeze(-1) + side.shift(part)


def merge(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merges two attentions of the same queries over different keys."""
    both = torch.logaddexp(lse, other_lse)
    finite = torch.where(both == -torch.inf, 0.0, both)
    weight, other = (torch.exp(x - finite)[..., None] for x in (lse, other_lse))
    return out * weight + other_out * other, both


def backward(call: Lowered, saved: list[Tensor], dout: Tensor, dlse: Tensor | None) -> list[Tensor]:
    """Returns the gradients of the tensors that the call has."""
    out, lse, far_out, far_lse = saved
    ((_, _, part),) = parts_of(call)
    (first, last), sides = layout(call, part)
    gradients = Gradients.zeros(call)
    wide_dout = dout.to(lse.dtype)
    delta = (wide_dout * out).sum(-1)
    if dlse is not None:
        delta = delta - dlse
    sweep.backward(part, first, last, wide_dout, lse, delta, gradients)
    for side in sides:
        _tail_backward(part, side, wide_dout, lse, delta, far_out[side.index], far_lse[side.index], gradients)
        _side_backward(part, side, dout, out, lse, dlse, gradients)
    return gradients.flat(call)


def _tail_backward(
    part: Part, side: Side, dout: Tensor, lse: Tensor, delta: Tensor, far_out: Tensor, far_lse: Tensor, gradients: Gradients
) -> None:
    """Adds the gradients of the tails that shift the log-sum-exp and the output, from the mass of the side in each row.

        mass = exp(far_lse - lse),   change = mass * (dout . (far_out + u) - delta)
        dbias = sum change,   dquery = scale sum change q,   dq += scale change a,   dvalue = sum mass dout
    """
    mass = torch.exp(far_lse - torch.where(lse == -torch.inf, 0.0, lse))
    value, query = side.tail("value", part.compute), side.tail("query", part.compute)
    change = mass * ((dout * (far_out if value is None else far_out + value)).sum(-1) - delta)
    if part.tables.bias is not None:
        _add(gradients, side, "bias", change.sum((0, 2)))
    if query is not None:
        scaled = part.scale * change[..., None]
        _add(gradients, side, "query", (scaled * part.raw_q).sum((0, 2)))
        gradients.raw_q += scaled * query
    if value is not None:
        _add(gradients, side, "value", (mass[..., None] * dout).sum((0, 2)))


def _side_backward(
    part: Part, side: Side, dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, gradients: Gradients
) -> None:
    """Adds what the vendor's backward pass gives: its weights are those of the whole softmax once the shift is taken off."""
    value = side.tail("value", part.compute)
    plain_out = out if value is None else (out.to(part.compute) - value).to(out.dtype)
    plain_lse = side.seen((lse - side.shift(part))[..., None]).squeeze(-1)
    plain_dlse = None if dlse is None else side.seen(dlse[..., None]).squeeze(-1)
    q, k, v, dout, plain_out = (side.seen(x) for x in (side.queries(part), part.k, part.v, dout, plain_out))
    dq = torch.zeros_like(gradients.q)
    for piece in far.pieces(q.shape[2], k.shape[2], side.limit):
        rows, keys = piece.rows, piece.keys
        piece_dq, piece_dk, piece_dv = far.attend_backward(
            dout[:, :, rows], q[:, :, rows], k[:, :, keys], v[:, :, keys], plain_out[:, :, rows],
            plain_lse[:, :, rows], None if plain_dlse is None else plain_dlse[:, :, rows],
            causal=piece.causal, scale=part.scale,
        )  # fmt: skip
        dq[:, :, rows] += piece_dq
        gradients.k[:, :, side.original(keys, k.shape[2])] += side.seen(piece_dk)
        gradients.v[:, :, side.original(keys, k.shape[2])] += side.seen(piece_dv)
    dq = side.seen(dq)
    if part.tables.key is not None:
        _add(gradients, side, "key", dq.sum((0, 2)))
    gain = side.tail("gain", part.compute)
    if gain is not None:
        dgain = (dq * part.q).sum((0, 2))
        _add(gradients, side, "gain", dgain if gain.shape[-1] > 1 else dgain.sum(-1, keepdim=True))
        dq = dq * gain
    gradients.q += dq


def _add(gradients: Gradients, side: Side, name: str, gradient: Tensor) -> None:
    """Adds a gradient, [heads] or [heads, channels], to a table's tail."""
    column = getattr(gradients.tables, name).values[:, side.column]
    column += gradient.sum(0, keepdim=True) if column.shape[0] == 1 else gradient


def far_sides(call: Lowered) -> int:
    """Returns how many far fields a call can have, by its kind alone, whatever its lengths."""
    if call.window is not None:
        return 0
    return 1 if call.causal or near_band(tables_of(call)) is None else 2


def far_shape(call: Lowered) -> tuple[int, ...]:
    return (far_sides(call), *call.q.shape[:3], call.v.shape[3])


def outputs(call: Lowered) -> list[Tensor]:
    """Returns empty tensors like those of `forward`, for tracing."""
    compute = torch.promote_types(call.q.dtype, torch.float32)
    shape = far_shape(call)
    return [
        call.q.new_empty(shape[1:]),
        call.q.new_empty(shape[1:-1], dtype=compute),
        call.q.new_empty(shape),
        call.q.new_empty(shape[:-1], dtype=compute),
    ]
