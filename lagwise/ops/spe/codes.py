"""Stochastic features without their codes in memory, in plain PyTorch: some tokens at a time, made again for the backward pass.

    y_t[r] = sum_d x_td code_d(t)[r] / sqrt(R)              code_d(t) = weights_d(t) @ draws_d

`weights` are learned functions of the position, `draws` random numbers that queries and keys share. The gradient of a code,
dcode_d(t)[r] = sum over the batch of x_td dy_t[r] / sqrt(R), makes that of the weights by one product with the draws.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from lagwise import noise
from lagwise.noise import Stream
from lagwise.ops.register import once, own_context, torch_transforms, transforms_are_active
from lagwise.ops.support import HAS_TRITON

# Tokens for which draws are made at once, and those of one matrix product: with filters of 128 taps a product of 64 tokens
# multiplies 191 draws, and 512 tokens share 639.
BLOCK, PART = 512, 64
# Tokens of one product with waves, whose draws do not move.
WAVES_PART = 256


@dataclass(frozen=True)
class Part:
    """Tokens of one product, and which of the block's draws they meet."""

    tokens: slice
    rows: slice


@dataclass(frozen=True)
class Block:
    """Neighbouring tokens: parts that share draws, which belong to the position `corner` (on each axis) and those after it."""

    parts: list[Part]
    corner: tuple[int, ...] = ()


class Recipe(ABC):
    """How the codes of one call are made from its parameters."""

    kind: str

    draws_move: bool
    """Whether the draws belong to positions and the weights are the same at all of them; otherwise it is the other way."""

    def __init__(self, parameters: Sequence[Tensor], realizations: int, seed: Tensor, *, gate_number: int = 0):
        self.parameters, self.realizations, self.seed, self.gate_number = list(parameters), realizations, seed, gate_number

    @abstractmethod
    def blocks(self, positions: Tensor) -> Iterator[Block]:
        """Cuts the tokens at these positions, [time], into blocks."""

    @abstractmethod
    def weights(
        self, head: int, side: int, positions: Tensor, dtype: torch.dtype, room: "Room"
    ) -> Float[Tensor, "head_dim tokens rows"]:
        """Returns what multiplies the draws, for queries (side 0) or keys (side 1)."""

    @abstractmethod
    def weights_backward(self, head: int, side: int, positions: Tensor, dweights: Tensor, found: Sequence[Tensor]) -> None:
        """Adds the gradients of the parameters to those that are `found` already."""

    @abstractmethod
    def draws(
        self, block: Block, head: int, dtype: torch.dtype, room: "Room | None" = None
    ) -> Float[Tensor, "head_dim rows realizations"]:
        """Returns the random numbers that a block's parts meet; on a grid, rows have an axis for each of the grid's."""

    def numbers(self, stream: Stream, head: int, *counters: Tensor, dtype: torch.dtype, room: "Room | None" = None) -> Tensor:
        """Returns the random numbers of a head, [head_dim, *counters, realizations]."""
        channels = torch.arange(self.head_dim, device=self.seed.device).view(-1, *[1] * max([0, *(x.ndim for x in counters)]))
        shape = torch.broadcast_shapes(channels.shape, *(x.shape for x in counters))
        out = None if room is None else room.get("draws", *shape, self.realizations)
        return noise.binomial(self.seed, stream, head, channels, *counters, size=self.realizations, dtype=dtype, out=out)

    def gate_draws(self, head: int, dtype: torch.dtype) -> Float[Tensor, "head_dim realizations"]:
        """Returns the random numbers of the gate, which are constant over positions; gates of another number have their own."""
        return self.numbers(Stream.GATE, head + self.gate_number * self.parameters[-1].shape[0], dtype=dtype)

    @property
    @abstractmethod
    def head_dim(self) -> int:
        """The number of channels of a head."""


