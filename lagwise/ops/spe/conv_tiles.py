"""Filters of noise at any positions and on grids: a tile of tokens makes the noise that it meets by itself.

A run of tokens that stand side by side makes the filter a product with a band: row t holds the taps, moved to the right by t. On
a grid a run lies in one line of cells, and each line of taps meets a line of noise of its own.
"""

# Triton's language is not typed as Python is.
# pyright: basic, reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false

import triton
import triton.language as tl

from lagwise.ops.kernels.rng import CODE_STEP, GATE_STEP, LEAST, channel_state, in_two, numbers, sum_product
from lagwise.ops.kernels.tiles import next_state

# A run on a grid as one number: its line times 2^32, plus its column, which may be before the line's first.
BEFORE = tl.constexpr(1024)
# The largest size of codes as they lie in memory.
MOST = tl.constexpr(16384.0)


@triton.jit
def keep_of(Gate, at, GATE: tl.constexpr):
    """Returns sqrt(1 - delta) of a channel, by which a gate multiplies its taps."""
    if not GATE:
        return 1.0
    return 1.0 / tl.sqrt(1.0 + tl.exp(tl.load(Gate + at).to(tl.float32)))


@triton.jit
def level_of(Gate, at, GATE: tl.constexpr):
    """Returns sqrt(delta) of a channel, which multiplies the gate's noise."""
    if not GATE:
        return 0.0
    return 1.0 / tl.sqrt(1.0 + tl.exp(-tl.load(Gate + at).to(tl.float32)))


