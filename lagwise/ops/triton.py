"""`impl="triton"`: scores of vector tables, one pass of the kernels each way, the gradients of the tables."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lagwise.ops.kernels.ahead import rehearsed
from lagwise.ops.kernels.forward import attend
from lagwise.ops.kernels.gradients import Incoming, differentiate, empty_gradient
from lagwise.ops.kernels.inputs import Inputs, band_tables, prepare
from lagwise.ops.kernels.pieces import EVERYTHING, Piece, lag_ranges, pieces_of
from lagwise.ops.kernels.plan import WHOLE_CALL, Plan, plan_for
from lagwise.ops.kernels.results import delta_of, gradients, prepared_outputs
from lagwise.ops.kernels.results import outputs as call_outputs
from lagwise.ops.lowering import OPERANDS, Lowered, wanted_gradients
from lagwise.ops.lowering import laid_out_gradients as backward_outputs
from lagwise.ops.merge import merge_into

__all__ = ["backward", "backward_again", "backward_outputs", "forward", "outputs"]


@rehearsed(lambda: backward)
def forward(lowered: Lowered) -> list[Tensor]:
    """Returns the output and the log-sum-exp, then what was prepared of tables and masks, for both passes."""
    plan = plan_for(lowered)
    if lag_ranges(plan):
        return attended(plan, lowered)
    inputs = [x for x in lowered.tensors if x is not None]
    return plan.tapes.run("forward", inputs, lambda: attended(plan, lowered))


def attended(plan: Plan, lowered: Lowered) -> list[Tensor]:
    """Returns what `forward` does, piece by piece."""
    prepared = prepare(plan, lowered)
    out, lse = call_outputs(lowered)
    pieces, ranges = pieces_of(plan), lag_ranges(plan)
    if pieces == [EVERYTHING] and not ranges:
        attend(Inputs(plan, lowered, prepared), out, lse)
        return [out, lse, *prepared]
    bands = None if ranges else band_tables(plan, lowered)
    for piece in pieces:
        part, piece_out, piece_lse = piece.part(lowered), piece.cut(out), piece.cut(lse)
        if not ranges:
            attend(inputs_of(plan, piece, part, prepared, bands, [piece_out, piece_lse]), piece_out, piece_lse)
            continue
        total = torch.zeros(piece_out.shape, dtype=torch.float32, device=out.device)
        piece_lse.fill_(-torch.inf)
        for lags in ranges:
            range_out, range_lse = call_outputs(part)
            attend(inputs_of(plan, piece, part, prepared, None, [], lags), range_out, range_lse)
            merge_into(total, piece_lse, range_out, range_lse)
        piece_out.copy_(total)
    return [out, lse, *prepared]


def inputs_of(
    plan: Plan,
    piece: Piece,
    part: Lowered,
    prepared: list[Tensor],
    bands: dict[str, Tensor] | None,
    results: list[Tensor],
    lags: tuple[int, int] | None = None,
) -> Inputs:
    """Returns a piece of a call as its kernels take it, or of the lags of a range alone, with its share of some results."""
    shares = None if bands is None else {name: piece.of_heads(x) for name, x in bands.items()}
    ready = piece.prepared(plan, prepared)
    others = [*ready, *([] if shares is None else shares.values()), *results]
    return Inputs(plan_for(part, lags=lags, origin=piece.origin, others=others), part, ready, shares)


@rehearsed()
def backward(lowered: Lowered, saved: list[Tensor], dout: Tensor, dlse: Tensor | None, learned: bool) -> list[Tensor]:
    """Returns the gradients of the tensors that the call has; of tables where they are `learned`."""
    plan = plan_for(lowered)
    if lag_ranges(plan):
        return differentiated(plan, lowered, saved, dout, dlse, learned)
    incoming = [*saved, dout] if dlse is None else [*saved, dout, dlse]
    inputs = [*[x for x in lowered.tensors if x is not None], *incoming]
    key = backward_key(incoming, dlse, learned)
    return plan.tapes.run(key, inputs, lambda: differentiated(plan, lowered, saved, dout, dlse, learned))


def backward_key(incoming: Sequence[Tensor], dlse: Tensor | None, learned: bool) -> tuple[Any, ...]:
    """Returns what a backward pass depends on beside the kind of its call: how the tensors lie that come in."""
    return learned, dlse is None, *[(x.stride(), x.dtype, x.data_ptr() % 16) for x in incoming]


def backward_again(
    plans: dict[Any, Plan], tensors: Sequence[Tensor], saved: Sequence[Tensor], dout: Tensor, dlse: Tensor | None, learned: bool
) -> list[Tensor] | None:
    """Returns what `backward` does where that is on a tape already, and else nothing, from all tensors of the call.

    Backward passes run on a thread of their own, where each step of Python takes long.
    """
    plan = plans.get(WHOLE_CALL)
    if plan is None:
        return None
    incoming = [*saved, dout] if dlse is None else [*saved, dout, dlse]
    return plan.tapes.replayed(backward_key(incoming, dlse, learned), [*tensors, *incoming])


def incoming_of(saved: list[Tensor], dout: Tensor, dlse: Tensor | None) -> tuple[Incoming, list[Tensor]]:
    """Returns what gradients start from, as kernels take it, and what was prepared of tables and masks."""
    out, lse, *prepared = saved
    dout = dout if dout.stride(3) == 1 else dout.contiguous()
    return Incoming(out, lse, dout, None if dlse is None else dlse.contiguous()), prepared


def differentiated(
    plan: Plan, lowered: Lowered, saved: list[Tensor], dout: Tensor, dlse: Tensor | None, learned: bool
) -> list[Tensor]:
    """Returns what `backward` does, piece by piece."""
    given, prepared = incoming_of(saved, dout, dlse)
    pieces, ranges = pieces_of(plan), lag_ranges(plan)
    if pieces == [EVERYTHING] and not ranges:
        return gradients(lowered, differentiate(Inputs(plan, lowered, prepared), given, learned=learned), learned)
    bands = None if ranges else band_tables(plan, lowered)
    delta = delta_of(given.dout, given.out, given.dlse)
    wanted = dict(wanted_gradients(lowered, learned))
    found = {name: empty_gradient(x, plan.heads) for name, x in wanted.items() if name in OPERANDS}
    # What several pieces or ranges give is added up in float32.
    tables = {
        name: torch.zeros(x.shape, dtype=torch.float32, device=x.device) for name, x in wanted.items() if name not in OPERANDS
    }
    for piece in pieces:
        part, into = piece.part(lowered), {name: piece.cut(x) for name, x in found.items()}
        own = Incoming(piece.cut(given.out), piece.cut(given.lse), piece.cut(given.dout), None, piece.cut(delta))
        results = [own.out, own.lse, own.dout, piece.cut(delta), *into.values()]
        more: dict[str, Tensor] = {}
        for lags in ranges:
            inputs = inputs_of(plan, piece, part, prepared, None, results, lags)
            changes = differentiate(inputs, own, learned=learned, dtype=torch.float32)
            more = {name: more[name] + x if name in more else x for name, x in changes.items()}
        if ranges:
            for name, x in into.items():
                x.copy_(more[name])
        else:
            inputs = inputs_of(plan, piece, part, prepared, bands, results)
            more = differentiate(inputs, own, learned=learned, dtype=torch.float32, into=into)
        for name, total in tables.items():
            piece.of_heads(total).add_(more[name])
        # Its memory is the next one's.
        del more
    return gradients(lowered, found | tables, learned)


def outputs(lowered: Lowered) -> list[Tensor]:
    """Returns empty tensors like those of `forward`."""
    return [*call_outputs(lowered), *prepared_outputs(lowered)]
