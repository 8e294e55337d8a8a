"""How the codes of stochastic features are made, some tokens at a time: by sines or by filters of noise.

    y_t[r] = sum_d x_td code_d(t)[r] / sqrt(R)              code_d(t) = weights_d(t) @ draws_d

`weights` are learned functions of the position, `draws` random numbers that queries and keys share. The gradient of a code,
dcode_d(t)[r] = sum over the batch of x_td dy_t[r] / sqrt(R), makes that of the weights by one product with the draws.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad, softplus

from lagwise import noise
from lagwise.noise import Stream

# Tokens for which draws are made at once, and those of one matrix product: with filters of 128 taps a product of 64 tokens
# multiplies 191 draws, and 512 tokens share 639.
BLOCK, PART = 512, 64
# Tokens of one product with sines, whose draws do not move.
SINES_PART = 256


@dataclass(frozen=True)
class TokenSpan:
    """Tokens of one product, and which of the block's draws they meet."""

    tokens: slice
    rows: slice


@dataclass(frozen=True)
class Block:
    """Neighbouring tokens: parts that share draws, which belong to the position `corner` (on each axis) and those after it."""

    parts: list[TokenSpan]
    corner: tuple[int, ...] = ()


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


class Recipe(ABC):
    """How the codes of one call are made from its parameters."""

    kind: str

    draws_move: bool
    """Whether the draws belong to positions and the weights are the same at all of them; otherwise it is the other way."""

    def __init__(self, learned: Sequence[Tensor], realizations: int, seed: Tensor, *, gate_number: int = 0):
        self.learned, self.realizations, self.seed, self.gate_number = list(learned), realizations, seed, gate_number
        self.made: list[Tensor] | None = None

    @property
    def parameters(self) -> list[Tensor]:
        """What the codes are made of, as functions of what is learned; kernels make them by themselves."""
        if self.made is None:
            self.made = self.derived(*self.learned)
        return self.made

    @staticmethod
    @abstractmethod
    def derived(*learned: Tensor) -> list[Tensor]:
        """Returns the parameters for what is learned."""

    @abstractmethod
    def blocks(self, positions: Tensor) -> Iterator[Block]:
        """Cuts the tokens at these positions, [time], into blocks."""

    @abstractmethod
    def weights(
        self, head: int, side: int, positions: Tensor, dtype: torch.dtype, room: Room
    ) -> Float[Tensor, "head_dim tokens rows"]:
        """Returns what multiplies the draws, for queries (side 0) or keys (side 1)."""

    @abstractmethod
    def weights_backward(self, head: int, side: int, positions: Tensor, dweights: Tensor, found: Sequence[Tensor]) -> None:
        """Adds the gradients of the parameters to those that are `found` already."""

    @abstractmethod
    def draws(
        self, block: Block, head: int, dtype: torch.dtype, room: Room | None = None
    ) -> Float[Tensor, "head_dim rows realizations"]:
        """Returns the random numbers that a block's parts meet; on a grid, rows have an axis for each of the grid's."""

    def numbers(self, stream: Stream, head: int, *counters: Tensor, dtype: torch.dtype, room: Room | None = None) -> Tensor:
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


