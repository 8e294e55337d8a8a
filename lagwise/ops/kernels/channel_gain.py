"""A gain per channel: the content product of the band, lag by lag, and its gradients.

    score(i, n) = sum_c gain_c(n) q_ic k_(i+n)c
    dq_ic = scale sum_n dscore(i, n) gain_c(n) k_(i+n)c         dk_jc = scale sum_n dscore(j-n, n) gain_c(n) q_(j-n)c
    dgain_c(n) = scale sum_i dscore(i, n) q_ic k_(i+n)c

Each lag has its own weights of the channels, so that this is no matrix product: the ordinary units do two operations per row,
lag and channel, and every other instruction counts. A program holds RUNS runs of LENGTH consecutive rows, as LENGTH tensors
[RUNS, WIDTH], and takes STEP lags at a time, a divisor of the lags of the band: the LENGTH + STEP - 1 rows that these pair with a
run are loaded and turned to float32 once, for LENGTH * STEP uses in registers.
"""

# Triton's language is not typed as Python is.
# pyright: basic, reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from lagwise.ops.kernels.arguments import Scores, Seen, Tables, view
from lagwise.ops.kernels.channel_products import (
    GAIN_LAGS,
    MARGIN,
    OWNERS,
    SLICE,
    SPAN,
    gain_words_kernel,
    word_gain_kernel,
    word_rows_kernel,
    word_scores_kernel,
)
from lagwise.ops.kernels.logits import query_start_of
from lagwise.ops.kernels.plan import Plan, blocks
from lagwise.ops.kernels.tables import steps
from lagwise.ops.kernels.tiles import DIRECT, head_of, load_rows, place_of, slab_of, step_of, store_rows

if TYPE_CHECKING:
    from lagwise.ops.kernels.inputs import Inputs

# Of the kernels for a gain per channel: the rows of a run, and those where the gradient of the gain is computed, the lags of a
# step, which divides every band, the lags of a program that scores, and the channels of all runs that a warp holds. The
# interpreter takes time by the operation.
LENGTH, GAIN_LENGTH, STEP = (4, 8, 8) if DIRECT.value else (2, 2, 4)
LAGS, WARP_CHANNELS = 64, 256
# Programs that sum the gradient of the gain, enough to fill a GPU.
GAIN_PROGRAMS = 2048
# Of the kernels on words: the rows of a run, by the channels that these hold; the lags of a program that scores, about a
# third of 128 on either side; lags of which a program writes words of gains; and programs that sum the gradient of the gain.
WORD_LENGTH, WORD_LAGS = ({64: 4, 128: 4}, 96) if DIRECT.value else ({64: 2, 128: 2}, 32)
TABLE_ROWS, WORD_GAIN_PROGRAMS = 16, 4096
WORD_WARPS = 4 if DIRECT.value else 2
# Numbers of the shares of the gradient of the gain that a program adds at a time.
FOLDED = 8192 if DIRECT.value else 256

NUMBERS = [
    "heads",
    "group",
    "queries",
    "keys",
    "query_start",
    "first",
    "last",
    "band_first",
    "band_lags",
    "chunks",
    "scale",
]


@triton.jit
def widened(x):
    """Turns numbers to float32.

    By itself the compiler takes two instructions for the second bfloat16 of a register; one is enough.
    """
    if DIRECT and x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;", "=r,=r,r", [x], dtype=tl.float32, is_pure=True, pack=2
        )
    else:
        return x.to(tl.float32)


@triton.jit
def load_runs(X, index, count, stride, dim: tl.constexpr, WIDTH: tl.constexpr, LENGTH: tl.constexpr):
    """Loads LENGTH rows from each index on, as that many tensors [index, WIDTH] in float32, with zeros beyond the ends."""
    channel = tl.arange(0, WIDTH)
    pointers = X + index.to(tl.int64)[:, None] * stride + channel[None, :]
    rows = ()
    for place in tl.static_range(LENGTH):
        there = (index >= -place)[:, None] & (index < count - place)[:, None]
        if dim != WIDTH:
            there = there & (channel < dim)[None, :]
        rows += (widened(tl.load(pointers, mask=there, other=0.0)),)
        pointers += stride
    return rows


