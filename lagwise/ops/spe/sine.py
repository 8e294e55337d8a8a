"""Features by sines: one matrix product over channels and sines, whose left operand is made in the tile.

    y[t, r] = sum_dp x[t, d] sizes_dp (cos phase_dp(t) draws_dp0[r] + sin phase_dp(t) draws_dp1[r]) / sqrt(R)
    phase_dp(t) = 2 pi (turns_dp t + shifts_dp)

Turns and shifts are fractions of 2^64, so that whole turns drop out of a product of integers, at every position below 2^31 alike.
The backward pass makes da = dy @ draws^T, the gradient of the left operand, and all other gradients from it. Rows of x and dy are
divided by their largest number, and sizes by theirs, so that two float16 numbers hold 22 bits of an operand.
"""

# Triton's language is not typed as Python is.
# pyright: basic, reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from lagwise.ops.kernels.launches import run
from lagwise.ops.kernels.rng import CODE_STEP, GATE_STEP, LARGER, UNIT, channel_state, in_two, numbers
from lagwise.ops.kernels.tiles import DIRECT, gather, next_state
from lagwise.ops.spe.recipes import Sines

PI = tl.constexpr(3.141592653589793)
HALF_TURN = tl.constexpr(3.141592653589793 / 2**31)

# Numbers of a tile [rows, realizations] that a program holds.
HELD = 8192
# The least number that rows are divided by, so that 256 times its inverse is finite. Rows of smaller numbers lose bits.
LEAST = tl.constexpr(1e-30)


@triton.jit
def draws_kernel(
    Draws, Seed, channels, realizations, waves, gate_heads, GATED: tl.constexpr, ROWS: tl.constexpr, REALIZATIONS: tl.constexpr
):
    """Writes the draws of all channels, [heads, channels, ROWS, realizations], with zeros below those that are used."""
    program = tl.program_id(0)
    head, channel = program // channels, program % channels
    row, r = tl.arange(0, ROWS), tl.arange(0, REALIZATIONS)
    states = next_state(channel_state(Seed, CODE_STEP, head, channel), row.to(tl.int64))
    used = 2 * waves
    if GATED:
        used -= 1
        states = tl.where(row == used - 1, channel_state(Seed, GATE_STEP, head + gate_heads, channel), states)
    made = tl.where((row < used)[:, None], numbers(states, REALIZATIONS), 0.0)
    Out = Draws + (program.to(tl.int64) * ROWS + row[:, None]) * realizations + r[None, :]
    tl.store(Out, made.to(Draws.dtype.element_ty), mask=(r < realizations)[None, :])


@triton.jit
def angles(Turns, Shifts, at, position, wave, waves, quarters):
    """Returns phases of a channel less some quarters of a turn, without whole turns, [rows, waves], between -pi and pi."""
    turns = tl.load(Turns + at * waves + wave, mask=wave < waves, other=0)
    shifts = tl.load(Shifts + at * waves + wave, mask=wave < waves, other=0)
    # The upper half of position * turns + shifts: what the lower half of the shifts carries is 2^-32 of a turn. As an unsigned
    # number a negative position is 2^32 too large, which adds the lower half of the turns to the upper one.
    low, high, t = turns.to(tl.uint32)[None, :], (turns >> 32).to(tl.uint32)[None, :], position.to(tl.uint32)[:, None]
    shifts = (shifts >> 32).to(tl.uint32) - (quarters.to(tl.uint32) << 30)
    phase = tl.umulhi(low, t) + high * t + shifts[None, :] - tl.where(position[:, None] < 0, low, 0)
    return phase.to(tl.int32, bitcast=True).to(tl.float32) * HALF_TURN


@triton.jit
def fast_cosine(angle):
    """Returns the cosine of angles between -pi and pi, good to 2^-21."""
    if DIRECT:
        return libdevice.fast_cosf(angle)
    return tl.cos(angle)


