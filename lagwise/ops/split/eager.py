"""`impl="split"` in PyTorch: the band swept in lag coordinates, the far fields on the vendor's kernel of the device."""

from typing import NamedTuple

import torch
from torch import Tensor

from lagwise.ops import vendor
from lagwise.ops.lowering import EVERYWHERE, Gradients, Lowered, Part, Place, contiguous_gradients, part_at, parts_of
from lagwise.ops.merge import Side, far_sides, layout, merge_into, pieces
from lagwise.ops.tiling import sweep

# The widest band whose logits are kept for the backward pass.
KEPT_LAGS = 1024


class Saved(NamedTuple):
    """What the forward pass leaves.

    Output and log-sum-exp; those of the far fields, the output without their values' tail; and the logits of the band where they
    take products with tables to compute again.
    """

    out: Tensor  # [batch, heads, queries, value_dim]
    lse: Tensor  # [batch, heads, queries]
    far_out: Tensor  # [sides, batch, heads, queries, value_dim]
    far_lse: Tensor  # [sides, batch, heads, queries]
    scores: Tensor  # [batch, heads, queries, lags or 0]

    def at(self, place: Place) -> "Saved":
        """Returns views on one part's share."""
        rows, far = place.rows, (slice(None), *place.rows)
        return Saved(self.out[rows], self.lse[rows], self.far_out[far], self.far_lse[far], self.scores[rows])

    @property
    def kept(self) -> Tensor | None:
        """The logits of the band, where they are kept."""
        return self.scores if self.scores.numel() else None


def forward(lowered: Lowered) -> list[Tensor]:
    """Returns output and log-sum-exp, then what `backward` needs, see `Saved`; sequences come one after the other."""
    saved = Saved(*outputs(lowered))
    for x in (saved.out, saved.far_out):
        x.zero_()
    for x in (saved.lse, saved.far_lse):
        x.fill_(-torch.inf)
    for place, part in parts_of(lowered, trimmed=True):
        _part_forward(part, saved.at(place))
    return list(saved)


def _part_forward(part: Part, saved: Saved) -> None:
    """Writes a part's results over zeros and minus infinity."""
    (first, last), sides = layout(part)
    out, lse = sweep.forward(part, first, last, saved.kept)
    for side in sides:
        side_out, side_lse = saved.far_out[side.index], saved.far_lse[side.index]
        # Pieces are merged in the type of the sums and rounded once.
        sums = side_out if side_out.dtype == out.dtype else torch.zeros_like(out)
        _side_forward(part, side, sums, side_lse)
        if sums is not side_out:
            side_out.copy_(sums)
        merge_into(out, lse, sums, side_lse, side.tail("value", part.compute))
    saved.out.copy_(out)
    saved.lse.copy_(lse)


def _side_forward(part: Part, side: Side, out: Tensor, lse: Tensor) -> None:
    """Writes the far field's output and log-sum-exp over zeros and minus infinity."""
    q, k, v = side.queries(side.seen(part.q), part.compute), side.seen(part.k), side.seen(part.v)
    for piece in pieces(q.shape[2], k.shape[2], side.limit):
        piece_out, piece_lse = vendor.attend(
            q[:, :, piece.rows], k[:, :, piece.keys], v[:, :, piece.keys], causal=piece.causal, scale=part.call.scale
        )
        rows = side.original(piece.rows, q.shape[2])
        merge_into(out[:, :, rows], lse[:, :, rows], side.seen(piece_out), side.seen(piece_lse))
    lse += side.shift(part)


def backward(lowered: Lowered, saved: list[Tensor], dout: Tensor, dlse: Tensor | None, learned: bool) -> list[Tensor]:
    """Returns the gradients of the tensors that the call has; of tables where they are `learned`."""
    gradients, results = Gradients.zeros(lowered), Saved(*saved)
    for place, part in parts_of(lowered, trimmed=True):
        part_dlse = None if dlse is None else dlse[place.rows]
        _part_backward(part, results.at(place), dout[place.rows], part_dlse, gradients.cut(place))
    return gradients.flat(lowered, learned)


def _part_backward(part: Part, saved: Saved, dout: Tensor, dlse: Tensor | None, gradients: Gradients) -> None:
    """Adds a part's share to the gradients."""
    (first, last), sides = layout(part)
    delta = sweep.delta(dout, saved.out, dlse)
    sweep.backward(part, first, last, dout, saved.lse, delta, gradients, saved.kept)
    for side in sides:
        if side.shifts:
            far_out, far_lse = saved.far_out[side.index], saved.far_lse[side.index]
            _shift_backward(part, side, dout, saved.lse, delta, far_out, far_lse, gradients)
        _side_backward(part, side, dout, saved.out, saved.lse, dlse, gradients)


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
            scaled = part.call.scale * change[..., None]
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
    for piece in pieces(q.shape[2], k.shape[2], side.limit):
        rows, keys = piece.rows, piece.keys
        piece_dq, piece_dk, piece_dv = vendor.attend_backward(
            dout[:, :, rows], q[:, :, rows], k[:, :, keys], v[:, :, keys], plain_out[:, :, rows],
            plain_lse[:, :, rows], None if plain_dlse is None else plain_dlse[:, :, rows],
            causal=piece.causal, scale=part.call.scale,
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


def outputs(lowered: Lowered) -> list[Tensor]:
    """Returns empty tensors like those of `forward`."""
    compute = torch.promote_types(lowered.q.dtype, torch.float32)
    shape = (*lowered.q.shape[:3], lowered.v.shape[3])
    lags = 0
    if lowered.query is not None or lowered.key is not None:
        (first, last), _ = layout(part_at(lowered, EVERYWHERE, lowered.query_start))
        lags = max(0, last - first + 1) if last - first < KEPT_LAGS else 0
    return [
        lowered.q.new_empty(shape),
        lowered.q.new_empty(shape[:-1], dtype=compute),
        lowered.q.new_empty((far_sides(lowered), *shape)),
        lowered.q.new_empty((far_sides(lowered), *shape[:-1]), dtype=compute),
        lowered.q.new_empty((*shape[:-1], lags), dtype=compute),
    ]


def backward_outputs(lowered: Lowered, learned: bool) -> list[Tensor]:
    """Returns empty tensors like those of `backward`."""
    return contiguous_gradients(lowered, learned)