@triton.jit
def lag_gain(pointer, dim: tl.constexpr, WIDTH: tl.constexpr):
    """Loads the weights of the channels at a lag, [1, WIDTH]."""
    channel = tl.arange(0, WIDTH)
    return tl.load(pointer + channel, mask=channel < dim, other=0.0)[None, :]


@triton.jit
def score_rows(scores, pair, queries, keys, start, band_first, band_lags, row):
    """Returns where rows of scores have their first column, and how far apart they are."""
    step = step_of(band_lags, keys) + 1
    home = scores.query + pair.to(tl.int64) * slab_of(queries, keys, band_lags) + band_first + start
    return home + row.to(tl.int64) * step, step


@triton.jit
def load_gradients(
    pointers, row, met, seen, batch, queries, keys, start, first, last, COUNT: tl.constexpr, flags: tl.constexpr
):  # fmt: skip
    """Loads the gradients of COUNT columns of some rows, as that many tensors [rows, 1] in float32; `met` is the first one's key.

    Pairs that nobody looked at hold whatever was there before.
    """
    there = (row >= 0) & (row < queries)
    begin, end = tl.maximum(row + start + first, 0), tl.minimum(row + start + last + 1, keys)
    if flags.MASK:
        begin = tl.maximum(begin, tl.load(seen.spans + 2 * batch))
        end = tl.minimum(end, tl.load(seen.spans + 2 * batch + 1))
    if flags.PACKED:
        begin = tl.maximum(begin, tl.load(seen.spans + row, mask=there, other=0))
        end = tl.minimum(end, tl.load(seen.spans + keys + row, mask=there, other=0))
    numbers = ()
    for place in tl.static_range(COUNT):
        looked_at = there & (met + place >= begin) & (met + place < end)
        numbers += (tl.load(pointers + place, mask=looked_at, other=0.0).to(tl.float32)[:, None],)
    return numbers


@triton.jit
def stacked(columns):
    """Joins tensors, a power of two of them, along a new last axis."""
    if len(columns) == 1:
        return columns[0]
    else:
        return tl.join(stacked(columns[0::2]), stacked(columns[1::2]))


