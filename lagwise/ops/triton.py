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
    prepared = prepare(plan, lowered)
    out, lse = call_outputs(lowered)
    ranges = lag_ranges(plan)
    if not ranges:
        attend(Inputs(plan, lowered, prepared), out, lse)
        return [out, lse, *prepared]
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    lse.fill_(-torch.inf)
    for lags in ranges:
        range_out, range_lse = call_outputs(lowered)
        attend(Inputs(plan_for(lowered, lags=lags), lowered, prepared), range_out, range_lse)
        merge_into(total, lse, range_out, range_lse)
    return [out.copy_(total), lse, *prepared]


@rehearsed()
def backward(lowered: Lowered, saved: list[Tensor], dout: Tensor, dlse: Tensor | None, learned: bool) -> list[Tensor]:
    """Returns the gradients of the tensors that the call has; of tables where they are `learned`."""
    out, lse, *prepared = saved
    dout = dout if dout.stride(3) == 1 else dout.contiguous()
    given = Incoming(out, lse, dout, None if dlse is None else dlse.contiguous())
    plan = plan_for(lowered)
    ranges = lag_ranges(plan)
    if not ranges:
        return gradients(lowered, differentiate(Inputs(plan, lowered, prepared), given, learned=learned), learned)
    found: dict[str, Tensor] = {}
    for lags in ranges:
        inputs = Inputs(plan_for(lowered, lags=lags), lowered, prepared)
        # Ranges are added up in float32.
        more = differentiate(inputs, given, learned=learned, dtype=torch.float32)
        found = {name: found[name] + x if name in found else x for name, x in more.items()}
    return gradients(lowered, found, learned)


def outputs(lowered: Lowered) -> list[Tensor]:
    """Returns empty tensors like those of `forward`."""
    return [*call_outputs(lowered), *prepared_outputs(lowered)]
