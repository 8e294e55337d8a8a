"""Random numbers in kernels, and products with them that lose nothing.

The numbers are those of `binomial` in lagwise/noise.py: multiples of 1/2 between -4 and 4, exact in float16. A product with them
is exact to nearly float32 once the other operand is written as a sum of two numbers of fewer bits.
"""

# Triton's language is not typed as Python is.
# pyright: basic, reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false

import triton
import triton.language as tl

from lagwise.noise import Stream
from lagwise.ops.kernels.tiles import DIRECT, GOLDEN, mix, next_state

# What the streams of lagwise/noise.py add to the state.
CODE_STEP = tl.constexpr(Stream.CODE * GOLDEN.value % 2**64)
GATE_STEP = tl.constexpr(Stream.GATE * GOLDEN.value % 2**64)
# What numbers of at most about a hundred are multiplied by before they are written as the sum of two, and its inverse.
LARGER = tl.constexpr(256.0)
UNIT = tl.constexpr(1.0 / 256.0)
# The least number that rows are divided by, so that 256 times its inverse is finite. Rows of smaller numbers lose bits.
LEAST = tl.constexpr(1e-30)


@triton.jit
def ones(bits):
    """Counts the ones of 16 bits."""
    if DIRECT:
        return tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [bits], dtype=tl.int32, is_pure=True, pack=1)
    bits = bits - ((bits >> 1) & 0x5555)
    bits = (bits & 0x3333) + ((bits >> 2) & 0x3333)
    bits = (bits + (bits >> 4)) & 0x0F0F
    return ((bits + (bits >> 8)) & 0xFF).to(tl.int32)


@triton.jit
def channel_state(Seed, step: tl.constexpr, head, channel):
    """Returns the state of a channel's random numbers."""
    state = mix(tl.load(Seed).to(tl.int64).to(tl.uint64))
    state = mix(state + step)
    # Under the interpreter the counter of a loop is a plain number.
    return next_state(next_state(state, head.to(tl.int64)), (head * 0 + channel).to(tl.int64))


@triton.jit
def numbers(states, REALIZATIONS: tl.constexpr):
    """Returns the random numbers that follow the states, [states, REALIZATIONS]: four of 16 bits each from a word."""
    words = next_state(states[:, None], tl.arange(0, REALIZATIONS // 4)[None, :].to(tl.int64))
    low, high = (words & 0xFFFFFFFF).to(tl.uint32), (words >> 32).to(tl.uint32)
    even = tl.join(ones(low & 0xFFFF), ones(high & 0xFFFF))
    odd = tl.join(ones(low >> 16), ones(high >> 16))
    counts = tl.reshape(tl.join(even, odd), [states.shape[0], REALIZATIONS])
    return (counts.to(tl.float32) - 8.0) * 0.5


@triton.jit
def largest(x, axis: tl.constexpr):
    """Returns the largest size of numbers along an axis, which may be divided by."""
    return tl.maximum(tl.max(tl.abs(x), axis), LEAST)


@triton.jit
def in_two(a):
    """Writes float32 numbers between 2^-3 and 2^15, as a rule, as the sum of two of float16: 22 bits."""
    first = a.to(tl.float16)
    return first, (a - first.to(tl.float32)).to(tl.float16)


@triton.jit
def sum_product(first, second, draws):
    """Returns the product of the sum of two, the second of which is the smaller one, with draws."""
    return tl.dot(first, draws, tl.dot(second, draws))