@triton.jit(do_not_specialize=NUMBERS)
def channel_scores_kernel(
    q, k, tables, scores, seen, heads, group, queries, keys, query_start, band_first, band_lags, flags: tl.constexpr
):  # fmt: skip
    """Writes the content product of LAGS lags to the scores of a block of queries, or adds it to those of a query table."""
    WIDTH: tl.constexpr = flags.WIDTH
    RUNS: tl.constexpr = flags.RUNS
    LENGTH: tl.constexpr = flags.LENGTH
    STEP: tl.constexpr = flags.STEP
    index, count, lag_blocks = tl.program_id(0), tl.cdiv(queries, RUNS * LENGTH), tl.cdiv(band_lags, flags.LAGS)
    block, lag_block, pair = index % count, index // count % lag_blocks, index // (count * lag_blocks)
    batch, head = pair // heads, pair % heads
    run = block * RUNS * LENGTH + tl.arange(0, RUNS) * LENGTH
    row = block * RUNS * LENGTH + tl.arange(0, RUNS * LENGTH)
    start = query_start_of(seen, batch, query_start, flags)
    Q = head_of(q, batch, head)
    K = head_of(k, batch, head // group)
    ChannelGain = tables.channel_gain + head * band_lags * flags.head_dim
    entry, _step = score_rows(scores, pair, queries, keys, start, band_first, band_lags, row)
    q_runs = load_runs(Q, run, queries, q.time, flags.head_dim, WIDTH, LENGTH)
    for lag in range(lag_block * flags.LAGS, min(lag_block * flags.LAGS + flags.LAGS, band_lags), STEP):
        met = run + start + band_first + lag
        k_runs = load_runs(K, met, keys, k.time, flags.head_dim, WIDTH, LENGTH + STEP - 1)
        columns = ()
        for step in tl.static_range(STEP):
            gain = lag_gain(ChannelGain + lag * flags.head_dim + step * flags.head_dim, flags.head_dim, WIDTH)
            column = ()
            for place in tl.static_range(LENGTH):
                column += (tl.sum(q_runs[place] * gain * k_runs[place + step], 1),)
            columns += (stacked(column),)
        found = tl.reshape(stacked(columns), [RUNS * LENGTH, STEP])
        taken = lag + tl.arange(0, STEP)[None, :]
        key = row[:, None] + start + band_first + taken
        there = (row < queries)[:, None] & (key >= 0) & (key < keys)
        if flags.QUERY:
            found += tl.load(entry[:, None] + taken, mask=there, other=0.0).to(tl.float32)
        tl.store(entry[:, None] + taken, found.to(scores.query.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=NUMBERS)
def channel_query_gradient_kernel(
    k, tables, scores, seen, dq, heads, group, queries, keys, query_start, first, last, band_first, band_lags, scale,
    flags: tl.constexpr,
):  # fmt: skip
    """Adds the band's share to dq of a block of queries."""
    WIDTH: tl.constexpr = flags.WIDTH
    RUNS: tl.constexpr = flags.RUNS
    LENGTH: tl.constexpr = flags.LENGTH
    STEP: tl.constexpr = flags.STEP
    block, pair, batch, head = place_of(queries, heads, RUNS * LENGTH)
    run = block * RUNS * LENGTH + tl.arange(0, RUNS) * LENGTH
    start = query_start_of(seen, batch, query_start, flags)
    K = head_of(k, batch, head // group)
    dscores, row_step = score_rows(scores, pair, queries, keys, start, band_first, band_lags, run)
    ChannelGain = tables.channel_gain + head * band_lags * flags.head_dim
    changes = (tl.zeros([RUNS, WIDTH], tl.float32),) * LENGTH
    for lag in range(0, band_lags, STEP):
        met = run + start + band_first + lag
        k_runs = load_runs(K, met, keys, k.time, flags.head_dim, WIDTH, LENGTH + STEP - 1)
        dscore = ()
        for place in tl.static_range(LENGTH):
            pointers = dscores + place * row_step + lag
            dscore += (
                load_gradients(pointers, run + place, met + place, seen, batch, queries, keys, start, first, last, STEP, flags),
            )
        for step in tl.static_range(STEP):
            gain = lag_gain(ChannelGain + lag * flags.head_dim + step * flags.head_dim, flags.head_dim, WIDTH)
            changed = ()
            for place in tl.static_range(LENGTH):
                changed += (changes[place] + dscore[place][step] * gain * k_runs[place + step],)
            changes = changed
    Dq = head_of(dq, batch, head)
    for place in tl.static_range(LENGTH):
        before = load_rows(Dq, run + place, queries, dq.time, flags.head_dim, WIDTH, False).to(tl.float32)
        store_rows(Dq, run + place, queries, dq.time, changes[place] * scale + before, flags.head_dim, WIDTH)


@triton.jit(do_not_specialize=NUMBERS)
def channel_key_gradient_kernel(
    q, tables, scores, seen, dk, heads, group, queries, keys, query_start, first, last, band_first, band_lags, scale,
    flags: tl.constexpr,
):  # fmt: skip
    """Adds the band's share to dk of a block of keys, from one query head."""
    WIDTH: tl.constexpr = flags.WIDTH
    RUNS: tl.constexpr = flags.RUNS
    LENGTH: tl.constexpr = flags.LENGTH
    STEP: tl.constexpr = flags.STEP
    block, pair, batch, head = place_of(keys, heads, RUNS * LENGTH)
    run = block * RUNS * LENGTH + tl.arange(0, RUNS) * LENGTH
    start = query_start_of(seen, batch, query_start, flags)
    Q = head_of(q, batch, head)
    ChannelGain = tables.channel_gain + head * band_lags * flags.head_dim
    changes = (tl.zeros([RUNS, WIDTH], tl.float32),) * LENGTH
    for lag in range(0, band_lags, STEP):
        # The query of a run's first key at the last lag: that of key `place` at lag `step` is `place + STEP - 1 - step` later.
        query = run - start - band_first - lag - (STEP - 1)
        q_runs = load_runs(Q, query, queries, q.time, flags.head_dim, WIDTH, LENGTH + STEP - 1)
        pointers, row_step = score_rows(scores, pair, queries, keys, start, band_first, band_lags, query)
        pointers += lag
        dscore = ()
        for place in tl.static_range(LENGTH + STEP - 1):
            met = query + place + start + band_first + lag
            dscore += (load_gradients(pointers, query + place, met, seen, batch, queries, keys, start, first, last, STEP, flags),)
            pointers += row_step
        for step in tl.static_range(STEP):
            gain = lag_gain(ChannelGain + lag * flags.head_dim + step * flags.head_dim, flags.head_dim, WIDTH)
            changed = ()
            for place in tl.static_range(LENGTH):
                changed += (changes[place] + dscore[place + STEP - 1 - step][step] * gain * q_runs[place + STEP - 1 - step],)
            changes = changed
    Dk = head_of(dk, batch, head)
    for place in tl.static_range(LENGTH):
        before = load_rows(Dk, run + place, keys, dk.time, flags.head_dim, WIDTH, False).to(tl.float32)
        store_rows(Dk, run + place, keys, dk.time, changes[place] * scale + before, flags.head_dim, WIDTH)


@triton.jit(do_not_specialize=NUMBERS)
def channel_gain_gradient_kernel(
    q, k, scores, seen, dgain, heads, group, queries, keys, query_start, first, last, band_first, band_lags, chunks,
    scale, flags: tl.constexpr,
):  # fmt: skip
    """Writes the share of dgain that a chunk of the queries gives to STEP lags, [chunks, lags, head_dim] per pair."""
    WIDTH: tl.constexpr = flags.WIDTH
    RUNS: tl.constexpr = flags.RUNS
    LENGTH: tl.constexpr = flags.LENGTH
    STEP: tl.constexpr = flags.STEP
    index, lag_blocks = tl.program_id(0), band_lags // STEP
    lag, chunk, pair = index % lag_blocks * STEP, index // lag_blocks % chunks, index // (lag_blocks * chunks)
    batch, head = pair // heads, pair % heads
    start = query_start_of(seen, batch, query_start, flags)
    Q = head_of(q, batch, head)
    K = head_of(k, batch, head // group)
    sums = (tl.zeros([RUNS, WIDTH], tl.float32),) * STEP
    for block in range(chunk * RUNS * LENGTH, queries, chunks * RUNS * LENGTH):
        run = block + tl.arange(0, RUNS) * LENGTH
        q_runs = load_runs(Q, run, queries, q.time, flags.head_dim, WIDTH, LENGTH)
        met = run + start + band_first + lag
        k_runs = load_runs(K, met, keys, k.time, flags.head_dim, WIDTH, LENGTH + STEP - 1)
        pointers, row_step = score_rows(scores, pair, queries, keys, start, band_first, band_lags, run)
        pointers += lag
        for place in tl.static_range(LENGTH):
            dscore = load_gradients(
                pointers, run + place, met + place, seen, batch, queries, keys, start, first, last, STEP, flags
            )
            pointers += row_step
            changed = ()
            for step in tl.static_range(STEP):
                changed += (sums[step] + dscore[step] * q_runs[place] * k_runs[place + step],)
            sums = changed
    share = dgain + ((pair.to(tl.int64) * chunks + chunk) * band_lags + lag) * flags.head_dim
    channel = tl.arange(0, WIDTH)
    for step in tl.static_range(STEP):
        tl.store(share + step * flags.head_dim + channel, tl.sum(sums[step], 0) * scale, mask=channel < flags.head_dim)


@triton.jit
def column_sums(X, part, outer, owner, heads, inner, step, place, SHARED: tl.constexpr, dim: tl.constexpr, WIDTH: tl.constexpr):
    """Sums some parts of a table [outer, heads, inner, step], those of one head or of all, from a place on, [WIDTH]."""
    channel = tl.arange(0, WIDTH)
    if SHARED:
        there, row = part < outer * heads * inner, part
    else:
        there, row = part < outer * inner, (part // inner * heads + owner) * inner + part % inner
    pointers = X + row.to(tl.int64)[:, None] * step + (place + channel)[None, :]
    return tl.sum(tl.load(pointers, mask=there[:, None] & (channel < dim)[None, :], other=0.0), 0)


@triton.jit(
    do_not_specialize=["outer", "heads", "chunks", "batch", "blocks", "table_first", "table_lags", "band_first", "band_lags"]
)
def fold_gain_kernel(
    shares, ends, gradient, outer, heads, chunks, batch, blocks, table_first, table_lags, band_first, band_lags,
    SHARED: tl.constexpr, FAR: tl.constexpr, dim: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Writes the gradient of a column of the gain from its shares, [outer, heads, chunks, lags, dim].

    What lies beyond the columns adds to the ends, and so do sums of the pass over queries, [batch, heads, blocks, 2, WIDTH].
    """
    column, owner = tl.program_id(0) % table_lags, tl.program_id(0) // table_lags
    lag = table_first + column - band_first
    is_past, is_future = column == 0, column == table_lags - 1
    begin, end = tl.where(is_past, 0, tl.maximum(lag, 0)), tl.where(is_future, band_lags, tl.minimum(lag + 1, band_lags))
    members = heads if SHARED else 1
    total = tl.zeros([WIDTH], tl.float32)
    for place in range(begin, end):
        for first in range(0, outer * members * chunks, PARTS):
            part = first + tl.arange(0, PARTS)
            total += column_sums(shares, part, outer, owner, heads, chunks, band_lags * dim, place * dim, SHARED, dim, WIDTH)
    if FAR:
        for END in tl.static_range(2):
            count = tl.where(is_future if END == 1 else is_past, batch * members * blocks, 0)
            for first in range(0, count, PARTS):
                part = first + tl.arange(0, PARTS)
                total += column_sums(ends, part, batch, owner, heads, blocks, 2 * WIDTH, END * WIDTH, SHARED, dim, WIDTH)
    channel = tl.arange(0, WIDTH)
    home = gradient + (owner * table_lags + column).to(tl.int64) * dim
    tl.store(home + channel, total.to(gradient.dtype.element_ty), mask=channel < dim)


def sums_words() -> bool:
    """Says whether the matrix units of the GPU take words as the kernels give them: from compute capability 8.0 on."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 0)


def takes_words(plan: Plan, *tensors: Tensor) -> bool:
    """Says whether q and k can be taken in words of two numbers, four at a time; where channels lie apart, they are copied."""
    beside = [x for x in tensors if x.stride(3) == 1]
    aligned = all(x.data_ptr() % 16 == 0 and all(step % 8 == 0 for step in x.stride()[:3]) for x in beside)
    fits = plan.dtype != torch.float32 and plan.head_dim % 8 == 0 and plan.head_dim <= 2 * SLICE.value
    return fits and aligned and sums_words()


def gain_words(plan: Plan, table: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gains of the band and those of its ends, as the kernels on words and the passes over pairs take them."""
    table = table if table.stride(2) == 1 else table.contiguous()
    device, lags = plan.kind.device, plan.band_lags + 2 * MARGIN.value
    words = torch.empty(plan.heads, lags, blocks(plan.head_dim, SLICE.value), 2 * SLICE.value, dtype=plan.dtype, device=device)
    ends = torch.empty(plan.heads, 2, plan.head_dim, dtype=torch.float32, device=device)
    columns = plan.columns("gain")
    values = (table, words, ends, *steps(table), *columns, plan.band_first, plan.band_lags, plan.head_dim, TABLE_ROWS)
    site = ("gain words", table.dtype, table.stride(), table.data_ptr() % 16)
    plan.launch(site, gain_words_kernel, (blocks(lags, TABLE_ROWS), plan.heads), values)
    return words, ends


def word_scores(plan: Plan, q: Tensor, k: Tensor, tables: Tables, scores: Scores, seen: Seen) -> None:
    """Does what `channel_scores` does, in words."""
    length = WORD_LENGTH[SLICE.value if plan.head_dim <= SLICE.value else 2 * SLICE.value]
    grid = (blocks(plan.batch * blocks(plan.queries, length * WORD_WARPS), 8), blocks(plan.band_lags + 16, WORD_LAGS), plan.heads)
    values = (
        view(q), view(k), tables, scores, seen, plan.batch, *plan.numbers[:5], plan.band_first, plan.band_lags,
        plan.flags_at("channels", LENGTH=length, LAGS=WORD_LAGS, WARPS=WORD_WARPS),
    )  # fmt: skip
    plan.launch("channel scores", word_scores_kernel, grid, values, WORD_WARPS)


def channel_scores(plan: Plan, q: Tensor, k: Tensor, tables: Tables, scores: Scores, seen: Seen) -> None:
    """Adds the content product of a plan's band to its scores, or writes it where there are none."""
    sizes, rows, warps = runs(plan, loads_gain=True)
    grid = (blocks(plan.queries, rows), blocks(plan.band_lags, LAGS), plan.pairs)
    values = (
        view(q), view(k), tables, scores, seen, *plan.numbers[:5], plan.band_first, plan.band_lags,
        plan.flags_at("channels", **sizes),
    )  # fmt: skip
    plan.launch("channel scores", channel_scores_kernel, grid, values, warps)


def runs(plan: Plan, *, loads_gain: bool) -> tuple[dict[str, int], int, int]:
    """Returns the sizes of the kernels here, the rows of a program, and its warps.

    To fewer warps Triton would hand the gains of a wide head through shared memory.
    """
    warps, length = (max(4, plan.flags["WIDTH"] // 16), LENGTH) if loads_gain else (4, GAIN_LENGTH)
    count = warps * WARP_CHANNELS // plan.flags["WIDTH"]
    return {"RUNS": count, "LENGTH": length, "STEP": STEP, "LAGS": LAGS}, count * length, warps


def channel_gradients(
    inputs: "Inputs", scores: Scores, ends: Tensor, found: dict[str, Tensor], *, learned: bool, dtype: torch.dtype
) -> None:
    """Adds the shares of a gain per channel to dq and dk, and finds its gradient: in the band from gradients in place of the
    scores, beyond it from the ends that the pass over queries summed."""
    plan, lowered = inputs.plan, inputs.lowered
    assert lowered.gain is not None
    shares = word_gradients(inputs, scores, found, learned) if inputs.words else run_gradients(inputs, scores, found, learned)
    if shares is None:
        return
    found["gain"] = gradient = torch.empty(lowered.gain.shape, dtype=dtype, device=shares.device)
    far = plan.only is None
    first, lags = plan.columns("gain")
    values = (
        shares, ends, gradient, shares.shape[0], plan.heads, shares.shape[2], plan.batch, ends.shape[2] if far else 0,
        first, lags, plan.band_first, plan.band_lags, gradient.shape[0] == 1, far, plan.head_dim, plan.flags["WIDTH"],
        blocks(FOLDED, plan.flags["WIDTH"]),
    )  # fmt: skip
    plan.launch(("fold gain", dtype), fold_gain_kernel, (lags, gradient.shape[0]), values)


def word_gradients(inputs: "Inputs", scores: Scores, found: dict[str, Tensor], learned: bool) -> Tensor | None:
    """Adds the band's shares to dq and dk, in words, and returns those of the gain, [1, heads, chunks, lags, head_dim]."""
    plan = inputs.plan
    numbers = (*plan.numbers[:7], plan.band_first, plan.band_lags)
    flags = plan.flags_at("channels", WARPS=WORD_WARPS)
    slices = blocks(plan.head_dim, SLICE.value)
    for name, partners, owners in (("q", inputs.k, plan.queries), ("k", inputs.q, plan.keys)):
        given = (view(partners), inputs.tables, scores, inputs.visible, view(found[name]))
        values = (*given, *numbers, plan.kind.scale, name == "k", flags)
        grid = (slices, blocks(owners, OWNERS.value * WORD_WARPS), plan.pairs)
        plan.launch(("channel rows", name, found[name].dtype), word_rows_kernel, grid, values, WORD_WARPS)
    if not learned:
        return None
    lag_blocks = blocks(plan.band_lags, GAIN_LAGS.value)
    members = plan.batch * blocks(plan.queries, SPAN.value)
    # Rows of the batch that come by eights have chunks of their own.
    columns = plan.batch // 8 if plan.batch % 8 == 0 else 1
    segments = min(blocks(WORD_GAIN_PROGRAMS, slices * lag_blocks * plan.heads * columns), blocks(members, 8 * columns))
    chunks = columns * segments
    shape = (1, plan.heads, chunks, plan.band_lags, plan.head_dim)
    shares = torch.empty(shape, dtype=torch.float32, device=inputs.q.device)
    values = (
        view(inputs.q), view(inputs.k), scores, inputs.visible, shares, plan.batch, *numbers, chunks, plan.kind.scale, flags
    )  # fmt: skip
    plan.launch("channel gain", word_gain_kernel, (slices, lag_blocks, chunks, plan.heads), values, warps=1)
    return shares


def run_gradients(inputs: "Inputs", scores: Scores, found: dict[str, Tensor], learned: bool) -> Tensor | None:
    """Does the same run by run, in float32; shares are [batch, heads, chunks, lags, head_dim]."""
    plan = inputs.plan
    sizes, rows, warps = runs(plan, loads_gain=True)
    flags = plan.flags_at("channels", **sizes)
    numbers = (*plan.numbers[:7], plan.band_first, plan.band_lags, plan.kind.scale)
    given = (inputs.tables, scores, inputs.visible)
    dq, dk = found["q"], found["k"]
    grid = (blocks(plan.queries, rows), plan.pairs)
    values = (view(inputs.k), *given, view(dq), *numbers, flags)
    plan.launch("channel queries", channel_query_gradient_kernel, grid, values, warps)
    grid = (blocks(plan.keys, rows), plan.pairs)
    values = (view(inputs.q), *given, view(dk), *numbers, flags)
    plan.launch("channel keys", channel_key_gradient_kernel, grid, values, warps)
    if not learned:
        return None
    sizes, rows, warps = runs(plan, loads_gain=False)
    lag_blocks = plan.band_lags // STEP
    chunks = min(blocks(GAIN_PROGRAMS, lag_blocks * plan.pairs), blocks(plan.queries, rows))
    shape = (plan.batch, plan.heads, chunks, plan.band_lags, plan.head_dim)
    shares = torch.empty(shape, dtype=torch.float32, device=dq.device)
    values = (
        view(inputs.q), view(inputs.k), scores, inputs.visible, shares, *numbers[:-1], chunks, plan.kind.scale,
        plan.flags_at("channels", **sizes),
    )  # fmt: skip
    plan.launch("channel gain", channel_gain_gradient_kernel, (lag_blocks, chunks, plan.pairs), values, warps)
    return shares
