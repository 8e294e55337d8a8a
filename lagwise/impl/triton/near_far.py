"""`impl="split"` on a GPU: the band on our kernels, the far fields on the vendor's, merged in one pass over the rows.

docs/mathematics.md derives what each side's tails become; `lagwise.impl.split` says which pairs belong to which side.
"""

from collections.abc import Iterator
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lagwise.impl import far
from lagwise.impl.lowering import Lowered, Part, parts_of
from lagwise.impl.split import Side, layout, merge, outputs
from lagwise.impl.triton.launch import (
    ROWS,
    FarEnds,
    Plan,
    attend,
    blocks,
    delta,
    differentiate,
    gradients,
    per_key_head,
    run,
    strides,
    width,
)
from lagwise.impl.triton.rows import add_rows_kernel, far_ends_kernel, merge_kernel
from lagwise.terms import Terms


def forward(call: Lowered) -> list[Tensor]:
    """Returns output and log-sum-exp, then outputs and log-sum-exps of the far fields."""
    ((_, _, part),) = parts_of(call)
    (first, last), sides = layout(call, part)
    out, lse, far_out, far_lse, nothing = outputs(call)
    # The far fields come first: while they run, the host prepares the rest.
    for side in sides:
        _side_forward(part, side, far_out[side.index], far_lse[side.index])
    plan = _plan(call, first, last)
    near_out, near_lse = torch.empty_like(out), torch.empty_like(lse)
    attend(plan, near_out, near_lse)
    given = {
        **_far_arguments(plan, sides, _shifts(part, sides)), "Near": near_out, "NearLse": near_lse,
        "FarOut": far_out, "FarLse": far_lse, "Out": out, "Lse": lse,
    }  # fmt: skip
    run(merge_kernel, (blocks(plan.queries, ROWS), plan.batch * plan.heads), given, warps=4, stages=1)
    return [out, lse, far_out, far_lse, nothing]


def _plan(call: Lowered, first: int, last: int) -> Plan:
    """Limits the kernels to the band; a window has no far field and may be wider than the tables."""
    return Plan(call, None if call.window is not None else (first, last))


def _far_arguments(plan: Plan, sides: list[Side], shifts: Tensor | None) -> dict[str, Any]:
    """Returns what the kernels on rows read of the far fields."""
    given = {**plan.arguments, "FarValue": plan.q, "ROWS": ROWS, "SIDES": len(sides)}
    given |= {"Shifts": plan.q if shifts is None else shifts, "SHIFTED": shifts is not None}
    tails = [tail for side in sides if (tail := side.tail("value", torch.float32)) is not None]
    if tails:
        given["FarValue"] = torch.stack([tail.expand(plan.heads, *tail.shape[1:]) for tail in tails]).contiguous()
    return given


def _shifts(part: Part, sides: list[Side]) -> Tensor | None:
    """Returns what the tails add to the log-sum-exp of each side, scale q . query + bias, [batch, heads, sides, queries].

    Both passes compute it in the same way, so that they weigh alike, rounding included.
    """
    batch, heads, queries = part.q.shape[:3]
    found = None
    if part.tables.query is not None and sides:
        tails = torch.cat([part.tables.query.values[:, side.column, None] for side in sides], dim=1).to(part.raw_q.dtype)
        found = part.scale * (part.raw_q @ tails.mT).float().mT
    if part.tables.bias is not None and sides:
        bias = torch.stack([part.tables.bias.values[:, side.column].float() for side in sides], dim=1)[..., None]
        found = bias.expand(batch, heads, len(sides), queries) if found is None else found + bias
    return None if found is None else found.contiguous()


def _side_forward(part: Part, side: Side, out: Tensor, lse: Tensor) -> None:
    """Writes a far field's output and log-sum-exp, without what its tails add."""
    q, k, v = side.queries(part), side.seen(part.k), side.seen(part.v)
    pieces = list(far.pieces(q.shape[2], k.shape[2], side.limit))
    found = [
        (side.original(piece.rows, q.shape[2]), *(side.seen(x) for x in _piece_forward(part, piece, q, k, v))) for piece in pieces
    ]
    if len(found) == 1:
        ((rows, piece_out, piece_lse),) = found
        for before in (slice(0, rows.start), slice(rows.stop, None)):
            out[:, :, before].zero_()
            lse[:, :, before].fill_(-torch.inf)
        out[:, :, rows], lse[:, :, rows] = piece_out, piece_lse
        return
    # Several pieces may hold the same rows; they are merged in float32 and rounded once.
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    lse.fill_(-torch.inf)
    for rows, piece_out, piece_lse in found:
        merge(total[:, :, rows], lse[:, :, rows], piece_out, piece_lse)
    out.copy_(total)


