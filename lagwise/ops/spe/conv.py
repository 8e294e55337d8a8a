"""Features by filters of noise: the codes of a tile are made in the tile, for a block of the batch at a time.

    code_d(t)[r] = sum_p taps_dp z_d(t + p)[r] + level_d gate_d[r]
    y[b, t, r] = sum_d x[b, t, d] code_d(t)[r] / sqrt(R)
    dx[b, t, d] = sum_r dy[b, t, r] code_d(t)[r] / sqrt(R)
    dtaps_dp = sum_tr dcode_d(t)[r] z_d(t + p)[r]                       dcode_d(t)[r] = sum_b x[b, t, d] dy[b, t, r] / sqrt(R)

A tile of tokens that stand side by side makes the filter a product with a band: row t holds the taps, moved to the right by t.
On a grid such a run of tokens lies in one line of cells, and each line of taps meets a line of noise of its own.
"""

# Triton's language is not typed as Python is.
# pyright: basic, reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from lagwise.ops.kernels.launches import run
from lagwise.ops.kernels.rng import CODE_STEP, GATE_STEP, LARGER, UNIT, channel_state, exact_product, near_exact_product, numbers
from lagwise.ops.kernels.tiles import DIRECT, gather, next_state
from lagwise.ops.spe.recipes import Filters, skewed_sum

# Numbers of a tile [batch, tokens, realizations] that a program holds in registers.
HELD = 32768
# The most draws, times realizations, that a tile of the gradient meets at once, and the programs that keep a large GPU busy.
WIDEST = 16384
PROGRAMS = 1024
# A run on a grid as one number: its line times 2^32, plus its column, which may be before the line's first.
BEFORE = tl.constexpr(1024)


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
def codes_of(
    Taps, Level, Seed, head, channel, channels, base, taps, room, leads, lines, rows, gate_heads,
    AXES: tl.constexpr, GATE: tl.constexpr, DRAWS: tl.constexpr, TOKENS: tl.constexpr, REALIZATIONS: tl.constexpr,
):  # fmt: skip
    """Returns the codes of a channel in the run `base`, [TOKENS, REALIZATIONS]."""
    at = head * channels + channel
    state = channel_state(Seed, CODE_STEP, head, channel)
    codes = tl.zeros([TOKENS, REALIZATIONS], tl.float32)
    line, column = run_start(base, AXES)
    for lead in range(leads):
        own = line_state(state, line, lead, lines, rows, AXES)
        for start in range(0, TOKENS + taps - 1, DRAWS):
            place = start + tl.arange(0, DRAWS)
            # There are TOKENS zeros on the left, and enough on the right.
            band = gather(Taps + (at * leads + lead) * room + TOKENS + place[None, :] - tl.arange(0, TOKENS)[:, None])
            draws = numbers(next_state(own, column + place.to(tl.int64)), REALIZATIONS)
            if DIRECT:
                draws = draws.to(tl.float16)
            codes += near_exact_product(band * LARGER, draws)
    codes *= UNIT
    if GATE:
        constant = numbers(channel_state(Seed, GATE_STEP, head + gate_heads, channel) + tl.zeros([1], tl.uint64), REALIZATIONS)
        codes += tl.load(Level + at) * constant
    return codes


@triton.jit
def first_run(left, offset):
    """Returns where a run of neighbouring positions among the tokens that are left starts, and its tokens."""
    base = tl.min(tl.where(left, offset, 1 << 62), 0)
    return base, left & (offset == base)


