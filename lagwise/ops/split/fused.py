"""`impl="split"` on a GPU: the band on our kernels, the far fields on the vendor's, merged in one pass over the rows.

docs/mathematics.md derives what each side's tails become; `lagwise.ops.merge` says which pairs belong to which side. A far
field has the last rows and the first keys of the call, in its own order of time, and its tensors hold these alone.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lagwise.lags import LagTable
from lagwise.ops import vendor
from lagwise.ops.kernels.ahead import rehearsed
from lagwise.ops.kernels.arguments import FarKeys, FarQueries, flags, view
from lagwise.ops.kernels.forward import attend
from lagwise.ops.kernels.gradients import Far, Incoming, differentiate
from lagwise.ops.kernels.inputs import Inputs, prepare
from lagwise.ops.kernels.launches import run
from lagwise.ops.kernels.plan import ROWS, blocks, plan_for, width
from lagwise.ops.kernels.results import gradients, prepared_outputs
from lagwise.ops.kernels.results import outputs as near_outputs
from lagwise.ops.kernels.rows import (
    FarFields,
    FarShares,
    Tails,
    TailSteps,
    far_ends_kernel,
    far_queries_kernel,
    merge_kernel,
    segments_kernel,
)
from lagwise.ops.lowering import EVERYWHERE, Lowered, Part, is_by_token, part_at
from lagwise.ops.lowering import laid_out_gradients as backward_outputs
from lagwise.ops.merge import Piece, Side, extent, layout, merge_into, pieces

__all__ = ["backward", "backward_outputs", "forward", "outputs"]


class Field(NamedTuple):
    """A far field: its side, how many rows and keys it has, and where they are cut into what the vendor's kernels take.

    That is pieces, or for sequences of different lengths runs: segments, and whether these are squares below a diagonal. Pieces
    may share rows, runs do not.
    """

    side: Side
    rows: int
    keys: int
    pieces: list[Piece]
    runs: list[tuple[vendor.Segments, bool]]


def fields_of(lowered: Lowered, part: Part, sides: list[Side]) -> list[Field]:
    found = []
    for side in sides:
        rows, keys = _extent(lowered, side)
        if is_ragged(lowered):
            found.append(Field(side, rows, keys, [], runs_of(lowered, side)))
        else:
            cut = list(pieces(rows, keys, side.limit + part.q.shape[2] - rows))
            found.append(Field(side, rows, keys, cut, []))
    return found


def _extent(lowered: Lowered, side: Side) -> tuple[int, int]:
    """Returns how many rows and keys a far field has; with sequences of different lengths it has all of them."""
    queries, keys = lowered.q.shape[2], lowered.k.shape[2]
    return (queries, keys) if is_ragged(lowered) else extent(queries, keys, side.limit)


def is_ragged(lowered: Lowered) -> bool:
    """Says whether sequences have different lengths, which the host does not know."""
    return lowered.call.key_mask is not None or lowered.call.cu_seqlens is not None


def runs_of(lowered: Lowered, side: Side) -> list[tuple[vendor.Segments, bool]]:
    """Returns the segments of a far field, and whether they are squares below a diagonal, from what the device knows.

    The queries of padding that are far beyond the last key see all keys, which are those of the square as well: a second call.
    """
    if side.limit > 0:
        # Without tables and not causal, all is one far field.
        return [(segments_of(lowered, side, WHOLE=True), False)]
    rest = lowered.call.cu_seqlens is None and not side.mirrored
    found = [(segments_of(lowered, side), True)]
    return [*found, (segments_of(lowered, side, REST=True), False)] if rest else found


def segments_of(lowered: Lowered, side: Side, *, WHOLE: bool = False, REST: bool = False) -> vendor.Segments:
    """Returns segments of a far field, see `segments_kernel`."""
    ends, mask, time = lowered.call.cu_seqlens, lowered.call.key_mask, lowered.q.shape[2]
    packed = ends is not None
    count = ends.shape[0] - 1 if packed else lowered.q.shape[0]
    lengths = ends if mask is None else mask.sum(1)
    # Both arrays begin at multiples of 16 bytes, so that the kernel is compiled once.
    starts = torch.empty(2, blocks(3 * count + 3, 4) * 4, dtype=torch.int32, device=lowered.q.device)[:, : 3 * count + 3]
    arguments = {
        "ends": lengths if ends is None else ends, "lengths": lengths, "query_ends": starts[0], "key_ends": starts[1],
        "count": count, "time": time, "apart": -side.limit, "PACKED": packed, "MIRRORED": side.mirrored,
        "WHOLE": WHOLE, "REST": REST, "SIZE": ROWS,
    }  # fmt: skip
    run(segments_kernel, (blocks(count, ROWS),), arguments, warps=1, stages=1)
    longest = lowered.call.max_seqlen if packed and lowered.call.max_seqlen is not None else time
    return vendor.Segments(starts[0], starts[1], min(longest, time))


@rehearsed(lambda: backward)
def forward(lowered: Lowered) -> list[Tensor]:
    """Returns output and log-sum-exp, then those of the far fields, without what their tails add, and what was prepared."""
    part = part_at(lowered, EVERYWHERE, lowered.query_start)
    band, sides = layout(part)
    nothing = _results(lowered, 0)
    out, lse = near_outputs(lowered)
    plan = plan_for(lowered, only=band if sides else None)
    if not sides:
        prepared = prepare(plan, lowered)
        attend(Inputs(plan, lowered, prepared), out, lse)
        return [out, lse, *nothing, *nothing, *prepared]
    # The far fields come first: while they run, the host prepares the rest.
    fields = fields_of(lowered, part, sides)
    found = [x for field in fields for x in _field_forward(part, field)]
    found += nothing * (2 - len(sides))
    near_out, near_lse = near_outputs(lowered)
    prepared = prepare(plan, lowered)
    attend(Inputs(plan, lowered, prepared), near_out, near_lse)
    arguments = _row_arguments(part, fields, found, OUT_BY_TOKEN=is_by_token(out))
    arguments |= {"near": near_out, "near_lse": near_lse, "out": out, "lse": lse}
    run(merge_kernel, (blocks(out.shape[2], ROWS), out.shape[0] * out.shape[1]), arguments, warps=4, stages=1)
    return [out, lse, *found, *prepared]


def _field_forward(part: Part, field: Field) -> tuple[Tensor, Tensor]:
    side = field.side
    q = _far_queries(part, field)
    k, v = side.first(part.k, field.keys), side.first(part.v, field.keys)
    if field.runs:
        (out, lse), *others = (
            vendor.attend(q, k, v, causal=causal, scale=part.call.scale, segments=segments) for segments, causal in field.runs
        )
        for other_out, other_lse in others:
            # They have no row in common, and what a run has not is zero and minus infinity.
            out, lse = out + other_out, torch.maximum(lse, other_lse)
        return out.contiguous(), lse.contiguous()
    if len(field.pieces) == 1:
        # It is all of the field.
        out, lse = vendor.attend(q, k, v, causal=field.pieces[0].causal, scale=part.call.scale)
        return out.contiguous(), lse.contiguous()
    found = [
        vendor.attend(q[:, :, piece.rows], k[:, :, piece.keys], v[:, :, piece.keys], causal=piece.causal, scale=part.call.scale)
        for piece in field.pieces
    ]
    # Several pieces may hold the same rows; they are merged in float32 and rounded once.
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float32, device=q.device)
    lse = torch.full(q.shape[:3], -torch.inf, dtype=torch.float32, device=q.device)
    for piece, (piece_out, piece_lse) in zip(field.pieces, found, strict=True):
        merge_into(out[:, :, piece.rows], lse[:, :, piece.rows], piece_out, piece_lse)
    return out.to(q.dtype), lse


def _far_queries(part: Part, field: Field) -> Tensor:
    """Returns the queries that make a far field plain attention, rounded once."""
    side, tables, q = field.side, part.tables, part.q
    if tables.gain is None and tables.key is None:
        return side.last(q, field.rows)
    batch, heads, queries, head_dim = q.shape
    found = q.new_empty(batch, heads, field.rows, head_dim)
    q = q if q.stride(3) == 1 else q.contiguous()
    gain, key = _ends(tables.gain, q), _ends(tables.key, q)
    gains, keys = (each.values[:, -1] if side.mirrored and each.values is not q else each.values for each in (gain, key))
    channels = tables.gain is not None and tables.gain.values.shape[2] > 1
    arguments = {
        "q": view(q), "found": found, "end_gains": gains, "tail_key": keys, "heads": heads, "rows": field.rows,
        "first": field.rows - 1 if side.mirrored else queries - field.rows, "gains_head": gain.head, "tail_key_head": key.head,
        "FUTURE": side.mirrored,
        "flags": flags(
            head_dim=head_dim, value_dim=0, WIDTH=width(head_dim), VALUE_WIDTH=0, ROWS=ROWS, KEY=tables.key is not None,
            GAIN=tables.gain is not None, CHANNELS=channels,
        ),
    }  # fmt: skip
    run(far_queries_kernel, (blocks(field.rows, ROWS), batch * heads), arguments, warps=4, stages=1)
    return found


class Ends(NamedTuple):
    """A table as kernels read its ends: where it is, how far apart its heads are, and where its last lag is."""

    values: Tensor
    head: int
    last: int


def _ends(table: LagTable | None, none: Tensor) -> Ends:
    """Returns the ends of a table; some tensor stands for one that is not there."""
    if table is None:
        return Ends(none, 0, 0)
    values = table.values if table.values.ndim == 2 or table.values.stride(2) == 1 else table.values.contiguous()
    return Ends(values, values.stride(0) if len(values) > 1 else 0, (values.shape[1] - 1) * values.stride(1))


def _row_arguments(part: Part, fields: list[Field], saved: list[Tensor], **more: Any) -> dict[str, Any]:
    """Returns what the kernels on rows read of the far fields and of the tables' tails, with more flags."""
    tables, q = part.tables, part.raw_q if part.raw_q.stride(3) == 1 else part.raw_q.contiguous()
    ends = [_ends(getattr(tables, name), q) for name in ("bias", "query", "value")]
    steps = [number for each in ends for number in (each.head, each.last)]
    head_dim, value_dim = q.shape[3], part.v.shape[3]
    return {
        "raw_q": view(q), "heads": q.shape[1], "queries": q.shape[2], "scale": part.call.scale,
        "far": FarFields(*saved), "past_rows": saved[1].shape[2], "future_rows": saved[3].shape[2],
        "tails": Tails(*(each.values for each in ends)), **dict(zip(TailSteps._fields, steps, strict=True)),
        "flags": flags(
            head_dim=head_dim, value_dim=value_dim, WIDTH=width(head_dim), VALUE_WIDTH=width(value_dim), ROWS=ROWS,
            SIDES=len(fields), **{name.upper(): getattr(tables, name) is not None for name in Tails._fields}, **more,
        ),
    }  # fmt: skip


