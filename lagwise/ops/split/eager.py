"""Attention of a clipped encoding as a near band and two far fields.

Beyond its last column each table is constant, so that a side with tail (bias b, gain g, query a, key c, value u) is
plain attention with

    q_eff = g * q + c,     log-sum-exp shifted by scale q . a + b,     output shifted by u

and runs on the vendor's kernel. The band between the tails is swept in lag coordinates, and the three are merged by their
log-sum-exps. docs/mathematics.md derives the backward pass.
"""

from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor

from lagwise.lags import LagTable
from lagwise.ops import vendor
from lagwise.ops.lowering import Gradients, Lowered, Part, contiguous_gradients, parts_of, tables_of
from lagwise.ops.support import HAS_TRITON
from lagwise.ops.tiling import sweep
from lagwise.terms import Terms

# The widest band whose logits are kept for the backward pass.
KEPT_LAGS = 1024


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
        """Returns a tensor, [batch, heads, time, ...], in this side's order of time."""
        return flipped(x) if self.mirrored else x

    def first(self, x: Tensor, count: int) -> Tensor:
        """Returns the start of a tensor's time as this side sees it."""
        return self.seen(x.narrow(2, x.shape[2] - count if self.mirrored else 0, count))

    def last(self, x: Tensor, count: int) -> Tensor:
        """Returns the end of a tensor's time as this side sees it."""
        return self.seen(x.narrow(2, 0 if self.mirrored else x.shape[2] - count, count))

    def original(self, time: slice, count: int) -> slice:
        """Returns a slice of this side's time in the call's order of time."""
        return slice(count - time.stop, count - time.start) if self.mirrored else time

    @property
    def shifts(self) -> bool:
        """Whether the tails shift the log-sum-exp or the output."""
        return any(getattr(self.tables, name) is not None for name in ("bias", "query", "value"))

    def tail(self, name: str, dtype: torch.dtype) -> Tensor | None:
        """Returns the tail of a table, [heads, 1] or [heads, 1, channels]."""
        table: LagTable | None = getattr(self.tables, name)
        return None if table is None else table.values[:, self.column, None].to(dtype)

    def add(self, gradients: Terms, name: str, gradient: Tensor) -> None:
        """Adds a gradient, [heads] or [heads, channels], to a table's tail."""
        column = getattr(gradients, name).values[:, self.column]
        column += gradient.sum(0, keepdim=True) if column.shape[0] == 1 else gradient

    def queries(self, q: Tensor, compute: torch.dtype) -> Tensor:
        """Returns the queries that make this side plain attention, summed in a type and rounded once."""
        gain, key = self.tail("gain", compute), self.tail("key", compute)
        if gain is None and key is not None:
            return torch.add(q, key, out=torch.empty_like(q))
        if gain is None:
            return q
        return (q * gain if key is None else torch.addcmul(key, q.to(compute), gain)).to(q.dtype)

    def shift(self, part: Part) -> Tensor:
        """Returns what the tails add to the log-sum-exp, broadcastable to [batch, heads, queries]."""
        query, bias = self.tail("query", part.compute), self.tail("bias", part.compute)
        shift = torch.zeros((), dtype=part.compute, device=part.q.device)
        if query is not None:
            shift = shift + part.scale * (part.raw_q.to(part.compute) @ query.mT).squeeze(-1)
        return shift if bias is None else shift + bias


def flipped(x: Tensor) -> Tensor:
    """Reverses the time of a tensor [batch, heads, time, ...].

    torch moves one number at a time, so that rows of half precision go as numbers of 16 bytes where they can.
    """
    step = 16 // x.element_size()
    wide = x.ndim == 4 and x.stride(3) == 1 and x.shape[3] % step == 0 and x.storage_offset() % step == 0
    if wide and all(stride % step == 0 for stride in x.stride()[:3]):
        return x.view(torch.complex128).flip(2).view(x.dtype)
    return x.flip(2)


def near_band(tables: Terms) -> tuple[int, int] | None:
    """Returns the first and the last lag of the tables' band, or None where every table is constant."""
    found = list(tables.tables().values())
    if all(table.constant for table in found):
        return None
    return min(table.first for table in found), max(table.last for table in found)


