"""Kernels by the lane: a tensor has one number for each lane of a program, in a register, 32 for each of its warps.

A word is a register with two half-precision numbers. Words are loaded four at a time, multiplied number by number, and summed by
the matrix units. `add_product` does both; operands of the matrix units and their result lie where lane = 4 g + t says,

    d[g, 2t], d[g, 2t+1], d[g+8, 2t], d[g+8, 2t+1]      += sum over 16 slots k of a[., k] b[k, .]
    a: words of the slots 2t, 2t+1 at g, at g+8; of 2t+8, 2t+9 at g, at g+8       b: words of 2t, 2t+1 at g; of 2t+8, 2t+9 at g

Under the interpreter, which knows no assembly, numpy multiplies and sums; there words are of float16.
"""

# Triton's language is not typed as Python is.
# pyright: basic, reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false

import numpy as np
import triton
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from lagwise.ops.kernels.tiles import DIRECT

LOW, HIGH = tl.constexpr(0x5410), tl.constexpr(0x7632)

LOAD_WORDS = tl.constexpr("""{
    .reg .pred there;
    setp.ne.b32 there, $5, 0;
    mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;
    @there ld.global.v4.b32 {$0, $1, $2, $3}, [$4];
}""")
STORE_WORDS = tl.constexpr("""{
    .reg .pred there;
    setp.ne.b32 there, $6, 0;
    mov.b32 $0, 0;
    @there st.global.v4.b32 [$1], {$2, $3, $4, $5};
}""")
STORE_NUMBERS = tl.constexpr("""{
    .reg .pred there;
    setp.ne.b32 there, $6, 0;
    mov.b32 $0, 0;
    @there st.global.v4.f32 [$1], {$2, $3, $4, $5};
}""")
LOAD_PAIR = tl.constexpr("""{
    .reg .pred there, other;
    .reg .b16 low, high;
    setp.ne.b32 there, $3, 0;
    setp.ne.b32 other, $4, 0;
    mov.b16 low, 0; mov.b16 high, 0;
    @there ld.global.b16 low, [$1];
    @other ld.global.b16 high, [$2];
    mov.b32 $0, {low, high};
}""")


@triton.jit
def halves(word, kind: tl.constexpr):
    """Returns the two numbers of a word in float32."""
    if DIRECT and kind == tl.bfloat16:
        low, high = word << 16, word & -65536
        return low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)
    else:
        low, high = word.to(tl.int16), (word >> 16).to(tl.int16)
        return low.to(kind, bitcast=True).to(tl.float32), high.to(kind, bitcast=True).to(tl.float32)


@triton.jit
def word_of(low, high, kind: tl.constexpr):
    """Rounds two numbers to a word."""
    low, high = low.to(kind).to(tl.int16, bitcast=True), high.to(kind).to(tl.int16, bitcast=True)
    return (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)


@triton.jit
def joined(a, b, PLACES: tl.constexpr):
    """Returns the word of the LOW numbers of two words, or of the HIGH ones."""
    if DIRECT:
        if PLACES == LOW:
            return tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0x5410;", "=r,r,r", [a, b], tl.int32, True, 1)
        else:
            return tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r", [a, b], tl.int32, True, 1)
    elif PLACES == LOW:
        return (a & 0xFFFF) | (b << 16)
    else:
        return ((a >> 16) & 0xFFFF) | (b & -65536)


@triton.constexpr_function
def numbers_of(word):
    """Returns the numbers of a word as the interpreter holds them, [warps, 8, 8] for lanes 4 g + t."""
    return word.handle.data.astype(np.int32).view(np.float16).reshape(-1, 8, 8)


@triton.constexpr_function
def interpreted(x, kind):
    """Returns numbers of the lanes as the interpreter holds them."""
    return tl.tensor(TensorHandle(x.reshape(-1), kind), tl.block_type(kind, [x.size]))


@triton.constexpr_function
def interpreted_product(d, x, y, b):
    """Does what `add_product` does in the interpreter."""
    with np.errstate(over="ignore", invalid="ignore"):
        a = [(numbers_of(left) * numbers_of(right)).astype(np.float32) for left, right in zip(x, y, strict=True)]
        b = [numbers_of(word).astype(np.float32).swapaxes(1, 2) for word in b]
        rows = a[0] @ b[0] + a[2] @ b[1], a[1] @ b[0] + a[3] @ b[1]
    changes = [row[..., odd::2].reshape(-1) for row in rows for odd in range(2)]
    return tuple(interpreted(before.handle.data + change, tl.float32) for before, change in zip(d, changes, strict=True))