class Waves(Recipe):
    """Waves: weights_d(t) = sizes_dp (cos, sin)(2 pi (turns_dp t + shifts_dp)) for each p; parameters turns, shifts and sizes.

    `turns` and `sizes` are [heads, head_dim, waves], `shifts` [2, heads, head_dim, waves], those of the queries first. The last
    wave of "gated waves" does not turn: its cosine is one, its sine nothing, and its draws are those of the gate.
    """

    draws_move = False

    def __init__(self, parameters: Sequence[Tensor], realizations: int, seed: Tensor, *, gated: bool, gate_number: int = 0):
        super().__init__(parameters, realizations, seed, gate_number=gate_number)
        self.asked: tuple[Tensor, int, torch.dtype] | None = None
        self.gated, self.kind = gated, "gated waves" if gated else "waves"

    @property
    def head_dim(self) -> int:
        return self.parameters[0].shape[1]

    def blocks(self, positions: Tensor) -> Iterator[Block]:
        for start in range(0, len(positions), WAVES_PART):
            yield Block([Part(slice(start, min(start + WAVES_PART, len(positions))), slice(None))])

    def _turned(self, head: int, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns cosine and sine at some positions without shifts, [head_dim, waves, tokens]; queries and keys ask in turn."""
        asked = self.asked
        if asked is None or asked[0] is not positions or asked[1:] != (head, dtype):
            # Whole turns are dropped in float64: position one million is as exact as position one.
            cycles = self.parameters[0][head].double()[..., None] * positions
            angles = cycles.sub_(cycles.round()).mul_(2.0 * math.pi).to(dtype)
            self.asked, self.answer = (positions, head, dtype), (angles.cos(), angles.sin())
        return self.answer

    def _shifted(self, head: int, side: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns cosine and sine of the shifts, [head_dim, waves]."""
        shifts = 2.0 * math.pi * self.parameters[1][side, head].double()
        return shifts.cos().to(dtype), shifts.sin().to(dtype)

    def weights(self, head: int, side: int, positions: Tensor, dtype: torch.dtype, room: "Room") -> Tensor:
        cos, sin = self._turned(head, positions, dtype)
        along, across = (self.parameters[2][head].to(dtype) * x for x in self._shifted(head, side, dtype))
        along, across = along[..., None], across[..., None]
        # The cosine and the sine of a sum of angles.
        made = room.get("weights", *cos.shape[:2], 2, cos.shape[2])
        torch.mul(along, cos, out=made[:, :, 0]).addcmul_(across, sin, value=-1.0)
        torch.mul(along, sin, out=made[:, :, 1]).addcmul_(across, cos)
        return made.flatten(1, 2).mT

    def weights_backward(self, head: int, side: int, positions: Tensor, dweights: Tensor, found: Sequence[Tensor]) -> None:
        dturns, dshifts, dsizes = found
        cos, sin = self._turned(head, positions, dweights.dtype)
        dcos, dsin = dweights.mT.unflatten(1, (-1, 2)).unbind(2)
        # Far from the start, the distance from the first position counts in fewer bits than the position.
        first = positions[0]
        sums = torch.stack([torch.ones_like(positions), positions - first], dim=1).to(dweights.dtype)
        along = (cos * dcos).addcmul_(sin, dsin) @ sums
        across = (cos * dsin).addcmul_(sin, dcos, value=-1.0) @ sums
        near, far = (x[..., None] for x in self._shifted(head, side, dweights.dtype))
        dsizes[head] += (near * along + far * across)[..., 0]
        turned = (near * across - far * along).double() * (2.0 * math.pi * self.parameters[2][head].double())[..., None]
        dshifts[side, head] += turned[..., 0]
        dturns[head] += turned[..., 1] + first * turned[..., 0]

    def draws(self, block: Block, head: int, dtype: torch.dtype, room: "Room | None" = None) -> Tensor:
        rows = torch.arange(2 * (self.parameters[0].shape[2] - self.gated), device=self.seed.device)
        made = self.numbers(Stream.CODE, head, rows, dtype=dtype)
        if not self.gated:
            return made
        gate = self.gate_draws(head, dtype)[:, None]
        return torch.cat([made, gate, torch.zeros_like(gate)], dim=1)


class Filters(Recipe):
    """Filters of noise at the positions: weights_d(t) are the taps, moved to t; parameters taps, and level with a gate.

    `taps` are [2, heads, head_dim, *kernel_size], those of the queries first; `level`, [heads, head_dim], multiplies the
    draws of the gate. On a grid positions count the cells row by row, and the noise belongs to the cells.
    """

    kind, draws_move = "filters", True

    def __init__(
        self, parameters: Sequence[Tensor], realizations: int, seed: Tensor, *, grid: Sequence[int] = (), gate_number: int = 0
    ):
        super().__init__(parameters, realizations, seed, gate_number=gate_number)
        self.grid, self.kernel_size = tuple(grid), tuple(parameters[0].shape[3:])

    @property
    def head_dim(self) -> int:
        return self.parameters[0].shape[2]

    def blocks(self, positions: Tensor) -> Iterator[Block]:
        # A run ends where the next token is not the right neighbour of the last one.
        breaks = positions.diff() != 1
        if self.grid:
            breaks |= positions[1:] % self.grid[-1] == 0
        ends = [0, *(breaks.nonzero().flatten() + 1).tolist(), len(positions)]
        for first, end in pairwise(ends):
            for start in range(first, end, BLOCK):
                size = min(BLOCK, end - start)
                parts = [self._part(start, at, min(PART, size - at)) for at in range(0, size, PART)]
                yield Block(parts, self._coordinates(int(positions[start])))

    def _part(self, start: int, at: int, size: int) -> Part:
        return Part(slice(start + at, start + at + size), slice(at, at + size + self.kernel_size[-1] - 1))

    def _coordinates(self, position: int) -> tuple[int, ...]:
        found = []
        for extent in reversed(self.grid):
            position, along = divmod(position, extent)
            found.append(along)
        return (position, *reversed(found))

    def weights(self, head: int, side: int, positions: Tensor, dtype: torch.dtype, room: "Room") -> Tensor:
        taps, tokens = self.parameters[0][side, head].to(dtype), len(positions)
        taps = taps.reshape(self.head_dim, -1, 1, self.kernel_size[-1])
        # Row t of a band is the taps moved to the right by t: rows that are one longer than the band's, read on end.
        rows = pad(taps.expand(-1, -1, tokens, -1), (0, tokens)).flatten(2)
        bands = rows[..., : tokens * (tokens + taps.shape[-1] - 1)].unflatten(2, (tokens, -1))
        # The taps of the axes before the last one meet draws of their own.
        return bands.transpose(1, 2).flatten(2)

    def weights_backward(self, head: int, side: int, positions: Tensor, dweights: Tensor, found: Sequence[Tensor]) -> None:
        dtaps = found[0][side, head]
        dtaps += skewed_sum(dweights, math.prod(self.kernel_size[:-1]), self.kernel_size[-1]).view(dtaps.shape)

    def draws(self, block: Block, head: int, dtype: torch.dtype, room: "Room | None" = None) -> Tensor:
        sizes = [*self.kernel_size[:-1], block.parts[-1].rows.stop]
        axes = [at + torch.arange(size, device=self.seed.device) for at, size in zip(block.corner, sizes, strict=True)]
        return self.numbers(Stream.CODE, head, *torch.meshgrid(*axes, indexing="ij"), dtype=dtype, room=room)


def skewed_sum(dbands: Float[Tensor, "dim tokens rows"], leading: int, taps: int) -> Float[Tensor, "dim leading taps"]:
    """Returns the gradient of the taps from that of bands, in which they are moved to the right by one for each token."""
    tokens = dbands.shape[1]
    bands = dbands.unflatten(2, (leading, -1)).transpose(1, 2)
    # The rows moved back to the left.
    return pad(bands.flatten(2), (0, tokens)).unflatten(2, (tokens, -1))[..., :taps].sum(2)


def passes(q_positions: Tensor, k_positions: Tensor) -> Iterator[tuple[tuple[int, ...], slice, Tensor]]:
    """Yields sides, rows of the batch, and the positions, [time], that these share: all at once where that is possible."""
    if q_positions.ndim == 1 and k_positions.ndim == 1 and torch.equal(q_positions, k_positions):
        yield (0, 1), slice(None), q_positions
        return
    for side, positions in enumerate((q_positions, k_positions)):
        if positions.ndim == 1:
            yield (side,), slice(None), positions
        else:
            yield from (((side,), slice(row, row + 1), own) for row, own in enumerate(positions))


class Tile(NamedTuple):
    """Tokens of one side and of one product."""

    side: int
    place: tuple[slice, int, slice]  # rows of the batch, head, and times
    positions: Tensor  # [tokens]
    draws: Tensor  # that they meet, [head_dim, rows, realizations]


class Room:
    """Memory for large results that are made again and again: asking the system each time takes longer than filling it."""

    def __init__(self, dtype: torch.dtype, device: torch.device):
        self.dtype, self.device = dtype, device
        self.held: dict[str, Tensor] = {}

    def get(self, name: str, *shape: int) -> Tensor:
        """Returns the memory of a name in a shape; what was in it before is lost."""
        size = math.prod(shape)
        if name not in self.held or self.held[name].numel() < size:
            self.held[name] = torch.empty(size, dtype=self.dtype, device=self.device)
        return self.held[name][:size].view(shape)


class Head:
    """The codes of one head. What does not move with the position is made once."""

    def __init__(self, recipe: Recipe, head: int, dtype: torch.dtype, room: Room):
        self.recipe, self.head, self.dtype, self.room = recipe, head, dtype, room
        self.made: dict[tuple[int, int], Tensor] = {}
        self.kept: Tensor | None = None
        self.gate_draws = self.constant = None
        if isinstance(recipe, Filters) and len(recipe.parameters) == 2:
            self.gate_draws = recipe.gate_draws(head, dtype)
            self.constant = (recipe.parameters[1][head].to(dtype)[:, None] * self.gate_draws)[:, None]

    def weights(self, side: int, tokens: Tensor) -> Tensor:
        """Returns the weights at some positions."""
        if not self.recipe.draws_move:
            return self.recipe.weights(self.head, side, tokens, self.dtype, self.room)
        key = (side, len(tokens))
        if key not in self.made:
            self.made[key] = self.recipe.weights(self.head, side, tokens, self.dtype, self.room)
        return self.made[key]

    def draws(self, block: Block) -> Tensor:
        """Returns the random numbers that a block's parts meet."""
        if self.kept is None or self.recipe.draws_move:
            self.kept = self.recipe.draws(block, self.head, self.dtype, self.room)
        return self.kept

    def tiles(self, q_positions: Tensor, k_positions: Tensor) -> Iterator["Tile"]:
        """Yields the tiles of queries and of keys, those of the same tokens one after the other."""
        for sides, batch, positions in passes(q_positions, k_positions):
            for block in self.recipe.blocks(positions):
                draws = self.draws(block)
                for part in block.parts:
                    met = draws[..., part.rows, :]
                    met, tokens = met if met.ndim == 3 else met.flatten(1, -2), positions[part.tokens]
                    for side in sides:
                        yield Tile(side, (batch, self.head, part.tokens), tokens, met)

    def codes(self, weights: Tensor, draws: Tensor) -> Tensor:
        """Returns the codes of a part, [head_dim, tokens, realizations]."""
        out = self.room.get("codes", *weights.shape[:2], draws.shape[2])
        if self.constant is None:
            return torch.bmm(weights, draws, out=out)
        return torch.baddbmm(self.constant, weights, draws, out=out)


def forward(recipe: Recipe, q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor) -> list[Tensor]:
    """Returns the features of q and k, [batch, heads, time, realizations]."""
    compute = torch.promote_types(q.dtype, torch.float32)
    out = [x.new_empty(*x.shape[:3], recipe.realizations) for x in (q, k)]
    scale, room = recipe.realizations**-0.5, Room(compute, q.device)
    for number in range(q.shape[1]):
        head = Head(recipe, number, compute, room)
        for side, place, tokens, draws in head.tiles(q_positions, k_positions):
            codes = head.codes(head.weights(side, tokens), draws)
            x = (q, k)[side][place].to(compute).transpose(0, 1)
            out[side][place] = torch.bmm(x, codes.transpose(0, 1)).mul_(scale).transpose(0, 1)
    return out


def backward(
    recipe: Recipe, douts: Sequence[Tensor], q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor
) -> list[Tensor]:
    """Returns the gradients of q, of k, and of the parameters."""
    compute = torch.promote_types(q.dtype, torch.float32)
    dinputs = [x.new_empty(x.shape) for x in (q, k)]
    found = [x.new_zeros(x.shape) for x in recipe.parameters]
    scale, room = recipe.realizations**-0.5, Room(compute, q.device)
    for number in range(q.shape[1]):
        head = Head(recipe, number, compute, room)
        # By side and number of tokens: these, and the gradients of weights that do not move, [head_dim, rows, tokens].
        steady: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        for side, place, tokens, draws in head.tiles(q_positions, k_positions):
            codes = head.codes(head.weights(side, tokens), draws)
            x = (q, k)[side][place].to(compute).transpose(0, 1)
            dout = douts[side][place].to(compute).transpose(0, 1) * scale
            dinputs[side][place] = torch.bmm(dout, codes.permute(1, 2, 0)).transpose(0, 1)
            dcodes = torch.bmm(x.mT, dout, out=room.get("dcodes", *codes.transpose(0, 1).shape)).transpose(0, 1)
            if head.gate_draws is not None:
                found[1][number] += (dcodes.sum(1) * head.gate_draws).sum(-1)
            if not recipe.draws_move:
                recipe.weights_backward(number, side, tokens, (draws @ dcodes.mT).mT, found)
            elif (side, len(tokens)) in steady:
                steady[side, len(tokens)][1].baddbmm_(draws, dcodes.mT)
            else:
                steady[side, len(tokens)] = tokens, draws @ dcodes.mT
        for (side, _), (tokens, dweights) in steady.items():
            recipe.weights_backward(number, side, tokens, dweights.mT, found)
    return [*dinputs, *found]


_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor q_positions, Tensor k_positions, Tensor seed, Tensor[] parameters, "
    "str kind, SymInt realizations, SymInt gate_number, SymInt[] grid, str impl"
)
torch.library.define("lagwise::features", f"({_ARGUMENTS}) -> Tensor[]")
torch.library.define("lagwise::features_backward", f"(Tensor[] douts, {_ARGUMENTS}) -> Tensor[]")