def is_plain(call: Lowered) -> bool:
    """Says whether a call is what the vendor's kernel computes by itself, so that nothing is to be merged."""
    aligned = call.query_start == 0 and (not call.causal or call.q.shape[2] == call.k.shape[2])
    return not tables_of(call).tables() and call.window is None and aligned


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
    high = part.last if call.causal else high
    sides = [
        Side(part.tables, part.query_start + min(low - 1, part.last), mirrored=False),
        Side(part.tables, keys - queries - part.query_start - (high + 1), mirrored=True),
    ]
    return (low, min(high, part.last)), sides[: 1 if call.causal else 2]


def fused(call: Lowered) -> bool:
    """Says whether the band runs on the Triton kernels: on a GPU, where Triton is installed."""
    return call.q.is_cuda and HAS_TRITON


def forward(call: Lowered) -> list[Tensor]:
    """Returns output and log-sum-exp, then what `backward` needs of the far fields and of the band.

    These are outputs (without their values' tail) and log-sum-exps of the far fields, and the logits of the band where they take
    products with tables to compute again.
    """
    if fused(call):
        return import_module("lagwise.ops.split.fused").forward(call)
    ((_, _, part),) = parts_of(call)
    (first, last), sides = layout(call, part)
    _, _, far_out, far_lse, scores = outputs(call)
    far_out.zero_()
    far_lse.fill_(-torch.inf)
    out, lse = sweep.forward(part, first, last, scores if scores.numel() else None)
    for side in sides:
        side_lse = far_lse[side.index]
        # Pieces are merged in the type of the sums and rounded once.
        side_out = far_out[side.index] if far_out.dtype == out.dtype else torch.zeros_like(out)
        _side_forward(part, side, side_out, side_lse)
        far_out[side.index] = side_out
        merge(out, lse, side_out, side_lse, side.tail("value", part.compute))
    return [out.to(call.q.dtype), lse, far_out, far_lse, scores]


def _side_forward(part: Part, side: Side, out: Tensor, lse: Tensor) -> None:
    """Writes the far field's output and log-sum-exp over zeros and minus infinity."""
    q, k, v = side.queries(side.seen(part.q), part.compute), side.seen(part.k), side.seen(part.v)
    for piece in vendor.pieces(q.shape[2], k.shape[2], side.limit):
        piece_out, piece_lse = vendor.attend(
            q[:, :, piece.rows], k[:, :, piece.keys], v[:, :, piece.keys], causal=piece.causal, scale=part.scale
        )
        rows = side.original(piece.rows, q.shape[2])
        merge(out[:, :, rows], lse[:, :, rows], side.seen(piece_out), side.seen(piece_lse))
    lse += side.shift(part)


def merge(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor, shift: Tensor | None = None) -> None:
    """Merges into an attention that of the same queries over other keys, whose output is shifted, in place."""
    both = torch.logaddexp(lse, other_lse)
    finite = torch.where(both == -torch.inf, 0.0, both)
    other = torch.exp(other_lse - finite)[..., None]
    out.mul_(torch.exp(lse - finite)[..., None])
    out.addcmul_(other_out.to(out.dtype), other)
    if shift is not None:
        out.addcmul_(shift, other)
    lse.copy_(both)


def backward(call: Lowered, saved: list[Tensor], dout: Tensor, dlse: Tensor | None) -> list[Tensor]:
    """Returns the gradients of the tensors that the call has."""
    if fused(call):
        return import_module("lagwise.ops.split.fused").backward(call, saved, dout, dlse)
    out, lse, far_out, far_lse, scores = saved
    ((_, _, part),) = parts_of(call)
    (first, last), sides = layout(call, part)
    gradients = Gradients.zeros(call)
    delta = sweep.delta(dout, out, dlse)
    sweep.backward(part, first, last, dout, lse, delta, gradients, scores if scores.numel() else None)
    for side in sides:
        if side.shifts:
            _shift_backward(part, side, dout, lse, delta, far_out[side.index], far_lse[side.index], gradients)
        _side_backward(part, side, dout, out, lse, dlse, gradients)
    return gradients.flat(call)