@rehearsed()
def backward(lowered: Lowered, saved: list[Tensor], dout: Tensor, dlse: Tensor | None, learned: bool) -> list[Tensor]:
    """Returns the gradients of the tensors that the call has; of tables where they are `learned`."""
    out, lse, *rest = saved
    rest, prepared = rest[:4], rest[4:]
    part = part_at(lowered, EVERYWHERE, lowered.query_start)
    band, sides = layout(part)
    dout = dout if dout.stride(3) == 1 else dout.contiguous()
    given = Incoming(out, lse, dout, None if dlse is None else dlse.contiguous())
    inputs = Inputs(plan_for(lowered, only=band if sides else None), lowered, prepared)
    if not sides:
        return gradients(lowered, differentiate(inputs, given, learned=learned), learned)
    fields = fields_of(lowered, part, sides)

    def per_row(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=lse.device)

    batch, heads, queries = lse.shape
    deltas, plain_lse = per_row(*lse.shape), [torch.empty_like(rest[1]), torch.empty_like(rest[3])]
    changes, masses = per_row(batch, heads, 2, queries), per_row(batch, heads, 2, queries)
    arguments = _row_arguments(part, fields, rest, OUT_BY_TOKEN=is_by_token(out), DLSE=dlse is not None)
    arguments |= {
        "out": out, "lse": lse, "dout": view(dout), "dlse": out if given.dlse is None else given.dlse,
        "found": FarShares(deltas, changes, masses, *plain_lse),
    }  # fmt: skip
    run(far_ends_kernel, (blocks(queries, ROWS), batch * heads), arguments, warps=4, stages=1)
    found = [_field_backward(part, field, dout, out, x, dlse) for field, x in zip(fields, plain_lse, strict=False)]
    far = _far_gradients(part, found, deltas, changes, masses)
    known = differentiate(inputs, given, learned=learned, far=far)
    if learned:
        for field, (dq, _, _) in zip(fields, found, strict=True):
            _tail_gradients(part, field, dq, known)
    return gradients(lowered, known, learned)