@triton.jit
def gate_numbers(Seed, at, channels, gate_heads, REALIZATIONS: tl.constexpr):
    """Returns the noise of a channel's gate, [1, REALIZATIONS]."""
    return numbers(
        channel_state(Seed, GATE_STEP, at // channels + gate_heads, at % channels) + tl.zeros([1], tl.uint64), REALIZATIONS
    )


@triton.jit
def level_share(Gate, Seed, at, channels, gate_heads, GATE: tl.constexpr, REALIZATIONS: tl.constexpr):
    """Returns what the gate adds to the codes of a channel, [REALIZATIONS]."""
    if not GATE:
        return tl.zeros([REALIZATIONS], tl.float32)
    return tl.sum(gate_numbers(Seed, at, channels, gate_heads, REALIZATIONS), 0) * level_of(Gate, at, GATE)


@triton.jit
def code_size(Taps, Gate, own, at, count, GATE: tl.constexpr):
    """Returns what the codes of a channel with `count` taps are divided by, so that none is larger than MOST."""
    total = tl.zeros([128], tl.float32)
    for start in range(0, count, 128):
        tap = start + tl.arange(0, 128)
        total += tl.abs(tl.load(Taps + own.to(tl.int64) * count + tap, mask=tap < count, other=0.0).to(tl.float32))
    # No number of the noise is larger than 4.
    return tl.maximum(keep_of(Gate, at, GATE) * tl.sum(total, 0) + level_of(Gate, at, GATE), LEAST) * (4.0 / MOST)


@triton.jit
def store_codes(Codes, row, r, codes, there, REALIZATIONS: tl.constexpr):
    """Writes rows of codes, [rows, REALIZATIONS], as sums of two."""
    first, second = in_two(codes)
    Row = Codes + row[:, None] * (2 * REALIZATIONS) + r[None, :]
    tl.store(Row, first, mask=there)
    tl.store(Row + REALIZATIONS, second, mask=there)


@triton.jit
def load_sums(Codes, row, r, REALIZATIONS: tl.constexpr):
    """Returns the two numbers whose sums are some rows of codes, or of their gradients."""
    Row = Codes + row[:, None] * (2 * REALIZATIONS) + r[None, :]
    return tl.load(Row), tl.load(Row + REALIZATIONS)


@triton.jit
def band_of(Taps, at, taps, start, TOKENS: tl.constexpr, DRAWS: tl.constexpr):
    """Returns the columns of a band from `start` on, [TOKENS, DRAWS]."""
    place = start + tl.arange(0, DRAWS)[None, :] - tl.arange(0, TOKENS)[:, None]
    found = tl.load(Taps + at.to(tl.int64) * taps + place, mask=(place >= 0) & (place < taps), other=0.0)
    return found.to(tl.float32)


@triton.jit
def floor_mod(x, extent):
    """Returns the remainder, which is not negative: that of C has the sign of x."""
    found = x % extent
    return tl.where(found < 0, found + extent, found)


@triton.jit
def run_through(position, token, columns, AXES: tl.constexpr):
    """Returns a number for the run of neighbours in which the cell at a position is that of the given token of a tile."""
    if AXES == 1:
        return position - token
    column = floor_mod(position, columns)
    return (position - column) // columns * (1 << 32) + (column - token + BEFORE)


@triton.jit
def run_start(number, AXES: tl.constexpr):
    """Returns line and column of a run's first token."""
    if AXES == 1:
        return number * 0, number
    return number >> 32, (number & 0xFFFFFFFF) - BEFORE


@triton.jit
def line_state(state, line, lead, lines, rows, AXES: tl.constexpr):
    """Returns the state of the noise that the line of taps `lead` meets; a volume has `lines` of them in a plane of taps."""
    if AXES == 1:
        return state
    if AXES == 2:
        return next_state(state, line + lead)
    row = floor_mod(line, rows)
    return next_state(next_state(state, (line - row) // rows + (line * 0 + lead) // lines), row + (line * 0 + lead) % lines)


@triton.jit
def first_run(left, offset):
    """Returns where a run of neighbouring positions among the tokens that are left starts, and its tokens."""
    base = tl.min(tl.where(left, offset, 1 << 62), 0)
    return base, left & (offset == base)


@triton.jit
def runs_of(Positions, first, count, start, columns, CONSECUTIVE: tl.constexpr, AXES: tl.constexpr, TOKENS: tl.constexpr):
    """Returns the run through each token from `first` on, and which tokens exist; as a rule a tile is one run."""
    token = first + tl.arange(0, TOKENS)
    there = token < count
    position = token.to(tl.int64) + start if CONSECUTIVE else tl.load(Positions + token, mask=there, other=0).to(tl.int64)
    return run_through(position, tl.arange(0, TOKENS), columns, AXES), there


@triton.jit(do_not_specialize=["side", "start", "skipped"])
def tile_codes_kernel(
    Codes, CodeSizes, Positions, Taps, Gate, Seed,
    side, heads, channels, taps, tokens, skipped, count, start, leads, lines, rows, columns, gate_heads,
    CONSECUTIVE: tl.constexpr, AXES: tl.constexpr, GATE: tl.constexpr, DRAWS: tl.constexpr, TOKENS: tl.constexpr,
    REALIZATIONS: tl.constexpr,
):  # fmt: skip
    """Writes the codes of a tile in one channel, of [heads, channels, tokens, REALIZATIONS], which begin at token `skipped`."""
    tiles = tokens // TOKENS
    tile, at = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    state = channel_state(Seed, CODE_STEP, at // channels, at % channels)
    size = code_size(Taps, Gate, side * heads * channels + at, at, taps * leads, GATE)
    tl.store(CodeSizes + at, size)
    inverse = 1.0 / size
    keep = keep_of(Gate, at, GATE) * inverse
    constant = inverse * level_share(Gate, Seed, at, channels, gate_heads, GATE, REALIZATIONS)
    offset, left = runs_of(Positions, skipped + tile * TOKENS, count, start, columns, CONSECUTIVE, AXES, TOKENS)
    codes = tl.zeros([TOKENS, REALIZATIONS], tl.float32)
    while tl.max(left.to(tl.int32), 0) > 0:
        base, run = first_run(left, offset)
        line, column = run_start(base, AXES)
        own = tl.zeros([TOKENS, REALIZATIONS], tl.float32)
        for lead in range(leads):
            met = line_state(state, line, lead, lines, rows, AXES)
            for begin in range(0, TOKENS + taps - 1, DRAWS):
                band = band_of(Taps, (side * heads * channels + at) * leads + lead, taps, begin, TOKENS, DRAWS) * keep
                draws = numbers(next_state(met, column + (begin + tl.arange(0, DRAWS)).to(tl.int64)), REALIZATIONS)
                first, second = in_two(band)
                own += sum_product(first, second, draws.to(tl.float16))
        codes = tl.where(run[:, None], own + constant[None, :], codes)
        left = left & ~run
    row, r = at.to(tl.int64) * tokens + tile * TOKENS + tl.arange(0, TOKENS), tl.arange(0, REALIZATIONS)
    store_codes(Codes, row, r, codes, None, REALIZATIONS)


@triton.jit(do_not_specialize=["start", "skipped", "more"])
def tile_taps_kernel(
    Codes, Sizes, Positions, Seed, DBands, channels, tokens, skipped, count, start, leads, lines, rows, columns,
    groups, windows, more,
    CONSECUTIVE: tl.constexpr, AXES: tl.constexpr, DRAWS: tl.constexpr, TOKENS: tl.constexpr, REALIZATIONS: tl.constexpr,
):  # fmt: skip
    """Sums the gradient of a channel's band, [TOKENS, windows * DRAWS], over a group of tiles, given that of the codes.

    A program has one line of taps and one window of draws. With `more` the sums are added to what is there.
    """
    program = tl.program_id(0)
    window, whole = program % windows, program // windows
    group, lead, at = whole % groups, (whole // groups) % leads, whole // (groups * leads)
    place, r, t = window * DRAWS + tl.arange(0, DRAWS), tl.arange(0, REALIZATIONS), tl.arange(0, TOKENS)
    state = channel_state(Seed, CODE_STEP, at // channels, at % channels)
    Out = DBands + (whole.to(tl.int64) * TOKENS + t[:, None]) * (windows * DRAWS) + place[None, :]
    dbands = tl.load(Out, mask=place[None, :] * 0 + more > 0, other=0.0)
    for tile in range(group, tokens // TOKENS, groups):
        row = at.to(tl.int64) * tokens + tile * TOKENS + t
        first, second = load_sums(Codes, row, r, REALIZATIONS)
        sizes = tl.load(Sizes + row)
        offset, left = runs_of(Positions, skipped + tile * TOKENS, count, start, columns, CONSECUTIVE, AXES, TOKENS)
        while tl.max(left.to(tl.int32), 0) > 0:
            base, run = first_run(left, offset)
            line, column = run_start(base, AXES)
            met = line_state(state, line, lead, lines, rows, AXES)
            draws = numbers(next_state(met, column + place.to(tl.int64)), REALIZATIONS)
            found = sum_product(first, second, tl.trans(draws.to(tl.float16)))
            dbands += found * tl.where(run, sizes, 0.0)[:, None]
            left = left & ~run
    tl.store(Out, dbands)