@triton.jit
def tile_of(Positions, heads, times, positions_batch, columns, AXES: tl.constexpr, BATCH: tl.constexpr, TOKENS: tl.constexpr):
    """Returns head, rows of the batch and tokens of a program, the run through each token, and which tokens exist.

    As a rule a tile is one run.
    """
    tiles = tl.cdiv(times, TOKENS)
    program = tl.program_id(0)
    tile, head, block = program % tiles, (program // tiles) % heads, program // (tiles * heads)
    token = tile * TOKENS + tl.arange(0, TOKENS)
    there = token < times
    # With positions of its own, each row of the batch is a block.
    position = tl.load(Positions + block.to(tl.int64) * positions_batch + token, mask=there, other=0).to(tl.int64)
    return head, block * BATCH + tl.arange(0, BATCH), token, run_through(position, tl.arange(0, TOKENS), columns, AXES), there


@triton.jit
def features_kernel(
    X, Y, Positions, Seed, Taps, Level,
    heads, times, channels, realizations, batches, taps, room, leads, lines, rows, columns, gate_heads,
    x_batch, x_head, x_time, positions_batch, scale,
    AXES: tl.constexpr, GATE: tl.constexpr, DRAWS: tl.constexpr, BATCH: tl.constexpr, TOKENS: tl.constexpr,
    REALIZATIONS: tl.constexpr,
):  # fmt: skip
    """Writes the features y, [batch, heads, times, realizations], of x, [batch, heads, times, channels]."""
    r = tl.arange(0, REALIZATIONS)
    head, row, token, offset, left = tile_of(Positions, heads, times, positions_batch, columns, AXES, BATCH, TOKENS)
    there = left
    Own = X + row.to(tl.int64)[:, None] * x_batch + head.to(tl.int64) * x_head + token.to(tl.int64)[None, :] * x_time
    y = tl.zeros([BATCH, TOKENS, REALIZATIONS], tl.float32)
    while tl.max(left.to(tl.int32), 0) > 0:
        base, run = first_run(left, offset)
        mask = (row < batches)[:, None] & run[None, :]
        for channel in range(channels):
            codes = codes_of(
                Taps, Level, Seed, head, channel, channels, base, taps, room, leads, lines, rows, gate_heads,
                AXES, GATE, DRAWS, TOKENS, REALIZATIONS,
            )  # fmt: skip
            x = tl.load(Own + channel, mask=mask, other=0.0).to(tl.float32)
            y += x[:, :, None] * codes[None, :, :]
        left = left & ~run
    Out = Y + ((row[:, None].to(tl.int64) * heads + head) * times + token[None, :]) * realizations
    mask = ((row < batches)[:, None] & there[None, :])[:, :, None] & (r < realizations)[None, None, :]
    tl.store(Out[:, :, None] + r[None, None, :], (y * scale).to(Y.dtype.element_ty), mask=mask)


@triton.jit
def inputs_kernel(
    Dx, Dy, Positions, Seed, Taps, Level,
    heads, times, channels, realizations, batches, taps, room, leads, lines, rows, columns, gate_heads, positions_batch, scale,
    AXES: tl.constexpr, GATE: tl.constexpr, DRAWS: tl.constexpr, BATCH: tl.constexpr, TOKENS: tl.constexpr,
    REALIZATIONS: tl.constexpr,
):  # fmt: skip
    """Writes the gradient of x, [batch, heads, times, channels]."""
    r = tl.arange(0, REALIZATIONS)
    head, row, token, offset, left = tile_of(Positions, heads, times, positions_batch, columns, AXES, BATCH, TOKENS)
    there = left
    place = (row[:, None].to(tl.int64) * heads + head) * times + token[None, :]
    exists = ((row < batches)[:, None] & there[None, :])[:, :, None] & (r < realizations)[None, None, :]
    dy = tl.load(Dy + place[:, :, None] * realizations + r[None, None, :], mask=exists, other=0.0).to(tl.float32) * scale
    while tl.max(left.to(tl.int32), 0) > 0:
        base, run = first_run(left, offset)
        mask = (row < batches)[:, None] & run[None, :]
        for channel in range(channels):
            codes = codes_of(
                Taps, Level, Seed, head, channel, channels, base, taps, room, leads, lines, rows, gate_heads,
                AXES, GATE, DRAWS, TOKENS, REALIZATIONS,
            )  # fmt: skip
            dx = tl.sum(dy * codes[None, :, :], 2)
            tl.store(Dx + place * channels + channel, dx.to(Dx.dtype.element_ty), mask=mask)
        left = left & ~run


@triton.jit
def taps_kernel(
    X, Dy, Positions, Seed, DBands, DLevel,
    heads, times, channels, realizations, batches, leads, lines, rows, columns, gate_heads,
    x_batch, x_head, x_time, positions_batch, groups, windows, scale,
    AXES: tl.constexpr, GATE: tl.constexpr, SHARED: tl.constexpr, DRAWS: tl.constexpr, TOKENS: tl.constexpr,
    REALIZATIONS: tl.constexpr,
):  # fmt: skip
    """Writes the gradient of the band of a channel, [programs, TOKENS, DRAWS], and that of its level.

    A program sums over the batch and over every tile of its group, for one line of taps and one window of draws. SHARED says
    that the rows of the batch have the same positions; otherwise each is a tile of its own.
    """
    program = tl.program_id(0)
    window, group = program % windows, (program // windows) % groups
    lead, at = (program // (windows * groups)) % leads, program // (windows * groups * leads)
    channel, head = at % channels, at // channels
    place, r = window * DRAWS + tl.arange(0, DRAWS), tl.arange(0, REALIZATIONS)
    state = channel_state(Seed, CODE_STEP, head, channel)
    dbands = tl.zeros([TOKENS, DRAWS], tl.float32)
    total = tl.zeros([REALIZATIONS], tl.float32)
    tiles = tl.cdiv(times, TOKENS)
    for step in range(group, tiles if SHARED else tiles * batches, groups):
        tile, first = step % tiles, step // tiles
        token = tile * TOKENS + tl.arange(0, TOKENS)
        there = token < times
        position = tl.load(Positions + first.to(tl.int64) * positions_batch + token, mask=there, other=0).to(tl.int64)
        dcodes = tl.zeros([TOKENS, REALIZATIONS], tl.float32)
        for row in range(first, batches if SHARED else first + 1):
            wide = (head * 0 + row).to(tl.int64)
            Own = X + wide * x_batch + head.to(tl.int64) * x_head + token.to(tl.int64) * x_time + channel
            Given = Dy + ((wide * heads + head) * times + token)[:, None] * realizations + r[None, :]
            x = tl.load(Own, mask=there, other=0.0).to(tl.float32)
            dy = tl.load(Given, mask=there[:, None] & (r < realizations)[None, :], other=0.0).to(tl.float32)
            dcodes += x[:, None] * dy
        dcodes *= scale
        total += tl.sum(dcodes, 0)
        offset, left = run_through(position, tl.arange(0, TOKENS), columns, AXES), there
        while tl.max(left.to(tl.int32), 0) > 0:
            base, run = first_run(left, offset)
            line, column = run_start(base, AXES)
            own = line_state(state, line, lead, lines, rows, AXES)
            draws = numbers(next_state(own, column + place.to(tl.int64)), REALIZATIONS)
            if DIRECT:
                draws = draws.to(tl.bfloat16)
            dbands = exact_product(tl.where(run[:, None], dcodes, 0.0), tl.trans(draws), dbands)
            left = left & ~run
    Out = DBands + program.to(tl.int64) * TOKENS * DRAWS + tl.arange(0, TOKENS)[:, None] * DRAWS
    tl.store(Out + tl.arange(0, DRAWS)[None, :], dbands)
    if GATE:
        constant = numbers(channel_state(Seed, GATE_STEP, head + gate_heads, channel) + tl.zeros([1], tl.uint64), REALIZATIONS)
        tl.store(DLevel + program + tl.arange(0, 1), tl.sum(total[None, :] * constant, 1))


class ConvPlan:
    """The tiles, grid and arguments of the kernels of queries (side 0) or keys (side 1)."""

    def __init__(self, recipe: Filters, side: int, x: Tensor, positions: Tensor):
        x = x if x.stride(3) == 1 else x.contiguous()
        self.side, self.x = side, x
        batch, heads, times, channels = x.shape
        taps, *level = recipe.parameters
        self.shared = positions.ndim == 1 or batch == 1
        width = max(16, triton.next_power_of_2(recipe.realizations))
        self.batch = min(triton.next_power_of_2(batch), max(1, HELD // (64 * width))) if self.shared else 1
        *lead_sizes, size = recipe.kernel_size
        self.tokens = max(16, min(64, HELD // (self.batch * width), triton.next_power_of_2((*recipe.grid, 64)[-1])))
        draws = min(64, triton.next_power_of_2(self.tokens + size - 1))
        reached = triton.cdiv(self.tokens + size - 1, draws) * draws
        own = pad(taps[side].float(), (self.tokens, reached - size))
        self.tiles, self.blocks = triton.cdiv(times, self.tokens), triton.cdiv(batch, self.batch)
        self.arguments: dict[str, Any] = dict(
            X=x, Positions=positions.contiguous(), Seed=recipe.seed, Taps=own,
            Level=level[0].float().contiguous() if level else own,
            heads=heads, times=times, channels=channels, realizations=recipe.realizations, batches=batch,
            taps=size, room=own.shape[-1], leads=math.prod(lead_sizes), lines=(1, *lead_sizes)[-1],
            rows=(1, 1, *recipe.grid)[-2], columns=(1, *recipe.grid)[-1], gate_heads=recipe.gate_number * heads,
            x_batch=x.stride(0), x_head=x.stride(1), x_time=x.stride(2),
            positions_batch=0 if self.shared else positions.shape[1], scale=recipe.realizations**-0.5,
            AXES=len(recipe.kernel_size), GATE=bool(level), DRAWS=draws, BATCH=self.batch, TOKENS=self.tokens, REALIZATIONS=width,
        )  # fmt: skip
        self.grid = (self.tiles, heads, self.blocks)
        self.warps = 8 if self.batch * self.tokens * width > HELD // 4 else 4

    def features(self) -> Tensor:
        """Returns the features of x."""
        y = self.x.new_empty(*self.x.shape[:3], self.arguments["realizations"])
        run(features_kernel, self.grid, {**self.arguments, "Y": y}, self.warps, 2)
        return y

    def gradients(self, dy: Tensor, found: Sequence[Tensor]) -> Tensor:
        """Returns the gradient of x, and adds those of the taps and of the level to those found."""
        dy, dx = dy.contiguous(), self.x.new_empty(self.x.shape)
        run(inputs_kernel, self.grid, {**self.arguments, "Dx": dx, "Dy": dy}, self.warps, 2)
        heads, channels, taps, leads = self.x.shape[1], self.x.shape[3], self.arguments["taps"], self.arguments["leads"]
        rows = self.tokens + taps - 1
        draws = max(16, min(WIDEST // self.arguments["REALIZATIONS"], triton.next_power_of_2(rows)))
        windows = triton.cdiv(rows, draws)
        steps = self.tiles if self.shared else self.tiles * self.x.shape[0]
        groups = min(steps, max(1, PROGRAMS // (heads * channels * leads * windows)))
        programs = heads * channels * leads * groups * windows
        dbands, dlevel = torch.empty(programs, self.tokens, draws, device=dy.device), torch.empty(programs, device=dy.device)
        arguments = {
            **self.arguments, "Dy": dy, "DBands": dbands, "DLevel": dlevel, "groups": groups, "windows": windows,
            "SHARED": self.shared, "DRAWS": draws,
        }  # fmt: skip
        run(taps_kernel, (windows, groups, leads, channels, heads), arguments, 8, 2)
        bands = dbands.view(heads * channels * leads, groups, windows, self.tokens, draws).sum(1).transpose(1, 2).flatten(2)
        found[0][self.side] += skewed_sum(bands[..., :rows], 1, taps).view(found[0].shape[1:])
        if self.arguments["GATE"]:
            found[1].add_(dlevel.view(heads, channels, leads, groups, windows)[:, :, 0, :, 0].sum(2))
        return dx


def forward(recipe: Filters, sides: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Returns the features of queries and keys, given with their positions."""
    return [ConvPlan(recipe, side, x, positions).features() for side, (x, positions) in enumerate(sides)]


def backward(recipe: Filters, sides: Sequence[tuple[Tensor, Tensor]], douts: Sequence[Tensor]) -> list[Tensor]:
    """Returns the gradients of queries, keys and parameters."""
    found = [x.new_zeros(x.shape) for x in recipe.parameters]
    plans = [ConvPlan(recipe, side, x, positions) for side, (x, positions) in enumerate(sides)]
    return [*(plan.gradients(dy, found) for plan, dy in zip(plans, douts, strict=True)), *found]
