"""Scores of vector tables, [rows, lags], in a sheared layout, and the products that their gradients become.

    score[r, c] = x_r . table(lag of c)           c = 0 .. lags - 1, the partner of x_r is number r + offset + c

Rows are queries and partners keys, with the lag of column c `band_first + c`; for the scores of keys it is the other way round,
and the lag falls: `band_last - c`. A tile [rows, partners] needs one number for each of its pairs:

    address of a pair (r, p) = r step + p = r step + r + offset + c

`step` is a multiple of 8, so that a tile is an aligned view of the memory, and is loaded and stored as any matrix. In lag
coordinates it is not: each row begins one number farther beyond a multiple of 8. The kernels here take the rows 8 a + b of one
residue b together. Their columns are aligned once b is counted in: a column's place among the aligned numbers is its spot.

Numbers are read and written by eights. A row has room for all eights that hold one of its columns, with zeros beside these, as
far as there are partners: `step` is no larger than the number of partners, raised to a multiple of 8.
"""

# Triton's language is not typed as Python is.
# pyright: basic, reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from lagwise.ops.kernels.plan import ALIGNED
from lagwise.ops.kernels.tiles import floored, product, raised, slab_of, step_of, store_rows

RESIDUES = tl.constexpr(ALIGNED)
NUMBERS = [
    "heads", "pairs", "group", "queries", "keys", "query_start", "first", "last", "band_first", "lags",
    "query_first", "query_lags", "key_first", "key_lags", "value_first", "value_lags",
    "query_span", "key_span", "together",
]  # fmt: skip


@dataclass(frozen=True)
class SideFlags:
    """What a kernel is compiled for of one table: whose scores it makes, and the width of its vectors.

    Heads have their own tables unless it is SHARED. ENDS: scores have ends, or gradients of them; ADDED: to what is there.
    """

    NAME: str
    dim: int
    WIDTH: int
    SHARED: bool
    ENDS: bool
    ADDED: bool = False

    @property
    def REVERSED(self) -> bool:
        """Whether rows are keys."""
        return self.NAME == "key"


@dataclass(frozen=True)
class ProductFlags:
    """What a kernel is compiled for: the tables, the rows of one residue and the columns that a program takes at a time.

    ALONE: the rows of a block belong to one pair of a batch row and a head, not to some `together`; the others are as in `Flags`.
    """

    sides: tuple[SideFlags, ...]
    ROWS: int
    COLUMNS: int
    ALONE: bool
    STARTS: bool
    MASK: bool
    PACKED: bool


class Side(NamedTuple):
    """The tensors of one table: `x` are its rows, or their gradient, and `sums` are those of its columns."""

    x: Any
    table: Any
    scores: Any
    ends: Any
    sums: Any
    head_step: Any
    lag_step: Any


class Numbers(NamedTuple):
    """The numbers of all tables of a call."""

    heads: Any
    pairs: Any
    group: Any
    queries: Any
    keys: Any
    query_start: Any
    first: Any
    last: Any
    band_first: Any
    lags: Any
    query_first: Any
    query_lags: Any
    key_first: Any
    key_lags: Any
    value_first: Any
    value_lags: Any
    query_span: Any
    key_span: Any
    together: Any


@triton.constexpr_function
def side_of(flags, EACH):
    """Returns the flags of one of the tables."""
    return flags.sides[EACH]


@triton.constexpr_function
def count_of_sides(flags):
    return len(flags.sides)


@triton.jit
def owners_of(n, of: tl.constexpr):
    """Returns how many tables there are, and how many pairs of a batch row and a head have the same one."""
    if of.SHARED:
        return 1, n.pairs
    else:
        return n.heads, n.pairs // n.heads


@triton.jit
def counts_of(n, of: tl.constexpr):
    """Returns the numbers of rows and of partners, and how many rows of a residue are counted for each pair."""
    if of.REVERSED:
        return n.keys, n.queries, n.key_span
    else:
        return n.queries, n.keys, n.query_span


@triton.jit
def columns_of(n, of: tl.constexpr):
    """Returns the first lag of a table and its number of lags."""
    if of.NAME == "query":
        return n.query_first, n.query_lags
    elif of.NAME == "key":
        return n.key_first, n.key_lags
    else:
        return n.value_first, n.value_lags


@triton.jit
def offset_of(start, n, of: tl.constexpr):
    """Returns the partner of row 0 in column 0."""
    if of.REVERSED:
        return 1 - n.band_first - n.lags - start
    else:
        return n.band_first + start


