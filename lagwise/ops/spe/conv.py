"""Features by filters of noise. The codes of some hundred tokens at a time lie in memory, and meet all rows of the batch.

    code_d(t)[r] = sum_p taps_dp z_d(t + p)[r] + level_d gate_d[r]
    y[b, t, r] = sum_d x[b, t, d] code_d(t)[r] / sqrt(R)
    dx[b, t, d] = sum_r dy[b, t, r] code_d(t)[r] / sqrt(R)
    dtaps_dp = sum_tr dcode_d(t)[r] z_d(t + p)[r]                       dcode_d(t)[r] = sum_b x[b, t, d] dy[b, t, r] / sqrt(R)

Codes lie in memory as sums of two float16 numbers, by a size of their channel: products with x and dy, which are written as such
sums too, are those of matrix units then. The gradient of a code is written over the code, by a size of its row. Codes come from
conv_lines.py or conv_tiles.py, by what is known of positions.
"""

# Triton's language is not typed as Python is.
# pyright: basic, reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false

import math
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lagwise.ops.kernels.launches import run
from lagwise.ops.kernels.rng import GATE_STEP, UNIT, channel_state, in_two, largest, numbers
from lagwise.ops.spe.conv_lines import line_codes_kernel, line_taps_kernel, noise_kernel
from lagwise.ops.spe.conv_tiles import keep_of, level_of, store_codes, tile_codes_kernel, tile_taps_kernel
from lagwise.ops.spe.recipes import Filters

# Bytes of codes and noise for each byte of x in float32: linear attention without positions takes about sixteen. Fewest and most
# tokens whose codes are in memory at once.
ROOM, FEWEST, MOST = 8, 256, 4096
# Numbers of a tile [channels, realizations] that meets the batch, and the most rows of the batch at once.
HELD, ROWS = 4096, 32
# Tokens that a program has one after the other, where codes meet the batch.
STEPS = 16
# What gradients of codes are multiplied by: sums over 32 rows of products of numbers below 256 are below 2^14 then.
LESS = tl.constexpr(1.0 / 128.0)
# Tokens of a block, and the most blocks of noise that a block of tokens may meet: their squares lie in shared memory.
SIZE, BLOCKS = 64, 4
# The most draws, times realizations, that a tile of the gradient meets at once, and the programs that keep a large GPU busy.
WIDEST, PROGRAMS = 16384, 512


