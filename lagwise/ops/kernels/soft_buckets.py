"""AT5's bias and its gradients: the MLP of each lag is evaluated in registers, twice in training, and none of it is stored."""

# Triton's language is not typed as Python is.
# pyright: basic, reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lagwise.ops.kernels.launches import run

BLOCK = 32
# Programs of the gradient at most, about two for each multiprocessor of a large GPU: more only have more sums to add up.
PROGRAMS = 256


class Layers(NamedTuple):
    """The slope and the weights, or where their gradients are added up, each [directions * heads, ...]."""

    slope: Any
    weight1: Any
    offset1: Any
    weight2: Any
    offset2: Any
    weight3: Any
    offset3: Any


@triton.jit
def one_minus_exp(x):
    """Returns 1 - exp(x) for x of at most 0, exact near 0 too."""
    # The series of (exp(x) - 1) / x up to x^8, which leaves 1e-9 of it at -1/2.
    series = 1.0 + x * (1.0 / 9.0)
    for i in tl.static_range(7):
        series = 1.0 + x * (1.0 / (8.0 - i)) * series
    return tl.where(x > -0.5, -x * series, 1.0 - tl.exp(x))


@triton.jit
def activate(x, SIGMOID: tl.constexpr):
    """Returns the activation of numbers."""
    if SIGMOID:
        return 1.0 / (1.0 + tl.exp(-x))
    return tl.maximum(x, 0.0)


@triton.jit
def through(gradient, y, SIGMOID: tl.constexpr):
    """Returns the gradient in front of an activation whose result was y."""
    if SIGMOID:
        return gradient * y * (1.0 - y)
    return tl.where(y > 0.0, gradient, 0.0)


@triton.jit
def lags_of(direction, first, last):
    """Returns the first lag of a direction and the number of its lags."""
    start = tl.where(direction == 0, first, tl.maximum(first, 1))
    end = tl.where(direction == 0, tl.minimum(last, 0), last)
    return start, tl.maximum(end - start + 1, 0)


@triton.jit
def bucket_of(slope, lag, reach):
    """Returns the buckets of lags, and by how much a bucket changes with the slope."""
    distance = tl.abs(lag).to(tl.float32) / reach
    bucket = one_minus_exp(-tl.maximum(slope, 0.0) * distance)
    return bucket, tl.where(slope > 0.0, (1.0 - bucket) * distance, 0.0)


@triton.jit(do_not_specialize=["heads", "first", "last", "reach"])
def forward_kernel(
    layers, out, heads, first, last, reach,
    A: tl.constexpr, B: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, SIGMOID: tl.constexpr,
):  # fmt: skip
    """Evaluates the MLP of one head and direction at a block of lags."""
    head, block = tl.program_id(0) % heads, tl.program_id(0) // heads
    # Blocks of the past come first.
    past_blocks = tl.cdiv(tl.maximum(tl.minimum(last, 0) - first + 1, 0), BLOCK)
    direction = (block >= past_blocks).to(tl.int32)
    start, count = lags_of(direction, first, last)
    place = (block - direction * past_blocks) * BLOCK + tl.arange(0, BLOCK)
    lag, row, channel = start + place, direction * heads + head, tl.arange(0, WIDTH)
    bucket, _ = bucket_of(tl.load(layers.slope + row).to(tl.float32), lag, reach)
    weight1 = tl.load(layers.weight1 + row * A + channel, mask=channel < A, other=0.0).to(tl.float32)
    offset1 = tl.load(layers.offset1 + row * A + channel, mask=channel < A, other=0.0).to(tl.float32)
    # [BLOCK, WIDTH]
    hidden = activate(bucket[:, None] * weight1[None, :] + offset1[None, :], SIGMOID)
    found = tl.zeros([BLOCK], tl.float32) + tl.load(layers.offset3 + row).to(tl.float32)
    for b in range(B):
        weight2 = tl.load(layers.weight2 + (row * A + channel) * B + b, mask=channel < A, other=0.0).to(tl.float32)
        unit = tl.sum(hidden * weight2[None, :], 1) + tl.load(layers.offset2 + row * B + b).to(tl.float32)
        found += tl.load(layers.weight3 + row * B + b).to(tl.float32) * activate(unit, SIGMOID)
    target = out + head.to(tl.int64) * (last - first + 1) + lag - first
    tl.store(target, found.to(out.dtype.element_ty), mask=place < count)


