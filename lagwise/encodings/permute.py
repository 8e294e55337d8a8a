"""PermuteFormer: positions as powers of a permutation of the features of linear attention."""

from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from lagwise import noise
from lagwise.encodings.base import Encoding
from lagwise.encodings.rotary import per_head
from lagwise.errors import require_seed_number, require_sizes, require_switches
from lagwise.lags import LagTable
from lagwise.noise import Stream
from lagwise.terms import FeatureTransform, Terms


class PermuteFormer(Encoding):
    """Permutes the features of linear attention once per position, and lets weights decay into the past.

        phi'(q_i) = rho^i Pi^i phi(q_i),   phi'(k_j) = rho^-j Pi^j phi(k_j)           rho_h = sigmoid(2 + 3 h / heads)
        phi'(q_i) . phi'(k_j) = rho^(i - j) phi(q_i) . Pi^(j - i) phi(k_j)

    Chen (2021). Pi is a random permutation of the features for each head and is not learned. The decay is a bias with a slope,
    log(rho) per lag, because rho^-j leaves every range; without `causal` there is none. Powers of Pi go along its cycles:
    position one million is as exact as position one. Softmax attention has no features and refuses it.

    Args:
        heads: Number of query heads.
        decay: Let weights decay in causal attention.
        seed: Where the random numbers of the permutations start.

    >>> PermuteFormer(heads=4).linear_terms(-9, 0, scale=1.0).bias.slopes[0]
    tensor([0.1269, 0.0620, 0.0298, 0.0142])
    """

    linear_only = True

    slope: Tensor

    def __init__(self, *, heads: int, decay: bool = True, seed: int = 0):
        super().__init__()
        require_sizes(heads=heads)
        require_switches(decay=decay)
        require_seed_number(seed)
        self.heads, self.decay, self.seed = heads, decay, seed
        slope = -torch.nn.functional.logsigmoid(2.0 + 3.0 * torch.arange(heads) / heads)
        self.register_buffer("slope", slope, persistent=False)

    def terms(self, first: int, last: int, *, scale: float, seed: Tensor | None = None) -> Terms:
        bias = None
        if self.decay and last <= 0:
            zeros = torch.zeros_like(self.slope)
            bias = LagTable(zeros[:, None], 0, (self.slope, zeros))
        return Terms(bias=bias, features=FeatureTransform(self._permute))

    def _permute(self, q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor) -> tuple[Tensor, Tensor]:
        if q.shape[1] != self.heads:
            raise ValueError(f"PermuteFormer is made for heads={self.heads}, but q has {q.shape[1]} heads")
        take = partial(to_the_power, cycles_of(self.heads, q.shape[-1], self.seed, q.device))
        return take(q, q_positions), take(k, k_positions)


class Cycles(NamedTuple):
    """Permutations by their cycles: element f has place `offset` in a cycle of `length`, which is at `start` of `elements`."""

    elements: Tensor  # all of them [heads, features]
    start: Tensor
    offset: Tensor
    length: Tensor


@cache
def cycles_of(heads: int, features: int, seed: int, device: torch.device) -> Cycles:
    """Draws a permutation of the features for each head."""
    with torch.device("cpu"):
        found = draw_cycles(heads, features, seed)
    return Cycles(*(x.to(device) for x in found))


def draw_cycles(heads: int, features: int, seed: int) -> Cycles:
    """Does so on the default device."""
    counters = torch.arange(heads)[:, None], torch.arange(features)
    permutations = noise.bits(torch.tensor(seed), Stream.PERMUTATION, *counters).argsort(1).tolist()
    elements, start, offset, length = torch.zeros(4, heads, features, dtype=torch.int64)
    for head, permutation in enumerate(permutations):
        begin = 0
        for first in range(features):
            if length[head, first]:
                continue
            cycle = [first]
            while (following := permutation[cycle[-1]]) != first:
                cycle.append(following)
            members = torch.tensor(cycle)
            elements[head, begin : begin + len(cycle)] = members
            start[head, members], offset[head, members] = begin, torch.arange(len(cycle))
            length[head, members] = len(cycle)
            begin += len(cycle)
    return Cycles(elements, start, offset, length)


def to_the_power(cycles: Cycles, x: Tensor, positions: Tensor) -> Tensor:
    """Returns `Pi^t x` for x, [batch, heads, time, features], at the positions t: feature f comes from `Pi^t(f)`."""
    start, offset, length = (part[:, None] for part in cycles[1:])
    places = start + (offset + per_head(positions)[..., None]) % length
    sources = cycles.elements[:, None].expand(places.shape).gather(-1, places)
    return x.gather(-1, sources.expand(x.shape))
