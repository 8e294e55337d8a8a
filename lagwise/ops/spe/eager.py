"""Stochastic features in plain PyTorch, without their codes in memory: some tokens at a time, made again for the gradients."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from lagwise.ops.spe.recipes import Block, Filters, Recipe, Room


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


class TokenTile(NamedTuple):
    """Tokens of one side and of one product."""

    side: int
    place: tuple[slice, int, slice]  # rows of the batch, head, and times
    positions: Tensor  # [tokens]
    draws: Tensor  # that they meet, [head_dim, rows, realizations]


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

    def tiles(self, q_positions: Tensor, k_positions: Tensor) -> Iterator["TokenTile"]:
        """Yields the tiles of queries and of keys, those of the same tokens one after the other."""
        for sides, batch, positions in passes(q_positions, k_positions):
            for block in self.recipe.blocks(positions):
                draws = self.draws(block)
                for part in block.parts:
                    met = draws[..., part.rows, :]
                    met, tokens = met if met.ndim == 3 else met.flatten(1, -2), positions[part.tokens]
                    for side in sides:
                        yield TokenTile(side, (batch, self.head, part.tokens), tokens, met)

    def codes(self, weights: Tensor, draws: Tensor) -> Tensor:
        """Returns the codes of a part, [head_dim, tokens, realizations]."""
        out = self.room.get("codes", *weights.shape[:2], draws.shape[2])
        if self.constant is None:
            return torch.bmm(weights, draws, out=out)
        return torch.baddbmm(self.constant, weights, draws, out=out)


Side: TypeAlias = tuple[Tensor, Tensor | int]
"""Queries or keys, with their positions or the first of consecutive ones."""


def positions_of(sides: Sequence[Side]) -> list[Tensor]:
    """Returns the positions of queries and of keys, [time] or [batch, time]."""
    return [
        place if isinstance(place, Tensor) else torch.arange(place, place + x.shape[2], device=x.device) for x, place in sides
    ]


def forward(recipe: Recipe, sides: Sequence[Side]) -> list[Tensor]:
    """Returns the features of queries and keys, [batch, heads, time, realizations]."""
    (q, k), positions = (x for x, _ in sides), positions_of(sides)
    compute = torch.promote_types(q.dtype, torch.float32)
    out = [x.new_empty(*x.shape[:3], recipe.realizations) for x in (q, k)]
    scale, room = recipe.realizations**-0.5, Room(compute, q.device)
    for number in range(q.shape[1]):
        head = Head(recipe, number, compute, room)
        for side, place, tokens, draws in head.tiles(*positions):
            codes = head.codes(head.weights(side, tokens), draws)
            x = (q, k)[side][place].to(compute).transpose(0, 1)
            out[side][place] = torch.bmm(x, codes.transpose(0, 1)).mul_(scale).transpose(0, 1)
    return out


def backward(recipe: Recipe, sides: Sequence[Side], douts: Sequence[Tensor]) -> list[Tensor]:
    """Returns the gradients of queries, of keys, and of the parameters."""
    (q, k), positions = (x for x, _ in sides), positions_of(sides)
    compute = torch.promote_types(q.dtype, torch.float32)
    dinputs = [x.new_empty(x.shape) for x in (q, k)]
    found = [x.new_zeros(x.shape) for x in recipe.parameters]
    scale, room = recipe.realizations**-0.5, Room(compute, q.device)
    for number in range(q.shape[1]):
        head = Head(recipe, number, compute, room)
        # By side and number of tokens: these, and the gradients of weights that do not move, [head_dim, rows, tokens].
        steady: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        for side, place, tokens, draws in head.tiles(*positions):
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
