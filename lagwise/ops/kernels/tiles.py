"""What the kernels share: the terms of a tile, who may see whom, dropout, loads of rows.

A tile is a rectangle of queries and keys, [queries, keys] or turned: `row` and `key` are the indices along its axes, and `lag`,
key - row - start, is the tile. The hardware's exponential has the base 2: a difference of logits is multiplied by log2(e).
"""

# Triton's language is not typed as Python is.
# pyright: basic, reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# Where the running maximum starts: below every logit, and finite, so that no difference of infinities appears.
LOWEST = tl.constexpr(-1e30)

# Under the interpreter, which knows no assembly, gathers are ordinary loads.
DIRECT = tl.constexpr(not triton.knobs.runtime.interpret)

# SplitMix64, as in lagwise/noise.py.
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
MIX_2 = tl.constexpr(0x94D049BB133111EB)
DROPOUT_STREAM = tl.constexpr(1)
DROPPED_BITS = tl.constexpr(40)

# Stretches of tiles, by where their lags are: before all tables, within the band of the scores, after all tables; on the edges
# of the band tiles hold both its lags and others. Without scores all tiles between past and future are INNER.
PAST = tl.constexpr(0)
EDGE = tl.constexpr(1)
INNER = tl.constexpr(2)
LATE_EDGE = tl.constexpr(3)
FUTURE = tl.constexpr(4)
# Past and future in one loop, for tables of scalars without slopes: there a tile needs to know its side for a number alone.
FAR_SIDES = tl.constexpr(5)
STRETCHES = tl.constexpr(6)


@triton.constexpr_function
def is_near(SIDE):
    """Says whether a stretch's tiles look up each pair's own lag."""
    return 0 < SIDE < 4


@triton.constexpr_function
def place_from_keys(SIDE):
    """Returns which stretch of queries sees a block of keys so: those that see it in their future come first."""
    return SIDE if SIDE == 5 else 4 - SIDE


@triton.constexpr_function
def is_taken(SIDE, flags):
    """Says whether a call has a loop of its own over the tiles of a stretch."""
    if SIDE == 2 or not flags.FAR:
        return SIDE == 2
    together = not (flags.SCORED or flags.SLOPES)
    return SIDE == 5 if together else SIDE < 5 and (flags.SCORED or SIDE in (0, 4))


@triton.jit
def product(a, b):
    """Multiplies matrices and sums in float32; float32 operands are not rounded to fewer bits."""
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def place_of(count, heads, SIZE: tl.constexpr, LAST_FIRST: tl.constexpr = False):
    """Returns which block of SIZE rows this program has, of which pair of a row of the batch and a head, and these two.

    A pass that reads what another wrote takes its LAST_FIRST: that is still in the cache.
    """
    index, blocks = tl.program_id(0), tl.cdiv(count, SIZE)
    if LAST_FIRST:
        index = tl.num_programs(0) - 1 - index
    pair = index // blocks
    return index % blocks, pair, pair // heads, pair % heads


@triton.jit
def head_of(x, batch, head):
    """Returns where the rows of a head begin in a `View`."""
    return x.data + batch.to(tl.int64) * x.batch + head.to(tl.int64) * x.head


@triton.jit
def load_rows(X, index, count, stride, dim: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr):
    """Loads rows of a matrix [count, dim] as [index, WIDTH], with zeros beyond its ends; WHOLE says that none lies beyond."""
    channel = tl.arange(0, WIDTH)
    pointers = X + index.to(tl.int64)[:, None] * stride + channel[None, :]
    if WHOLE and dim == WIDTH:
        return tl.load(pointers)
    there = (index >= 0)[:, None] & (index < count)[:, None] & (channel < dim)[None, :]
    return tl.load(pointers, mask=there, other=0.0)


@triton.jit
def load_keys(
    X, KeyMask, key, keys, stride, dim: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr, HIDE: tl.constexpr
):  # fmt: skip
    """Loads rows of k or v, with HIDE zeros where a mask hides them: they may hold anything, and zero times NaN is NaN."""
    if HIDE:
        channel = tl.arange(0, WIDTH)
        shown = tl.load(KeyMask + key, mask=(key >= 0) & (key < keys), other=0) != 0
        pointers = X + key.to(tl.int64)[:, None] * stride + channel[None, :]
        return tl.load(pointers, mask=shown[:, None] & (channel < dim)[None, :], other=0.0)
    else:
        return load_rows(X, key, keys, stride, dim, WIDTH, WHOLE)


@triton.jit
def store_rows(X, index, count, stride, x, dim: tl.constexpr, WIDTH: tl.constexpr):
    """Stores [index, WIDTH] to rows of a matrix [count, dim]."""
    channel = tl.arange(0, WIDTH)
    pointers = X + index.to(tl.int64)[:, None] * stride + channel[None, :]
    tl.store(pointers, x.to(X.dtype.element_ty), mask=(index < count)[:, None] & (channel < dim)[None, :])


