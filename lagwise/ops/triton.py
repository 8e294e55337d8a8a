"""`impl="triton"`: scores of vector tables, one pass of the kernels each way, the gradients of the tables."""

import torch
from torch import Tensor

from lagwise.ops.kernels.ahead import rehearsed
from lagwise.ops.kernels.forward import attend
from lagwise.ops.kernels.gradients import Incoming, differentiate
from lagwise.ops.kernels.inputs import Inputs, prepare
from lagwise.ops.kernels.plan import Plan, plan_for
from lagwise.ops.kernels.results import gradients, prepared_outputs
from lagwise.ops.kernels.results import outputs as call_outputs
from lagwise.ops.lowering import Lowered
from lagwise.ops.lowering import laid_out_gradients as backward_outputs
from lagwise.ops.merge import merge_into

__all__ = ["backward", "backward_outputs", "forward", "outputs"]

# The most lags of tables of vectors whose scores are in memory at a time.
WIDEST = 1024


def lag_ranges(plan: Plan) -> list[tuple[int, int]]:
    """Returns the ranges of lags that are computed one after the other, so that the scores of a range fit into memory.

    There are none where all lags fit. Each has at most WIDEST columns of the tables of vectors; the first and the last reach
    beyond.
    """
    if not plan.scored or plan.band_lags <= WIDEST:
        return []
    starts = [plan.first, *range(plan.band_first + WIDEST, plan.band_last + 1, WIDEST)]
    return list(zip(starts, [*(start - 1 for start in starts[1:]), plan.last], strict=True))


@rehearsed(lambda: backward)
def forward(lowered: Lowered) -> list[Tensor]:
    """Returns the output and the log-sum-exp, then what was prepared of tables and masks, for both passes."""
    plan = plan_for(lowered)
    ranges = lag_ranges(plan)
    if not ranges:
        inputs = [x for x in lowered.tensors if x is not None]
        return plan.tapes.run("forward", inputs, lambda: attended(plan, lowered))
    prepared = prepare(plan, lowered)
    out, lse = call_outputs(lowered)
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    lse.fill_(-torch.inf)
    for lags in ranges:
        range_out, range_lse = call_outputs(lowered)
        attend(Inputs(plan_for(lowered, lags=lags), lowered, prepared), range_out, range_lse)
        merge_into(total, lse, range_out, range_lse)
    return [out.copy_(total), lse, *prepared]


def attended(plan: Plan, lowered: Lowered) -> list[Tensor]:
    """Returns what `forward` does, where all lags are computed at once."""
    prepared = prepare(plan, lowered)
    out, lse = call_outputs(lowered)
    attend(Inputs(plan, lowered, prepared), out, lse)
    return [out, lse, *prepared]


@rehearsed()
def backward(lowered: Lowered, saved: list[Tensor], dout: Tensor, dlse: Tensor | None, learned: bool) -> list[Tensor]:
    """Returns the gradients of the tensors that the call has; of tables where they are `learned`."""
    plan = plan_for(lowered)
    ranges = lag_ranges(plan)
    if not ranges:
        incoming = [*saved, dout] if dlse is None else [*saved, dout, dlse]
        inputs = [*[x for x in lowered.tensors if x is not None], *incoming]
        key = learned, dlse is None, *[(x.stride(), x.dtype, x.data_ptr() % 16) for x in incoming]
        return plan.tapes.run(key, inputs, lambda: differentiated(plan, lowered, saved, dout, dlse, learned))
    given, prepared = incoming_of(saved, dout, dlse)
    found: dict[str, Tensor] = {}
    for lags in ranges:
        inputs = Inputs(plan_for(lowered, lags=lags), lowered, prepared)
        # Ranges are added up in float32.
        more = differentiate(inputs, given, learned=learned, dtype=torch.float32)
        found = {name: found[name] + x if name in found else x for name, x in more.items()}
    return gradients(lowered, found, learned)


def incoming_of(saved: list[Tensor], dout: Tensor, dlse: Tensor | None) -> tuple[Incoming, list[Tensor]]:
    """Returns what gradients start from, as kernels take it, and what was prepared of tables and masks."""
    out, lse, *prepared = saved
    dout = dout if dout.stride(3) == 1 else dout.contiguous()
    return Incoming(out, lse, dout, None if dlse is None else dlse.contiguous()), prepared


def differentiated(
    plan: Plan, lowered: Lowered, saved: list[Tensor], dout: Tensor, dlse: Tensor | None, learned: bool
) -> list[Tensor]:
    """Returns what `backward` does, where all lags are computed at once."""
    given, prepared = incoming_of(saved, dout, dlse)
    return gradients(lowered, differentiate(Inputs(plan, lowered, prepared), given, learned=learned), learned)


def outputs(lowered: Lowered) -> list[Tensor]:
    """Returns empty tensors like those of `forward`."""
    return [*call_outputs(lowered), *prepared_outputs(lowered)]
