"""Scores of vector tables, [rows, lags], in a sheared layout, and the products that their gradients become.

    score[r, c] = x_r . table(lag of c)           c = 0 .. lags - 1, the partner of x_r is number r + offset + c

Rows are queries and partners keys, with the lag of column c `band_first + c`; for the scores of keys it is the other way round,
and the lag falls: `band_last - c`. A tile [rows, partners] needs one number for each of its pairs. Rows lie `stretch` apart, one
more than a multiple of 8:

    address(r, c) = r stretch + lead + c,     of a pair (r, p) with p = r + offset + c:     r (stretch - 1) + home + p

`home = lead - offset` is a multiple of 8, so that a tile is an aligned view of the memory, and is loaded and stored as any
matrix. In lag coordinates it is not: row r begins r numbers beyond a multiple of 8. The kernels here take the rows 8 a + b of one
residue b together. Their columns are aligned once b is counted in, so that nothing is read or written number by number.

Where gradients replace the scores, `stretch` leaves room between the rows for what tiles hold beyond the columns.
"""

# Triton's language is not typed as Python is.
# pyright: basic, reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false

from typing import Any, NamedTuple

import triton
import triton.language as tl

from lagwise.ops.kernels.plan import ALIGNED
from lagwise.ops.kernels.tiles import DIRECT, home_of, product, store_rows

# Numbers before the first score and after the last one that tiles may read.
ROOM = 512
# Rows of one residue, and columns, that a program takes at a time.
ROWS, COLUMNS = (64, 64) if DIRECT.value else (16, 16)

RESIDUES = tl.constexpr(ALIGNED)
SCORE_NUMBERS = [
    "heads", "group", "count", "partners", "query_start", "table_first", "table_lags",
    "first", "last", "band_first", "lags", "stretch", "slab",
]  # fmt: skip
SHARE_NUMBERS = ["owners", "members", "shares", "spots", "span"]


@triton.jit
def offset_of(seen, batch, query_start, band_first, lags, REVERSED: tl.constexpr, STARTS: tl.constexpr):
    """Returns the partner of row 0 in column 0."""
    start = tl.load(seen.starts + batch).to(tl.int32) if STARTS else query_start
    if REVERSED:
        return 1 - band_first - lags - start
    else:
        return band_first + start


class Rows(NamedTuple):
    """Some rows of one residue, of one pair of a batch row and a head after the other."""

    pair: Any
    batch: Any
    head: Any
    row: Any
    there: Any
    place: Any  # where they have their first aligned number among all scores


