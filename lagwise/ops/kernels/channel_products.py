"""A gain per channel in half precision: the formulas of `lagwise.ops.kernels.channel_gain` on words of two numbers.

    score(i, n) = sum_c gain_c(n) (q_ic k_(i+n)c)                   words of two channels, summed over channels
    dq_ic = scale sum_n dscore(i, n) (gain_c(n) k_(i+n)c)           words of two keys, summed over keys; dk: of two queries
    dgain_c(n) = scale sum_i dscore(i, n) (q_ic k_(i+n)c)           words of two queries, summed over queries

What is in brackets is rounded, as `gain` is. The factor before it makes all but one column of the other operand of the matrix
units zero: they multiply it in and sum, 256 products an instruction, while a lane multiplies 8. Operands are never handed from
lane to lane: each loads what it multiplies. Loads are few since slots lie SPAN apart: a block of rows meets a block of partners
in as few shifts as it has neighbours, and what is loaded for a shift serves all their pairs.
"""

# Triton's language is not typed as Python is.
# pyright: basic, reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false

import triton
import triton.language as tl

from lagwise.ops.kernels.lanes import (
    HIGH,
    LOW,
    add_product,
    halves,
    joined,
    load_pair,
    load_words,
    store_numbers,
    store_words,
    word_of,
)
from lagwise.ops.kernels.logits import query_start_of
from lagwise.ops.kernels.tiles import floored, head_of, raised, slab_of, step_of

# Slots of the matrix units lie that far apart, and a lane holds so many channels of a row.
SPAN = tl.constexpr(8)
# Channels that a warp holds, 8 lanes side by side.
SLICE = tl.constexpr(64)
# Rows that get a gradient in one program, lags in one that sums the gradient of the gain.
OWNERS, GAIN_LAGS = tl.constexpr(16), tl.constexpr(16)
# Lags of zeros that words of gains have beyond the band on either side: blocks reach there.
MARGIN = tl.constexpr(96)

NUMBERS = [
    "batch", "heads", "group", "queries", "keys", "query_start", "first", "last", "band_first", "band_lags", "chunks",
    "scale", "table_first", "table_lags",
]  # fmt: skip


