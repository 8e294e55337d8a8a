"""Questions and windows of their paragraphs as tokens, and where in them the answers are."""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torchmetrics.functional.text import squad

from lagwise.lab.tasks.base import Batch, Sequences
from lagwise.lab.tasks.text.questions import Question

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Frame(NamedTuple):
    """The special tokens before a question, between question and paragraph, and after it."""

    before: list[int]
    middle: list[int]
    after: list[int]

    @property
    def size(self) -> int:
        return len(self.before) + len(self.middle) + len(self.after)


def frame_of(tokenizer: "Tokenizer") -> Frame:
    """Returns the special tokens that a tokenizer puts around two texts."""
    found = tokenizer.encode("a", "b")
    sides = found.sequence_ids
    first, second, end = sides.index(0), sides.index(1), len(sides) - sides[::-1].index(1)
    middle = second - sides[:second][::-1].index(0)
    return Frame(found.ids[:first], found.ids[middle:second], found.ids[end:])


class QuestionTokens(NamedTuple):
    """Questions and their paragraphs in tokens, each with its place in the text: rows of token, start and end."""

    questions: list[Int[Tensor, "tokens 3"]]
    contexts: list[Int[Tensor, "tokens 3"]]
    spans: list[tuple[int, int] | None]
    """The first and the last token of each first answer; None where tokens do not give the answer's text."""


class Windows(Sequences):
    """Questions with windows of their paragraphs.

    Beside `tokens` and `lengths` a batch has `chars` [batch, time, 2] (where in the paragraph each token starts and ends),
    `first` and `last` (the window is from `first` to before `last`), `start` and `end` (the answer's tokens; 0 for "not in this
    window" where the model can say so, -1 where nothing is asked of it), and `question` (its number).
    """

    def batch(self, indices: Sequence[int]) -> Batch:
        found = super().batch(indices)
        return {**found, "tokens": found["tokens"][..., 0], "chars": found["tokens"][..., 1:]}


def window_of(batch: Batch) -> Bool[Tensor, "batch time"]:
    """Returns which tokens are of the paragraph."""
    time = torch.arange(batch["tokens"].shape[1], device=batch["tokens"].device)
    return (time >= batch["first"][:, None]) & (time < batch["last"][:, None])


def encode_questions(asked: Sequence[Question], tokenizer: "Tokenizer") -> QuestionTokens:
    """Returns questions and paragraphs in tokens, each paragraph once, and the tokens of the first answers."""
    contexts = list(dict.fromkeys(each.context for each in asked))
    by_text = dict(zip(contexts, token_rows(contexts, tokenizer), strict=True))
    own = [by_text[each.context] for each in asked]
    return QuestionTokens(token_rows([each.text for each in asked], tokenizer), own, spans_of(asked, by_text))


def token_rows(texts: Sequence[str], tokenizer: "Tokenizer") -> list[Int[Tensor, "tokens 3"]]:
    """Returns the tokens of texts, each with its start and end in the text."""
    found = tokenizer.encode_batch(list(texts), add_special_tokens=False)
    ids = torch.tensor([token for each in found for token in each.ids], dtype=torch.int32)
    places = torch.tensor([place for each in found for pair in each.offsets for place in pair], dtype=torch.int32)
    rows = torch.cat([ids[:, None], places.view(-1, 2)], dim=1)
    return list(rows.split([len(each.ids) for each in found]))


def spans_of(asked: Sequence[Question], tokens: Mapping[str, Int[Tensor, "tokens 3"]]) -> list[tuple[int, int] | None]:
    """Returns the first and the last token of each first answer, or None where their text is not the answer's."""
    places = {text: (rows[:, 1].tolist(), rows[:, 2].tolist()) for text, rows in tokens.items()}
    found: list[tuple[int, int] | None] = []
    for each in asked:
        starts, ends = places[each.context]
        # The first token that ends after the answer's start, and the last that starts before its end.
        first, last = bisect_right(ends, each.start), bisect_left(starts, each.start + len(each.answers[0])) - 1
        whole = each.context[starts[first] : ends[last]] if first <= last else ""
        found.append((first, last) if whole and same_answer(whole, each.answers[0]) else None)
    return found


def same_answer(one: str, other: str) -> bool:
    """Says whether two texts are equal for the official script."""
    if one == other:
        return True
    target: Any = {"id": "", "answers": {"text": [other]}}
    return bool(squad({"id": "", "prediction_text": one}, target)["exact_match"] > 0)


def cut_windows(
    tokens: QuestionTokens, numbers: Sequence[int], frame: Frame, *, length: int, stride: int, longest_question: int, absent: int
) -> tuple[list[Int[Tensor, "tokens 3"]], dict[str, Int[Tensor, " windows"]]]:
    """Returns the tokens of all windows with their places, and of each the columns of `Windows`.

    Args:
        tokens: Of the questions and their paragraphs.
        numbers: Of the questions.
        frame: The special tokens around them.
        length: Most tokens of question and window together.
        stride: Tokens from the start of one window to the start of the next.
        longest_question: Most tokens of a question; the rest is cut off.
        absent: The label of windows that the answer is not in as a whole.
    """
    before, middle, after = (torch.tensor([[token, 0, 0] for token in part], dtype=torch.int32).view(-1, 3) for part in frame)
    rows, columns = [], []
    for number, question, context, span in zip(numbers, *tokens, strict=True):
        question = question[:longest_question]
        head, room = len(before) + len(question) + len(middle), length - frame.size - len(question)
        for start in range(0, max(0, len(context) - room) + stride, stride):
            window = context[start : start + room]
            rows.append(torch.cat([before, question, middle, window, after]))
            inside = span is not None and start <= span[0] and span[1] < start + len(window)
            labels = [head + token - start for token in span] if inside and span else [absent if span else -1] * 2
            columns.append([number, head, head + len(window), *labels])
    table = torch.tensor(columns).T
    return rows, dict(zip(("question", "first", "last", "start", "end"), table, strict=True))
