"""Filters of noise that lies in memory, for consecutive positions on one axis: codes, and the gradient of the filters.

A block of 64 tokens meets the noise of its own positions and of the blocks after it: a product with a band of taps, row t moved
to the right by t, cut into squares. All blocks have the same squares, so that a program makes those of its channel once. It reads
each block of noise once, too, and adds it to the codes of all blocks of tokens that meet it.
"""

# Triton's language is not typed as Python is.
# pyright: basic, reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false

import triton
import triton.language as tl

from lagwise.ops.kernels.rng import CODE_STEP, channel_state, in_two, numbers, sum_product
from lagwise.ops.kernels.tiles import next_state
from lagwise.ops.spe.conv_tiles import band_of, code_size, keep_of, level_share, load_sums, store_codes


@triton.jit(do_not_specialize=["start"])
def noise_kernel(Noise, Seed, channels, rows, start, ROWS: tl.constexpr, REALIZATIONS: tl.constexpr):
    """Writes the noise of positions from `start` on, [heads, channels, rows, REALIZATIONS]; rows are whole blocks."""
    blocks = rows // ROWS
    block, at = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    state = channel_state(Seed, CODE_STEP, at // channels, at % channels)
    row = block * ROWS + tl.arange(0, ROWS)
    made = numbers(next_state(state, row.to(tl.int64) + start), REALIZATIONS)
    Out = Noise + (at.to(tl.int64) * rows + row)[:, None] * REALIZATIONS + tl.arange(0, REALIZATIONS)[None, :]
    tl.store(Out, made.to(Noise.dtype.element_ty))


@triton.jit
def product_with_sum(noise, parts):
    """Returns the product of noise with the sum of two, the second of which is the smaller one."""
    return tl.dot(noise, parts[0], tl.dot(noise, parts[1]))


@triton.jit(do_not_specialize=["side"])
def line_codes_kernel(
    Codes, CodeSizes, Noise, Taps, Gate, Seed, side, heads, channels, realizations, taps, tokens, groups, gate_heads,
    GATE: tl.constexpr, BLOCKS: tl.constexpr, SIZE: tl.constexpr, REALIZATIONS: tl.constexpr,
):  # fmt: skip
    """Writes the codes of a group of blocks in one channel, of [heads, channels, tokens, REALIZATIONS].

    They are made turned, [REALIZATIONS, SIZE]: matrix units read the noise once for all squares then.
    """
    group, at = tl.program_id(0) % groups, tl.program_id(0) // groups
    blocks = tokens // SIZE
    share = tl.cdiv(blocks, groups)
    begin, end = group * share, tl.minimum((group + 1) * share, blocks)
    t, r = tl.arange(0, SIZE), tl.arange(0, REALIZATIONS)
    size = code_size(Taps, Gate, side * heads * channels + at, at, taps, GATE)
    tl.store(CodeSizes + at, size)
    inverse = 1.0 / size
    squares = ()
    for block in tl.static_range(BLOCKS):
        square = tl.trans(band_of(Taps, side * heads * channels + at, taps, block * SIZE, SIZE, SIZE))
        squares += (in_two(square * (keep_of(Gate, at, GATE) * inverse)),)
    constant = inverse * level_share(Gate, Seed, at, channels, gate_heads, GATE, REALIZATIONS)
    Met = Noise + at.to(tl.int64) * (blocks + BLOCKS - 1) * SIZE * REALIZATIONS + t[:, None] * REALIZATIONS + r[None, :]
    # The sums of the blocks of tokens that have not met all their noise yet, the newest first.
    sums = ()
    for _ in tl.static_range(BLOCKS - 1):
        sums += (tl.zeros([REALIZATIONS, SIZE], tl.float32),)
    for step in range(begin, end + BLOCKS - 1):
        noise = tl.trans(tl.load(Met + step * SIZE * REALIZATIONS))
        codes = sums[BLOCKS - 2] + product_with_sum(noise, squares[BLOCKS - 1]) + constant[:, None]
        # The first steps belong to blocks before the group, whose codes are not whole.
        done = step - (BLOCKS - 1)
        row = at.to(tl.int64) * tokens + done * SIZE + t
        store_codes(Codes, row, r, tl.trans(codes), t[:, None] * 0 + done >= begin, REALIZATIONS)
        newer = (product_with_sum(noise, squares[0]),)
        for block in tl.static_range(1, BLOCKS - 1):
            newer += (sums[block - 1] + product_with_sum(noise, squares[block]),)
        sums = newer


@triton.jit(do_not_specialize=["more"])
def line_taps_kernel(
    Codes, Sizes, Noise, DBands, tokens, groups, more, BLOCKS: tl.constexpr, SIZE: tl.constexpr, REALIZATIONS: tl.constexpr
):  # fmt: skip
    """Sums the gradient of a channel's band, [SIZE, BLOCKS * SIZE], over a group of blocks, given that of the codes.

    With `more` it is added to what is there.
    """
    program = tl.program_id(0)
    group, at = program % groups, program // groups
    blocks = tokens // SIZE
    share = tl.cdiv(blocks, groups)
    t, r = tl.arange(0, SIZE), tl.arange(0, REALIZATIONS)
    Met = Noise + at.to(tl.int64) * (blocks + BLOCKS - 1) * SIZE * REALIZATIONS + t[:, None] * REALIZATIONS + r[None, :]
    Out = DBands + program.to(tl.int64) * SIZE * BLOCKS * SIZE + t[:, None] * (BLOCKS * SIZE) + t[None, :]
    sums = ()
    for block in tl.static_range(BLOCKS):
        sums += (tl.load(Out + block * SIZE, mask=t[None, :] + more * SIZE >= SIZE, other=0.0),)
    for step in range(group * share, tl.minimum((group + 1) * share, blocks)):
        row = at.to(tl.int64) * tokens + step * SIZE + t
        first, second = load_sums(Codes, row, r, REALIZATIONS)
        sizes = tl.load(Sizes + row)[:, None]
        newer = ()
        for block in tl.static_range(BLOCKS):
            noise = tl.load(Met + (step + block) * SIZE * REALIZATIONS)
            newer += (sums[block] + sum_product(first, second, tl.trans(noise)) * sizes,)
        sums = newer
    for block in tl.static_range(BLOCKS):
        tl.store(Out + block * SIZE, sums[block])