@triton.jit(do_not_specialize=["heads", "rows", "shares", "size", "first", "last", "reach"])
def backward_kernel(
    layers, gradients, dout, heads, rows, shares, size, first, last, reach,
    A: tl.constexpr, B: tl.constexpr, WIDTH: tl.constexpr, WIDTH_B: tl.constexpr, BLOCK: tl.constexpr, SIGMOID: tl.constexpr,
):  # fmt: skip
    """Sums the gradients of one head and direction over a share of its lags, in a fixed order."""
    row, share = tl.program_id(0) % rows, tl.program_id(0) // rows
    head = row % heads
    start, count = lags_of(row // heads, first, last)
    channel, column = tl.arange(0, WIDTH), tl.arange(0, WIDTH_B)
    slope = tl.load(layers.slope + row).to(tl.float32)
    weight1 = tl.load(layers.weight1 + row * A + channel, mask=channel < A, other=0.0).to(tl.float32)
    offset1 = tl.load(layers.offset1 + row * A + channel, mask=channel < A, other=0.0).to(tl.float32)
    dslope, doffset3 = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    dweight1, doffset1 = tl.zeros([WIDTH], tl.float32), tl.zeros([WIDTH], tl.float32)
    dweight2 = tl.zeros([WIDTH, WIDTH_B], tl.float32)
    doffset2, dweight3 = tl.zeros([WIDTH_B], tl.float32), tl.zeros([WIDTH_B], tl.float32)
    for block in range(share, tl.cdiv(count, BLOCK), shares):
        place = block * BLOCK + tl.arange(0, BLOCK)
        lag = start + place
        source = dout + head.to(tl.int64) * (last - first + 1) + lag - first
        gradient = tl.load(source, mask=place < count, other=0.0).to(tl.float32)
        bucket, change = bucket_of(slope, lag, reach)
        # [BLOCK, WIDTH]
        hidden = activate(bucket[:, None] * weight1[None, :] + offset1[None, :], SIGMOID)
        dhidden = tl.zeros([BLOCK, WIDTH], tl.float32)
        for b in range(B):
            weight2 = tl.load(layers.weight2 + (row * A + channel) * B + b, mask=channel < A, other=0.0).to(tl.float32)
            unit = tl.sum(hidden * weight2[None, :], 1) + tl.load(layers.offset2 + row * B + b).to(tl.float32)
            unit = activate(unit, SIGMOID)
            dunit = through(gradient * tl.load(layers.weight3 + row * B + b).to(tl.float32), unit, SIGMOID)
            dhidden += dunit[:, None] * weight2[None, :]
            dweight3 += tl.where(column == b, tl.sum(gradient * unit, 0), 0.0)
            doffset2 += tl.where(column == b, tl.sum(dunit, 0), 0.0)
            dweight2 += tl.where(column[None, :] == b, tl.sum(hidden * dunit[:, None], 0)[:, None], 0.0)
        dhidden = through(dhidden, hidden, SIGMOID)
        dweight1 += tl.sum(dhidden * bucket[:, None], 0)
        doffset1 += tl.sum(dhidden, 0)
        dslope += tl.sum(dhidden * weight1[None, :], 1) * change
        doffset3 += gradient
    # Each share has its own sums, `size` numbers of all parameters.
    mine = share.to(tl.int64) * size
    tl.store(gradients.slope + mine + row, tl.sum(dslope, 0))
    tl.store(gradients.weight1 + mine + row * A + channel, dweight1, mask=channel < A)
    tl.store(gradients.offset1 + mine + row * A + channel, doffset1, mask=channel < A)
    at = mine + (row * A + channel)[:, None] * B + column[None, :]
    tl.store(gradients.weight2 + at, dweight2, mask=(channel < A)[:, None] & (column < B)[None, :])
    tl.store(gradients.offset2 + mine + row * B + column, doffset2, mask=column < B)
    tl.store(gradients.weight3 + mine + row * B + column, dweight3, mask=column < B)
    tl.store(gradients.offset3 + mine + row, tl.sum(doffset3, 0))


def forward(slope: Tensor, weights: tuple[Tensor, ...], first: int, last: int, reach: float, activation: str) -> Tensor:
    """Returns the bias, see `lagwise.ops.soft_buckets.bias`."""
    heads = slope.shape[1]
    out = slope.new_empty(heads, last - first + 1)
    arguments, warps = arguments_of(slope, weights, first, last, reach, activation)
    run(forward_kernel, (heads, sum(blocks_of(first, last))), {**arguments, "out": out}, warps=warps, stages=1)
    return out


def backward(
    gradient: Tensor, slope: Tensor, weights: tuple[Tensor, ...], first: int, last: int, reach: float, activation: str
) -> list[Tensor]:
    """Returns the gradients of the slope and of the weights, as views of one tensor."""
    parameters, rows = (slope, *weights), slope.numel()
    sizes = [x.numel() for x in parameters]
    shares = max(1, min(max(blocks_of(first, last)), PROGRAMS // rows))
    sums = torch.empty(shares, sum(sizes), dtype=torch.float32, device=slope.device)
    arguments, warps = arguments_of(slope, weights, first, last, reach, activation)
    arguments |= {
        "gradients": Layers(*sums[0].split(sizes)), "dout": gradient.contiguous(), "rows": rows, "shares": shares,
        "size": sum(sizes), "WIDTH_B": triton.next_power_of_2(weights[2].shape[3]),
    }  # fmt: skip
    run(backward_kernel, (rows, shares), arguments, warps=warps, stages=1)
    total = (sums[0] if shares == 1 else sums.sum(0)).to(slope.dtype)
    return [x.view(like.shape) for x, like in zip(total.split(sizes), parameters, strict=True)]


def blocks_of(first: int, last: int) -> tuple[int, int]:
    """Returns the number of blocks of lags of the past and of the future."""
    past, future = max(min(last, 0) - first + 1, 0), max(last - max(first, 1) + 1, 0)
    return math.ceil(past / BLOCK), math.ceil(future / BLOCK)


def arguments_of(
    slope: Tensor, weights: tuple[Tensor, ...], first: int, last: int, reach: float, activation: str
) -> tuple[dict[str, Any], int]:
    """Returns what both kernels are given, and how many warps they have."""
    a, b = weights[2].shape[2:]
    width = triton.next_power_of_2(a)
    arguments = {
        "layers": Layers(*(x.contiguous() for x in (slope, *weights))), "heads": slope.shape[1], "first": first, "last": last,
        "reach": reach, "A": a, "B": b, "WIDTH": width, "BLOCK": BLOCK, "SIGMOID": activation == "sigmoid",
    }  # fmt: skip
    return arguments, max(1, math.ceil(width / 32))