@triton.jit
def rows_of_residue(block, residue, owner, owners, members, heads, count, span, stretch, slab, ROWS: tl.constexpr):
    """Returns a block of the rows of all pairs that have one table; of each pair `span` rows are counted."""
    flat = block * ROWS + tl.arange(0, ROWS)
    member, eights = flat // span, flat % span * RESIDUES
    row, pair = eights + residue, member * owners + owner
    place = pair.to(tl.int64) * (slab // 8 * 8) + row.to(tl.int64) * (stretch // 8 * 8) + eights
    return Rows(pair, pair // heads, pair % heads, row, (member < members) & (row < count), place)


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
def load_table(Table, column, band_first, lags, table_first, table_lags, lag_step, dim: tl.constexpr, WIDTH: tl.constexpr,
               REVERSED: tl.constexpr, kind: tl.constexpr):  # fmt: skip
    """Loads the vectors of some columns, zero where there is no column, [column, WIDTH]."""
    lag = band_first + (lags - 1 - column if REVERSED else column)
    place = tl.minimum(tl.maximum(lag - table_first, 0), table_lags - 1)
    channel = tl.arange(0, WIDTH)
    there = ((column >= 0) & (column < lags))[:, None] & (channel < dim)[None, :]
    pointers = Table + place.to(tl.int64)[:, None] * lag_step + channel[None, :]
    return tl.load(pointers, mask=there, other=0.0).to(kind)


@triton.jit(do_not_specialize=[*SCORE_NUMBERS, *SHARE_NUMBERS])
def scores_kernel(
    x, table, out, ends, seen, head_step, lag_step, heads, group, count, partners, query_start, table_first, table_lags,
    first, last, band_first, lags, stretch, slab, owners, members, shares, spots, span,
    dim: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ROOM: tl.constexpr,
    REVERSED: tl.constexpr, STARTS: tl.constexpr, ENDS: tl.constexpr,
):  # fmt: skip
    """Writes some columns of the scores, of rows of one residue, with zeros beside them, and end columns, [past or future, rows].

    A program has one tile of the table and takes a share of the rows, one block after the other.
    """
    spot, residue, owner, share = place_in_table(spots, owners, COLUMNS)
    Table = table + owner.to(tl.int64) * head_step
    offset = offset_of(seen, owner * 0, query_start, band_first, lags, REVERSED, STARTS)
    column = spot - (offset + home_of(offset) + residue)
    kind: tl.constexpr = x.data.dtype.element_ty
    vectors = load_table(Table, column, band_first, lags, table_first, table_lags, lag_step, dim, WIDTH, REVERSED, kind)
    for block in range(share, tl.cdiv(members * span, ROWS), shares):
        rows = rows_of_residue(block, residue, owner, owners, members, heads, count, span, stretch, slab, ROWS)
        if STARTS:
            batch = (block * ROWS // span * owners + owner) // heads
            offset = offset_of(seen, batch, query_start, band_first, lags, REVERSED, STARTS)
            column = spot - (offset + home_of(offset) + residue)
            vectors = load_table(Table, column, band_first, lags, table_first, table_lags, lag_step, dim, WIDTH, REVERSED, kind)
        found = product(load_flat(x, rows, group, dim, WIDTH), tl.trans(vectors))
        # A row owns the memory up to the next one, the last row up to the end of the slab.
        length = stretch - 1 + tl.where(residue == RESIDUES - 1, RESIDUES, 0)
        length = tl.where(rows.row == count - 1, slab - (rows.place - rows.pair.to(tl.int64) * slab), length)
        length = tl.where(rows.there, length, 0).to(tl.int32) // 8 * 8
        tl.store(out + rows.place[:, None] + spot[None, :], found.to(kind), mask=spot[None, :] < length[:, None])
        if ENDS:
            home = ends + rows.pair.to(tl.int64) * 2 * count + rows.row
            for END in tl.static_range(2):
                here = column == (0 if (END == 1) == REVERSED else lags - 1)
                there = rows.there & (tl.max(here.to(tl.int32), 0) > 0)
                tl.store(home + END * count, tl.sum(found * here.to(tl.float32)[None, :], 1), mask=there)
    if tl.program_id(0) == 0:
        room = tl.arange(0, ROOM)
        tl.store(out - ROOM + room, tl.zeros([ROOM], kind))
        tl.store(out + (members * owners).to(tl.int64) * slab + room, tl.zeros([ROOM], kind))


@triton.jit
def place_in_table(spots, owners, COLUMNS: tl.constexpr):
    """Returns a program's aligned columns, its residue, its table, and its share of the rows."""
    index, blocks = tl.program_id(0), spots // COLUMNS
    rest = index // (blocks * RESIDUES)
    return index % blocks * COLUMNS + tl.arange(0, COLUMNS), index // blocks % RESIDUES, rest % owners, rest // owners


@triton.jit
def seen_columns(
    rows, offset, seen, start, count, partners, first, last, lags,
    REVERSED: tl.constexpr, MASK: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Returns the columns of some rows whose pairs may be seen, from the first to the end.

    Programs write what they look at. Other pairs hold whatever was there before.
    """
    row, there = rows.row, rows.there
    # The partners of a row, of which the lags are between `first` and `last`.
    begin = row - start - last if REVERSED else row + start + first
    end = row - start - first + 1 if REVERSED else row + start + last + 1
    begin, end = tl.maximum(begin, 0), tl.minimum(end, partners)
    if MASK:
        spans = seen.spans + 2 * rows.batch
        first_key, end_key = tl.load(spans, mask=there, other=0), tl.load(spans + 1, mask=there, other=0)
        if REVERSED:
            shown = tl.load(seen.key_mask + rows.batch.to(tl.int64) * count + row, mask=there, other=0) != 0
            there = there & shown & (row >= first_key) & (row < end_key)
        else:
            begin, end = tl.maximum(begin, first_key), tl.minimum(end, end_key)
    if PACKED:
        begin = tl.maximum(begin, tl.load(seen.spans + row, mask=there, other=0))
        end = tl.minimum(end, tl.load(seen.spans + count + row, mask=there, other=0))
    return tl.maximum(begin - row - offset, 0), tl.where(there, tl.minimum(end - row - offset, lags), 0)


@triton.jit
def load_gradients(
    scores, ends, rows, spot, column, begin, end, count, lags, REVERSED: tl.constexpr, ENDS: tl.constexpr, kind: tl.constexpr
):  # fmt: skip
    """Loads gradients of scores, [row, spot], zero where no pair is seen, with those of the ends in the end columns."""
    found = tl.load(scores + rows.place[:, None] + spot[None, :], mask=rows.there[:, None], other=0.0)
    found = tl.where((column[None, :] >= begin[:, None]) & (column[None, :] < end[:, None]), found, 0.0)
    if ENDS:
        found = found.to(tl.float32)
        home = ends + rows.pair.to(tl.int64) * 2 * count + rows.row
        for END in tl.static_range(2):
            here = (column == (0 if (END == 1) == REVERSED else lags - 1)).to(tl.float32)
            found += tl.load(home + END * count, mask=rows.there, other=0.0)[:, None] * here[None, :]
    return found.to(kind)


@triton.jit(do_not_specialize=[*SCORE_NUMBERS, "owners", "members", "span", "scale"])
def score_rows_kernel(
    scores, ends, table, dx, seen, head_step, lag_step, heads, group, count, partners, query_start, table_first, table_lags,
    first, last, band_first, lags, stretch, slab, owners, members, span, scale,
    dim: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, REVERSED: tl.constexpr,
    STARTS: tl.constexpr, MASK: tl.constexpr, PACKED: tl.constexpr, ENDS: tl.constexpr, ADDED: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    """Adds to the gradient of some rows of one residue what their scores give: scale sum_c dscore[r, c] table(c)."""
    index, row_blocks = tl.program_id(0), tl.cdiv(members * span, ROWS)
    residue, block, owner = index % RESIDUES, index // RESIDUES % row_blocks, index // (RESIDUES * row_blocks)
    rows = rows_of_residue(block, residue, owner, owners, members, heads, count, span, stretch, slab, ROWS)
    batch = (block * ROWS // span * owners + owner) // heads
    offset = offset_of(seen, batch, query_start, band_first, lags, REVERSED, STARTS)
    start = (1 - band_first - lags - offset) if REVERSED else offset - band_first
    lead = offset + home_of(offset) + residue
    Table = table + owner.to(tl.int64) * head_step
    begin, end = seen_columns(rows, offset, seen, start, count, partners, first, last, lags, REVERSED, MASK, PACKED)
    change = tl.zeros([ROWS, WIDTH], tl.float32)
    for place in range(0, lead + lags, COLUMNS):
        spot = place + tl.arange(0, COLUMNS)
        gradients = load_gradients(scores, ends, rows, spot, spot - lead, begin, end, count, lags, REVERSED, ENDS, kind)
        vectors = load_table(Table, spot - lead, band_first, lags, table_first, table_lags, lag_step, dim, WIDTH, REVERSED, kind)
        change += product(gradients, vectors)
    change = change * scale
    if ADDED:
        change += load_flat(dx, rows, 1, dim, WIDTH).to(tl.float32)
    there = rows.there[:, None] & (tl.arange(0, WIDTH) < dim)[None, :]
    tl.store(row_pointers(dx, rows, 1, WIDTH), change.to(dx.data.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=[*SCORE_NUMBERS, *SHARE_NUMBERS])
def score_table_kernel(
    scores, ends, x, sums, seen, head_step, lag_step, heads, group, count, partners, query_start, table_first, table_lags,
    first, last, band_first, lags, stretch, slab, owners, members, shares, spots, span,
    dim: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, REVERSED: tl.constexpr,
    STARTS: tl.constexpr, MASK: tl.constexpr, PACKED: tl.constexpr, ENDS: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    """Writes what one share gives to the gradient of some columns, from rows of one residue, sum_r dscore[r, c] x_r.

    A table has `members`, the rows of the batch, or with one for all heads all of their heads. Where rows of the batch start at
    their own positions, a share is one member, whose columns are aligned alike.
    """
    spot, residue, owner, share = place_in_table(spots, owners, COLUMNS)
    offset = offset_of(seen, (share * owners + owner) // heads, query_start, band_first, lags, REVERSED, STARTS)
    start = (1 - band_first - lags - offset) if REVERSED else offset - band_first
    column = spot - (offset + home_of(offset) + residue)
    change = tl.zeros([COLUMNS, WIDTH], tl.float32)
    row_blocks = tl.cdiv(members * span, ROWS)
    lower, upper = (share * (span // ROWS), (share + 1) * (span // ROWS)) if STARTS else (share, row_blocks)
    for block in range(lower, upper, 1 if STARTS else shares):
        rows = rows_of_residue(block, residue, owner, owners, members, heads, count, span, stretch, slab, ROWS)
        begin, end = seen_columns(rows, offset, seen, start, count, partners, first, last, lags, REVERSED, MASK, PACKED)
        gradients = load_gradients(scores, ends, rows, spot, column, begin, end, count, lags, REVERSED, ENDS, kind)
        change += product(tl.trans(gradients), load_flat(x, rows, group, dim, WIDTH))
    home = sums + ((share * owners + owner) * RESIDUES + residue).to(tl.int64) * spots * dim
    store_rows(home, spot, spots, dim, change, dim, WIDTH)


@triton.jit
def column_sums(
    Sums, seen, lag, owners, owner, heads, query_start, band_first, lags, spots, shares,
    dim: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, REVERSED: tl.constexpr, STARTS: tl.constexpr,
):  # fmt: skip
    """Adds up the shares of some lags, [lag, WIDTH]; zero for those without a column."""
    column = (band_first + lags - 1 - lag if REVERSED else lag - band_first)[None, :, None]
    channel = tl.arange(0, WIDTH)[None, None, :]
    there = (column >= 0) & (column < lags) & (channel < dim)
    total = tl.zeros([lag.shape[0], WIDTH], tl.float32)
    for first_part in range(0, shares * RESIDUES, PARTS):
        part = first_part + tl.arange(0, PARTS)
        share, residue = part // RESIDUES, part % RESIDUES
        if STARTS:
            start = tl.load(seen.starts + share * owners // heads, mask=share < shares, other=0).to(tl.int32)
        else:
            start = query_start
        offset = (1 - band_first - lags - start) if REVERSED else band_first + start
        base = ((share * owners + owner) * RESIDUES + residue).to(tl.int64) * spots + offset + home_of(offset) + residue
        place = (base[:, None, None] + column) * dim + channel
        total += tl.sum(tl.load(Sums + place, mask=there & (share < shares)[:, None, None], other=0.0), 0)
    return total


@triton.jit(do_not_specialize=[
    "owners", "heads", "query_start", "band_first", "lags", "spots", "shares", "first", "count", "scale",
])  # fmt: skip
def fold_vectors_kernel(
    sums, seen, dtable, owners, heads, query_start, band_first, lags, spots, shares, first, count, scale,
    dim: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, REVERSED: tl.constexpr,
    STARTS: tl.constexpr,
):  # fmt: skip
    """Writes the gradient of some columns of a table [heads or 1, count, dim]; lags beyond its columns add to its ends."""
    index, column_blocks = tl.program_id(0), tl.cdiv(count, COLUMNS)
    block, owner = index % column_blocks, index // column_blocks
    step = tl.arange(0, COLUMNS)
    column = block * COLUMNS + step
    total = column_sums(
        sums, seen, tl.where(column < count, first + column, band_first - 1), owners, owner, heads, query_start,
        band_first, lags, spots, shares, dim, WIDTH, PARTS, REVERSED, STARTS,
    )  # fmt: skip
    # Lags before the columns are left to the first block, those after them to the last.
    end = band_first + lags
    past_blocks = tl.where(block == 0, tl.cdiv(tl.maximum(tl.minimum(first, end) - band_first, 0), COLUMNS), 0)
    future = tl.maximum(first + count, band_first)
    blocks = past_blocks + tl.where(block == column_blocks - 1, tl.cdiv(tl.maximum(end - future, 0), COLUMNS), 0)
    for each in range(0, blocks):
        is_past = each < past_blocks
        lag = tl.where(is_past, band_first + each * COLUMNS, future + (each - past_blocks) * COLUMNS) + step
        lag = tl.where(is_past & (lag >= first), band_first - 1, lag)
        found = column_sums(
            sums, seen, lag, owners, owner, heads, query_start, band_first, lags, spots, shares,
            dim, WIDTH, PARTS, REVERSED, STARTS,
        )  # fmt: skip
        here = column == tl.where(is_past, 0, count - 1)
        total += tl.where(here[:, None], tl.sum(found, 0)[None, :], 0.0)
    store_rows(dtable + owner.to(tl.int64) * count * dim, column, count, dim, total * scale, dim, WIDTH)