@triton.jit
def fast_sine(angle):
    """Returns the sine of angles between -pi and pi, good to 2^-21."""
    if DIRECT:
        return libdevice.fast_sinf(angle)
    return tl.sin(angle)


@triton.jit
def largest(x, axis: tl.constexpr):
    """Returns the largest size of numbers along an axis, which may be divided by."""
    return tl.maximum(tl.max(tl.abs(x), axis), LEAST)


@triton.jit
def row_places(Positions, tile, batches, times, positions_batch, ROWS: tl.constexpr):
    """Returns row of the batch, time and position of a tile's rows, and which of them exist; the others stand for the first."""
    row = tile * ROWS + tl.arange(0, ROWS)
    there = row < batches * times
    row = tl.where(there, row, 0)
    batch, time = (row // times).to(tl.int64), (row % times).to(tl.int64)
    return batch, time, tl.load(Positions + batch * positions_batch + time).to(tl.int64), there


@triton.jit
def features_kernel(
    X, Y, Positions, Draws, Turns, Shifts, Sizes, Largest,
    heads, times, channels, realizations, batches, waves, x_batch, x_head, x_time, positions_batch, scale,
    ROWS: tl.constexpr, WAVES: tl.constexpr, REALIZATIONS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Writes the features y, [batch, heads, times, realizations], of x, [batch, heads, times, channels]."""
    program = tl.program_id(0)
    head, tile = program % heads, program // heads
    r, m = tl.arange(0, REALIZATIONS), tl.arange(0, 2 * WAVES)
    batch, time, position, there = row_places(Positions, tile, batches, times, positions_batch, ROWS)
    Own = X + batch * x_batch + head.to(tl.int64) * x_head + time * x_time
    most = tl.zeros([ROWS], tl.float32)
    for start in range(0, channels, BLOCK):
        channel = start + tl.arange(0, BLOCK)
        x = tl.load(Own[:, None] + channel[None, :], mask=(channel < channels)[None, :], other=0.0).to(tl.float32)
        most = tl.maximum(most, largest(x, 1))
    y, inverse = tl.zeros([ROWS, REALIZATIONS], tl.float32), 1.0 / most * LARGER
    # The columns of the left operand: cosine and sine of each wave in turn. A sine is a cosine a quarter of a turn later.
    wave = m // 2
    for start in range(0, channels, GROUP):
        # Long sums within matrix units would lose bits.
        part = tl.zeros([ROWS, REALIZATIONS], tl.float32)
        for step in tl.static_range(GROUP):
            channel = start + step
            there_too = (wave < waves) & (channel < channels)
            at = head * channels + tl.minimum(channel, channels - 1)
            x = gather(Own + tl.minimum(channel, channels - 1))
            sizes = tl.load(Sizes + at * waves + wave, mask=there_too, other=0.0)
            angle = angles(Turns, Shifts, at, position, wave, waves, m % 2)
            met = Draws + at.to(tl.int64) * 2 * WAVES * realizations + m[:, None] * realizations + r[None, :]
            draws = tl.load(met, mask=(r < realizations)[None, :], other=0.0)
            first, second = in_two((x * inverse)[:, None] * sizes[None, :] * fast_cosine(angle))
            part = tl.dot(second, draws, part, input_precision="ieee")
            part = tl.dot(first, draws, part, input_precision="ieee")
        y += part
    Out = Y + ((batch * heads + head) * times + time)[:, None] * realizations + r[None, :]
    factor = most * tl.load(Largest) * scale * UNIT
    tl.store(Out, (y * factor[:, None]).to(Y.dtype.element_ty), mask=there[:, None] & (r < realizations)[None, :])


@triton.jit
def gradient_kernel(
    X, Dx, Dy, Positions, Draws, Turns, Shifts, Sizes, Largest, Sums,
    heads, times, channels, realizations, batches, waves, x_batch, x_head, x_time, positions_batch, scale,
    ROWS: tl.constexpr, WAVES: tl.constexpr, REALIZATIONS: tl.constexpr,
):  # fmt: skip
    """Writes the gradient of x, [batch, heads, times, channels], and its tile's part of those of turns, shifts and sizes.

    The parts are [tiles, heads, channels, WAVES, 4].
    """
    program = tl.program_id(0)
    head, tile = program % heads, program // heads
    r, m, wave = tl.arange(0, REALIZATIONS), tl.arange(0, 2 * WAVES), tl.arange(0, WAVES)
    batch, time, position, there = row_places(Positions, tile, batches, times, positions_batch, ROWS)
    Own = X + batch * x_batch + head.to(tl.int64) * x_head + time * x_time
    place = (batch * heads + head) * times + time
    Given = Dy + place[:, None] * realizations + r[None, :]
    dy = tl.load(Given, mask=there[:, None] & (r < realizations)[None, :], other=0.0).to(tl.float32) * scale
    most = largest(dy, 1)
    first, second = in_two(dy * (1.0 / most * LARGER)[:, None])
    i, j = tl.arange(0, 2)[None, :, None], tl.arange(0, 2)[None, None, :]
    for channel in range(channels):
        at = head * channels + channel
        met = Draws + at.to(tl.int64) * 2 * WAVES * realizations + m[None, :] * realizations + r[:, None]
        draws = tl.load(met, mask=(r < realizations)[:, None], other=0.0)
        da = tl.dot(second, draws, input_precision="ieee")
        da = tl.dot(first, draws, da, input_precision="ieee") * (most * UNIT)[:, None]
        dcos, dsin = tl.split(tl.reshape(da, [ROWS, WAVES, 2]))
        x = tl.where(there, gather(Own + channel), 0.0)
        sizes = tl.load(Sizes + at * waves + wave, mask=wave < waves, other=0.0) * tl.load(Largest)
        angle = angles(Turns, Shifts, at, position, wave, waves, wave * 0)
        cos, sin = fast_cosine(angle), fast_sine(angle)
        along = cos * dcos + sin * dsin
        dx = tl.sum(along * sizes[None, :], 1)
        tl.store(Dx + place * channels + channel, dx.to(Dx.dtype.element_ty), mask=there)
        dcycles = 2.0 * PI * x[:, None] * sizes[None, :] * (cos * dsin - sin * dcos)
        # One sum over the rows for all: [WAVES, 2, 2] with turns, sizes, shifts, and shifts again.
        summed = tl.sum(
            tl.join(tl.join(dcycles * position.to(tl.float32)[:, None], dcycles), tl.join(x[:, None] * along, dcycles)), 0
        )
        Sum = Sums + ((program.to(tl.int64) * channels + channel) * WAVES + wave)[:, None, None] * 4 + i * 2 + j
        tl.store(Sum, summed)


def fixed(x: Tensor) -> Tensor:
    """Returns the fractions of turns in units of 2^-64, as int64 whose sign is the highest bit."""
    x = x.double()
    return ((x - x.floor()) * 2.0**63).to(torch.int64) * 2


class Prepared(NamedTuple):
    """The parameters and draws in the form that the kernels read, for both sides."""

    turns: Tensor
    shifts: Tensor
    sizes: Tensor
    largest: Tensor
    draws: Tensor


class SinePlan:
    """The tiles and arguments of the kernels of queries (side 0) or keys (side 1)."""

    def __init__(self, recipe: Sines, prepared: Prepared, side: int, x: Tensor, positions: Tensor):
        x = x if x.stride(3) == 1 else x.contiguous()
        self.recipe, self.side, self.x = recipe, side, x
        batch, heads, times, channels = x.shape
        width = max(16, triton.next_power_of_2(recipe.realizations))
        self.rows = max(16, min(128, HELD // width))
        self.tiles = triton.cdiv(batch * times, self.rows)
        self.arguments: dict[str, Any] = dict(
            X=x, Positions=positions.contiguous(), Draws=prepared.draws, Turns=prepared.turns, Shifts=prepared.shifts[side],
            Sizes=prepared.sizes, Largest=prepared.largest, heads=heads, times=times, channels=channels,
            realizations=recipe.realizations, batches=batch, waves=prepared.turns.shape[2],
            x_batch=x.stride(0), x_head=x.stride(1), x_time=x.stride(2),
            positions_batch=0 if positions.ndim == 1 else positions.shape[1], scale=recipe.realizations**-0.5,
            ROWS=self.rows, WAVES=prepared.draws.shape[2] // 2, REALIZATIONS=width, BLOCK=16, GROUP=4,
        )  # fmt: skip

    def features(self) -> Tensor:
        """Returns the features of x."""
        y = self.x.new_empty(*self.x.shape[:3], self.recipe.realizations)
        run(features_kernel, (self.x.shape[1], self.tiles), {**self.arguments, "Y": y}, 4, 1)
        return y

    def gradients(self, dy: Tensor, found: Sequence[Tensor]) -> Tensor:
        """Returns the gradient of x, and adds those of the parameters to those found."""
        heads, channels, waves = self.x.shape[1], self.x.shape[3], self.arguments["WAVES"]
        dx = self.x.new_empty(self.x.shape)
        sums = torch.empty(self.tiles, heads, channels, waves, 4, device=dx.device)
        arguments = {**self.arguments, "Dx": dx, "Dy": dy.contiguous(), "Sums": sums}
        run(gradient_kernel, (heads, self.tiles), arguments, 4, 2)
        own = sums.sum(0, dtype=torch.float64)[:, :, : self.arguments["waves"]]
        dturns, dshifts, dsizes = found
        dturns += own[..., 0]
        dsizes += own[..., 1]
        dshifts[self.side] += own[..., 2]
        return dx


def prepare(recipe: Sines, x: Tensor) -> Prepared:
    """Returns parameters and draws, [heads, channels, rows, realizations] with at least 16 rows, for the kernels."""
    heads, channels, waves = recipe.parameters[0].shape
    rows = max(16, triton.next_power_of_2(2 * waves))
    draws = torch.empty(
        heads, channels, rows, recipe.realizations, device=x.device, dtype=torch.float16 if DIRECT.value else torch.float32
    )
    run(
        draws_kernel, (heads * channels,),
        {
            "Draws": draws, "Seed": recipe.seed, "channels": channels, "realizations": recipe.realizations, "waves": waves,
            "gate_heads": recipe.gate_number * heads, "GATED": recipe.gated, "ROWS": rows,
            "REALIZATIONS": max(16, triton.next_power_of_2(recipe.realizations)),
        },
        4, 1,
    )  # fmt: skip
    turns, shifts, sizes = recipe.parameters
    largest = sizes.abs().amax().float().clamp_min(1e-30)
    return Prepared(fixed(turns), fixed(shifts), (sizes / largest).float().contiguous(), largest, draws)


def forward(recipe: Sines, sides: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Returns the features of queries and keys, given with their positions."""
    prepared = prepare(recipe, sides[0][0])
    return [SinePlan(recipe, prepared, side, x, positions).features() for side, (x, positions) in enumerate(sides)]


def backward(recipe: Sines, sides: Sequence[tuple[Tensor, Tensor]], douts: Sequence[Tensor]) -> list[Tensor]:
    """Returns the gradients of queries, keys and parameters."""
    prepared = prepare(recipe, sides[0][0])
    found = [x.new_zeros(x.shape) for x in recipe.parameters]
    plans = [SinePlan(recipe, prepared, side, x, positions) for side, (x, positions) in enumerate(sides)]
    return [*(plan.gradients(dy, found) for plan, dy in zip(plans, douts, strict=True)), *found]
