"""Gradients of tables of scalars: sums of dlogit along the diagonals of [queries, keys].

    dbias(n) = sum_i dlogit(i, i + n),      dgain(n) = scale sum_i dlogit(i, i + n) q_i . k_(i + n)

The pass over queries has dlogit of its near tiles. It writes some of them side by side to a patch of memory that is its own,
[queries, keys], and reads the patch again along its diagonals. Each program has a row of sums, one for each lag, and
`fold_kernel` adds the rows up: no atomics, the same bits each time, and no tile is computed again.
"""

# Triton's language is not typed as Python is.
# pyright: basic, reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lagwise.ops.kernels.plan import PATCH, Plan, blocks
from lagwise.ops.kernels.tiles import DIRECT
from lagwise.ops.lowering import Lowered

# How many diagonals of a patch are summed at a time.
DIAGONALS = tl.constexpr(64 if DIRECT.value else 16)
# How many rows of sums and columns of the table a program adds up at a time.
PARTS, COLUMNS = 128, 32


@triton.jit
def clear_sums(Sums, lags, COUNT: tl.constexpr):
    """Writes zeros to sums."""
    for start in range(0, lags, COUNT):
        place = start + tl.arange(0, COUNT)
        tl.store(Sums + place, tl.zeros([COUNT], tl.float32), mask=place < lags)


@triton.jit
def add_diagonals(Patch, Sums, corner, filled, lags, ROWS: tl.constexpr, PATCH: tl.constexpr):
    """Adds the sums of a patch along its diagonals to those of the lags; its corner has lag number `corner`."""
    row = tl.arange(0, ROWS)
    for start in range(-ROWS, filled, DIAGONALS):
        diagonal = start + tl.arange(0, DIAGONALS)
        column = row[:, None] + diagonal[None, :]
        inside = (column >= 0) & (column < filled)
        numbers = tl.load(Patch + row[:, None] * PATCH + column, mask=inside, other=0.0)
        lag = corner + diagonal
        known = (lag >= 0) & (lag < lags)
        before = tl.load(Sums + lag, mask=known, other=0.0)
        tl.store(Sums + lag, before + tl.sum(numbers.to(tl.float32), 0), mask=known)