@triton.jit
def multiplied(a, b, kind: tl.constexpr):
    """Multiplies two words number by number, and rounds."""
    if kind == tl.bfloat16:
        # Before Hopper there is no product alone; -0 changes no product.
        return tl.inline_asm_elementwise(
            "{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, $1, $2, zero; }", "=r,r,r", [a, b], tl.int32, True, 1
        )
    else:
        return tl.inline_asm_elementwise("mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, True, 1)


@triton.jit
def add_product(d, x, y, b, kind: tl.constexpr):
    """Multiplies four words x and y, and adds the product of these as a [16, 16] and b [16, 8] to d [16, 8] in float32."""
    if DIRECT:
        operands = (
            multiplied(x[0], y[0], kind), multiplied(x[1], y[1], kind),
            multiplied(x[2], y[2], kind), multiplied(x[3], y[3], kind),
            b[0], b[1], d[0], d[1], d[2], d[3],
        )  # fmt: skip
        if kind == tl.bfloat16:
            return tl.inline_asm_elementwise(
                "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
                "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", operands, (tl.float32, tl.float32, tl.float32, tl.float32), True, 1,
            )  # fmt: skip
        else:
            return tl.inline_asm_elementwise(
                "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
                "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", operands, (tl.float32, tl.float32, tl.float32, tl.float32), True, 1,
            )  # fmt: skip
    else:
        return interpreted_product(d, x, y, b)


@triton.jit
def load_words(pointers, there):
    """Loads four words from each aligned address, zero where nothing is there."""
    if DIRECT:
        return tl.inline_asm_elementwise(
            LOAD_WORDS, "=r,=r,=r,=r,l,r", [pointers.to(tl.int64), there.to(tl.int32)],
            (tl.int32, tl.int32, tl.int32, tl.int32), True, 1,
        )  # fmt: skip
    else:
        words = ()
        for place in tl.static_range(4):
            low = tl.load(pointers + 2 * place, mask=there, other=0.0).to(tl.int16, bitcast=True).to(tl.int32)
            high = tl.load(pointers + 2 * place + 1, mask=there, other=0.0).to(tl.int16, bitcast=True).to(tl.int32)
            words += ((low & 0xFFFF) | (high << 16),)
        return words


@triton.jit
def load_pair(low, high, low_there, high_there):
    """Loads a word from two addresses, zero where nothing is there."""
    if DIRECT:
        return tl.inline_asm_elementwise(
            LOAD_PAIR, "=r,l,l,r,r", [low.to(tl.int64), high.to(tl.int64), low_there.to(tl.int32), high_there.to(tl.int32)],
            tl.int32, True, 1,
        )  # fmt: skip
    else:
        first = tl.load(low, mask=low_there, other=0.0).to(tl.int16, bitcast=True).to(tl.int32)
        second = tl.load(high, mask=high_there, other=0.0).to(tl.int16, bitcast=True).to(tl.int32)
        return (first & 0xFFFF) | (second << 16)


@triton.jit
def store_words(pointers, words, there):
    """Stores four words to each aligned address."""
    if DIRECT:
        tl.inline_asm_elementwise(
            STORE_WORDS, "=r,l,r,r,r,r,r",
            [pointers.to(tl.int64), words[0], words[1], words[2], words[3], there.to(tl.int32)], tl.int32, False, 1,
        )  # fmt: skip
    else:
        kind: tl.constexpr = pointers.dtype.element_ty
        for place in tl.static_range(4):
            tl.store(pointers + 2 * place, words[place].to(tl.int16).to(kind, bitcast=True), mask=there)
            tl.store(pointers + 2 * place + 1, (words[place] >> 16).to(tl.int16).to(kind, bitcast=True), mask=there)


@triton.jit
def store_numbers(pointers, numbers, there):
    """Stores four numbers of float32 to each aligned address."""
    if DIRECT:
        tl.inline_asm_elementwise(
            STORE_NUMBERS, "=r,l,f,f,f,f,r",
            [pointers.to(tl.int64), numbers[0], numbers[1], numbers[2], numbers[3], there.to(tl.int32)], tl.int32, False, 1,
        )  # fmt: skip
    else:
        for place in tl.static_range(4):
            tl.store(pointers + place, numbers[place], mask=there)