def _recipe(
    seed: Tensor, parameters: Sequence[Tensor], kind: str, realizations: int, gate_number: int, grid: Sequence[int]
) -> Recipe:
    if kind == "filters":
        return Filters(parameters, realizations, seed, grid=grid, gate_number=gate_number)
    return Waves(parameters, realizations, seed, gated=kind == "gated waves", gate_number=gate_number)


def _implementation(impl: str) -> Any:
    """Returns the module that computes; that of the kernels is imported when it is first used, because Triton is."""
    return import_module("lagwise.ops.spe.fused" if impl == "triton" else "lagwise.ops.spe.codes")


@torch.library.impl("lagwise::features", "CompositeExplicitAutograd")
def _features(q, k, q_positions, k_positions, seed, parameters, kind, realizations, gate_number, grid, impl):
    recipe = _recipe(seed, parameters, kind, realizations, gate_number, grid)
    with own_context(q):
        return _implementation(impl).forward(recipe, q, k, q_positions, k_positions)


@torch.library.impl("lagwise::features_backward", "CompositeExplicitAutograd")
def _features_backward(douts, q, k, q_positions, k_positions, seed, parameters, kind, realizations, gate_number, grid, impl):
    recipe = _recipe(seed, parameters, kind, realizations, gate_number, grid)
    with own_context(q):
        return _implementation(impl).backward(recipe, douts, q, k, q_positions, k_positions)


