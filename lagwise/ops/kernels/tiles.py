"""What the kernels share: the terms of a tile, who may see whom, dropout, loads of rows.

A tile is a rectangle of queries and keys in either order of its axes: `row` and `key` are their indices, shaped so that
`lag = key - row - start` is the tile. The hardware's exponential has the base 2: a difference of logits is multiplied by log2(e).
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

PAST = tl.constexpr(0)
NEAR = tl.constexpr(1)
FUTURE = tl.constexpr(2)


@triton.jit
def product(a, b):
    """Multiplies matrices and sums in float32; float32 operands are not rounded to fewer bits."""
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def place_of(count, heads, SIZE: tl.constexpr):
    """Returns which block of SIZE rows this program has, of which pair of a row of the batch and a head, and these two."""
    index, blocks = tl.program_id(0), tl.cdiv(count, SIZE)
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
def load_columns(X, index, count, stride, dim: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr):
    """Loads rows of a matrix [count, dim] as the columns of [WIDTH, index]."""
    channel = tl.arange(0, WIDTH)
    pointers = X + index.to(tl.int64)[None, :] * stride + channel[:, None]
    if WHOLE and dim == WIDTH:
        return tl.load(pointers)
    there = (index >= 0)[None, :] & (index < count)[None, :] & (channel < dim)[:, None]
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
def visible(lag, row, key, KeyMask, seen, sizes, RAGGED: tl.constexpr, flags: tl.constexpr):
    """Says which pairs of a tile may be seen, by their lag, the last key of a ragged tile, a mask, or packed sequences."""
    found = row >= 0
    if flags.LIMITED:
        found = found & (lag >= sizes.first) & (lag <= sizes.last)
    if RAGGED:
        found = found & (key < sizes.keys)
    if flags.MASK:
        found = found & (tl.load(KeyMask + key, mask=key < sizes.keys, other=0) != 0)
    if flags.PACKED:
        there = row < sizes.queries
        found = found & (key >= tl.load(seen.sequence_start + row, mask=there, other=0))
        found = found & (key < tl.load(seen.sequence_end + row, mask=there, other=0))
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
def lag_scores(Scores, index, count, lag, first, lags):
    """Gathers from scores [queries or keys, lags] the entry of each pair; what is beyond the columns is no number to use.

    `index` says of each pair which query, or which key, it has: among the neighbours of a tile the columns of one query go up
    with the key, those of one key go down with the query, and both lie side by side. Lags of a tile that are beyond the columns
    read what lies beside them: scores have room for all near lags before the first row and after the last.
    """
    row = tl.minimum(index, count - 1).to(tl.int64)
    return gather(Scores + row * lags + (lag - first))


@triton.jit
def with_ends(x, past, future, lag, first, lags):
    """Replaces in a tile what lies before the columns and after them."""
    return tl.where(lag < first, past, tl.where(lag < first + lags, x, future))


@triton.jit
def scatter(pointers, x, mask):
    """Stores a tile to scattered addresses, from where its numbers are; the counterpart of `gather`."""
    if DIRECT:
        kind: tl.constexpr = pointers.dtype.element_ty
        addresses, there = pointers.to(tl.int64), mask.to(tl.int32)
        if kind == tl.float32:
            tl.inline_asm_elementwise(
                """{
                .reg .pred there;
                setp.ne.s32 there, $3, 0;
                @there st.global.f32 [$1], $2;
                mov.b32 $0, 0;
                }""",
                "=r,l,f,r", [addresses, x, there], dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip
        else:
            tl.inline_asm_elementwise(
                """{
                .reg .pred there;
                setp.ne.s32 there, $3, 0;
                @there st.global.b16 [$1], $2;
                mov.b32 $0, 0;
                }""",
                "=r,l,h,r", [addresses, x.to(kind).to(tl.int16, bitcast=True), there], dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip
    else:
        tl.store(pointers, x.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def put_lag_scores(Scores, index, count, lag, first, lags, x):
    """Writes a tile to scores [queries or keys, lags]; what is beyond the columns is left out."""
    column = lag - first
    inside = (column >= 0) & (column < lags) & (index < count)
    scatter(Scores + index.to(tl.int64) * lags + column, x, inside)


@triton.jit
def clear_scores(Scores, index, count, step, shift, begin, end, seen, lags, fill, COLUMNS: tl.constexpr):
    """Writes a number to scores [index, lags] where the partner lies before `begin` or from `end` on, and from column `seen` on.

    The partner of column c is `index + step * (shift + c)`: for queries, step 1, a key, for keys, step -1, a query. Only blocks
    at the ends of the sequence have many such columns.
    """
    lowest, highest = tl.min(index, 0), tl.max(index, 0)
    if step == 1:
        until, since = begin - lowest - shift, end - highest - shift
    else:
        until, since = highest - shift - end + 1, lowest - shift - begin + 1
    since = tl.maximum(tl.minimum(since, seen), 0)
    fill_columns(Scores, index, count, step, shift, begin, end, seen, lags, fill, 0, tl.minimum(until, lags), COLUMNS)
    fill_columns(Scores, index, count, step, shift, begin, end, seen, lags, fill, since, lags, COLUMNS)


@triton.jit
def fill_columns(Scores, index, count, step, shift, begin, end, seen, lags, fill, first, last, COLUMNS: tl.constexpr):
    """Does so for the columns from `first` to `last`."""
    for start in range(first, last, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        partner = index[:, None] + step * (shift + column[None, :])
        outside = (partner < begin) | (partner >= end) | (column >= seen)[None, :]
        outside = outside & (index < count)[:, None] & (column < lags)[None, :]
        tl.store(Scores + index.to(tl.int64)[:, None] * lags + column[None, :], fill, mask=outside)


@triton.jit
def load_numbers(X, index, count):
    """Loads numbers of a vector where they are used, as `gather` does; beyond its end there is no number to use."""
    return gather(X + tl.minimum(index, count - 1))


@triton.jit
def load_ends(Ends, index, count, THERE: tl.constexpr):
    """Loads ends [count, 2]: what lags before the first column and after the last one see; zero where there are none."""
    if THERE:
        entry = Ends + 2 * tl.minimum(index, count - 1)
        return gather(entry), gather(entry + 1)
    else:
        return 0.0, 0.0


@triton.jit
def store_ends(Ends, index, count, past, future):
    """Stores ends [count, 2]."""
    tl.store(Ends + 2 * index, past, mask=index < count)
    tl.store(Ends + 2 * index + 1, future, mask=index < count)


@triton.jit
def before(x, lag, first):
    """Keeps of a tile what lies before the lag `first`."""
    return tl.where(lag < first, x, 0.0)


@triton.jit
def after(x, lag, last):
    """Keeps of a tile what lies after the lag `last`."""
    return tl.where(lag > last, x, 0.0)


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