def _piece_forward(part: Part, piece: far.Piece, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return far.attend(q[:, :, piece.rows], k[:, :, piece.keys], v[:, :, piece.keys], causal=piece.causal, scale=part.scale)


def backward(call: Lowered, saved: list[Tensor], dout: Tensor, dlse: Tensor | None) -> list[Tensor]:
    """Returns the gradients of the tensors that the call has."""
    out, lse, far_out, far_lse, _ = saved
    dout = dout if dout.stride(3) == 1 else dout.contiguous()
    ((_, _, part),) = parts_of(call)
    (first, last), sides = layout(call, part)
    # The far fields come first: while they run, the host prepares the rest.
    shifts = _shifts(part, sides)
    pieces = [piece for side in sides for piece in _side_backward(part, side, shifts, dout, out, lse, dlse)]
    plan = _plan(call, first, last)
    deltas = delta(dout, out, dlse)
    ends = FarEnds(*(torch.empty(*lse.shape[:2], 2, lse.shape[2], dtype=torch.float32, device=lse.device) for _ in range(2)))
    given = {
        **_far_arguments(plan, sides, shifts), "Dout": dout, **strides("dout", dout), "Lse": lse, "Delta": deltas,
        "FarOut": far_out, "FarLse": far_lse, "Changes": ends.changes, "Masses": ends.masses,
    }  # fmt: skip
    run(far_ends_kernel, (blocks(plan.queries, ROWS), plan.batch * plan.heads), given, warps=4, stages=1)
    found, tables = differentiate(plan, dout, lse, deltas, None if plan.only is None else ends)
    found |= {name: per_key_head(found[name], call.k.shape[1]) for name in ("k", "v")}
    for piece in pieces:
        _tail_gradients(part, piece, tables)
    gains = None if part.tables.gain is None else [side.tail("gain", torch.float32) for side in sides]
    past_pieces, future_pieces = ([piece for piece in pieces if piece.side.mirrored is mirrored] for mirrored in (False, True))
    for past, future in zip_longest(past_pieces, future_pieces):
        for name in ("q", "k", "v"):
            add_pieces(found[name], placed(past, name), placed(future, name), gains if name == "q" else None)
    return gradients(call, found, tables)


class PieceGradients(NamedTuple):
    """What the vendor's backward pass gives for one piece of a far field, in the side's order of time."""

    side: Side
    rows: slice  # in the call's order of time
    keys: slice
    dq: Tensor
    dk: Tensor
    dv: Tensor


def placed(piece: PieceGradients | None, name: str) -> tuple[Tensor, int] | None:
    """Returns a gradient of a piece and where in the call its rows start."""
    return None if piece is None else (getattr(piece, f"d{name}"), (piece.rows if name == "q" else piece.keys).start)


def _side_backward(
    part: Part, side: Side, shifts: Tensor | None, dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None
) -> Iterator[PieceGradients]:
    """Yields the gradients of a far field's pieces: their weights are those of the whole softmax once the shift is taken off."""
    value = side.tail("value", torch.float32)
    plain_out = out if value is None else (out.float() - value).to(out.dtype)
    plain_lse = side.seen(lse if shifts is None else lse - shifts[:, :, side.index])
    plain_dlse = None if dlse is None else side.seen(dlse)
    q, k, v, dout, plain_out = side.queries(part), *(side.seen(x) for x in (part.k, part.v, dout, plain_out))
    for piece in far.pieces(q.shape[2], k.shape[2], side.limit):
        rows, keys = piece.rows, piece.keys
        found = far.attend_backward(
            dout[:, :, rows], q[:, :, rows], k[:, :, keys], v[:, :, keys], plain_out[:, :, rows],
            plain_lse[:, :, rows], None if plain_dlse is None else plain_dlse[:, :, rows],
            causal=piece.causal, scale=part.scale,
        )  # fmt: skip
        yield PieceGradients(side, side.original(rows, q.shape[2]), side.original(keys, k.shape[2]), *found)


def _tail_gradients(part: Part, piece: PieceGradients, tables: Terms) -> None:
    """Adds the gradients of the tails of `key` and `gain`, from the gradient of the far field's queries."""
    if tables.key is not None:
        piece.side.add(tables, "key", piece.dq.sum((0, 2), dtype=torch.float32))
    if tables.gain is not None:
        q = piece.side.seen(part.q[:, :, piece.rows])
        dgain = (piece.dq.float() * q).sum((0, 2))
        piece.side.add(tables, "gain", dgain if tables.gain.values.shape[2] > 1 else dgain.sum(-1, keepdim=True))


def add_pieces(
    x: Tensor, past: tuple[Tensor, int] | None, future: tuple[Tensor, int] | None, gains: list[Tensor | None] | None = None
) -> None:
    """Adds rows, given with where they start in x, those of the future in reverse, times gains [heads or 1, 1, channels]."""
    batch, heads, count, dim = x.shape
    given: dict[str, Any] = {"X": x, "heads": heads, "count": count, "dim": dim, "WIDTH": width(dim), "ROWS": ROWS}
    given |= {"Factor": x, "FACTOR": gains is not None}
    if gains is not None:
        factors = [torch.ones_like(x[0, :, :1], dtype=torch.float32) if gain is None else gain for gain in gains]
        given["Factor"] = torch.stack([factor.expand(heads, 1, dim) for factor in [*factors, factors[-1]][:2]]).contiguous()
    for name, piece in (("past", past), ("future", future)):
        rows, first = (x[:, :, :0], 0) if piece is None else piece
        rows = rows if rows.stride(3) == 1 else rows.contiguous()
        given |= {name.capitalize(): rows, **strides(name, rows), f"{name}_first": first, f"{name}_rows": rows.shape[2]}
    run(add_rows_kernel, (blocks(count, ROWS), batch * heads), given, warps=4, stages=1)