@torch.library.register_fake("lagwise::features")
def _fake_features(q, k, q_positions, k_positions, seed, parameters, kind, realizations, gate_number, grid, impl):
    return [x.new_empty(*x.shape[:3], realizations) for x in (q, k)]


@torch.library.register_fake("lagwise::features_backward")
def _fake_features_backward(douts, q, k, q_positions, k_positions, seed, parameters, kind, realizations, gate_number, grid, impl):
    return [x.new_empty(x.shape) for x in (q, k, *parameters)]


class Differentiable(torch.autograd.Function):
    """The operator with its derivative."""

    @staticmethod
    def forward(kind, realizations, gate_number, grid, impl, *tensors):
        with torch._C._AutoDispatchBelowAutograd():
            return tuple(torch.ops.lagwise.features(*tensors[:5], list(tensors[5:]), kind, realizations, gate_number, grid, impl))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.others = inputs[:5]
        ctx.save_for_backward(*inputs[5:])

    @staticmethod
    def backward(ctx, *douts):
        tensors = ctx.saved_tensors
        dq, dk, *found = once(
            SECOND_DERIVATIVE, torch.ops.lagwise.features_backward,
            list(douts), *tensors[:5], list(tensors[5:]), *ctx.others,
        )  # fmt: skip
        return None, None, None, None, None, dq, dk, None, None, None, *found