class Sines(Recipe):
    """Sines: weights_d(t) = sizes_dp (cos, sin)(2 pi (turns_dp t + shifts_dp)) for each p; parameters turns, shifts and sizes.

    `turns` and `sizes` are [heads, head_dim, sines], `shifts` [2, heads, head_dim, sines], those of the queries first. The last
    sine of "gated sines" does not turn: its cosine is one, its sine nothing, and its draws are those of the gate.

        turns = sigmoid(freq) / 2,   shifts = (offset / 2 pi, 0),   sizes = sqrt(1 - delta) softplus(gain) / sqrt(2 K)
        the gate's size is sqrt(delta), delta = sigmoid(gate)                    learned are freq, offset, gain and maybe gate
    """

    draws_move = False

    def __init__(self, learned: Sequence[Tensor], realizations: int, seed: Tensor, *, gated: bool, gate_number: int = 0):
        super().__init__(learned, realizations, seed, gate_number=gate_number)
        self.asked: tuple[Tensor, int, torch.dtype] | None = None
        self.gated, self.kind = gated, "gated sines" if gated else "sines"

    @staticmethod
    def derived(*learned: Tensor) -> list[Tensor]:
        freq, offset, gain, *gates = learned
        turns, offsets = torch.sigmoid(freq.double()) / 2.0, offset.double() / (2.0 * math.pi)
        shifts = torch.stack([offsets, torch.zeros_like(offsets)])
        sizes = softplus(gain) / math.sqrt(2 * gain.shape[-1])
        for gate in gates:
            delta = torch.sigmoid(gate)[..., None]
            turns, shifts = pad(turns, (0, 1)), pad(shifts, (0, 1))
            sizes = torch.cat([(1.0 - delta).sqrt() * sizes, delta.sqrt()], dim=-1)
        return [turns, shifts, sizes]

    @property
    def head_dim(self) -> int:
        return self.learned[0].shape[1]

    def blocks(self, positions: Tensor) -> Iterator[Block]:
        for start in range(0, len(positions), SINES_PART):
            yield Block([TokenSpan(slice(start, min(start + SINES_PART, len(positions))), slice(None))])

    def _turned(self, head: int, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns cosine and sine at some positions without shifts, [head_dim, sines, tokens]; queries and keys ask in turn."""
        asked = self.asked
        if asked is None or asked[0] is not positions or asked[1:] != (head, dtype):
            # Whole turns are dropped in float64: position one million is as exact as position one.
            cycles = self.parameters[0][head].double()[..., None] * positions
            angles = cycles.sub_(cycles.round()).mul_(2.0 * math.pi).to(dtype)
            self.asked, self.answer = (positions, head, dtype), (angles.cos(), angles.sin())
        return self.answer

    def _shifted(self, head: int, side: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns cosine and sine of the shifts, [head_dim, sines]."""
        shifts = 2.0 * math.pi * self.parameters[1][side, head].double()
        return shifts.cos().to(dtype), shifts.sin().to(dtype)

    def weights(self, head: int, side: int, positions: Tensor, dtype: torch.dtype, room: Room) -> Tensor:
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

    def draws(self, block: Block, head: int, dtype: torch.dtype, room: Room | None = None) -> Tensor:
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

        taps = sqrt(1 - delta) filters,   level = sqrt(delta),   delta = sigmoid(gate)        learned are filters and maybe gate
    """

    kind, draws_move = "filters", True

    def __init__(
        self, learned: Sequence[Tensor], realizations: int, seed: Tensor, *, grid: Sequence[int] = (), gate_number: int = 0
    ):
        super().__init__(learned, realizations, seed, gate_number=gate_number)
        self.grid, self.kernel_size = tuple(grid), tuple(learned[0].shape[3:])

    @staticmethod
    def derived(*learned: Tensor) -> list[Tensor]:
        filters, *gates = learned
        if not gates:
            return [filters]
        delta = torch.sigmoid(gates[0])
        return [(1.0 - delta).sqrt().view(*delta.shape, *[1] * (filters.ndim - 3)) * filters, delta.sqrt()]

    @property
    def head_dim(self) -> int:
        return self.learned[0].shape[2]

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

    def _part(self, start: int, at: int, size: int) -> TokenSpan:
        return TokenSpan(slice(start + at, start + at + size), slice(at, at + size + self.kernel_size[-1] - 1))

    def _coordinates(self, position: int) -> tuple[int, ...]:
        found = []
        for extent in reversed(self.grid):
            position, along = divmod(position, extent)
            found.append(along)
        return (position, *reversed(found))

    def weights(self, head: int, side: int, positions: Tensor, dtype: torch.dtype, room: Room) -> Tensor:
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

    def draws(self, block: Block, head: int, dtype: torch.dtype, room: Room | None = None) -> Tensor:
        sizes = [*self.kernel_size[:-1], block.parts[-1].rows.stop]
        axes = [at + torch.arange(size, device=self.seed.device) for at, size in zip(block.corner, sizes, strict=True)]
        return self.numbers(Stream.CODE, head, *torch.meshgrid(*axes, indexing="ij"), dtype=dtype, room=room)


def skewed_sum(dbands: Float[Tensor, "dim tokens rows"], leading: int, taps: int) -> Float[Tensor, "dim leading taps"]:
    """Returns the gradient of the taps from that of bands, in which they are moved to the right by one for each token."""
    tokens = dbands.shape[1]
    bands = dbands.unflatten(2, (leading, -1)).transpose(1, 2)
    # The rows moved back to the left.
    return pad(bands.flatten(2), (0, tokens)).unflatten(2, (tokens, -1))[..., :taps].sum(2)
