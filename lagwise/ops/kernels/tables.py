"""What a call prepares for its kernels, a kernel each: tables of scalars for all near lags, and who may see whom.

A table of scalars is read once per pair of a near tile. So that no index is clamped there, and no type converted, its copy has a
row for each head, float32, from `table_first` on, PADDING lags before the near ones and after them. Sloped tails are part of it,
and at the end of its row are the slopes themselves.
"""

# Triton's language is not typed as Python is.
# pyright: basic, reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from lagwise.ops.kernels.plan import Plan, blocks
from lagwise.ops.lowering import Lowered

COLUMNS = 256
# Numbers of tables of vectors that a program copies.
NUMBERS = 1024


@triton.jit
def column_of(Table, head, head_step, lag_step, lag, first, lags):
    """Loads a table at some lags, beyond its ends its end columns."""
    column = tl.minimum(tl.maximum(lag - first, 0), lags - 1)
    return tl.load(Table + head.to(tl.int64) * head_step + column.to(tl.int64) * lag_step).to(tl.float32)


@triton.jit(do_not_specialize=[
    "bias_head", "bias_lag", "gain_head", "gain_lag", "slope_head", "heads", "table_first", "table_lags",
    "bias_first", "bias_lags", "gain_first", "gain_lags",
])  # fmt: skip
def scalars_kernel(
    bias, gain, past_slope, future_slope, out, bias_head, bias_lag, gain_head, gain_lag, slope_head, heads,
    table_first, table_lags, bias_first, bias_lags, gain_first, gain_lags,
    BIAS: tl.constexpr, GAIN: tl.constexpr, SLOPES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Writes some columns of one head's bias, and of its gain, [bias or gain, heads, lags and two slopes]."""
    index, count = tl.program_id(0), tl.cdiv(table_lags, COLUMNS)
    block, head = index % count, index // count
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    lag = table_first + column
    there = column < table_lags
    row = out + head.to(tl.int64) * (table_lags + 2)
    # Without slopes, and after a gain, there are zeros.
    past, future = tl.full([], 0.0, tl.float32), tl.full([], 0.0, tl.float32)
    if GAIN:
        gain_row = row + (heads.to(tl.int64) * (table_lags + 2) if BIAS else 0)
        tl.store(gain_row + column, column_of(gain, head, gain_head, gain_lag, lag, gain_first, gain_lags), mask=there)
        tl.store(gain_row + table_lags, past, mask=block == 0)
        tl.store(gain_row + table_lags + 1, future, mask=block == 0)
    if BIAS:
        found = column_of(bias, head, bias_head, bias_lag, lag, bias_first, bias_lags)
        if SLOPES:
            past = tl.load(past_slope + head * slope_head).to(tl.float32)
            future = tl.load(future_slope + head * slope_head).to(tl.float32)
            found += past * tl.minimum(lag - bias_first, 0).to(tl.float32)
            found += future * tl.maximum(lag - (bias_first + bias_lags - 1), 0).to(tl.float32)
        tl.store(row + column, found, mask=there)
        tl.store(row + table_lags, past, mask=block == 0)
        tl.store(row + table_lags + 1, future, mask=block == 0)


def scalar_tables(plan: Plan, lowered: Lowered) -> list[Tensor]:
    """Returns the tables of scalars that a call has, padded, in one tensor [tables, heads, lags and two slopes], or nothing."""
    named = plan.scalars
    if not named:
        return []
    bias, gain = lowered.bias, lowered.gain
    none = bias if bias is not None else gain
    assert none is not None
    found = torch.empty(plan.scalar_shape, dtype=torch.float32, device=none.device)
    past = none if lowered.past_slope is None else lowered.past_slope
    future = none if lowered.future_slope is None else lowered.future_slope
    values = (
        none if bias is None else bias, none if gain is None else gain, past, future, found,
        *(steps(bias) if "bias" in named else (0, 0)), *(steps(gain) if "gain" in named else (0, 0)),
        0 if past.shape[0] == 1 else past.stride(0), plan.heads, plan.table_first, plan.table_lags,
        *plan.columns("bias"), *plan.columns("gain"),
        "bias" in named, "gain" in named, plan.flags["SLOPES"], COLUMNS,
    )  # fmt: skip
    plan.launch("scalars", scalars_kernel, (blocks(plan.table_lags, COLUMNS), plan.heads), values)
    return [found]


VECTOR_NUMBERS = ["head_step", "lag_step", "channel_step", "start", "columns", "lags", "channels", "count"]


@triton.jit(do_not_specialize=VECTOR_NUMBERS)
def vectors_kernel(
    table, out, head_step, lag_step, channel_step, start, columns, lags, channels, count, NUMBERS: tl.constexpr
):  # fmt: skip
    """Copies a table of vectors at some lags, from a column on, to where its numbers lie side by side, in another type."""
    number = (tl.program_id(0) * NUMBERS + tl.arange(0, NUMBERS)).to(tl.int64)
    lag, channel = number // channels % lags, number % channels
    column = tl.minimum(tl.maximum(lag + start, 0), columns - 1)
    place = number // (lags * channels) * head_step + column * lag_step + channel * channel_step
    found = tl.load(table + place, mask=number < count, other=0.0)
    tl.store(out + number, found.to(out.dtype.element_ty), mask=number < count)


def copied(plan: Plan, site: str, name: str, table: Tensor, heads: int, start: int, lags: int) -> Tensor:
    """Returns a table of vectors at some lags from a column on, [heads, lags, channels]; it is constant beyond its columns."""
    out = torch.empty(heads, lags, table.shape[2], dtype=plan.dtype, device=table.device)
    head_step = table.stride(0) if table.shape[0] == heads else 0
    numbers = (head_step, *table.stride()[1:], start, table.shape[1], lags, table.shape[2], out.numel())
    plan.launch((site, name), vectors_kernel, (blocks(out.numel(), NUMBERS),), (table, out, *numbers, NUMBERS))
    return out


def is_copied(table: Tensor | None, dtype: torch.dtype) -> bool:
    """Says whether a table of vectors is there that products cannot take: one of another type, or with channels apart."""
    return table is not None and (table.dtype != dtype or table.stride(2) != 1)


def vector_tables(plan: Plan, lowered: Lowered) -> list[Tensor]:
    """Returns the tables of vectors that products cannot take as they are, in the type of these, channels side by side."""
    tables: list[tuple[str, Tensor]] = [(name, getattr(lowered, name)) for name in plan.vectors]
    return [copied(plan, "vectors", name, x, *x.shape[:1], 0, x.shape[1]) for name, x in tables if is_copied(x, plan.dtype)]


def band_values(plan: Plan, table: Tensor) -> Tensor:
    """Returns the value table in the band, a copy for each head."""
    start = plan.band_first - plan.firsts["value"]
    return copied(plan, "band", "value", table, plan.heads, start, plan.band_lags)


def steps(table: Tensor | None) -> tuple[int, int]:
    """Returns how far apart heads and lags of a table are; heads that share a table are not."""
    assert table is not None
    return 0 if table.shape[0] == 1 else table.stride(0), table.stride(1)


@triton.jit(do_not_specialize=["keys"])
def mask_spans_kernel(key_mask, spans, keys, COLUMNS: tl.constexpr):
    """Writes for a row of the batch the first key that a mask leaves and the end of those; `keys` and 0 if there is none."""
    batch = tl.program_id(0).to(tl.int64)
    first, end = tl.full([COLUMNS], 2147483647, tl.int32), tl.full([COLUMNS], 0, tl.int32)
    for start in range(0, keys, COLUMNS):
        key = start + tl.arange(0, COLUMNS)
        seen = tl.load(key_mask + batch * keys + key, mask=key < keys, other=0) != 0
        first = tl.minimum(first, tl.where(seen, key, 2147483647))
        end = tl.maximum(end, tl.where(seen, key + 1, 0))
    tl.store(spans + 2 * batch, tl.minimum(tl.min(first, 0), keys))
    tl.store(spans + 2 * batch + 1, tl.max(end, 0))


@triton.jit(do_not_specialize=["keys", "ends"])
def sequence_spans_kernel(cu_seqlens, spans, keys, ends, COLUMNS: tl.constexpr, ENDS: tl.constexpr):
    """Writes for some tokens where their packed sequence begins and ends, [2, keys]."""
    token = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    first, end = tl.zeros([COLUMNS], tl.int32), tl.full([COLUMNS], 2147483647, tl.int32)
    for start in range(0, ends, ENDS):
        place = start + tl.arange(0, ENDS)
        bound = tl.load(cu_seqlens + place, mask=place < ends, other=-1).to(tl.int32)
        before = (bound[None, :] >= 0) & (bound[None, :] <= token[:, None])
        first = tl.maximum(first, tl.max(tl.where(before, bound[None, :], 0), 1))
        after = bound[None, :] > token[:, None]
        end = tl.minimum(end, tl.min(tl.where(after, bound[None, :], 2147483647), 1))
    tl.store(spans + token, first, mask=token < keys)
    tl.store(spans + keys + token, end, mask=token < keys)


def spans_of(plan: Plan, lowered: Lowered) -> list[Tensor]:
    """Returns what a mask of keys leaves of each row of the batch, [batch, 2], or the sequence of each token, [2, keys]."""
    call = lowered.call
    if call.key_mask is not None:
        mask = call.key_mask.contiguous().view(torch.uint8)
        found = torch.empty(plan.spans_shape, dtype=torch.int32, device=mask.device)
        plan.launch("mask spans", mask_spans_kernel, (plan.batch,), (mask, found, plan.keys, COLUMNS))
        return [found]
    if call.cu_seqlens is not None:
        found = torch.empty(plan.spans_shape, dtype=torch.int32, device=call.cu_seqlens.device)
        values = (call.cu_seqlens, found, plan.keys, len(call.cu_seqlens), COLUMNS, 16)
        plan.launch("sequence spans", sequence_spans_kernel, (blocks(plan.keys, COLUMNS),), values)
        return [found]
    return []