@triton.constexpr_function
def slices_of(dim):
    return -(-dim // 64)


@triton.constexpr_function
def words_of(dim):
    """Returns how many words a lane has of a row that four lanes hold."""
    return 4 * -(-dim // 32)


@triton.jit(do_not_specialize=NUMBERS)
def gain_words_kernel(
    table, words, ends, head_step, lag_step, table_first, table_lags, band_first, band_lags,
    dim: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Writes the gains of a head at some lags n and n + 1 as words, zero beyond the band, and those of the band's ends.

    Words of a slice of channels lie as lanes load them, [lags, slices, halves of 8 channels, 8 lanes, 4 channels].
    """
    SLICES: tl.constexpr = slices_of(dim)
    PLACES: tl.constexpr = 128 * triton.next_power_of_2(SLICES)
    count = band_lags + 2 * MARGIN
    blocks = tl.cdiv(count, ROWS)
    block, head = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    row, place = block * ROWS + tl.arange(0, ROWS), tl.arange(0, PLACES)
    channel = place // 128 * 64 + place // 8 % 8 * 8 + place // 64 % 2 * 4 + place // 2 % 4
    lag = row[:, None] - MARGIN + place[None, :] % 2
    there = (lag >= 0) & (lag < band_lags) & (channel < dim)[None, :]
    column = tl.minimum(tl.maximum(lag + band_first - table_first, 0), table_lags - 1)
    Table = table + head.to(tl.int64) * head_step
    found = tl.load(Table + column * lag_step + channel[None, :], mask=there, other=0.0)
    entry = (head * count + row)[:, None].to(tl.int64) * (SLICES * 128) + place[None, :]
    shown = (row < count)[:, None] & (place < SLICES * 128)[None, :]
    tl.store(words + entry, found.to(words.dtype.element_ty), mask=shown)
    if block < 2:
        end = tl.minimum(tl.maximum(band_first + (band_lags - 1) * block - table_first, 0), table_lags - 1)
        gains = tl.load(Table + end * lag_step + place, mask=place < dim, other=0.0)
        tl.store(ends + (head * 2 + block) * dim + place, gains.to(tl.float32), mask=place < dim)


@triton.jit
def gain_pointers(tables, head, band_lags, dim: tl.constexpr):
    """Returns where a head has the words of gains at lag 0 of the band."""
    SLICES: tl.constexpr = slices_of(dim)
    return tables.channel_gain + (head.to(tl.int64) * (band_lags + 2 * MARGIN) + MARGIN) * (SLICES * 128)


@triton.jit
def load_row(X, index, count, stride, channel, dim: tl.constexpr):
    """Loads 8 channels of a row, four words; that of a row beside the ends is one of theirs."""
    row = tl.minimum(tl.maximum(index, 0), count - 1).to(tl.int64)
    return load_words(X + row * stride + channel, channel < dim)


@triton.jit
def load_whole(X, index, count, stride, t, dim: tl.constexpr):
    """Loads a row with its four lanes."""
    words = ()
    for place in tl.static_range(words_of(dim) // 4):
        words += load_row(X, index, count, stride, 32 * place + 8 * t, dim)
    return words


@triton.jit
def paired(a, b):
    """Returns words of the same channel of two rows, one for each of 8 channels."""
    words = ()
    for place in tl.static_range(4):
        words += (joined(a[place], b[place], LOW), joined(a[place], b[place], HIGH))
    return words


@triton.jit
def gains_of_lag(Gains, lag, t, dim: tl.constexpr):
    """Loads the gains of all channels at a lag, as `load_whole` has those of a row."""
    SLICES: tl.constexpr = slices_of(dim)
    words = ()
    for place in tl.static_range(words_of(dim) // 4):
        home = Gains + (lag * SLICES + place // 2) * 128 + (4 * (place % 2) + t) * 8
        for half in tl.static_range(2):
            found = load_words(home + 64 * half, lag == lag)
            words += (joined(found[0], found[1], LOW), joined(found[2], found[3], LOW))
    return words


@triton.jit
def members_of(first, batch, row_blocks, ROWS: tl.constexpr):
    """Returns the row of the batch and the first query of members, blocks of queries, and which there are.

    The same queries of all rows of the batch are neighbours: they meet the same lags.
    """
    there = first < batch * row_blocks
    member = tl.minimum(first, batch * row_blocks - 1)
    return member % batch, member // batch * ROWS, there


@triton.jit(do_not_specialize=NUMBERS)
def word_scores_kernel(
    q, k, tables, scores, seen, batch, heads, group, queries, keys, query_start, band_first, band_lags,
    flags: tl.constexpr,
):  # fmt: skip
    """Writes the content product of at most LAGS lags to the scores of queries, or adds it to those of a query table.

    A lane has the channels 8 t to 8 t + 7, and those 32 later, of runs of LENGTH queries, each of another member. Runs meet the
    same lags: a matrix instruction takes two queries of each run at one lag. As lags go on, keys move through the registers.
    Warps have neighbouring runs, so that they find each other's keys in the cache.
    """
    LENGTH: tl.constexpr = flags.LENGTH
    LANES: tl.constexpr = 32 * flags.WARPS
    dim: tl.constexpr = flags.head_dim
    WORDS: tl.constexpr = words_of(flags.head_dim)
    kind: tl.constexpr = q.data.dtype.element_ty
    lane = tl.arange(0, LANES)
    warp, g, t = lane // 32, lane // 4 % 8, lane % 4
    ROWS: tl.constexpr = LENGTH * flags.WARPS
    row_blocks, parts = tl.cdiv(queries, ROWS), tl.cdiv(band_lags + 16, flags.LAGS)
    member_blocks = tl.cdiv(batch * row_blocks, 8)
    index = tl.program_id(0)
    block, part, head = index % member_blocks, index // member_blocks % parts, index // (member_blocks * parts)
    at, row, there = members_of(block * 8 + g, batch, row_blocks, ROWS)
    _at, first_row, _there = members_of(block * 8, batch, row_blocks, ROWS)
    _at, last_row, _there = members_of(block * 8 + 7, batch, row_blocks, ROWS)
    row += warp * LENGTH
    start = query_start + at * 0
    first_start, last_start = query_start, query_start
    if flags.STARTS:
        start = tl.load(seen.starts + at).to(tl.int32)
        first_start, last_start = tl.min(start, 0), tl.max(start, 0)
    # Columns whose keys some queries of a warp have, with those beside them in the same eights, whose gains are zero.
    before = part * flags.LAGS - (0 if flags.QUERY else 8)
    begin = tl.maximum(floored(-last_row - warp * LENGTH - (LENGTH - 1) - band_first - last_start), before)
    end = tl.minimum(raised(keys) - first_row - warp * LENGTH - band_first - first_start, before + flags.LAGS)
    end = tl.minimum(end, band_lags + (0 if flags.QUERY else 8))
    turns = tl.max(tl.cdiv(end - begin, 8), 0)
    offset = band_first + start
    Q = q.data + at.to(tl.int64) * q.batch + head.to(tl.int64) * q.head
    K = k.data + at.to(tl.int64) * k.batch + (head // group).to(tl.int64) * k.head
    Gains = gain_pointers(tables, head, band_lags, flags.head_dim)
    pair = at * heads + head
    home = scores.query + pair.to(tl.int64) * slab_of(queries, keys, band_lags) + offset
    apart = step_of(band_lags, keys) + 1
    q_words = ()
    for place in tl.static_range(LENGTH):
        q_words += (load_whole(Q, row + place, queries, q.time, t, dim),)
    met = row + offset
    # Keys come one step before they are met.
    window = ()
    for place in tl.static_range(LENGTH):
        window += load_whole(K, met + begin + place, keys, k.time, t, dim)
    for turn in range(0, turns):
        lag = begin + 8 * turn
        gains = gains_of_lag(Gains, tl.minimum(lag, band_lags) + g, t, dim)
        sums = (tl.zeros([LANES], tl.float32),) * (2 * LENGTH)
        for step in tl.static_range(8):
            window += load_whole(K, met + lag + LENGTH + step, keys, k.time, t, dim)
            factors = ()
            for place in tl.static_range(WORDS):
                factors += (tl.where(g == step, gains[place], 0),)
            changed = ()
            for two in tl.static_range(LENGTH // 2):
                a, b = q_words[2 * two], q_words[2 * two + 1]
                d = sums[4 * two : 4 * two + 4]
                for place in tl.static_range(WORDS // 2):
                    x = a[2 * place], b[2 * place], a[2 * place + 1], b[2 * place + 1]
                    y = (
                        window[2 * two * WORDS + 2 * place],
                        window[2 * two * WORDS + WORDS + 2 * place],
                        window[2 * two * WORDS + 2 * place + 1],
                        window[2 * two * WORDS + WORDS + 2 * place + 1],
                    )
                    d = add_product(d, x, y, factors[2 * place : 2 * place + 2], kind)
                changed += (d[0], d[1], d[2], d[3])
            sums = changed
            window = window[WORDS:]
        entries = home + row.to(tl.int64) * apart + lag + 2 * t
        for place in tl.static_range(LENGTH):
            begin_key = tl.maximum(floored(met + place), 0)
            end_key = tl.minimum(raised(met + place + band_lags), raised(keys))
            for odd in tl.static_range(2):
                found = sums[4 * (place // 2) + 2 * (place % 2) + odd]
                partner = met + place + lag + 2 * t + odd
                shown = there & (lag < end) & (row + place < queries) & (partner >= begin_key) & (partner < end_key)
                if flags.QUERY:
                    found += tl.load(entries + odd, mask=shown, other=0.0).to(tl.float32)
                tl.store(entries + odd, found.to(kind), mask=shown)
            entries += apart


@triton.jit
def reach_of(batch, own, owners, seen, low, high, count, keys, start, KEY: tl.constexpr, flags: tl.constexpr):
    """Returns the partners from the first to the end that rows see, or that see them, at lags from `low` to `high`."""
    if KEY:
        begin, end = tl.maximum(own - start - high, 0), tl.minimum(own - start - low + 1, count)
    else:
        begin, end = tl.maximum(own + start + low, 0), tl.minimum(own + start + high + 1, count)
        if flags.MASK:
            begin = tl.maximum(begin, tl.load(seen.spans + 2 * batch))
            end = tl.minimum(end, tl.load(seen.spans + 2 * batch + 1))
    if flags.PACKED:
        begin = tl.maximum(begin, tl.load(seen.spans + own, mask=own < owners, other=0))
        end = tl.minimum(end, tl.load(seen.spans + keys + own, mask=own < owners, other=0))
    return begin, end


@triton.jit
def span_of(batch, own, owners, seen, low, high, count, keys, start, KEY: tl.constexpr, flags: tl.constexpr):
    """Returns the same, and nothing for rows that there are not or that are hidden."""
    begin, end = reach_of(batch, own, owners, seen, low, high, count, keys, start, KEY, flags)
    there = own < owners
    if KEY and flags.MASK:
        there = there & (own >= tl.load(seen.spans + 2 * batch)) & (own < tl.load(seen.spans + 2 * batch + 1))
    return begin, tl.where(there, end, begin)


@triton.jit
def query_factors(Dscores, owner, begin, end, partner, row_step, t):
    """Loads the gradients of 64 keys in words of two for 16 queries: a lane has two eights of one query in each half of these."""
    words = ()
    for half in tl.static_range(2):
        for other in tl.static_range(2):
            eight = partner + SPAN * (t + 4 * other)
            place = owner[half].to(tl.int64) * row_step + eight
            words += load_words(Dscores + place, (eight + 8 > begin[half]) & (eight < end[half]) & (begin[half] < end[half]))
    return words


@triton.jit
def key_factors(Dscores, owner, begin, end, partner, row_step, t):
    """The same of 64 queries for 16 keys, the later query first."""
    words = ()
    for half in tl.static_range(2):
        for other in tl.static_range(2):
            for step in tl.static_range(0, SPAN, 2):
                row = partner + SPAN * (t + 4 * other) + step
                place = Dscores + row.to(tl.int64) * row_step + owner[half]
                is_seen, is_next_seen = (row >= begin[half]) & (row < end[half]), (row + 1 >= begin[half]) & (row + 1 < end[half])
                words += (load_pair(place + row_step, place, is_next_seen, is_seen),)
    return words


@triton.constexpr_function
def column_of(step, shift):
    """Returns which of 16 columns words of two slots at a step meet at a shift; -1 if none."""
    return step + shift if 0 <= step + shift < 16 else -1


@triton.jit
def column_factors(factors, g, STEP: tl.constexpr, COLUMN: tl.constexpr):
    """Returns two slots' factors, zero but for a column; `factors` are [8 columns' halves, 2 slots, 4 steps of two]."""
    place: tl.constexpr = 8 * (COLUMN // 8) + STEP // 2
    return tl.where(g == COLUMN % 8, factors[place], 0), tl.where(g == COLUMN % 8, factors[place + 4], 0)


@triton.jit
def add_column(sums, a, b, factors, kind: tl.constexpr):
    """Adds products of words, [2 slots, 8 channels], and two slots' factors to sums, [8 columns, 64 channels].

    Nothing but a type is compiled in, so that Triton reads this once for all columns: it takes longer to read than to compile.
    """
    changed = ()
    for pair in tl.static_range(4):
        x = a[2 * pair], a[2 * pair + 1], a[8 + 2 * pair], a[8 + 2 * pair + 1]
        y = b[2 * pair], b[2 * pair + 1], b[8 + 2 * pair], b[8 + 2 * pair + 1]
        changed += add_product(sums[4 * pair : 4 * pair + 4], x, y, factors, kind)
    return changed


@triton.jit(do_not_specialize=NUMBERS)
def word_rows_kernel(
    x, tables, scores, seen, dx, heads, group, queries, keys, query_start, first, last, band_first, band_lags, scale,
    KEY: tl.constexpr, flags: tl.constexpr,
):  # fmt: skip
    """Adds the band's share to dq of 16 queries a warp, or with KEY to dk of 16 keys from one query head; `x` are their partners.

    A warp takes 64 partners at a time, in words of two neighbours. A lane has 8 channels of slots t and t + 4.
    """
    dim: tl.constexpr = flags.head_dim
    SLICES: tl.constexpr = slices_of(flags.head_dim)
    LANES: tl.constexpr = 32 * flags.WARPS
    kind: tl.constexpr = x.data.dtype.element_ty
    lane = tl.arange(0, LANES)
    warp, g, t = lane // 32, lane // 4 % 8, lane % 4
    owners, count = (keys, queries) if KEY else (queries, keys)
    owner_blocks = tl.cdiv(owners, OWNERS * flags.WARPS)
    index = tl.program_id(0)
    part, block, pair = index % SLICES, index // SLICES % owner_blocks, index // (SLICES * owner_blocks)
    batch, head = pair // heads, pair % heads
    start = query_start_of(seen, batch, query_start, flags)
    X = head_of(x, batch, head if KEY else head // group)
    Gains = gain_pointers(tables, head, band_lags, flags.head_dim) + part * 128 + g * 8
    Dscores = scores.query + pair.to(tl.int64) * slab_of(queries, keys, band_lags)
    row_step = step_of(band_lags, keys)
    channel = part * SLICE + 8 * g
    low, high = tl.maximum(first, band_first), tl.minimum(last, band_first + band_lags - 1)
    first_row = (block * flags.WARPS + warp) * OWNERS
    row, later_row = first_row + g, first_row + 8 + g
    begin, end = span_of(batch, row, owners, seen, low, high, count, keys, start, KEY, flags)
    later_begin, later_end = span_of(batch, later_row, owners, seen, low, high, count, keys, start, KEY, flags)
    rows, begins, ends = (row, later_row), (begin, later_begin), (end, later_end)
    # Neither end of what rows see comes before that of the row before.
    lower, _end = reach_of(batch, first_row, owners, seen, low, high, count, keys, start, KEY, flags)
    last_row = tl.minimum(first_row + OWNERS, owners) - 1
    _begin, upper = reach_of(batch, last_row, owners, seen, low, high, count, keys, start, KEY, flags)
    lower, upper = floored(lower), tl.where(first_row < owners, upper, 0)
    nearest = first_row - start - band_first if KEY else first_row + start + band_first
    early, late = (tl.zeros([LANES], tl.float32),) * 16, (tl.zeros([LANES], tl.float32),) * 16
    for turn in range(0, tl.max(tl.cdiv(upper - lower, 8 * SPAN), 0)):
        # A warp that is done looks at partners that are there, and counts none.
        ahead = lower + 8 * SPAN * turn
        partner = tl.where(ahead < upper, ahead, nearest)
        ends = (tl.where(ahead < upper, end, begin), tl.where(ahead < upper, later_end, later_begin))
        # Words of two partners, [4 steps of two, 2 slots, 8 channels].
        partners = ()
        for step in tl.static_range(0, SPAN, 2):
            for other in tl.static_range(2):
                met = partner + SPAN * (t + 4 * other) + step
                a = load_row(X, met, count, x.time, channel, dim)
                b = load_row(X, met + 1, count, x.time, channel, dim)
                partners += paired(b, a) if KEY else paired(a, b)
        if KEY:
            factors = key_factors(Dscores, rows, begins, ends, partner, row_step, t)
        else:
            factors = query_factors(Dscores, rows, begins, ends, partner // 8 * 8, row_step, t)
        for SHIFT in tl.static_range(2 - SPAN if KEY else 1 - OWNERS, OWNERS if KEY else SPAN - 1):
            gains = ()
            for other in tl.static_range(2):
                if KEY:
                    lag = first_row - partner - start - band_first - SPAN * (t + 4 * other) + SHIFT - 1
                else:
                    lag = partner - first_row - start - band_first + SPAN * (t + 4 * other) + SHIFT
                gains += load_words(Gains + lag * (SLICES * 128), lag == lag)
                gains += load_words(Gains + lag * (SLICES * 128) + 64, lag == lag)
            for step in tl.static_range(0, SPAN, 2):
                if column_of(step, SHIFT if KEY else -SHIFT) >= 0:
                    given = partners[8 * step : 8 * step + 16]
                    operand = column_factors(factors, g, step, column_of(step, SHIFT if KEY else -SHIFT))
                    if column_of(step, SHIFT if KEY else -SHIFT) < 8:
                        early = add_column(early, gains, given, operand, kind)
                    else:
                        late = add_column(late, gains, given, operand, kind)
    Dx = head_of(dx, batch, head)
    for half in tl.static_range(2):
        for odd in tl.static_range(2):
            changed = first_row + 8 * half + 2 * t + odd
            add_row(Dx, changed, changed < owners, dx.time, channel, late if half else early, odd, scale, dim)


@triton.jit
def add_row(Dx, row, there, stride, channel, sums, odd: tl.constexpr, scale, dim: tl.constexpr):
    """Adds to 8 channels of a row what the matrix units have summed for an even row or the odd one after it."""
    kind: tl.constexpr = Dx.dtype.element_ty
    there = there & (channel < dim)
    pointers = Dx + row.to(tl.int64) * stride + channel
    if kind == tl.float32:
        for place in tl.static_range(8):
            change = sums[4 * (place // 2) + 2 * (place % 2) + odd] * scale
            tl.store(pointers + place, change + tl.load(pointers + place, mask=there, other=0.0), mask=there)
    else:
        before, after = load_words(pointers, there), ()
        for place in tl.static_range(4):
            low, high = halves(before[place], kind)
            after += (word_of(low + sums[4 * place + odd] * scale, high + sums[4 * place + 2 + odd] * scale, kind),)
        store_words(pointers, after, there)


@triton.jit
def gain_factors(
    Dscores, lag, at, row, there, seen, queries, keys, start, low, high, row_step, flags: tl.constexpr
):  # fmt: skip
    """Loads the gradients of SPAN queries at a lag, in words of two, zero where nothing may be seen."""
    met = row + start + lag
    # Queries that see their keys at this lag, counted from the first one.
    begin, end = tl.maximum(-met, 0), tl.minimum(queries - row, keys - met)
    if flags.MASK:
        begin = tl.maximum(begin, tl.load(seen.spans + 2 * at) - met)
        end = tl.minimum(end, tl.load(seen.spans + 2 * at + 1) - met)
    end = tl.where(there & (lag >= low) & (lag <= high), end, 0)
    pointers = Dscores + row.to(tl.int64) * row_step + met
    words = ()
    for step in tl.static_range(0, SPAN, 2):
        is_seen, is_next_seen = (step >= begin) & (step < end), (step + 1 >= begin) & (step + 1 < end)
        if flags.PACKED:
            is_seen &= met + step >= tl.load(seen.spans + row + step, mask=is_seen, other=0)
            is_seen &= met + step < tl.load(seen.spans + keys + row + step, mask=is_seen, other=0)
            is_next_seen &= met + step + 1 >= tl.load(seen.spans + row + step + 1, mask=is_next_seen, other=0)
            is_next_seen &= met + step + 1 < tl.load(seen.spans + keys + row + step + 1, mask=is_next_seen, other=0)
        words += (load_pair(pointers, pointers + row_step + 1, is_seen, is_next_seen),)
        pointers += 2 * (row_step + 1)
    return words


@triton.jit(do_not_specialize=NUMBERS)
def word_gain_kernel(
    q, k, scores, seen, dgain, batch, heads, group, queries, keys, query_start, first, last, band_first, band_lags,
    chunks, scale, flags: tl.constexpr,
):  # fmt: skip
    """Writes the share of dgain that a chunk of the members gives to 16 lags, [heads, chunks, lags, head_dim].

    It takes SPAN queries of 8 members at a time, in words of two neighbours. A lane has 8 channels of slots t and t + 4.
    """
    dim: tl.constexpr = flags.head_dim
    SLICES: tl.constexpr = slices_of(flags.head_dim)
    kind: tl.constexpr = q.data.dtype.element_ty
    lane = tl.arange(0, 32)
    g, t = lane // 4, lane % 4
    lag_blocks = tl.cdiv(band_lags, GAIN_LAGS)
    index = tl.program_id(0)
    part, lag_block, rest = index % SLICES, index // SLICES % lag_blocks, index // (SLICES * lag_blocks)
    chunk, head = rest % chunks, rest // chunks
    lag = band_first + lag_block * GAIN_LAGS
    channel = part * SLICE + 8 * g
    low, high = tl.maximum(first, band_first), tl.minimum(last, band_first + band_lags - 1)
    # Blocks of queries that see these lags.
    row_blocks = tl.cdiv(queries, SPAN)
    begin, end = 0, row_blocks
    if not flags.STARTS:
        begin = tl.maximum(-query_start - lag - (GAIN_LAGS - 1), 0) // SPAN
        end = tl.minimum(row_blocks, tl.cdiv(tl.maximum(keys - query_start - lag, 0), SPAN))
    if (lag > high) | (lag + GAIN_LAGS <= low):
        end = begin
    early, late = (tl.zeros([32], tl.float32),) * 16, (tl.zeros([32], tl.float32),) * 16
    # Each turn has the next queries of the same rows of the batch, where these come by eights: keys are in the cache.
    period = tl.where(batch % 8 == 0, batch, 8)
    columns = period // 8
    segments, turns = chunks // columns, tl.cdiv((end - begin) * batch, period)
    length = tl.cdiv(turns, segments)
    segment, first_member = chunk // columns, begin * batch + chunk % columns * 8
    for turn in range(segment * length, tl.minimum(segment * length + length, turns)):
        member = first_member + turn * period
        Q, K, D, at, row, start, there = (), (), (), (), (), (), ()
        for other in tl.static_range(2):
            at_other, row_other, _there = members_of(member + t + 4 * other, batch, row_blocks, SPAN)
            start_other = query_start + at_other * 0
            if flags.STARTS:
                start_other = tl.load(seen.starts + at_other).to(tl.int32)
            Q += (q.data + at_other.to(tl.int64) * q.batch + head.to(tl.int64) * q.head,)
            K += (k.data + at_other.to(tl.int64) * k.batch + (head // group).to(tl.int64) * k.head,)
            D += (scores.query + (at_other * heads + head).to(tl.int64) * slab_of(queries, keys, band_lags),)
            at += (at_other,)
            row += (row_other,)
            start += (start_other,)
            there += (member + t + 4 * other < end * batch,)
        # Words of two queries, [4 steps of two, 2 slots, 8 channels].
        q_words = ()
        for step in tl.static_range(0, SPAN, 2):
            for other in tl.static_range(2):
                a = load_row(Q[other], row[other] + step, queries, q.time, channel, dim)
                b = load_row(Q[other], row[other] + step + 1, queries, q.time, channel, dim)
                q_words += paired(a, b)
        factors = ()
        for half in tl.static_range(2):
            for other in tl.static_range(2):
                factors += gain_factors(
                    D[other], lag + 8 * half + g, at[other], row[other], there[other], seen, queries, keys,
                    start[other], low, high, step_of(band_lags, keys), flags,
                )  # fmt: skip
        met = row[0] + start[0] + lag, row[1] + start[1] + lag
        before = load_row(K[0], met[0], keys, k.time, channel, dim), load_row(K[1], met[1], keys, k.time, channel, dim)
        for SHIFT in tl.static_range(SPAN - 2 + GAIN_LAGS):
            a = load_row(K[0], met[0] + SHIFT + 1, keys, k.time, channel, dim)
            b = load_row(K[1], met[1] + SHIFT + 1, keys, k.time, channel, dim)
            k_words = paired(before[0], a) + paired(before[1], b)
            before = a, b
            for step in tl.static_range(0, SPAN, 2):
                if column_of(-step, SHIFT) >= 0:
                    given = q_words[8 * step : 8 * step + 16]
                    operand = column_factors(factors, g, step, column_of(-step, SHIFT))
                    if column_of(-step, SHIFT) < 8:
                        early = add_column(early, given, k_words, operand, kind)
                    else:
                        late = add_column(late, given, k_words, operand, kind)
    share = dgain + ((head.to(tl.int64) * chunks + chunk) * band_lags + lag_block * GAIN_LAGS) * dim
    for half in tl.static_range(2):
        for odd in tl.static_range(2):
            step = 8 * half + 2 * t + odd
            there = (lag_block * GAIN_LAGS + step < band_lags) & (channel < dim)
            found = late if half else early
            for place in tl.static_range(0, 8, 4):
                numbers = ()
                for pair in tl.static_range(place // 2, place // 2 + 2):
                    numbers += (found[4 * pair + odd] * scale, found[4 * pair + 2 + odd] * scale)
                store_numbers(share + step * dim + channel + place, numbers, there)
