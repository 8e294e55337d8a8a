"""`impl="split"` on a GPU: the band on our kernels, the far fields on the vendor's, merged in one pass over the rows.

docs/mathematics.md derives what each side's tails become; `lagwise.impl.split` says which pairs belong to which side.
"""

from typing import Any

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
    plan = _plan(call, first, last)
    near_out, near_lse = torch.empty_like(out), torch.empty_like(lse)
    attend(plan, near_out, near_lse)
    for side in sides:
        _side_forward(part, side, far_out[side.index], far_lse[side.index])
    given = {
        **_far_arguments(plan, sides), "Near": near_out, "NearLse": near_lse, "FarOut": far_out, "FarLse": far_lse,
        "Out": out, "Lse": lse,
    }  # fmt: skip
    run(merge_kernel, (blocks(plan.queries, ROWS), plan.batch * plan.heads), given, warps=4, stages=1)
    return [out, lse, far_out, far_lse, nothing]


def _plan(call: Lowered, first: int, last: int) -> Plan:
    """Limits the kernels to the band; a window has no far field and may be wider than the tables."""
    return Plan(call, None if call.window is not None else (first, last))


def _far_arguments(plan: Plan, sides: list[Side]) -> dict[str, Any]:
    """Returns what the kernels on rows read of the far fields' tails."""
    given = {**plan.arguments, "FarBias": plan.q, "FarValue": plan.q, "ROWS": ROWS, "SIDES": len(sides)}
    for field, name in (("FarBias", "bias"), ("FarValue", "value")):
        tails = [side.tail(name, torch.float32) for side in sides]
        found = [tail.expand(plan.heads, *tail.shape[1:]) for tail in tails if tail is not None]
        if found:
            given[field] = torch.stack(found).contiguous()
    return given


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
    plan = _plan(call, first, last)
    deltas = delta(dout, out, dlse)
    ends = FarEnds(*(torch.empty(*lse.shape[:2], 2, lse.shape[2], dtype=torch.float32, device=lse.device) for _ in range(2)))
    given = {
        **_far_arguments(plan, sides), "Dout": dout, **strides("dout", dout), "Lse": lse, "Delta": deltas,
        "FarOut": far_out, "FarLse": far_lse, "Changes": ends.changes, "Masses": ends.masses,
    }  # fmt: skip
    run(far_ends_kernel, (blocks(plan.queries, ROWS), plan.batch * plan.heads), given, warps=4, stages=1)
    found, tables = differentiate(plan, dout, lse, deltas, None if plan.only is None else ends)
    found |= {name: per_key_head(found[name], call.k.shape[1]) for name in ("k", "v")}
    for side in sides:
        _side_backward(plan, part, side, dout, out, lse, dlse, found, tables)
    return gradients(call, found, tables)


def _side_backward(
    plan: Plan, part: Part, side: Side, dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None,
    found: dict[str, Tensor], tables: Terms,
) -> None:  # fmt: skip
    """Adds what the vendor's backward pass gives: its weights are those of the whole softmax once the shift is taken off."""
    value, gain = side.tail("value", torch.float32), side.tail("gain", torch.float32)
    plain_out = out if value is None else (out.float() - value).to(out.dtype)
    plain_lse, plain_dlse = side.seen(lse - side.shift(part)), None if dlse is None else side.seen(dlse)
    q, k, v, dout, plain_out = side.queries(part), *(side.seen(x) for x in (part.k, part.v, dout, plain_out))
    for piece in far.pieces(q.shape[2], k.shape[2], side.limit):
        rows, keys = piece.rows, piece.keys
        dq, dk, dv = far.attend_backward(
            dout[:, :, rows], q[:, :, rows], k[:, :, keys], v[:, :, keys], plain_out[:, :, rows],
            plain_lse[:, :, rows], None if plain_dlse is None else plain_dlse[:, :, rows],
            causal=piece.causal, scale=part.scale,
        )  # fmt: skip
        own_rows, own_keys = side.original(rows, q.shape[2]), side.original(keys, k.shape[2])
        _tail_gradients(part, side, side.seen(dq), part.q[:, :, own_rows], tables)
        add_rows(found["q"], dq, own_rows.start, flip=side.mirrored, factor=gain)
        add_rows(found["k"], dk, own_keys.start, flip=side.mirrored)
        add_rows(found["v"], dv, own_keys.start, flip=side.mirrored)


def _tail_gradients(part: Part, side: Side, dq: Tensor, q: Tensor, tables: Terms) -> None:
    """Adds the gradients of the tails of `key` and `gain`, from the gradient of the far field's queries."""
    if tables.key is not None:
        side.add(tables, "key", dq.sum((0, 2), dtype=torch.float32))
    if tables.gain is not None:
        dgain = (dq.float() * q).sum((0, 2))
        side.add(tables, "gain", dgain if tables.gain.values.shape[2] > 1 else dgain.sum(-1, keepdim=True))


def add_rows(x: Tensor, y: Tensor, first: int, *, flip: bool, factor: Tensor | None = None) -> None:
    """Adds rows to those of x from `first` on, in reverse order with `flip`, times a factor [heads or 1, 1, channels or 1]."""
    batch, heads, count, dim = x.shape
    y = y if y.stride(3) == 1 else y.contiguous()
    given = {
        "X": x, "Y": y, **strides("y", y), "heads": heads, "count": count, "first": first, "rows": y.shape[2], "dim": dim,
        "WIDTH": width(dim), "ROWS": ROWS, "FLIP": flip, "FACTOR": factor is not None,
        "Factor": x if factor is None else factor.expand(heads, 1, dim).contiguous(),
    }  # fmt: skip
    run(add_rows_kernel, (blocks(y.shape[2], ROWS), batch * heads), given, warps=4, stages=1)
