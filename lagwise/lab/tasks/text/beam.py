"""Beam search: the best translations that a model can be asked for token by token."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lagwise.errors import require_sizes


@dataclass(frozen=True)
class BeamOptions:
    """How translations are looked for.

    Args:
        beam: How many hypotheses are followed; 1 takes the likeliest token each time.
        length_penalty: The exponent of ((5 + n) / 6), by which the log-probability of n tokens is divided, the end counted.
    """

    beam: int = 4
    length_penalty: float = 0.6

    def __post_init__(self) -> None:
        require_sizes(beam=self.beam)
        if self.length_penalty < 0.0:
            raise ValueError(f"length_penalty must be at least 0, but is {self.length_penalty}")

    def penalty(self, length: int | Tensor) -> Any:
        """Returns what the log-probability of a translation is divided by.

        >>> BeamOptions(length_penalty=0.5).penalty(19)
        2.0
        """
        return ((5 + length) / 6) ** self.length_penalty


class Translation(NamedTuple):
    """Tokens without the end, and their log-probability by the length penalty, in nats."""

    tokens: list[int]
    score: float


Step = Callable[[Int[Tensor, " now"], Int[Tensor, " now"]], Float[Tensor, "now symbols"]]
"""Is told the last token of each hypothesis, and which of those before it goes on from; returns the scores of the next token.

Those before the first step are the sentences.
"""


@torch.no_grad()
def beam_search(
    step: Step, limits: Int[Tensor, " sentences"], *, start: int, end: int, search: BeamOptions
) -> list[Translation]:  # fmt: skip
    """Returns the best translation of each sentence that beam search finds.

    Of the candidates of a step the best ones, as many as the beam has, may end a translation; as many that do not end go on. A
    sentence is over when as many translations ended as the beam has, or when none that goes on can become better than the best
    of them, or at its limit, where translations must end.

    Args:
        step: The model.
        limits: How many tokens the translation of each sentence may have, the end counted.
        start: The token before the first.
        end: The token after the last.
        search: Beam and length penalty.
    """
    device, beam = limits.device, search.beam
    found: list[list[Translation]] = [[] for _ in limits]
    # The sentences that are not over; the tensors of the loop have a row for each.
    alive = torch.arange(len(limits), device=device)
    tokens = torch.full((len(limits), 1, 1), start, device=device)
    scores, origins = torch.zeros(len(limits), 1, device=device), alive
    for length in range(1, int(limits.max()) + 1):
        steps = step(tokens[..., -1].flatten(), origins).float().log_softmax(-1).unflatten(0, scores.shape)
        last, symbols = limits[alive] == length, steps.shape[2]
        steps = steps.masked_fill(last[:, None, None] & (torch.arange(symbols, device=device) != end), -torch.inf)
        totals, places = (scores[..., None] + steps).flatten(1).topk(min(2 * beam, steps[0].numel()))
        parents, choices = places // symbols, places % symbols
        ends = choices == end
        for row, place in (ends & (totals > -torch.inf))[:, :beam].nonzero().tolist():
            own = tokens[row, parents[row, place], 1:].tolist()
            found[int(alive[row])].append(Translation(own, float(totals[row, place]) / search.penalty(length)))
        # Each hypothesis has one candidate that ends, so that enough others are left.
        kept = ends.long().argsort(dim=1, stable=True)[:, : min(beam, steps[0].numel() - scores.shape[1])]
        scores, parents, choices = (x.gather(1, kept) for x in (totals, parents, choices))
        best = scores[:, 0] / search.penalty(limits[alive])
        over = [
            done or len(found[sentence]) >= beam or any(each.score >= bound for each in found[sentence])
            for sentence, done, bound in zip(alive.tolist(), last.tolist(), best.tolist(), strict=True)
        ]
        rows = torch.tensor([row for row, done in enumerate(over) if not done], dtype=torch.int64, device=device)
        if not len(rows):
            break
        origins = (rows[:, None] * tokens.shape[1] + parents[rows]).flatten()
        tokens = torch.cat([tokens[rows[:, None], parents[rows]], choices[rows][..., None]], dim=2)
        alive, scores = alive[rows], scores[rows]
    return [max(own, key=lambda each: each.score, default=Translation([], -float("inf"))) for own in found]
