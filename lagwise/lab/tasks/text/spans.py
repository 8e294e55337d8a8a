"""Spans of a paragraph: the best one by the scores of starts and ends, and the official score of answers."""

from collections.abc import Sequence
from typing import Any, Literal

import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.functional.text import squad
from torchmetrics.utilities import dim_zero_cat

from lagwise.lab.tasks.text.questions import Question


def mask_scores(scores: Float[Tensor, "batch time 2"], allowed: Bool[Tensor, "batch time"]) -> Float[Tensor, "batch time 2"]:
    """Returns scores in float32, with -inf where nothing may start or end."""
    return scores.float().masked_fill(~allowed[..., None], float("-inf"))


def best_spans(
    scores: Float[Tensor, "batch time 2"], longest: int
) -> tuple[Float[Tensor, " batch"], Int[Tensor, " batch"], Int[Tensor, " batch"]]:
    """Returns the best sum of the scores of a start and an end, and those two: at most `longest` tokens, the end not before.

    The sum is -inf where no span is possible.

    >>> import torch
    >>> scores = torch.tensor([[[0.0, 9.0], [1.0, 0.0], [0.0, 2.0], [0.0, 5.0]]])
    >>> best_spans(scores, longest=2)
    (tensor([9.]), tensor([0]), tensor([0]))
    >>> best_spans(mask_scores(scores, torch.tensor([[False, True, True, True]])), longest=2)
    (tensor([5.]), tensor([2]), tensor([3]))
    """
    start, end = scores.unbind(-1)
    ends = F.pad(end, (0, longest - 1), value=float("-inf")).unfold(1, longest, 1)
    score, place = (start[..., None] + ends).flatten(1).max(1)
    first = place // longest
    # Where all sums are -inf, the place may be one beyond the end.
    return score, first, (first + place % longest).clamp(max=scores.shape[1] - 1)


class SpanMetric(Metric):
    """The official exact match or F1, in percent, of the best span over all windows of each question.

    Questions none of whose windows were seen do not count; one without a possible span has an empty answer.

    Args:
        asked: The questions, by number.
        part: Which of the two.
    """

    higher_is_better = True
    is_differentiable = False
    full_state_update = False
    spans: list[Tensor] | Tensor
    numbers: list[Tensor] | Tensor

    def __init__(self, asked: Sequence[Question], part: Literal["exact_match", "f1"]):
        super().__init__()
        self.asked, self.part = asked, part
        self.add_state("spans", default=[], dist_reduce_fx="cat")
        self.add_state("numbers", default=[], dist_reduce_fx="cat")

    def update(self, spans: Float[Tensor, "batch 3"], numbers: Int[Tensor, " batch"]) -> None:
        """Takes rows of a score and the places of the first and the last character, and the numbers of their questions."""
        assert isinstance(self.spans, list) and isinstance(self.numbers, list)
        # Flat and of the metric's own type, as what torchmetrics puts in the place of a process that saw nothing. Float32 is
        # exact for numbers and places up to 16 million.
        self.spans.append(spans.to(self.dtype).flatten())
        self.numbers.append(numbers.to(self.dtype))

    def best(self) -> dict[int, str]:
        """Returns the best answer to each question, by number; of equal scores the earlier place counts."""
        found: dict[int, tuple[float, float, float]] = {}
        if len(self.numbers):
            numbers, spans = dim_zero_cat(self.numbers).tolist(), dim_zero_cat(self.spans).view(-1, 3).tolist()
            for number, (score, start, end) in zip(numbers, spans, strict=True):
                found[int(number)] = max(found.get(int(number), (float("-inf"), 0.0, 0.0)), (score, -start, -end))
        return {
            number: self.asked[number].context[int(-start) : int(-end)] if score > float("-inf") else ""
            for number, (score, start, end) in sorted(found.items())
        }

    def predictions(self) -> dict[str, str]:
        """Returns the answers by the questions' own keys, as the official script reads them."""
        return {self.asked[number].key: text for number, text in self.best().items()}

    def compute(self) -> Tensor:
        best = self.best()
        if not best:
            raise ValueError("a score needs at least one answered question, but there is none")
        given = [{"id": str(number), "prediction_text": text} for number, text in best.items()]
        wanted: list[Any] = [{"id": str(number), "answers": {"text": list(self.asked[number].answers)}} for number in best]
        return squad(given, wanted)[self.part]
