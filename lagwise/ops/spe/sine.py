"""Features by sines: one matrix product over channels and sines, whose left operand is made in the tile.

    y[t, r] = sum_dp x[t, d] sizes_dp (cos phase_dp(t) draws_dp0[r] + sin phase_dp(t) draws_dp1[r]) / sqrt(R)
    phase_dp(t) = 2 pi (turns_dp t + shifts_dp)

Turns and shifts are fractions of 2^64, so that whole turns drop out of a product of integers, at every position below 2^31 alike.
The backward pass makes da = dy @ draws^T, the gradient of the left operand, and all other gradients from it. Rows of x and dy are
divided by their largest number, and sizes by theirs, so that two float16 numbers hold 22 bits of an operand.

A program has the same tokens of some rows of the batch, and takes their cosines once. A product has some channels at a time.
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
from lagwise.ops.kernels.rng import (
    CODE_STEP,
    GATE_STEP,
    LARGER,
    LEAST,
    UNIT,
    channel_state,
    in_two,
    largest,
    numbers,
    sum_product,
)
from lagwise.ops.kernels.tiles import DIRECT, gather, next_state
from lagwise.ops.spe.recipes import Sines

PI = tl.constexpr(3.141592653589793)
HALF_TURN = tl.constexpr(3.141592653589793 / 2**31)

# Numbers [rows of the batch, tokens, realizations] that a program holds, and the columns of a product, two for each wave.
HELD, COLUMNS = 16384, 64


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def soft_size(gain, sines):
    """Returns softplus(gain) / sqrt(2 sines), in float64."""
    gain = gain.to(tl.float64)
    return (tl.maximum(gain, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(gain)))) * tl.rsqrt(2.0 * sines.to(tl.float64))


@triton.jit
def gate_sizes(Gate, at, there, GATED: tl.constexpr):
    """Returns sqrt(1 - delta) and sqrt(delta) of channels, in float64: 1 and 0 without a gate."""
    if not GATED:
        return tl.full(at.shape, 1.0, tl.float64), tl.zeros(at.shape, tl.float64)
    gate = tl.load(Gate + at, mask=there, other=0.0).to(tl.float64)
    return tl.sqrt(sigmoid(-gate)), tl.sqrt(sigmoid(gate))


@triton.jit
def fixed(x):
    """Returns the fractions of turns in units of 2^-64, as int64 whose sign is the highest bit."""
    return ((x - tl.floor(x)) * 9223372036854775808.0).to(tl.int64) * 2


@triton.jit
def prepare_kernel(
    Freq, Offset, Gain, Gate, Seed, Draws, Turns, Shifts, Sizes, Largest,
    heads, channels, realizations, sines, waves, gate_heads,
    GATED: tl.constexpr, ROWS: tl.constexpr, REALIZATIONS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes turns, shifts and sizes of a channel, and its draws, [ROWS, realizations], with zeros below those that are used.

    Sizes are divided by the largest of the head, which each program looks for: they are few.
    """
    program = tl.program_id(0)
    head, channel = program // channels, program % channels
    most = tl.zeros([BLOCK], tl.float64)
    for start in range(head * channels * sines, (head + 1) * channels * sines, BLOCK):
        at = start + tl.arange(0, BLOCK)
        there = at < (head + 1) * channels * sines
        keep, level = gate_sizes(Gate, at // sines, there, GATED)
        found = keep * soft_size(tl.load(Gain + at, mask=there, other=0.0), sines)
        most = tl.maximum(most, tl.where(there, tl.maximum(found, level), 0.0))
    least: tl.constexpr = LEAST
    largest = tl.maximum(tl.max(most, 0), least)
    tl.store(Largest + head + tl.arange(0, 1), tl.zeros([1], tl.float32) + largest.to(tl.float32), mask=channel == 0)
    wave = tl.arange(0, ROWS // 2)
    there = wave < sines
    at = program * sines + wave
    keep, level = gate_sizes(Gate, wave * 0 + program, wave >= 0, GATED)
    turns = sigmoid(tl.load(Freq + at, mask=there, other=0.0).to(tl.float64)) * 0.5
    shifts = tl.load(Offset + at, mask=there, other=0.0).to(tl.float64) * (0.5 / PI)
    sizes = tl.where(there, keep * soft_size(tl.load(Gain + at, mask=there, other=0.0), sines), level) / largest
    # The gate does not turn.
    at = program * waves + wave
    tl.store(Turns + at, fixed(tl.where(there, turns, 0.0)), mask=wave < waves)
    tl.store(Shifts + at, fixed(tl.where(there, shifts, 0.0)), mask=wave < waves)
    tl.store(Shifts + heads * channels * waves + at, wave.to(tl.int64) * 0, mask=wave < waves)
    tl.store(Sizes + at, sizes.to(tl.float32), mask=wave < waves)
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
def column_sum(Sums, tiles, rows, at, there, BLOCK: tl.constexpr):
    """Returns the sum over tiles of numbers that lie `rows` apart, in float64."""
    total = tl.zeros(at.shape, tl.float64)
    for start in range(0, tiles, BLOCK):
        tile = start + tl.arange(0, BLOCK)
        found = tl.load(
            Sums + tile.to(tl.int64)[:, None] * rows + at[None, :], mask=(tile < tiles)[:, None] & there[None, :], other=0.0
        )
        total += tl.sum(found.to(tl.float64), 0)
    return total


@triton.jit
def finish_kernel(
    Freq, Gain, Gate, QuerySums, KeySums, DFreq, DOffset, DGain, DGate,
    heads, channels, sines, query_tiles, key_tiles,
    GATED: tl.constexpr, WAVES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums the parts of a channel over the tiles of both sides, and writes the gradients of what is learned."""
    program = tl.program_id(0)
    wave, rows = tl.arange(0, WAVES), heads * channels * WAVES * 4
    there, own = wave <= sines, (program * WAVES + wave) * 4
    dturns = column_sum(QuerySums, query_tiles, rows, own, there, BLOCK)
    dturns += column_sum(KeySums, key_tiles, rows, own, there, BLOCK)
    dsizes = column_sum(QuerySums, query_tiles, rows, own + 1, there, BLOCK)
    dsizes += column_sum(KeySums, key_tiles, rows, own + 1, there, BLOCK)
    dshifts = column_sum(QuerySums, query_tiles, rows, own + 2, there, BLOCK)
    there, at = wave < sines, program * sines + wave
    keep, level = gate_sizes(Gate, wave * 0 + program, wave >= 0, GATED)
    turns = sigmoid(tl.load(Freq + at, mask=there, other=0.0).to(tl.float64))
    gain = tl.load(Gain + at, mask=there, other=0.0)
    size, slope = soft_size(gain, sines), sigmoid(gain.to(tl.float64)) * tl.rsqrt(2.0 * sines.to(tl.float64))
    tl.store(DFreq + at, (dturns * 0.5 * turns * (1.0 - turns)).to(DFreq.dtype.element_ty), mask=there)
    tl.store(DOffset + at, (dshifts * (0.5 / PI)).to(DOffset.dtype.element_ty), mask=there)
    tl.store(DGain + at, (dsizes * keep * slope).to(DGain.dtype.element_ty), mask=there)
    if GATED:
        # keep^2 = 1 - delta and level^2 = delta have the gradients -keep^2 level^2 and keep^2 level^2.
        dgate = tl.sum(0.5 * tl.where(there, -size * keep * level * level, keep * keep * level) * dsizes, 0)
        tl.store(DGate + program + tl.arange(0, 1), (tl.zeros([1], tl.float64) + dgate).to(DGate.dtype.element_ty))


@triton.jit
def angles(Turns, Shifts, at, there, position, quarters):
    """Returns phases less some quarters of a turn, without whole turns, between -pi and pi."""
    turns = tl.load(Turns + at, mask=there, other=0)[None, :]
    shifts = tl.load(Shifts + at, mask=there, other=0)[None, :]
    # The upper half of position * turns + shifts: what the lower half of the shifts carries is 2^-32 of a turn. As an unsigned
    # number a negative position is 2^32 too large, which adds the lower half of the turns to the upper one.
    low, high, t = turns.to(tl.uint32), (turns >> 32).to(tl.uint32), position.to(tl.uint32)[:, None]
    shifts = (shifts >> 32).to(tl.uint32) - (quarters.to(tl.uint32) << 30)[None, :]
    phase = tl.umulhi(low, t) + high * t + shifts - tl.where(position[:, None] < 0, low, 0)
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
def block_of(
    Positions, times, heads, positions_batch, start, CONSECUTIVE: tl.constexpr, BATCH: tl.constexpr, TOKENS: tl.constexpr
):
    """Returns head, first row of the batch, and times of a program's tokens, which of these exist, and their positions."""
    program, blocks = tl.program_id(0), tl.cdiv(times, TOKENS)
    head, tile = program % heads, program // heads
    row, time = tile // blocks * BATCH, tile % blocks * TOKENS + tl.arange(0, TOKENS)
    kept = tl.minimum(time, times - 1).to(tl.int64)
    if CONSECUTIVE:
        return head, row, kept, time < times, kept + start
    # Rows whose positions are their own have programs of their own.
    return head, row, kept, time < times, tl.load(Positions + row.to(tl.int64) * positions_batch + kept).to(tl.int64)


@triton.jit
def kept_row(row, batches):
    """Returns a row of the batch, or the last one where there is none."""
    return tl.minimum(row, batches - 1).to(tl.int64)


@triton.jit(do_not_specialize=["start"])
def features_kernel(
    X, Y, Positions, Draws, Turns, Shifts, Sizes, Largest,
    heads, times, channels, realizations, batches, waves, x_batch, x_head, x_time, positions_batch, start, scale,
    CONSECUTIVE: tl.constexpr, BATCH: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, WAVES: tl.constexpr,
    REALIZATIONS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the features y, [batch, heads, times, realizations], of x, [batch, heads, times, channels]."""
    head, row, time, there, position = block_of(Positions, times, heads, positions_batch, start, CONSECUTIVE, BATCH, TOKENS)
    r, m = tl.arange(0, REALIZATIONS), tl.arange(0, CHANNELS * 2 * WAVES)
    Own, sizes_of_rows, sums = (), (), ()
    for step in tl.static_range(BATCH):
        Own += (X + kept_row(row + step, batches) * x_batch + head.to(tl.int64) * x_head + time * x_time,)
        most = tl.zeros([TOKENS], tl.float32)
        for base in range(0, channels, BLOCK):
            channel = base + tl.arange(0, BLOCK)
            x = tl.load(Own[step][:, None] + channel[None, :], mask=(channel < channels)[None, :], other=0.0).to(tl.float32)
            most = tl.maximum(most, largest(x, 1))
        sizes_of_rows += (most,)
        sums += (tl.zeros([TOKENS, REALIZATIONS], tl.float32),)
    # The columns of the left operand: cosine and sine of each wave in turn. A sine is a cosine a quarter of a turn later.
    for base in range(0, channels, CHANNELS):
        channel, wave = base + m // (2 * WAVES), m % (2 * WAVES) // 2
        kept, known = tl.minimum(channel, channels - 1), (channel < channels) & (wave < waves)
        at = (head * channels + kept) * waves + wave
        angle = angles(Turns, Shifts, at, known, position, m % 2)
        weights = tl.load(Sizes + at, mask=known, other=0.0)[None, :] * fast_cosine(angle)
        Met = Draws + ((head * channels + base).to(tl.int64) * 2 * WAVES + m)[:, None] * realizations + r[None, :]
        draws = tl.load(Met, mask=(channel < channels)[:, None] & (r < realizations)[None, :], other=0.0)
        newer = ()
        for step in tl.static_range(BATCH):
            x = gather(Own[step][:, None] + kept[None, :])
            first, second = in_two(x * (1.0 / sizes_of_rows[step] * LARGER)[:, None] * weights)
            # Long sums within matrix units would lose bits.
            newer += (sums[step] + sum_product(first, second, draws),)
        sums = newer
    for step in tl.static_range(BATCH):
        place = (kept_row(row + step, batches) * heads + head) * times + time
        y = sums[step] * (sizes_of_rows[step] * tl.load(Largest + head) * scale * UNIT)[:, None]
        own = (there & (row + step < batches))[:, None] & (r < realizations)[None, :]
        tl.store(Y + place[:, None] * realizations + r[None, :], y.to(Y.dtype.element_ty), mask=own)


@triton.jit(do_not_specialize=["start"])
def gradient_kernel(
    X, Dx, Dy, Positions, Draws, Turns, Shifts, Sizes, Largest, Sums,
    heads, times, channels, realizations, batches, waves, x_batch, x_head, x_time, positions_batch, start, scale,
    CONSECUTIVE: tl.constexpr, BATCH: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, WAVES: tl.constexpr,
    REALIZATIONS: tl.constexpr,
):  # fmt: skip
    """Writes the gradient of x, [batch, heads, times, channels], and its tile's part of those of turns, shifts and sizes.

    The parts are [tiles, heads, channels, WAVES, 4].
    """
    head, row, time, there, position = block_of(Positions, times, heads, positions_batch, start, CONSECUTIVE, BATCH, TOKENS)
    r, m, w = tl.arange(0, REALIZATIONS), tl.arange(0, CHANNELS * 2 * WAVES), tl.arange(0, CHANNELS * WAVES)
    Own, Out, exist, mosts, parts = (), (), (), (), ()
    for step in tl.static_range(BATCH):
        batch = kept_row(row + step, batches)
        place = (batch * heads + head) * times + time
        exist += (there & (row + step < batches),)
        Given = Dy + place[:, None] * realizations + r[None, :]
        dy = tl.load(Given, mask=exist[step][:, None] & (r < realizations)[None, :], other=0.0).to(tl.float32) * scale
        Own += (X + batch * x_batch + head.to(tl.int64) * x_head + time * x_time,)
        Out += (Dx + place * channels,)
        mosts += (largest(dy, 1),)
        parts += (in_two(dy * (1.0 / mosts[step] * LARGER)[:, None]),)
    i, j = tl.arange(0, 2)[None, :, None], tl.arange(0, 2)[None, None, :]
    for base in range(0, channels, CHANNELS):
        column = base + m // (2 * WAVES)
        Met = Draws + ((head * channels + base).to(tl.int64) * 2 * WAVES + m)[None, :] * realizations + r[:, None]
        draws = tl.load(Met, mask=(column < channels)[None, :] & (r < realizations)[:, None], other=0.0)
        channel, wave = base + w // WAVES, w % WAVES
        kept, known = tl.minimum(channel, channels - 1), (channel < channels) & (wave < waves)
        at = (head * channels + kept) * waves + wave
        sizes = (tl.load(Sizes + at, mask=known, other=0.0) * tl.load(Largest + head))[None, :]
        angle = angles(Turns, Shifts, at, known, position, w * 0)
        cos, sin = fast_cosine(angle), fast_sine(angle)
        # The sums over rows of the batch of x times the gradients of a token's cosines and sines.
        all_cos, all_sin = tl.zeros([TOKENS, CHANNELS * WAVES], tl.float32), tl.zeros([TOKENS, CHANNELS * WAVES], tl.float32)
        own = base + tl.arange(0, CHANNELS)
        for step in tl.static_range(BATCH):
            da = sum_product(parts[step][0], parts[step][1], draws)
            dcos, dsin = tl.split(tl.reshape(da, [TOKENS, CHANNELS * WAVES, 2]))
            unit = (mosts[step] * UNIT)[:, None]
            dx = tl.sum(tl.reshape((cos * dcos + sin * dsin) * sizes, [TOKENS, CHANNELS, WAVES]), 2) * unit
            tl.store(
                Out[step][:, None] + own[None, :],
                dx.to(Dx.dtype.element_ty),
                mask=exist[step][:, None] & (own < channels)[None, :],
            )
            x = tl.where(exist[step][:, None], gather(Own[step][:, None] + kept[None, :]), 0.0) * unit
            all_cos += x * dcos
            all_sin += x * dsin
        dcycles = 2.0 * PI * sizes * (cos * all_sin - sin * all_cos)
        along = cos * all_cos + sin * all_sin
        # One sum over the tokens for all: turns, sizes, shifts, and shifts again.
        summed = tl.sum(tl.join(tl.join(dcycles * position.to(tl.float32)[:, None], dcycles), tl.join(along, dcycles)), 0)
        Sum = Sums + ((tl.program_id(0).to(tl.int64) * channels + channel) * WAVES + wave)[:, None, None] * 4 + i * 2 + j
        tl.store(Sum, summed, mask=(channel < channels)[:, None, None])


class Prepared(NamedTuple):
    """The parameters and draws in the form that the kernels read, for both sides."""

    turns: Tensor
    shifts: Tensor
    sizes: Tensor
    largest: Tensor
    draws: Tensor


class SinePlan:
    """The tiles and arguments of the kernels of queries (side 0) or keys (side 1)."""

    def __init__(self, recipe: Sines, prepared: Prepared, side: int, x: Tensor, positions: Tensor | int):
        x = x if x.stride(3) == 1 else x.contiguous()
        self.x, self.realizations = x, recipe.realizations
        batch, heads, times, channels = x.shape
        width, waves = max(16, triton.next_power_of_2(recipe.realizations)), prepared.draws.shape[2] // 2
        given = positions.contiguous() if isinstance(positions, Tensor) else x
        alone = isinstance(positions, Tensor) and positions.ndim == 2
        tokens = min(64, max(16, triton.next_power_of_2(times)), max(16, HELD // width))
        together = max(1, COLUMNS // (2 * waves))
        rows = 1 if alone else min(4, triton.next_power_of_2(batch), max(1, HELD // (tokens * width)))
        self.tiles = triton.cdiv(times, tokens) * triton.cdiv(batch, rows)
        self.arguments: dict[str, Any] = dict(
            X=x, Positions=given, Draws=prepared.draws, Turns=prepared.turns, Shifts=prepared.shifts[side], Sizes=prepared.sizes,
            Largest=prepared.largest, heads=heads, times=times, channels=channels, realizations=recipe.realizations,
            batches=batch, waves=prepared.turns.shape[2], x_batch=x.stride(0), x_head=x.stride(1), x_time=x.stride(2),
            positions_batch=times if alone else 0, start=0 if isinstance(positions, Tensor) else positions,
            scale=recipe.realizations**-0.5, CONSECUTIVE=not isinstance(positions, Tensor), BATCH=rows, TOKENS=tokens,
            CHANNELS=together, WAVES=waves, REALIZATIONS=width, BLOCK=16,
        )  # fmt: skip

    def features(self) -> Tensor:
        """Returns the features of x."""
        y = self.x.new_empty(*self.x.shape[:3], self.realizations)
        # Half the rows and channels at a time: a program holds sums of all rows, and more programs fit.
        rows, channels = (max(1, self.arguments[name] // 2) for name in ("BATCH", "CHANNELS"))
        tiles = triton.cdiv(self.x.shape[2], self.arguments["TOKENS"]) * triton.cdiv(self.x.shape[0], rows)
        arguments = {**self.arguments, "Y": y, "BATCH": rows, "CHANNELS": channels}
        run(features_kernel, (self.x.shape[1], tiles), arguments, 4, 1)
        return y

    def gradients(self, dy: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the gradient of x, and the tiles' parts of those of turns, sizes and shifts."""
        heads, channels = self.x.shape[1], self.x.shape[3]
        dx = self.x.new_empty(self.x.shape)
        sums = torch.empty(self.tiles, heads, channels, self.arguments["WAVES"], 4, device=dx.device)
        arguments = {**self.arguments, "Dx": dx, "Dy": dy.contiguous(), "Sums": sums}
        run(gradient_kernel, (heads, self.tiles), arguments, 4, 2)
        return dx, sums


def channel_arguments(recipe: Sines) -> dict[str, Any]:
    """Returns the arguments of the kernels that have a program for each channel."""
    freq, offset, gain, *gates = (x.contiguous() for x in recipe.learned)
    heads, channels, sines = freq.shape
    return dict(
        Freq=freq, Offset=offset, Gain=gain, Gate=gates[0] if gates else gain, Seed=recipe.seed, heads=heads, channels=channels,
        realizations=recipe.realizations, sines=sines, waves=sines + recipe.gated, gate_heads=recipe.gate_number * heads,
        GATED=recipe.gated, ROWS=max(16, triton.next_power_of_2(2 * (sines + recipe.gated))),
        REALIZATIONS=max(16, triton.next_power_of_2(recipe.realizations)),
    )  # fmt: skip


def prepare(recipe: Sines) -> Prepared:
    """Returns parameters and draws, [heads, channels, rows, realizations] with at least 16 rows, for the kernels."""
    arguments = channel_arguments(recipe)
    heads, channels, waves, device = arguments["heads"], arguments["channels"], arguments["waves"], recipe.seed.device
    turns, shifts = (torch.empty(*some, heads, channels, waves, dtype=torch.int64, device=device) for some in ((), (2,)))
    numbers = torch.empty(heads * (channels * waves + 1), device=device)
    draws = torch.empty(heads, channels, arguments["ROWS"], recipe.realizations, device=device, dtype=torch.float16)
    prepared = Prepared(turns, shifts, numbers[:-heads].view(heads, channels, waves), numbers[-heads:], draws)
    results = {"Turns": turns, "Shifts": shifts, "Sizes": prepared.sizes, "Largest": prepared.largest, "Draws": draws}
    run(prepare_kernel, (heads * channels,), {**arguments, **results, "BLOCK": 512}, 4, 1)
    return prepared


def forward(recipe: Sines, sides: Sequence[tuple[Tensor, Tensor | int]]) -> list[Tensor]:
    """Returns the features of queries and keys, given with their positions or the first of consecutive ones."""
    prepared = prepare(recipe)
    return [SinePlan(recipe, prepared, side, x, positions).features() for side, (x, positions) in enumerate(sides)]


def backward(recipe: Sines, sides: Sequence[tuple[Tensor, Tensor | int]], douts: Sequence[Tensor]) -> list[Tensor]:
    """Returns the gradients of queries, keys and what is learned."""
    prepared = prepare(recipe)
    plans = [SinePlan(recipe, prepared, side, x, positions) for side, (x, positions) in enumerate(sides)]
    (dq, query_sums), (dk, key_sums) = (plan.gradients(dy) for plan, dy in zip(plans, douts, strict=True))
    arguments, found = channel_arguments(recipe), [x.new_empty(x.shape) for x in recipe.learned]
    results = dict(zip(("DFreq", "DOffset", "DGain", "DGate"), [*found, found[0]], strict=False))
    sums = {"QuerySums": query_sums, "KeySums": key_sums, "query_tiles": len(query_sums), "key_tiles": len(key_sums)}
    grid, waves = (arguments["heads"] * arguments["channels"],), arguments["ROWS"] // 2
    run(finish_kernel, grid, {**arguments, **results, **sums, "WAVES": waves, "BLOCK": 32}, 4, 1)
    return [dq, dk, *found]