def _shift_backward(
    part: Part, side: Side, dout: Tensor, lse: Tensor, delta: Tensor, far_out: Tensor, far_lse: Tensor, gradients: Gradients
) -> None:
    """Adds the gradients of the tails that shift log-sum-exp and output, from the mass of the side in each row.

    mass = exp(far_lse - lse),   change = mass * (dout . (far_out + u) - delta)
    dbias = sum change,   dquery = scale sum change q,   dq += scale change a,   dvalue = sum mass dout
    """
    value, query = side.tail("value", part.compute), side.tail("query", part.compute)
    for rows in sweep.blocks(part):
        # Block by block, so that nothing of the length of the sequence is written.
        here = dout[:, :, rows].to(part.compute)
        row_lse = lse[:, :, rows]
        mass = torch.exp(far_lse[:, :, rows] - torch.where(row_lse == -torch.inf, 0.0, row_lse))
        shifted = far_out[:, :, rows] if value is None else far_out[:, :, rows] + value
        change = mass * ((here * shifted).sum(-1) - delta[:, :, rows])
        if part.tables.bias is not None:
            side.add(gradients.tables, "bias", change.sum((0, 2)))
        if query is not None:
            scaled = part.scale * change[..., None]
            side.add(gradients.tables, "query", (scaled * part.raw_q[:, :, rows]).sum((0, 2)))
            gradients.raw_q[:, :, rows] += scaled * query
        if value is not None:
            side.add(gradients.tables, "value", (mass[..., None] * here).sum((0, 2)))


def _side_backward(
    part: Part, side: Side, dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, gradients: Gradients
) -> None:
    """Adds what the vendor's backward pass gives: its weights are those of the whole softmax once the shift is taken off."""
    value, gain = side.tail("value", part.compute), side.tail("gain", part.compute)
    plain_out = out if value is None else (out.to(part.compute) - value).to(out.dtype)
    # A row that saw nothing has weights exp(logit - inf) = 0 here too, also where the shift is minus infinity.
    unshifted = torch.where(lse == -torch.inf, torch.inf, lse - side.shift(part))
    plain_lse, plain_dlse = side.seen(unshifted), None if dlse is None else side.seen(dlse)
    q = side.queries(side.seen(part.q), part.compute)
    k, v, dout, plain_out = (side.seen(x) for x in (part.k, part.v, dout, plain_out))
    for piece in vendor.pieces(q.shape[2], k.shape[2], side.limit):
        rows, keys = piece.rows, piece.keys
        piece_dq, piece_dk, piece_dv = vendor.attend_backward(
            dout[:, :, rows], q[:, :, rows], k[:, :, keys], v[:, :, keys], plain_out[:, :, rows],
            plain_lse[:, :, rows], None if plain_dlse is None else plain_dlse[:, :, rows],
            causal=piece.causal, scale=part.scale,
        )  # fmt: skip
        dq = side.seen(piece_dq).to(part.compute)
        rows, keys = side.original(rows, q.shape[2]), side.original(keys, k.shape[2])
        gradients.k[:, :, keys] += side.seen(piece_dk)
        gradients.v[:, :, keys] += side.seen(piece_dv)
        if part.tables.key is not None:
            side.add(gradients.tables, "key", dq.sum((0, 2)))
        if gain is None:
            gradients.q[:, :, rows] += dq
        else:
            dgain = (dq * part.q[:, :, rows]).sum((0, 2))
            side.add(gradients.tables, "gain", dgain if gain.shape[-1] > 1 else dgain.sum(-1, keepdim=True))
            gradients.q[:, :, rows].addcmul_(dq, gain)


def far_sides(call: Lowered) -> int:
    """Returns how many far fields a call can have, by its kind alone, whatever its lengths."""
    if call.window is not None:
        return 0
    return 1 if call.causal or near_band(tables_of(call)) is None else 2


def outputs(call: Lowered) -> list[Tensor]:
    """Returns empty tensors like those of `forward`."""
    if fused(call):
        return import_module("lagwise.ops.split.fused").outputs(call)
    compute = torch.promote_types(call.q.dtype, torch.float32)
    shape = (*call.q.shape[:3], call.v.shape[3])
    lags = 0
    if call.query is not None or call.key is not None:
        ((_, _, part),) = parts_of(call)
        (first, last), _ = layout(call, part)
        lags = max(0, last - first + 1) if last - first < KEPT_LAGS else 0
    return [
        call.q.new_empty(shape),
        call.q.new_empty(shape[:-1], dtype=compute),
        call.q.new_empty((far_sides(call), *shape)),
        call.q.new_empty((far_sides(call), *shape[:-1]), dtype=compute),
        call.q.new_empty((*shape[:-1], lags), dtype=compute),
    ]


def backward_outputs(call: Lowered) -> list[Tensor]:
    """Returns empty tensors like those of `backward`."""
    if fused(call):
        return import_module("lagwise.ops.kernels.launch").backward_outputs(call)
    return contiguous_gradients(call)