@triton.jit
def lag_sums(Sums, lag, head, batch, heads, parts, low, high, PARTS: tl.constexpr):
    """Adds up the sums [batch, heads, parts, lags] of some lags, zero outside `low` to `high`, which they are there for."""
    inside = ((lag >= low) & (lag <= high))[None, :]
    total = tl.zeros(lag.shape, tl.float32)
    for start in range(0, batch * parts, PARTS):
        part = start + tl.arange(0, PARTS)[:, None]
        base = ((part // parts * heads + head) * parts + part % parts).to(tl.int64) * (high - low + 1)
        total += tl.sum(tl.load(Sums + base + (lag - low)[None, :], mask=inside & (part < batch * parts), other=0.0), 0)
    return total


@triton.jit
def end_sum(Ends, head, batch, heads, entries, pair_step, entry_step, ENTRIES: tl.constexpr):
    """Adds up one of the ends [batch, heads, entries] of a head."""
    total = tl.zeros([ENTRIES], tl.float32)
    for start in range(0, batch * entries, ENTRIES):
        index = start + tl.arange(0, ENTRIES)
        place = (index // entries * heads + head).to(tl.int64) * pair_step + index % entries * entry_step
        total += tl.load(Ends + place, mask=index < batch * entries, other=0.0)
    return tl.sum(total, 0)


@triton.jit(do_not_specialize=[
    "batch", "heads", "parts", "entries", "pair_step", "entry_step", "side_step", "slope_step", "low", "high",
    "sum_first", "sum_last", "first", "lags",
])  # fmt: skip
def fold_kernel(
    Sums, Ends, Dtable, Dpast, Dfuture, batch, heads, parts, entries, pair_step, entry_step, side_step, slope_step,
    low, high, sum_first, sum_last, first, lags,
    PARTS: tl.constexpr, COLUMNS: tl.constexpr, SHARED: tl.constexpr, ENDS: tl.constexpr, SLOPES: tl.constexpr,
):  # fmt: skip
    """Writes the gradient of a table [heads or 1, lags] from the sums of the lags, those beyond its columns at its ends.

    `Ends` hold what far tiles, before `low` and after `high`, add to the ends of the table, and `slope_step` farther to its
    slopes. With SHARED the table is that of all heads.
    """
    index, count = tl.program_id(0), tl.cdiv(lags, COLUMNS)
    block, owner = index % count, index // count
    step = tl.arange(0, COLUMNS)
    column = block * COLUMNS + step
    # Lags before the columns are left to the first block, those after them to the last.
    past_end = tl.where(block == 0, tl.minimum(first, sum_last + 1), sum_first)
    future_start = tl.where(block == count - 1, tl.maximum(first + lags, sum_first), sum_last + 1)
    total = tl.zeros([COLUMNS], tl.float32)
    past, future = tl.full([], 0.0, tl.float32), tl.full([], 0.0, tl.float32)
    past_slope, future_slope = tl.full([], 0.0, tl.float32), tl.full([], 0.0, tl.float32)
    for head in range(0 if SHARED else owner, heads if SHARED else owner + 1):
        found = lag_sums(Sums, first + column, head, batch, heads, parts, sum_first, sum_last, PARTS)
        total += tl.where(column < lags, found, 0.0)
        for start in range(sum_first, past_end, COLUMNS):
            beyond = start + step - first
            found = lag_sums(Sums, start + step, head, batch, heads, parts, sum_first, sum_last, PARTS)
            found = tl.where(beyond < 0, found, 0.0)
            past += tl.sum(found, 0)
            past_slope += tl.sum(found * beyond.to(tl.float32), 0)
        for start in range(future_start, sum_last + 1, COLUMNS):
            beyond = start + step - (first + lags - 1)
            found = lag_sums(Sums, start + step, head, batch, heads, parts, sum_first, sum_last, PARTS)
            future += tl.sum(found, 0)
            future_slope += tl.sum(found * beyond.to(tl.float32), 0)
        if ENDS:
            if block == 0:
                change = end_sum(Ends, head, batch, heads, entries, pair_step, entry_step, 1024)
                past += change
                if SLOPES:
                    # The ends count distances from `low` and `high`.
                    past_slope += change * tl.minimum(low - first, 0).to(tl.float32)
                    past_slope += end_sum(Ends + slope_step, head, batch, heads, entries, pair_step, entry_step, 1024)
            if block == count - 1:
                change = end_sum(Ends + side_step, head, batch, heads, entries, pair_step, entry_step, 1024)
                future += change
                if SLOPES:
                    future_slope += change * tl.maximum(high - (first + lags - 1), 0).to(tl.float32)
                    future_slope += end_sum(
                        Ends + slope_step + side_step, head, batch, heads, entries, pair_step, entry_step, 1024
                    )
    total += tl.where(column == 0, past, 0.0) + tl.where(column == lags - 1, future, 0.0)
    tl.store(Dtable + owner * lags + column, total.to(Dtable.dtype.element_ty), mask=column < lags)
    if SLOPES:
        tl.store(Dpast + owner, past_slope.to(Dpast.dtype.element_ty), mask=block == 0)
        tl.store(Dfuture + owner, future_slope.to(Dfuture.dtype.element_ty), mask=block == count - 1)


class RowSums(NamedTuple):
    """What the pass over queries finds for tables of scalars, a row for each of its blocks of queries.

    `sums` is [tables, batch, heads, blocks, lags], `ends` [batch, heads, blocks, past or future, bias or gain or slope],
    `patches` is where the pass keeps dlogit, and dlogit times content.
    """

    sums: Tensor
    ends: Tensor
    patches: Tensor


def sum_range(plan: Plan) -> tuple[int, int]:
    """Returns the first and the last lag of the sums: those of near tiles."""
    beyond = sum(plan.tiles["query"][:2])
    return plan.near_first - beyond, plan.near_last + beyond


def row_sums(plan: Plan) -> RowSums:
    """Returns space for the sums of a call that has tables of scalars."""
    rows, device = plan.tiles["query"][0], plan.kind.device
    count = blocks(plan.queries, rows)
    planes = len(plan.scalars)
    first, last = sum_range(plan)
    return RowSums(
        torch.empty(planes, plan.pairs * count * (last - first + 1), dtype=torch.float32, device=device),
        torch.empty(plan.pairs * count, 2, 3, dtype=torch.float32, device=device),
        torch.empty(plan.pairs * count * planes * rows * PATCH, dtype=plan.dtype, device=device),
    )


def scalar_gradients(
    plan: Plan, lowered: Lowered, found: RowSums, changes: Tensor | None, dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """Returns the gradients of bias, slopes and a gain of scalars: in the band from sums of rows, beyond it from their ends.

    Args:
        plan: The plan.
        lowered: The call.
        found: What the pass over queries found.
        changes: What far fields of `split` add to the ends of a bias, [batch, heads, past or future, queries], in place of those.
        dtype: The type of the gradients; that of each table unless given.
    """
    gradients: dict[str, Tensor] = {}
    count = blocks(plan.queries, plan.tiles["query"][0])
    for index, name in enumerate(plan.scalars):
        table: Tensor = getattr(lowered, name)
        sloped = name == "bias" and plan.flags["SLOPES"]
        made = torch.empty(table.shape, dtype=dtype or table.dtype, device=table.device)
        past = future = made
        if sloped:
            assert lowered.past_slope is not None and lowered.future_slope is not None
            past, future = (
                torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device) for x in (lowered.past_slope, lowered.future_slope)
            )
            gradients |= {"past_slope": past, "future_slope": future}
        if changes is None:
            # Of the three kinds the gain's is the second, the slopes' the third.
            ends, steps = found.ends[0, 0, 1 if name == "gain" else 0 :], (count, 6 * count, 6, 3, 2)
        else:
            ends, steps = changes, (plan.queries, 2 * plan.queries, 1, plan.queries, 0)
        values = (
            found.sums[index], ends, made, past, future, plan.batch, plan.heads, count, *steps,
            plan.low, plan.high, *sum_range(plan), *plan.columns(name),
            PARTS, COLUMNS, table.shape[0] == 1, changes is None or name == "bias", sloped,
        )  # fmt: skip
        plan.launch(
            ("fold", name, changes is None, dtype), fold_kernel, (blocks(table.shape[1], COLUMNS), table.shape[0]), values
        )
        gradients[name] = made
    return gradients