@triton.jit
def places(X, token, row, heads, head, times, x_batch, x_head, x_time, count, batches):
    """Returns where rows of x begin, their numbers among rows without gaps, and which of them exist.

    Tokens are counted over the whole batch where each row of it has codes of its own.
    """
    there = (token < count) & (row < batches)
    token, row = tl.where(there, token, 0), tl.where(there, row, 0)
    batch, time = (row + token // times).to(tl.int64), (token % times).to(tl.int64)
    return X + batch * x_batch + head.to(tl.int64) * x_head + time * x_time, (batch * heads + head) * times + time, there


@triton.jit
def product_of_sums(a, a_small, b, b_small, total):
    """Adds the product of two sums to a total, without that of their small parts."""
    return tl.dot(a, b, tl.dot(a, b_small, tl.dot(a_small, b, total)))


@triton.jit(do_not_specialize=["skipped"])
def features_kernel(
    X, Y, Codes, CodeSizes, heads, times, channels, realizations, batches, tokens, skipped, count, x_batch, x_head, x_time, scale,
    BATCH: tl.constexpr, CHANNELS: tl.constexpr, STEPS: tl.constexpr, REALIZATIONS: tl.constexpr,
):  # fmt: skip
    """Writes the features y, [batch, heads, times, realizations], of tokens from `skipped` on.

    A program has some tokens, one after the other, and some channels of a token at a time.
    """
    tiles, blocks = tokens // STEPS, tl.cdiv(channels, CHANNELS)
    tile, head = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    row, r = tl.arange(0, BATCH), tl.arange(0, REALIZATIONS)
    y = tl.zeros([REALIZATIONS, BATCH], tl.float32)
    for step in range(tile * STEPS * blocks, (tile + 1) * STEPS * blocks):
        token, block = step // blocks, step % blocks
        channel = block * CHANNELS + tl.arange(0, CHANNELS)
        Own, place, there = places(X, skipped + token, row, heads, head, times, x_batch, x_head, x_time, count, batches)
        at, known = head * channels + channel, channel < channels
        Code = Codes + ((at.to(tl.int64) * tokens + token) * (2 * REALIZATIONS))[:, None] + r[None, :]
        code = tl.load(Code, mask=known[:, None], other=0.0)
        code_small = tl.load(Code + REALIZATIONS, mask=known[:, None], other=0.0)
        x = tl.load(Own[None, :] + channel[:, None], mask=there[None, :] & known[:, None], other=0.0).to(tl.float32)
        x *= tl.load(CodeSizes + at, mask=known, other=0.0)[:, None]
        size = largest(x, 0) * UNIT
        x, x_small = in_two(x * (1.0 / size)[None, :])
        nothing = tl.zeros([REALIZATIONS, BATCH], tl.float32)
        found = product_of_sums(tl.trans(code), tl.trans(code_small), x, x_small, nothing) * (size * scale)[None, :]
        y = tl.where(block > 0, y, 0.0) + found
        whole = there[None, :] & (r < realizations)[:, None] & (block == blocks - 1)
        tl.store(Y + place[None, :] * realizations + r[:, None], y.to(Y.dtype.element_ty), mask=whole)


@triton.jit(do_not_specialize=["skipped", "more"])
def inputs_kernel(
    X, Dx, Dy, Codes, CodeSizes, Sizes, DLevels, Seed,
    heads, times, channels, realizations, batches, tokens, skipped, count, x_batch, x_head, x_time, scale, gate_heads, more,
    GATE: tl.constexpr, BATCH: tl.constexpr, CHANNELS: tl.constexpr, STEPS: tl.constexpr, REALIZATIONS: tl.constexpr,
):  # fmt: skip
    """Writes the gradient of x, [batch, heads, times, channels], that of the codes over the codes, and its part of the levels'.

    A program has some channels of some tokens, one after the other: their codes meet all rows of the batch by products. `more`
    adds the levels' part, [heads, channels, tiles], to what is there.
    """
    tiles, blocks = tokens // STEPS, tl.cdiv(channels, CHANNELS)
    tile, block, head = tl.program_id(0) % tiles, tl.program_id(0) // tiles % blocks, tl.program_id(0) // (tiles * blocks)
    channel, row, r = block * CHANNELS + tl.arange(0, CHANNELS), tl.arange(0, BATCH), tl.arange(0, REALIZATIONS)
    known, used, at = (channel < channels)[:, None], (r < realizations)[None, :], head * channels + channel
    first = at.to(tl.int64) * tokens
    Met = Codes + first[:, None] * (2 * REALIZATIONS) + r[None, :]
    code_size = tl.load(CodeSizes + at, mask=channel < channels, other=0.0)[:, None]
    gate, levels = tl.zeros([CHANNELS, REALIZATIONS], tl.float16), tl.zeros([CHANNELS, BATCH], tl.float32)
    if GATE:
        gate = numbers(channel_state(Seed, GATE_STEP, head + gate_heads, channel), REALIZATIONS).to(tl.float16)
    for token in range(tile * STEPS, (tile + 1) * STEPS):
        Own, place, there = places(X, skipped + token, row, heads, head, times, x_batch, x_head, x_time, count, batches)
        code = tl.load(Met + token * 2 * REALIZATIONS, mask=known, other=0.0)
        code_small = tl.load(Met + (token * 2 + 1) * REALIZATIONS, mask=known, other=0.0)
        # What does not exist has no gradient, and gives none to the codes.
        Given = Dy + place[:, None] * realizations + r[None, :]
        dy = tl.load(Given, mask=there[:, None] & used, other=0.0).to(tl.float32) * scale
        x = tl.load(Own[None, :] + channel[:, None], mask=there[None, :] & known, other=0.0).to(tl.float32)
        dy_size = largest(dy, 1) * UNIT
        dy, dy_small = in_two(dy * (1.0 / dy_size)[:, None])
        nothing = tl.zeros([CHANNELS, BATCH], tl.float32)
        dx = product_of_sums(code, code_small, tl.trans(dy), tl.trans(dy_small), nothing) * code_size * dy_size[None, :]
        tl.store(Dx + place[None, :] * channels + channel[:, None], dx.to(Dx.dtype.element_ty), mask=there[None, :] & known)
        x *= dy_size[None, :]
        if GATE:
            levels += x * tl.dot(gate, tl.trans(dy), tl.dot(gate, tl.trans(dy_small)))
        x_size = largest(x, 1) * UNIT
        x, x_small = in_two(x * (1.0 / x_size)[:, None])
        nothing = tl.zeros([CHANNELS, REALIZATIONS], tl.float32)
        # The product before has waited for all codes of the token.
        dcodes = product_of_sums(x, x_small, dy, dy_small, nothing) * LESS
        store_codes(Codes, first + token, r, dcodes, known, REALIZATIONS)
        tl.store(Sizes + first + token, x_size * (1.0 / LESS), mask=channel < channels)
    if GATE:
        Level = DLevels + at * tiles + tile
        before = tl.load(Level, mask=(channel < channels) & (more > 0), other=0.0)
        tl.store(Level, before + tl.sum(levels, 1), mask=channel < channels)


@triton.jit
def finish_kernel(
    Filters, Gate, QueryBands, KeyBands, QueryLevels, KeyLevels, DFilters, DGate,
    programs, taps, leads, query_groups, key_groups, query_tiles, key_tiles,
    GATE: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums the gradients of a channel's bands along their diagonals, and writes those of its filters and of its gate."""
    at = tl.program_id(0)
    keep, level = keep_of(Gate, at, GATE), level_of(Gate, at, GATE)
    shrunk, dlevel = tl.zeros([BLOCK], tl.float64), tl.zeros([1], tl.float64)
    for side in tl.static_range(2):
        if side == 0:
            Bands, Levels, groups, tiles = QueryBands, QueryLevels, query_groups, query_tiles
        else:
            Bands, Levels, groups, tiles = KeyBands, KeyLevels, key_groups, key_tiles
        for line in range(leads):
            for first in range(0, taps, BLOCK):
                tap = first + tl.arange(0, BLOCK)
                diagonal = tl.arange(0, TOKENS)[:, None] * (WIDTH + 1) + tap[None, :]
                total = tl.zeros([BLOCK], tl.float64)
                for group in range(groups):
                    start = ((at.to(tl.int64) * leads + line) * groups + group) * TOKENS * WIDTH
                    total += tl.sum(tl.load(Bands + start + diagonal, mask=(tap < taps)[None, :], other=0.0), 0)
                own = ((side * programs + at).to(tl.int64) * leads + line) * taps + tap
                tl.store(DFilters + own, (total * keep).to(DFilters.dtype.element_ty), mask=tap < taps)
                shrunk += total * tl.load(Filters + own, mask=tap < taps, other=0.0)
        if GATE:
            for first in range(0, tiles, BLOCK):
                tile = first + tl.arange(0, BLOCK)
                dlevel += tl.sum(tl.load(Levels + at * tiles + tile, mask=tile < tiles, other=0.0).to(tl.float64), 0)
    if GATE:
        # The derivatives of sqrt(1 - delta) and sqrt(delta) by the gate.
        dgate = 0.5 * keep * level * (keep * dlevel - level * tl.sum(shrunk, 0))
        tl.store(DGate + at + tl.arange(0, 1), dgate.to(DGate.dtype.element_ty))


class ConvPlan:
    """The pieces, tiles and arguments of the kernels of queries (side 0) or keys (side 1)."""

    def __init__(self, recipe: Filters, side: int, x: Tensor, positions: Tensor | int):
        self.recipe, self.x = recipe, x if x.stride(3) == 1 else x.contiguous()
        batch, heads, times, channels = x.shape
        given = isinstance(positions, Tensor)
        # Without positions in common, tokens of all rows of the batch stand one after the other.
        self.shared = not given or positions.ndim == 1 or batch == 1
        self.rows, self.count = (batch, times) if self.shared else (1, batch * times)
        self.channels, self.width = heads * channels, max(16, triton.next_power_of_2(recipe.realizations))
        filters, *gates = (p.contiguous() for p in recipe.learned)
        *lead_sizes, taps = recipe.kernel_size
        self.blocks = max(2, triton.cdiv(SIZE + taps - 1, SIZE))
        self.line = not given and not recipe.grid and self.blocks <= BLOCKS
        self.size: int = SIZE if self.line else min(SIZE, max(16, triton.next_power_of_2((*recipe.grid, SIZE)[-1])))
        draws = max(16, triton.next_power_of_2(self.size + taps - 1))
        self.window = min(draws, max(16, WIDEST // self.width))
        self.reached = self.blocks * SIZE if self.line else triton.cdiv(self.size + taps - 1, self.window) * self.window
        self.leads = math.prod(lead_sizes)
        # Of the kernels of codes and of taps: blocks that are on their way lie in shared memory, which two programs share.
        self.stages = (4, 2) if self.width <= 64 else (1, 1)
        rows = min(triton.next_power_of_2(self.rows), ROWS)
        self.together = max(16, min(triton.next_power_of_2(channels), HELD // self.width))
        self.arguments: dict[str, Any] = dict(
            Positions=positions.contiguous() if given else x, Seed=recipe.seed, Taps=filters, Gate=gates[0] if gates else filters,
            side=side, heads=heads, times=times, channels=channels, realizations=recipe.realizations, count=self.count,
            taps=taps, start=0 if given else positions, leads=self.leads, lines=(1, *lead_sizes)[-1],
            rows=(1, 1, *recipe.grid)[-2], columns=(1, *recipe.grid)[-1], gate_heads=recipe.gate_number * heads,
            x_batch=self.x.stride(0), x_head=self.x.stride(1), x_time=self.x.stride(2), scale=recipe.realizations**-0.5,
            windows=self.reached // self.window, CONSECUTIVE=not given, AXES=len(recipe.kernel_size), GATE=bool(gates),
            DRAWS=min(draws, SIZE), BLOCKS=self.blocks, SIZE=SIZE, BATCH=max(16, rows), CHANNELS=self.together,
            STEPS=STEPS, REALIZATIONS=self.width,
        )  # fmt: skip
        # Linear attention needs room for its own results anyway; more pieces than needed would be more launches.
        most = min(max(ROOM * 4 * self.rows * self.count // (6 * self.width), FEWEST), MOST)
        pieces = triton.cdiv(self.count, most)
        self.tokens: int = math.ceil(self.count / (pieces * self.size)) * self.size

    def pieces(self) -> Iterator["Piece"]:
        """Yields rows of the batch and the first of the tokens that have codes in memory at a time."""
        for row in range(0, self.rows, ROWS):
            for first in range(0, self.count, self.tokens):
                yield Piece(self, slice(row, row + ROWS) if self.rows > ROWS else None, first)

    def groups(self) -> int:
        """Returns in how many groups the blocks of a piece are cut, so that there are enough programs."""
        return min(self.tokens // self.size, math.ceil(PROGRAMS / (self.channels * self.leads)))


class Room:
    """Memory for the codes of a piece and their sizes, and for the noise, which queries and keys share."""

    def __init__(self, plans: Sequence[ConvPlan], *, gradients: bool):
        numbers = [plan.channels * plan.width for plan in plans]
        device = plans[0].x.device
        codes = max(2 * n * plan.tokens for n, plan in zip(numbers, plans, strict=True))
        self.codes = torch.empty(codes, device=device, dtype=torch.float16)
        self.code_sizes = torch.empty(max(plan.channels for plan in plans), device=device)
        rows = [plan.tokens + plan.reached - SIZE if plan.line else 0 for plan in plans]
        self.noise = torch.empty(max(n * row for n, row in zip(numbers, rows, strict=True)), device=device, dtype=torch.float16)
        self.sizes = torch.empty(max(plan.channels * plan.tokens for plan in plans) if gradients else 0, device=device)
        self.held: tuple[int, int] | None = None
        self.arguments = {"Codes": self.codes, "CodeSizes": self.code_sizes, "Sizes": self.sizes, "Noise": self.noise}

    def fill(self, plan: ConvPlan, start: int) -> None:
        """Makes the noise of a piece that begins at a position, unless it is there."""
        rows = plan.tokens + plan.reached - SIZE
        if self.held != (start, rows):
            arguments = {**plan.arguments, "Noise": self.noise, "rows": rows, "start": start, "ROWS": SIZE}
            run(noise_kernel, (rows // SIZE, plan.channels), arguments, 4, 1)
            self.held = start, rows


class Piece:
    """Some tokens of some rows of the batch."""

    def __init__(self, plan: ConvPlan, rows: slice | None, first: int):
        self.plan, self.rows = plan, rows
        batches = plan.rows if rows is None else min(ROWS, plan.rows - rows.start)
        self.arguments = {**plan.arguments, "X": self.of(plan.x), "batches": batches, "tokens": plan.tokens, "skipped": first}
        self.first = first

    def of(self, x: Tensor) -> Tensor:
        """Returns the rows of a tensor."""
        return x if self.rows is None else x[self.rows]

    def codes(self, room: Room) -> None:
        """Makes the codes of the piece."""
        plan = self.plan
        if plan.line:
            room.fill(plan, plan.arguments["start"] + self.first)
            groups = plan.groups()
            arguments = {**self.arguments, **room.arguments, "groups": groups}
            run(line_codes_kernel, (groups, plan.channels), arguments, 4, plan.stages[0])
        else:
            arguments = {**self.arguments, **room.arguments, "TOKENS": plan.size}
            run(tile_codes_kernel, (plan.tokens // plan.size, plan.channels), arguments, 4, 2)

    def features(self, room: Room, y: Tensor) -> None:
        """Writes the piece's features."""
        self.codes(room)
        arguments = {**self.arguments, **room.arguments, "Y": self.of(y)}
        run(features_kernel, (self.plan.tokens // STEPS, self.arguments["heads"]), arguments, 4, 3)

    def gradients(self, room: Room, dy: Tensor, dx: Tensor, dbands: Tensor, dlevels: Tensor, more: bool) -> None:
        """Writes the piece's gradient of x, and its part of those of bands and levels; `more` adds it to what is there."""
        self.codes(room)
        plan = self.plan
        arguments = {
            **self.arguments, **room.arguments, "Dy": self.of(dy), "Dx": self.of(dx), "DBands": dbands, "DLevels": dlevels,
            "more": int(more),
        }  # fmt: skip
        blocks = triton.cdiv(self.arguments["channels"], plan.together)
        run(inputs_kernel, (plan.tokens // STEPS, blocks, self.arguments["heads"]), arguments, 4, 3)
        groups = len(dbands) // (plan.channels * plan.leads)
        arguments |= {"groups": groups, "TOKENS": plan.size}
        if plan.line:
            run(line_taps_kernel, (groups, plan.channels), arguments, 4, plan.stages[1])
        else:
            run(tile_taps_kernel, (plan.reached // plan.window, len(dbands)), {**arguments, "DRAWS": plan.window}, 8, 2)


def in_turns(plans: Sequence[ConvPlan]) -> Iterator[tuple[int, int, Piece]]:
    """Yields pieces of queries and keys in turns, so that they share noise, with their side and number."""
    for number, pieces in enumerate(zip_longest(*(plan.pieces() for plan in plans))):
        yield from ((side, number, piece) for side, piece in enumerate(pieces) if piece is not None)


def forward(recipe: Filters, sides: Sequence[tuple[Tensor, Tensor | int]]) -> list[Tensor]:
    """Returns the features of queries and keys, given with their positions or the first of consecutive ones."""
    plans = [ConvPlan(recipe, side, x, positions) for side, (x, positions) in enumerate(sides)]
    found = [x.new_empty(*x.shape[:3], recipe.realizations) for x, _ in sides]
    room = Room(plans, gradients=False)
    for side, _, piece in in_turns(plans):
        piece.features(room, found[side])
    return found


def backward(recipe: Filters, sides: Sequence[tuple[Tensor, Tensor | int]], douts: Sequence[Tensor]) -> list[Tensor]:
    """Returns the gradients of queries, keys and what is learned."""
    plans = [ConvPlan(recipe, side, x, positions) for side, (x, positions) in enumerate(sides)]
    douts, dinputs = [dy.contiguous() for dy in douts], [x.new_empty(x.shape) for x, _ in sides]
    room, device = Room(plans, gradients=True), douts[0].device
    groups = [plan.groups() for plan in plans]
    dbands = [
        torch.empty(plan.channels * plan.leads * own, plan.size, plan.reached, device=device)
        for plan, own in zip(plans, groups, strict=True)
    ]
    tiles = [plan.tokens // STEPS for plan in plans]
    dlevels = [torch.empty(plan.channels * own, device=device) for plan, own in zip(plans, tiles, strict=True)]
    for side, number, piece in in_turns(plans):
        piece.gradients(room, douts[side], dinputs[side], dbands[side], dlevels[side], more=number > 0)
    found, plan = [p.new_empty(p.shape) for p in recipe.learned], plans[0]
    arguments = {
        **plan.arguments, "Filters": plan.arguments["Taps"], "QueryBands": dbands[0], "KeyBands": dbands[1],
        "QueryLevels": dlevels[0], "KeyLevels": dlevels[1], "DFilters": found[0], "DGate": found[-1],
        "programs": plan.channels, "query_groups": groups[0], "key_groups": groups[1],
        "query_tiles": tiles[0], "key_tiles": tiles[1], "TOKENS": plan.size,
        "WIDTH": plan.reached, "BLOCK": min(128, triton.next_power_of_2(plan.arguments["taps"])),
    }  # fmt: skip
    run(finish_kernel, (plan.channels,), arguments, 4, 1)
    return [*dinputs, *found]