@triton.jit
def head_rows(X, pair, heads, count, dim: tl.constexpr, BY_TOKEN: tl.constexpr):
    """Returns where the rows of a head begin in a tensor [batch, heads, count, dim], and how far apart they are.

    BY_TOKEN says that it lies in memory as [batch, count, heads, dim].
    """
    if BY_TOKEN:
        return X + ((pair // heads).to(tl.int64) * count * heads + pair % heads) * dim, heads * dim
    else:
        return X + pair.to(tl.int64) * count * dim, dim


@triton.jit
def load_gain(Gain, head_dim: tl.constexpr, WIDTH: tl.constexpr, GAIN: tl.constexpr, CHANNELS: tl.constexpr):
    """Loads a column of a gain, one number or one per channel, [1, channels]; without a gain it is one."""
    if CHANNELS:
        channel = tl.arange(0, WIDTH)
        return tl.load(Gain + channel, mask=channel < head_dim, other=0.0).to(tl.float32)[None, :]
    elif GAIN:
        return tl.load(Gain).to(tl.float32)
    else:
        return 1.0


@triton.jit
def visible(lag, row, key, KeyMask, seen, sizes, RAGGED: tl.constexpr, TURNED: tl.constexpr, flags: tl.constexpr):
    """Says which pairs of a tile may be seen, by their lag, the last key of a ragged tile, a mask, or packed sequences."""
    found = lag == lag
    if flags.LIMITED:
        found = found & (lag >= sizes.first) & (lag <= sizes.last)
    if RAGGED:
        found = found & turned((key >= 0) & (key < sizes.keys), not TURNED)
    if flags.MASK:
        shown = tl.load(KeyMask + key, mask=(key >= 0) & (key < sizes.keys), other=0) != 0
        found = found & turned(shown, not TURNED)
    if flags.PACKED:
        there = row < sizes.queries
        begin = tl.load(seen.spans + row, mask=there, other=0)
        end = tl.load(seen.spans + sizes.keys + row, mask=there, other=0)
        keys = turned(key, not TURNED)
        found = found & (keys >= turned(begin, TURNED)) & (keys < turned(end, TURNED))
    return found


@triton.jit
def gather(pointers):
    """Loads a tile from scattered addresses, in float32.

    An ordinary load takes a layout of its own, made for rows of memory, and its result goes through shared memory to the
    layout of the matrix products. Neighbouring diagonals are in the cache anyway: this loads each number where it is used.
    """
    if DIRECT:
        kind: tl.constexpr = pointers.dtype.element_ty
        addresses = pointers.to(tl.int64)
        if kind == tl.float32:
            return tl.inline_asm_elementwise(
                "ld.global.f32 $0, [$1];", "=f,l", [addresses], dtype=tl.float32, is_pure=True, pack=1
            )  # fmt: skip
        elif kind == tl.bfloat16:
            return tl.inline_asm_elementwise(
                """{
                .reg .b16 low, high;
                mov.b16 low, 0;
                ld.global.b16 high, [$1];
                mov.b32 $0, {low, high};
                }""",
                "=f,l", [addresses], dtype=tl.float32, is_pure=True, pack=1,
            )  # fmt: skip
        else:
            return tl.inline_asm_elementwise(
                """{
                .reg .b16 found;
                ld.global.b16 found, [$1];
                cvt.f32.f16 $0, found;
                }""",
                "=f,l", [addresses], dtype=tl.float32, is_pure=True, pack=1,
            )  # fmt: skip
    else:
        return tl.load(pointers).to(tl.float32)


@triton.jit
def at_lags(Table, lag, first):
    """Gathers from a table that has a column for each lag of the tile."""
    return gather(Table + (lag - first))


@triton.jit
def floored(x):
    """Returns the last multiple of 8 that is at most x; the compiler sees it."""
    return (x >> 3) * 8


@triton.jit
def raised(x):
    """Returns the first multiple of 8 that is at least x."""
    return floored(x + 7)


@triton.jit
def step_of(lags, partners):
    """Returns how far apart rows of scores are in a tile: there is room for all eights of their columns, or of all partners."""
    return floored(tl.minimum(lags + 16, partners + 7))


@triton.jit
def slab_of(rows, partners, lags):
    """Returns how many numbers the scores of a head take."""
    return (rows.to(tl.int64) - 1) * step_of(lags, partners) + raised(partners)


@triton.jit
def score_pointers(Scores, row, partner, partners, lags):
    """Returns where scores lie of a tile [row, partner]: queries and keys, or for the scores of keys keys and queries.

    The entry of a pair is at `row * step + partner`, with a step that is a multiple of 8: rows of the tile are aligned.
    """
    return Scores + row[:, None] * step_of(lags, partners) + partner[None, :]


@triton.jit
def have_room(row, partner, partners, offset, lags):
    """Says which pairs of a tile [row, partner] have a place among the row's scores: all eights with one of its columns.

    Row r has a column for each partner from `r + offset` on, as far as there are any.
    """
    begin, end = floored(row + offset)[:, None], tl.minimum(raised(row + offset + lags), raised(partners))[:, None]
    return (partner[None, :] >= begin) & (partner[None, :] < end)


@triton.jit
def add_scores(x, Scores, owner, owners, partner, partners, offset, lags, TURNED: tl.constexpr, WITHIN: tl.constexpr):
    """Adds scores to a tile [owner, partner], or TURNED [partner, owner]; beyond the columns it adds zero.

    In half precision they are added by a product with the identity: as operands they come from shared memory, turned or not, and
    their layout is not converted. WITHIN says that all pairs of the tile have a column.
    """
    if WITHIN:
        found = tl.load(score_pointers(Scores, owner, partner, partners, lags))
    else:
        row = tl.minimum(owner, owners - 1)
        pointers = score_pointers(Scores, row, partner, partners, lags)
        found = tl.load(pointers, mask=have_room(row, partner, partners, offset, lags), other=0.0)
    if TURNED:
        found = tl.trans(found)
    if DIRECT and found.dtype != tl.float32:
        SIZE: tl.constexpr = x.shape[0]
        place = tl.arange(0, SIZE)
        return tl.dot((place[:, None] == place[None, :]).to(found.dtype), found, x)
    else:
        return x + found.to(tl.float32)


@triton.jit
def put_scores(Scores, x, owner, owners, partner, partners, offset, lags, WITHIN: tl.constexpr):
    """Writes a tile [owner, partner] to scores, where they have room for it."""
    pointers = score_pointers(Scores, owner, partner, partners, lags)
    found = x.to(Scores.dtype.element_ty)
    if WITHIN:
        tl.store(pointers, found)
    else:
        tl.store(pointers, found, mask=have_room(owner, partner, partners, offset, lags) & (owner < owners)[:, None])


@triton.jit
def tile_indices(start, SIZE: tl.constexpr, SCORED: tl.constexpr):
    """Returns the indices of a tile, from a multiple of its size on; SCORED says so once more, since scores must be aligned."""
    if SCORED:
        return start // SIZE * SIZE + tl.arange(0, SIZE)
    else:
        return start + tl.arange(0, SIZE)


@triton.jit
def turned(x, TURNED: tl.constexpr):
    """Returns numbers of rows as a factor of a tile [row, key], or TURNED [key, row]."""
    if TURNED:
        return x[None, :]
    else:
        return x[:, None]


@triton.constexpr_function
def has_past(SIDE, flags):
    """Says whether tiles of a stretch hold lags before the columns of the scores."""
    return SIDE in (PAST, EDGE) or (SIDE == LATE_EDGE and not flags.APART)


@triton.constexpr_function
def has_future(SIDE, flags):
    """Says whether tiles of a stretch hold lags after the columns of the scores."""
    return SIDE in (FUTURE, LATE_EDGE) or (SIDE == EDGE and not flags.APART)


@triton.jit
def add_ends(x, past, future, lag, bands, SIDE: tl.constexpr, flags: tl.constexpr):
    """Adds to a tile what lags before the columns see, and what those after them see."""
    if has_past(SIDE, flags):
        x += before(past, lag, bands, SIDE)
    if has_future(SIDE, flags):
        x += after(future, lag, bands, SIDE)
    return x


@triton.jit
def load_end(Ends, index, count, END: tl.constexpr, WHOLE: tl.constexpr):
    """Loads ends [2, count]: what lags before the first column (END 0) or after the last one see."""
    return tl.load(Ends + END * count + (index if WHOLE else tl.minimum(index, count - 1)))


@triton.jit
def before(x, lag, bands, SIDE: tl.constexpr):
    """Keeps of a tile what lies before the columns of the scores."""
    return x if SIDE == PAST else tl.where(lag < bands.first, x, 0.0)


@triton.jit
def after(x, lag, bands, SIDE: tl.constexpr):
    """Keeps of a tile what lies after the columns of the scores."""
    return x if SIDE == FUTURE else tl.where(lag >= bands.first + bands.lags, x, 0.0)


@triton.jit
def mix(x):
    x = (x ^ (x >> 30)) * MIX_1
    x = (x ^ (x >> 27)) * MIX_2
    return x ^ (x >> 31)


@triton.jit
def next_state(state, counter):
    return mix(state + counter.to(tl.uint64) * GOLDEN)


@triton.jit
def dropout_state(Seed, batch, head):
    """Returns the state of the dropout mask of one head, before rows and keys are counted."""
    state = mix(tl.load(Seed).to(tl.int64).to(tl.uint64))
    state = mix(state + DROPOUT_STREAM * GOLDEN)
    return next_state(next_state(state, batch.to(tl.int64)), head.to(tl.int64))


@triton.jit
def kept(state, row, key, dropped):
    """Says which pairs of a tile dropout keeps; `dropped` is the probability of dropping in steps of 2^-24."""
    return (next_state(next_state(state, row.to(tl.int64)), key.to(tl.int64)) >> DROPPED_BITS).to(tl.int32) >= dropped