def _field_backward(
    part: Part, field: Field, dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of a far field's queries, keys and values, from the log-sum-exp less its shift."""
    side = field.side
    value = side.tail("value", torch.float32)
    q = _far_queries(part, field)
    k, v = side.first(part.k, field.keys), side.first(part.v, field.keys)
    dout, out = side.last(dout, field.rows), side.last(out, field.rows)
    if value is not None:
        out = (out.float() - value).to(out.dtype)
    dlse = None if dlse is None else side.last(dlse, field.rows)
    if field.runs:
        given = (dout, q, k, v, out, lse, dlse)
        (dq, dk, dv), *others = (
            vendor.attend_backward(*given, causal=causal, scale=part.call.scale, segments=segments)
            for segments, causal in field.runs
        )
        for other_dq, other_dk, other_dv in others:
            dq, dk, dv = dq + other_dq, dk.float() + other_dk, dv.float() + other_dv
        return dq, dk, dv
    if len(field.pieces) == 1:
        return vendor.attend_backward(dout, q, k, v, out, lse, dlse, causal=field.pieces[0].causal, scale=part.call.scale)
    found = [
        vendor.attend_backward(
            dout[:, :, rows], q[:, :, rows], k[:, :, keys], v[:, :, keys], out[:, :, rows], lse[:, :, rows],
            None if dlse is None else dlse[:, :, rows], causal=causal, scale=part.call.scale,
        )
        for rows, keys, causal in field.pieces
    ]  # fmt: skip
    dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v))
    for (rows, keys, _), (piece_dq, piece_dk, piece_dv) in zip(field.pieces, found, strict=True):
        dq[:, :, rows] += piece_dq
        dk[:, :, keys] += piece_dk
        dv[:, :, keys] += piece_dv
    return dq, dk, dv