class Rows(NamedTuple):
    """Some rows of one residue, of one pair of a batch row and a head after the other."""

    pair: Any
    batch: Any
    head: Any
    eights: Any  # the multiples of 8 below them
    row: Any
    there: Any
    place: Any  # where they have their first aligned number among all scores
    offset: Any
    start: Any


@triton.jit
def rows_of_residue(block, residue, owner, seen, n, of: tl.constexpr, flags: tl.constexpr):
    """Returns a block of the rows of all pairs that have one table; of each pair `span` rows are counted.

    A block has the same rows of some pairs together, neighbours: they see the same columns.
    """
    owners, members = owners_of(n, of)
    count, partners, span = counts_of(n, of)
    step = tl.arange(0, flags.ROWS)
    if flags.ALONE:
        member, before = block * flags.ROWS // span, block * flags.ROWS % span * RESIDUES
        step = step * RESIDUES
    else:
        blocks = span * n.together // flags.ROWS
        member, before = block // blocks * n.together + step % n.together, 0
        step = (block % blocks * (flags.ROWS // n.together) + step // n.together) * RESIDUES
    pair = tl.minimum(member, members - 1) * owners + owner
    batch, head = pair // n.heads, pair % n.heads
    row = before + residue + step
    start = tl.load(seen.starts + batch).to(tl.int32) if flags.STARTS else n.query_start
    offset, apart = offset_of(start, n, of), step_of(n.lags, partners).to(tl.int64)
    place = pair * slab_of(count, partners, n.lags) + (before + residue) * apart + before + floored(offset) + step * apart + step
    return Rows(pair, batch, head, before + step, row, (member < members) & (row < count), place, offset, start)


@triton.jit
def row_pointers(x, rows, group, WIDTH: tl.constexpr):
    """Returns where rows lie in a `View`, [rows, WIDTH]."""
    base = rows.batch.to(tl.int64) * x.batch + (rows.head // group).to(tl.int64) * x.head + rows.row.to(tl.int64) * x.time
    return x.data + base[:, None] + tl.arange(0, WIDTH)[None, :]


@triton.jit
def load_flat(x, rows, group, dim: tl.constexpr, WIDTH: tl.constexpr):
    """Loads rows of a `View`, zero where there are none."""
    there = rows.there[:, None]
    if dim != WIDTH:
        there = there & (tl.arange(0, WIDTH) < dim)[None, :]
    return tl.load(row_pointers(x, rows, group, WIDTH), mask=there, other=0.0)


@triton.jit
def load_table(side, owner, column, n, of: tl.constexpr):
    """Loads the vectors of some columns, zero where there is no column, [column, WIDTH]."""
    first, count = columns_of(n, of)
    lag = n.band_first + (n.lags - 1 - column if of.REVERSED else column)
    place = tl.minimum(tl.maximum(lag - first, 0), count - 1)
    channel = tl.arange(0, of.WIDTH)
    there = ((column >= 0) & (column < n.lags))[:, None]
    if of.dim != of.WIDTH:
        there = there & (channel < of.dim)[None, :]
    pointers = side.table + owner.to(tl.int64) * side.head_step + place.to(tl.int64)[:, None] * side.lag_step + channel[None, :]
    return tl.load(pointers, mask=there, other=0.0)


@triton.jit
def end_vector(side, owner, n, of: tl.constexpr, END: tl.constexpr):
    """Loads the vector of the first lag of the band (END 0) or of the last one, [1, WIDTH] in float32."""
    first, count = columns_of(n, of)
    place = tl.minimum(tl.maximum(n.band_first + END * (n.lags - 1) - first, 0), count - 1)
    channel = tl.arange(0, of.WIDTH)
    pointers = side.table + owner.to(tl.int64) * side.head_step + place.to(tl.int64) * side.lag_step + channel
    return tl.load(pointers, mask=channel < of.dim, other=0.0).to(tl.float32)[None, :]


@triton.jit
def end_pointers(ends, rows, n, of: tl.constexpr, END: tl.constexpr):
    """Returns where rows have an end, [pairs, 2, rows]."""
    count, _, _ = counts_of(n, of)
    return ends + (rows.pair.to(tl.int64) * 2 + END) * count + rows.row


@triton.jit
def lead_of(rows, residue, of: tl.constexpr):
    """Returns the spot of column 0."""
    return rows.offset - floored(rows.offset) + residue


@triton.jit
def seen_spots(rows, residue, seen, n, REACH: tl.constexpr, of: tl.constexpr, flags: tl.constexpr):
    """Returns from which spot on to which one rows have columns whose pairs may be seen, in whole eights.

    Passes over pairs take tiles, and write what they look at. Where scores are made for them, REACH says how far from a pair that
    may be seen others are that are looked at. Pairs beyond hold whatever was there before.
    """
    count, partners, _ = counts_of(n, of)
    row, there, start = rows.row, rows.there, rows.start
    # The partners of a row, of which the lags are between `first` and `last`.
    begin = row - start - n.last if of.REVERSED else row + start + n.first
    end = row - start - n.first + 1 if of.REVERSED else row + start + n.last + 1
    begin, end = tl.maximum(begin - REACH, 0), tl.minimum(end + REACH, partners)
    if flags.MASK and REACH == 0:
        spans = seen.spans + 2 * rows.batch
        first_key, end_key = tl.load(spans), tl.load(spans + 1)
        if of.REVERSED:
            shown = tl.load(seen.key_mask + rows.batch.to(tl.int64) * count + row, mask=there, other=0) != 0
            there = there & shown & (row >= first_key) & (row < end_key)
        else:
            begin, end = tl.maximum(begin, first_key), tl.minimum(end, end_key)
    if flags.PACKED and REACH == 0:
        begin = tl.maximum(begin, tl.load(seen.spans + row, mask=there, other=0))
        end = tl.minimum(end, tl.load(seen.spans + count + row, mask=there, other=0))
    there = there & (begin < end)
    lead, home = lead_of(rows, residue, of), -floored(rows.offset) - rows.eights
    begin, end = tl.maximum(floored(begin) + home, floored(lead)), tl.minimum(raised(end) + home, raised(lead + n.lags))
    return tl.where(there, begin, raised(lead + n.lags)), tl.where(there, end, 0)


@triton.jit
def place_of_rows(n, of: tl.constexpr, flags: tl.constexpr):
    """Returns a program's block of rows, its residue and its table, and whether there is such a block."""
    index = tl.program_id(0) // count_of_sides(flags)
    owners, members = owners_of(n, of)
    _, _, span = counts_of(n, of)
    row_blocks = tl.cdiv(members, n.together) * (span * n.together // flags.ROWS)
    residue, block, owner = index % RESIDUES, index // RESIDUES % row_blocks, index // (RESIDUES * row_blocks)
    return block, residue, owner, owner < owners


@triton.jit
def write_scores(side, seen, n, REACH: tl.constexpr, of: tl.constexpr, flags: tl.constexpr):
    """Writes the scores of some rows of one residue, with zeros beside them, and their ends, [past or future, rows]."""
    block, residue, owner, there = place_of_rows(n, of, flags)
    if there:
        rows = rows_of_residue(block, residue, owner, seen, n, of, flags)
        x = load_flat(side.x, rows, n.group if of.REVERSED else 1, of.dim, of.WIDTH)
        begin, end = seen_spots(rows, residue, seen, n, REACH, of, flags)
        lead = lead_of(rows, residue, of)
        for place in range(tl.min(begin, 0), tl.max(end, 0), flags.COLUMNS):
            spot = place // 8 * 8 + tl.arange(0, flags.COLUMNS)
            vectors = load_table(side, owner, spot - lead, n, of)
            found = product(x, tl.trans(vectors)).to(side.scores.dtype.element_ty)
            written = (spot[None, :] >= begin[:, None]) & (spot[None, :] < end[:, None])
            tl.store(side.scores + rows.place[:, None] + spot[None, :], found, mask=written)
        if of.ENDS:
            for END in tl.static_range(2):
                found = tl.sum(x.to(tl.float32) * end_vector(side, owner, n, of, END), 1)
                tl.store(end_pointers(side.ends, rows, n, of, END), found, mask=rows.there)


@triton.jit(do_not_specialize=NUMBERS)
def scores_kernel(
    sides, seen, heads, pairs, group, queries, keys, query_start, first, last, band_first, lags,
    query_first, query_lags, key_first, key_lags, value_first, value_lags, query_span, key_span, together,
    REACH: tl.constexpr, flags: tl.constexpr,
):  # fmt: skip
    """Writes the scores of all tables, each with programs of its own."""
    n = Numbers(
        heads, pairs, group, queries, keys, query_start, first, last, band_first, lags,
        query_first, query_lags, key_first, key_lags, value_first, value_lags, query_span, key_span, together,
    )  # fmt: skip
    for EACH in tl.static_range(count_of_sides(flags)):
        if tl.program_id(0) % count_of_sides(flags) == EACH:
            write_scores(sides[EACH], seen, n, REACH, side_of(flags, EACH), flags)


@triton.jit
def add_row_gradients(side, seen, n, scale, of: tl.constexpr, flags: tl.constexpr):
    """Adds to the gradient of some rows of one residue what their scores give: scale sum_c dscore[r, c] table(c)."""
    block, residue, owner, there = place_of_rows(n, of, flags)
    if there:
        rows = rows_of_residue(block, residue, owner, seen, n, of, flags)
        begin, end = seen_spots(rows, residue, seen, n, 0, of, flags)
        lead = lead_of(rows, residue, of)
        ROWS: tl.constexpr = flags.ROWS
        WIDTH: tl.constexpr = of.WIDTH
        change = tl.zeros([ROWS, WIDTH], tl.float32)
        for place in range(tl.min(begin, 0), tl.max(end, 0), flags.COLUMNS):
            spot = place // 8 * 8 + tl.arange(0, flags.COLUMNS)
            read = (spot[None, :] >= begin[:, None]) & (spot[None, :] < end[:, None])
            gradients = tl.load(side.scores + rows.place[:, None] + spot[None, :], mask=read, other=0.0)
            change += product(gradients, load_table(side, owner, spot - lead, n, of))
        if of.ENDS:
            for END in tl.static_range(2):
                gradient = tl.load(end_pointers(side.ends, rows, n, of, END), mask=rows.there, other=0.0)
                change += gradient[:, None] * end_vector(side, owner, n, of, END)
        change = change * scale
        if of.ADDED:
            change += load_flat(side.x, rows, 1, of.dim, of.WIDTH).to(tl.float32)
        written = rows.there[:, None] & (tl.arange(0, of.WIDTH) < of.dim)[None, :]
        tl.store(row_pointers(side.x, rows, 1, of.WIDTH), change.to(side.x.data.dtype.element_ty), mask=written)


@triton.jit(do_not_specialize=[*NUMBERS, "scale"])
def score_rows_kernel(
    sides, seen, heads, pairs, group, queries, keys, query_start, first, last, band_first, lags,
    query_first, query_lags, key_first, key_lags, value_first, value_lags, query_span, key_span, together,
    scale, flags: tl.constexpr,
):  # fmt: skip
    """Adds to the gradients of the raw q and k what their scores give."""
    n = Numbers(
        heads, pairs, group, queries, keys, query_start, first, last, band_first, lags,
        query_first, query_lags, key_first, key_lags, value_first, value_lags, query_span, key_span, together,
    )  # fmt: skip
    for EACH in tl.static_range(count_of_sides(flags)):
        if tl.program_id(0) % count_of_sides(flags) == EACH:
            add_row_gradients(sides[EACH], seen, n, scale, side_of(flags, EACH), flags)


@triton.jit
def shares_of(shares, n, of: tl.constexpr, flags: tl.constexpr):
    """Returns how many shares of the rows there are: where rows of the batch start at their own positions, one per member."""
    if flags.STARTS:
        _, members = owners_of(n, of)
        return members
    else:
        return shares


@triton.jit
def blocks_that_see(spot, blocks, offset, n, of: tl.constexpr, flags: tl.constexpr):
    """Returns the first block of rows of a pair, or of some together, that has partners in COLUMNS spots, and how many have."""
    _, partners, _ = counts_of(n, of)
    size = flags.ROWS // n.together * RESIDUES
    first = tl.maximum(-floored(offset) - spot - flags.COLUMNS, 0) // size
    end = tl.cdiv(tl.maximum(raised(partners) - floored(offset) - spot, 0), size)
    return first, tl.maximum(tl.minimum(end, blocks) - first, 0)


@triton.jit
def sum_columns(side, seen, n, shares, spots, of: tl.constexpr, flags: tl.constexpr):
    """Writes what a share of the rows of one residue gives to the gradient of some columns, sum_r dscore[r, c] x_r.

    `sums` are [shares, tables, residues, spots, dim]. The last two spots are those of the ends, which have programs of their own.
    Where rows of the batch start at their own positions, a share is one member of a table, whose columns are aligned alike.
    """
    index = tl.program_id(0) // count_of_sides(flags)
    owners, members = owners_of(n, of)
    _, _, span = counts_of(n, of)
    spot_blocks = tl.cdiv(spots - 2, flags.COLUMNS)
    programs = spot_blocks + (1 if of.ENDS else 0)
    spot_block, residue, rest = index % programs, index // programs % RESIDUES, index // (programs * RESIDUES)
    owner, share = rest % owners, rest // owners
    shares = shares_of(shares, n, of, flags)
    ROWS: tl.constexpr = flags.ROWS
    COLUMNS: tl.constexpr = flags.COLUMNS
    WIDTH: tl.constexpr = of.WIDTH
    if share < shares:
        # Pairs, or some of them together, and the blocks of rows of each; a share takes each `step`-th one from `lower` on.
        groups, blocks, before, lower, step = tl.cdiv(members, n.together), span * n.together // ROWS, 0, share, shares
        start = n.query_start
        if flags.STARTS:
            groups, before, lower, step = 1, share * blocks, 0, 1
            start = tl.load(seen.starts + (share * owners + owner) // n.heads).to(tl.int32)
        home = side.sums + ((share * owners + owner) * RESIDUES + residue).to(tl.int64) * spots * of.dim
        if spot_block < spot_blocks:
            spot = spot_block * flags.COLUMNS + tl.arange(0, flags.COLUMNS)
            change = tl.zeros([COLUMNS, WIDTH], tl.float32)
            first, count = blocks_that_see(spot_block * COLUMNS, blocks, offset_of(start, n, of), n, of, flags)
            for place in range(lower, groups * count, step):
                # The blocks that were written last come first: they are still in the cache.
                from_last = groups * count - 1 - place
                block = before + from_last // count * blocks + first + from_last % count
                rows = rows_of_residue(block, residue, owner, seen, n, of, flags)
                begin, end = seen_spots(rows, residue, seen, n, 0, of, flags)
                read = (spot[None, :] >= begin[:, None]) & (spot[None, :] < end[:, None])
                gradients = tl.load(side.scores + rows.place[:, None] + spot[None, :], mask=read, other=0.0)
                change += product(tl.trans(gradients), load_flat(side.x, rows, n.group if of.REVERSED else 1, of.dim, of.WIDTH))
            store_rows(home, spot, spots - 2, of.dim, change, of.dim, of.WIDTH)
        elif of.ENDS:
            past = tl.zeros([ROWS, WIDTH], tl.float32)
            future = tl.zeros([ROWS, WIDTH], tl.float32)
            for place in range(lower, groups * blocks, step):
                rows = rows_of_residue(before + place, residue, owner, seen, n, of, flags)
                x = load_flat(side.x, rows, n.group if of.REVERSED else 1, of.dim, of.WIDTH).to(tl.float32)
                past += x * tl.load(end_pointers(side.ends, rows, n, of, 0), mask=rows.there, other=0.0)[:, None]
                future += x * tl.load(end_pointers(side.ends, rows, n, of, 1), mask=rows.there, other=0.0)[:, None]
            channel = tl.arange(0, of.WIDTH)
            tl.store(home + (spots - 2) * of.dim + channel, tl.sum(past, 0), mask=channel < of.dim)
            tl.store(home + (spots - 1) * of.dim + channel, tl.sum(future, 0), mask=channel < of.dim)


@triton.jit(do_not_specialize=[*NUMBERS, "shares", "spots"])
def score_table_kernel(
    sides, seen, heads, pairs, group, queries, keys, query_start, first, last, band_first, lags,
    query_first, query_lags, key_first, key_lags, value_first, value_lags, query_span, key_span, together,
    shares, spots, flags: tl.constexpr,
):  # fmt: skip
    """Writes the sums that the gradients of all tables become."""
    n = Numbers(
        heads, pairs, group, queries, keys, query_start, first, last, band_first, lags,
        query_first, query_lags, key_first, key_lags, value_first, value_lags, query_span, key_span, together,
    )  # fmt: skip
    for EACH in tl.static_range(count_of_sides(flags)):
        if tl.program_id(0) % count_of_sides(flags) == EACH:
            sum_columns(sides[EACH], seen, n, shares, spots, side_of(flags, EACH), flags)


@triton.jit
def column_sums(side, seen, lag, owner, n, shares, spots, of: tl.constexpr, flags: tl.constexpr):
    """Adds up the shares of some lags, [lag, WIDTH]; zero for those without a column. ROWS are the sums taken at a time."""
    WIDTH: tl.constexpr = of.WIDTH
    LAGS: tl.constexpr = lag.shape[0]
    owners, _ = owners_of(n, of)
    channel = tl.arange(0, WIDTH)[None, None, :]
    there = ((lag >= n.band_first) & (lag < n.band_first + n.lags))[None, :, None] & (channel < of.dim)
    is_past, is_future = lag == n.band_first, lag == n.band_first + n.lags - 1
    total = tl.zeros([LAGS, WIDTH], tl.float32)
    for first_part in range(0, shares * RESIDUES, flags.ROWS):
        part = first_part + tl.arange(0, flags.ROWS)
        share, residue = part // RESIDUES, part % RESIDUES
        start = n.query_start
        if flags.STARTS:
            start = tl.load(seen.starts + share * owners // n.heads, mask=share < shares, other=0).to(tl.int32)
        offset = offset_of(start, n, of)
        lead = offset - floored(offset) + residue
        row = ((share * owners + owner) * RESIDUES + residue).to(tl.int64) * spots
        column = n.band_first + n.lags - 1 - lag if of.REVERSED else lag - n.band_first
        place = (row + lead)[:, None, None] + column[None, :, None]
        shown = there & (share < shares)[:, None, None]
        total += tl.sum(tl.load(side.sums + place * of.dim + channel, mask=shown, other=0.0), 0)
        if of.ENDS:
            for END in tl.static_range(2):
                is_end = (is_future if END == 1 else is_past)[None, :, None]
                place = row[:, None, None] + (spots - 2 + END) + tl.zeros([1, LAGS, 1], tl.int32)
                total += tl.sum(tl.load(side.sums + place * of.dim + channel, mask=shown & is_end, other=0.0), 0)
    return total


@triton.jit
def fold_columns(side, seen, n, shares, spots, scale, of: tl.constexpr, flags: tl.constexpr):
    """Writes the gradient of some columns of a table [heads or 1, count, dim]; lags beyond its columns add to its ends."""
    first, count = columns_of(n, of)
    owners, _ = owners_of(n, of)
    shares = shares_of(shares, n, of, flags)
    index, column_blocks = tl.program_id(0) // count_of_sides(flags), tl.cdiv(count, flags.COLUMNS)
    block, owner = index % column_blocks, index // column_blocks
    if owner < owners:
        step = tl.arange(0, flags.COLUMNS)
        column = block * flags.COLUMNS + step
        lag = tl.where(column < count, first + column, n.band_first - 1)
        total = column_sums(side, seen, lag, owner, n, shares, spots, of, flags)
        # Lags before the columns are left to the first block, those after them to the last.
        end = n.band_first + n.lags
        past_blocks = tl.where(block == 0, tl.cdiv(tl.maximum(tl.minimum(first, end) - n.band_first, 0), flags.COLUMNS), 0)
        future = tl.maximum(first + count, n.band_first)
        future_blocks = tl.where(block == column_blocks - 1, tl.cdiv(tl.maximum(end - future, 0), flags.COLUMNS), 0)
        for each in range(0, past_blocks + future_blocks):
            is_past = each < past_blocks
            lag = tl.where(is_past, n.band_first + each * flags.COLUMNS, future + (each - past_blocks) * flags.COLUMNS) + step
            lag = tl.where(is_past & (lag >= first), n.band_first - 1, lag)
            found = column_sums(side, seen, lag, owner, n, shares, spots, of, flags)
            here = column == tl.where(is_past, 0, count - 1)
            total += tl.where(here[:, None], tl.sum(found, 0)[None, :], 0.0)
        total = total if of.NAME == "value" else total * scale
        store_rows(side.table + owner.to(tl.int64) * side.head_step, column, count, side.lag_step, total, of.dim, of.WIDTH)


@triton.jit(do_not_specialize=[*NUMBERS, "shares", "spots", "scale"])
def fold_vectors_kernel(
    sides, seen, heads, pairs, group, queries, keys, query_start, first, last, band_first, lags,
    query_first, query_lags, key_first, key_lags, value_first, value_lags, query_span, key_span, together,
    shares, spots, scale, flags: tl.constexpr,
):  # fmt: skip
    """Writes the gradients of all tables from their sums."""
    n = Numbers(
        heads, pairs, group, queries, keys, query_start, first, last, band_first, lags,
        query_first, query_lags, key_first, key_lags, value_first, value_lags, query_span, key_span, together,
    )  # fmt: skip
    for EACH in tl.static_range(count_of_sides(flags)):
        if tl.program_id(0) % count_of_sides(flags) == EACH:
            fold_columns(sides[EACH], seen, n, shares, spots, scale, side_of(flags, EACH), flags)