@torch.library.impl("lagwise::features", "Autograd")
def _differentiable_features(q, k, q_positions, k_positions, seed, parameters, kind, realizations, gate_number, grid, impl):
    return list(
        Differentiable.apply(kind, realizations, gate_number, grid, impl, q, k, q_positions, k_positions, seed, *parameters)
    )


SECOND_DERIVATIVE = "stochastic features have no second derivative: use exact_terms of the encoding for gradients of gradients"


def features(
    recipe: Recipe, q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor, impl: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Returns the features of q and k, which both have the recipe's heads; positions are [time] or [batch, time].

    On a GPU kernels make them, except in float64 and on grids of more than three axes.
    """
    transforms = torch_transforms()
    if transforms:
        raise ValueError(
            f"stochastic features cannot be made under {' and '.join(sorted(transforms))} of torch.func: "
            "use exact_terms of the encoding"
        )
    grid = list(recipe.grid) if isinstance(recipe, Filters) else []
    if impl == "auto":
        impl = "triton" if q.is_cuda and HAS_TRITON and len(grid) < 3 and q.dtype != torch.float64 else "torch"
    tensors = (q, k, q_positions, k_positions, recipe.seed)
    others = (recipe.kind, recipe.realizations, recipe.gate_number, grid, impl)
    if transforms_are_active():
        made = Differentiable.apply(*others, *tensors, *recipe.parameters)
    else:
        made = torch.ops.lagwise.features(*tensors, recipe.parameters, *others)
    return made[0], made[1]