def _far_gradients(part: Part, found: list[tuple[Tensor, Tensor, Tensor]], delta: Tensor, changes: Tensor, masses: Tensor) -> Far:
    """Returns the far fields' gradients as the kernels of the band take them, to add them to theirs."""
    sides = [tuple(x if x.stride(3) == 1 else x.contiguous() for x in side) for side in found]
    # Where there is one side alone, the other is not read.
    (past_q, past_k, past_v), (future_q, future_k, future_v) = sides[0], sides[-1]
    return Far(
        FarQueries(view(past_q), view(future_q), *_ends(part.tables.gain, part.q)),
        FarKeys(view(past_k), view(future_k), view(past_v), view(future_v)),
        len(found), (past_q.shape[2], future_q.shape[2]), (past_k.shape[2], future_k.shape[2]), delta, changes, masses,
    )  # fmt: skip


def _tail_gradients(part: Part, field: Field, dq: Tensor, known: dict[str, Tensor]) -> None:
    """Adds the gradients of the tails of `key` and `gain`, from the gradient of the far field's queries."""
    side, tables = field.side, part.tables
    if tables.key is not None:
        _add_to_tail(side, known["key"], dq.sum((0, 2), dtype=torch.float32))
    if tables.gain is not None:
        # Of all products of a channel of dq with one of q, those of the same channel.
        dgain = summed_products(dq.to(part.q.dtype), side.last(part.q, field.rows)).diagonal(dim1=1, dim2=2)
        _add_to_tail(side, known["gain"], dgain if tables.gain.values.shape[2] > 1 else dgain.sum(-1, keepdim=True))


def _add_to_tail(side: Side, gradient: Tensor, change: Tensor) -> None:
    """Adds a change, [heads, channels], to the gradient of a table's tail."""
    column = gradient[:, side.column]
    column += (change.sum(0, keepdim=True) if column.shape[0] == 1 else change).to(column.dtype)


def summed_products(a: Tensor, b: Tensor) -> Tensor:
    """Returns the sum over batch and time of a's columns times b's, [heads, a's, b's]."""
    if a.is_cuda and a.dtype != torch.float32:
        found = torch.bmm(a.flatten(0, 1).mT, b.flatten(0, 1), out_dtype=torch.float32)
    else:
        found = torch.bmm(a.float().flatten(0, 1).mT, b.float().flatten(0, 1))
    return found.unflatten(0, a.shape[:2]).sum(0)


def outputs(lowered: Lowered) -> list[Tensor]:
    """Returns empty tensors like those of `forward`."""
    _, sides = layout(part_at(lowered, EVERYWHERE, lowered.query_start))
    rows = [_extent(lowered, side)[0] for side in sides]
    far = [x for count in [*rows, 0, 0][:2] for x in _results(lowered, count)]
    return [*near_outputs(lowered), *far, *prepared_outputs(lowered)]


def _results(lowered: Lowered, rows: int) -> list[Tensor]:
    """Returns an empty output and log-sum-exp for some rows of a far field."""
    shape = (*lowered.q.shape[:2], rows)
    return [lowered.q.new_empty(*shape, lowered.v.shape[3]), lowered.q.new_empty(shape, dtype=torch.float32)]
