"""SQuAD 1.1: the words of a paragraph that answer a question (Rajpurkar, Zhang, Lopyrev, Liang 2016)."""

import json
import warnings
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.functional.text import squad
from torchmetrics.utilities import dim_zero_cat

from lagwise.errors import require_sizes
from lagwise.lab.config import Config
from lagwise.lab.tasks.base import HUB, SPLITS, Batch, Facts, Sampling, Sequences, Split, Task
from lagwise.lab.tasks.files import write_whole
from lagwise.lab.tasks.models import encoder_of, sides_of
from lagwise.lab.tasks.text.pretrained import Absolute, Pretrained, check_pretrained
from lagwise.lab.tasks.text.qanet import Averaged, QANet
from lagwise.lab.tasks.text.questions import (
    FILES,
    ON_THE_HUB,
    Article,
    Asked,
    Part,
    divide_articles,
    read_articles,
    sample_articles,
)
from lagwise.lab.tasks.text.streams import TOKENIZER
from lagwise.lab.tasks.text.wordpiece import WORDS, Frame, loaded_tokenizer, piece_names, tokenizer_files, trained_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ModelName = Literal["encoder", "qanet", "hf"]

ARTICLES = "articles.json"


@dataclass(frozen=True)
class SquadOptions:
    """What can be chosen of SQuAD.

    Args:
        model: "encoder" (a stack of this library over question and paragraph), "qanet" (five of them, and attention between
            question and paragraph, without convolutions), or "hf" (a Hugging Face encoder that is converted to the encoding).
        path: Folder or name of the Hugging Face model.
        absolute: What becomes of its absolute positions. The encoding "learned" leaves the model as it is in any case, and so
            does "none" with "keep".
        fade: With absolute="fade", the training steps after which nothing is left of them.
        tokenizer: "words", or folder, file or name of a tokenizer. Unless given that of the Hugging Face model, tokenizer.json or
            vocab.txt in the data folder, or WordPiece that is trained on the training text.
        vocabulary: Number of tokens of a tokenizer that is trained.
        length: Most tokens of question and window together.
        stride: Tokens from the start of one window of a paragraph to the start of the next.
        question: Most tokens of a question; the rest is cut off.
        longest_answer: Most tokens of an answer.
        average: Evaluate with the exponential moving average of the weights that decays by this factor; 0 for the last weights.
        split_articles: Train on this share of the articles of one file, and evaluate on the others; 0 for the official split.
        split_file: The file that is divided.
        split_seed: Which articles fall on which side.
        validation_articles: Keep this share of the articles to train on for validation; 0 for validation on dev.
    """

    model: ModelName = "encoder"
    path: str = ""
    absolute: Absolute = "remove"
    fade: int = 0
    tokenizer: str = ""
    vocabulary: int = 8000
    length: int = 384
    stride: int = 128
    question: int = 64
    longest_answer: int = 30
    average: float = 0.0
    split_articles: float = 0.0
    split_file: str = FILES["dev"]
    split_seed: int = 0
    validation_articles: float = 0.0

    def __post_init__(self) -> None:
        require_sizes(
            vocabulary=self.vocabulary, length=self.length, stride=self.stride, question=self.question,
            longest_answer=self.longest_answer,
        )  # fmt: skip
        if self.model not in get_args(ModelName):
            raise ValueError(f"model must be one of {', '.join(get_args(ModelName))}, but is {self.model!r}")
        for name in ("average", "split_articles", "validation_articles"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} must be at least 0 and less than 1, but is {getattr(self, name)}")
        check_pretrained(self.model, self.path, self.absolute, self.fade)


class Pieces(NamedTuple):
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


class Squad(Task):
    """Questions on paragraphs of Wikipedia, each answered by some words of the paragraph."""

    facts: ClassVar[Facts] = Facts(
        words="which words of a paragraph answer a question?",
        metric="f1",
        source="SQuAD 1.1 (Rajpurkar et al. 2016), paragraphs of Wikipedia. Its test split is not public: dev is evaluated",
        size="87,599 training and 10,570 dev questions; or one file, divided by articles",
        licence="CC BY-SA 4.0",
        published=(
            "EM/F1 on dev: QANet without convolutions (Wu et al. 2021, read off a figure) T5 71.41/80.52, AT5 72.39/81.03, no "
            "positions about 14/22; BERT-base (Hugging Face, Huang et al. 2020) absolute 81.22/88.52, Shaw F1 89.51, method 4 "
            "83.68/90.54. Numbers of a divided file compare with none of them"
        ),
        files="train-v1.1.json and dev-v1.1.json, plain or as .xz or .gz; with split_articles only one of them",
        hub=ON_THE_HUB,
    )
    defaults: ClassVar[dict[str, Any]] = {
        "dim": 128, "layers": 2, "batch": 16, "steps": 500, "warmup": 50, "dropout": 0.1, "evaluate_batch": 32,
        "evaluate_examples": 1000,
    }  # fmt: skip
    # What is known of the paper has no number of blocks, no steps and no limit of answers: these are a public QANet's.
    # 2 epochs are counted in questions; 48 are the 6 of each of 8 devices.
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper1-qanet": {
            "task_options": {
                "model": "qanet", "tokenizer": WORDS, "vocabulary": 50_000, "length": 453, "question": 50, "average": 0.9999,
            },
            "dim": 128, "layers": 7, "heads": 8, "hidden": 128, "activation": "relu", "dropout": 0.1, "batch": 32, "rate": 1e-3,
            "schedule": "constant", "warmup": 1000, "steps": 60_000, "beta1": 0.8, "beta2": 0.999, "clip": 5.0,
            "weight_decay": 3e-7, "evaluate_every": 1000, "evaluate_examples": None,
        },
        "paper2-base": {
            "task_options": {"model": "hf", "path": "google-bert/bert-base-uncased", "length": 512, "stride": 128},
            "encoding": "huang4", "encoding_options": {"max_lag": 511}, "per_layer": True, "dropout": 0.1,
            "attention_dropout": 0.1, "batch": 48, "rate": 3e-5, "schedule": "linear", "warmup": 0, "steps": 3_650,
            "evaluate_examples": None,
        },
    }  # fmt: skip
    Options: ClassVar[type] = SquadOptions
    options: SquadOptions

    def __init__(self, data: Path | str | None = None, *, seed: int = 0, **options: Any):
        super().__init__(data, seed=seed, **options)
        self.folder: Path | None = None
        self.asked: list[Asked] = []
        """All questions that were read; a question's number is its place here."""
        self.numbers: dict[Part, range] = {}
        self.pieces: dict[Part, Pieces] = {}
        self.windows: dict[tuple[Part, int], Windows] = {}

    def attach(self, folder: Path) -> None:
        """Keeps the tokenizer and the titles of the articles of all parts in a run's folder, or takes the tokenizer there."""
        self.folder = folder
        if not (folder / TOKENIZER).is_file():
            write_whole(folder / TOKENIZER, self.tokenizer.to_str())
        if not (folder / ARTICLES).is_file():
            titles = {part: [article.title for article in articles] for part, articles in self.articles.items()}
            write_whole(folder / ARTICLES, as_json(titles))

    def examples(self, split: Split, length: int | None = None) -> Windows:
        """Returns the windows of a split, validation being dev unless it has articles; with `length`, windows of that length."""
        length = self.options.length if length is None else length
        part: Part = split if split in self.articles else "dev"
        if (part, length) not in self.windows:
            self.windows[part, length] = self.cut(part, length)
        return self.windows[part, length]

    def cut(self, part: Part, length: int) -> Windows:
        """Returns the windows of a part; of training paragraphs only those from which something can be learnt."""
        options, frame = self.options, self.frame
        if length - frame.size - options.question < options.stride:
            raise ValueError(
                f"length must be at least {frame.size + options.question + options.stride}, so that windows overlap beside "
                f"questions of {options.question} tokens, but is {length}: choose a smaller stride or shorter questions"
            )
        pieces, numbers = self.pieces_of(part), self.numbers[part]
        rows, columns = windows_of(pieces, numbers, frame, options, length, absent=0 if self.can_decline else -1)
        if part == "train":
            kept = (columns["start"] >= 0).nonzero()[:, 0].tolist()
            if not kept:
                raise ValueError("data must have an answer to train on, but no window has one: check the offsets of the file")
            rows, columns = [rows[index] for index in kept], {name: column[kept] for name, column in columns.items()}
        ends = torch.tensor([len(row) for row in rows]).cumsum(0)
        return Windows(torch.cat(rows), ends, padding=0, max_length=None, **columns)

    def pieces_of(self, part: Part) -> Pieces:
        """Returns the tokens of a part, which is read and numbered at its first use."""
        if part not in self.pieces:
            found = [asked for article in self.articles[part] for asked in article.asked]
            pieces = encoded(found, self.tokenizer)
            wrong = sum(span is None for span in pieces.spans)
            if wrong:
                warnings.warn(
                    f"{wrong:,} of {len(found):,} first answers of {part} are not the text of whole tokens where they should "
                    "begin: they are asked, but not trained on",
                    stacklevel=2,
                )
            self.numbers[part] = range(len(self.asked), len(self.asked) + len(found))
            self.asked += found
            self.pieces[part] = pieces
        return self.pieces[part]

    @cached_property
    def articles(self) -> dict[Part, list[Article]]:
        """The articles of train and dev, and of validation where it has its own."""
        options = self.options
        if self.data is None:
            train, dev = sample_articles("train"), sample_articles("dev")
        elif options.split_articles:
            whole = read_articles(self.data, options.split_file)
            train, dev = divide_articles(whole, options.split_articles, "split_articles", salt=f"{options.split_seed} ")
        else:
            train, dev = read_articles(self.data, FILES["train"]), read_articles(self.data, FILES["dev"])
        if not options.validation_articles:
            return {"train": train, "dev": dev}
        kept, train = divide_articles(train, options.validation_articles, "validation_articles", salt="validation ")
        return {"train": train, "validation": kept, "dev": dev}

    @cached_property
    def tokenizer(self) -> "Tokenizer":
        """What makes tokens of texts."""
        if self.folder is not None and (self.folder / TOKENIZER).is_file():
            return loaded_tokenizer(str(self.folder / TOKENIZER))
        named = self.options.tokenizer or self.options.path
        if not named and isinstance(self.data, Path | str) and self.data != HUB:
            named = next((str(path) for path in tokenizer_files(Path(self.data)) if path.is_file()), "")
        if named and named != WORDS:
            return loaded_tokenizer(named)
        asked = [asked for article in self.articles["train"] for asked in article.asked]
        texts = [*dict.fromkeys(each.context for each in asked), *(each.text for each in asked)]
        return trained_tokenizer(texts, "words" if named else "pieces", self.options.vocabulary)

    @cached_property
    def frame(self) -> Frame:
        """The special tokens around a question and a window."""
        found = self.tokenizer.encode("a", "b")
        sides = found.sequence_ids
        first, second, end = sides.index(0), sides.index(1), len(sides) - sides[::-1].index(1)
        middle = second - sides[:second][::-1].index(0)
        return Frame(found.ids[:first], found.ids[middle:second], found.ids[end:])

    @property
    def can_decline(self) -> bool:
        """Whether the model can choose the token before the question, which says that the window has no answer."""
        return self.options.model != "qanet" and bool(self.frame.before)

    def model(self, config: Config) -> nn.Module:
        options = self.options
        if config.start and options.model == "qanet":
            raise ValueError(f"start must be left out with model='qanet', but is {config.start!r}")
        symbols = max(self.tokenizer.get_vocab().values()) + 1
        if options.model == "encoder":
            model: nn.Module = SpanEncoder(config, symbols=symbols)
        elif options.model == "qanet":
            model = QANet(config, symbols=symbols, frame=self.frame)
        else:
            model = HuggingFaceSpans(config, options, symbols=symbols)
        return Averaged(model, options.average) if options.average else model

    def loss(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        allowed = window_of(batch)
        if self.can_decline:
            allowed[:, 0] = True
        scores = masked(outputs, allowed)
        labels = torch.stack([batch["start"], batch["end"]], dim=1)
        total = F.cross_entropy(scores, labels, ignore_index=-1, reduction="sum") / 2
        return total, (batch["start"] >= 0).sum()

    def metrics(self) -> dict[str, Metric]:
        return {"f1": SpanMetric(self.asked, "f1"), "em": SpanMetric(self.asked, "exact_match")}

    def answers(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns of each window the score of its best span and where that begins and ends, and the question's number."""
        score, first, last = best_spans(masked(outputs, window_of(batch)), self.options.longest_answer)
        rows = torch.arange(len(score), device=score.device)
        places = torch.stack([batch["chars"][rows, first, 0], batch["chars"][rows, last, 1]], dim=1)
        return torch.cat([score[:, None], places.to(score.dtype)], dim=1), batch["question"]

    @torch.no_grad()
    def generate(self, model: nn.Module, prompt: str | None, sampling: Sampling, out: Path) -> list[Path]:
        """Writes the best answers to the questions of a split, "test" unless the prompt names another, in the official format.

        Nothing is drawn: `sampling` does not matter.
        """
        chosen: list[Split] = [split for split in SPLITS if split == (prompt or "test")]
        if not chosen:
            raise ValueError(f"prompt must be one of {', '.join(SPLITS)}, or left out for test, but is {prompt!r}")
        metric, examples = SpanMetric(self.asked, "f1"), self.examples(chosen[0])
        device = next(model.parameters()).device
        for start in range(0, len(examples), PREDICTED):
            batch = examples.batch(range(start, min(start + PREDICTED, len(examples))))
            batch = {name: x.to(device) for name, x in batch.items()}
            predictions, numbers = self.answers(model(batch), batch)
            metric.update(predictions.cpu(), numbers.cpu())
        path = out / "predictions.json"
        write_whole(path, as_json(metric.predictions()))
        return [path]

    def encoding_options(self, encoding: str) -> dict[str, Any]:
        if encoding == "learned":
            return {"length": self.options.length}
        if encoding == "at5" and self.options.model == "qanet":
            return {"reach": 400, "widths": [32, 4], "slopes": [5.0, 15.0], "std": 0.02}
        return {}

    def token_names(self, tokens: Sequence[int]) -> list[str]:
        return piece_names(self.tokenizer, tokens)


PREDICTED = 32
"""Windows that are answered at a time."""


def as_json(content: Mapping[str, Any]) -> str:
    """Returns the text of a JSON file."""
    return json.dumps(content, ensure_ascii=False, indent=1) + "\n"


# Spans and their scores


def window_of(batch: Batch) -> Bool[Tensor, "batch time"]:
    """Returns which tokens are of the paragraph."""
    time = torch.arange(batch["tokens"].shape[1], device=batch["tokens"].device)
    return (time >= batch["first"][:, None]) & (time < batch["last"][:, None])


def masked(scores: Float[Tensor, "batch time 2"], allowed: Bool[Tensor, "batch time"]) -> Float[Tensor, "batch time 2"]:
    """Returns scores in float32, with -inf where nothing may start or end."""
    return scores.float().masked_fill(~allowed[..., None], float("-inf"))


def best_spans(
    scores: Float[Tensor, "batch time 2"], longest: int
) -> tuple[Float[Tensor, " batch"], Int[Tensor, " batch"], Int[Tensor, " batch"]]:
    """Returns the best sum of the scores of a start and an end, and those two: at most `longest` tokens, the end not before.

    The sum is -inf where no span is possible.

    >>> scores = torch.tensor([[[0.0, 9.0], [1.0, 0.0], [0.0, 2.0], [0.0, 5.0]]])
    >>> best_spans(scores, longest=2)
    (tensor([9.]), tensor([0]), tensor([0]))
    >>> best_spans(masked(scores, torch.tensor([[False, True, True, True]])), longest=2)
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

    def __init__(self, asked: Sequence[Asked], part: Literal["exact_match", "f1"]):
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


# Models: a batch in, scores of start and end [batch, time, 2] out


class SpanEncoder(nn.Module):
    """A stack of layers over question and window, which a learned vector tells apart."""

    def __init__(self, config: Config, *, symbols: int):
        super().__init__()
        self.embedding = nn.Embedding(symbols, config.dim)
        self.side = nn.Embedding(2, config.dim)
        if config.start:
            # What was trained before knows no sides, and vectors as large as its embeddings would drown these.
            nn.init.zeros_(self.side.weight)
        self.encoder = encoder_of(config)
        self.span = nn.Linear(config.dim, 2)

    def forward(self, batch: Batch) -> Float[Tensor, "batch time 2"]:
        x = self.embedding(batch["tokens"]) + self.side(sides_of(batch))
        return self.span(self.encoder(x, lengths=batch["lengths"]))


class HuggingFaceSpans(Pretrained):
    """An encoder of Hugging Face with its head for questions."""

    def __init__(self, config: Config, options: SquadOptions, *, symbols: int):
        super().__init__(
            config, options.path, "AutoModelForQuestionAnswering", absolute=options.absolute, fade=options.fade, symbols=symbols
        )

    def forward(self, batch: Batch) -> Float[Tensor, "batch time 2"]:
        found = self.outputs(batch)
        return torch.stack([found.start_logits, found.end_logits], dim=-1)


# Windows


def encoded(asked: Sequence[Asked], tokenizer: "Tokenizer") -> Pieces:
    """Returns questions and paragraphs in tokens, each paragraph once, and the tokens of the first answers."""
    contexts = list(dict.fromkeys(each.context for each in asked))
    by_text = dict(zip(contexts, token_rows(contexts, tokenizer), strict=True))
    own = [by_text[each.context] for each in asked]
    return Pieces(token_rows([each.text for each in asked], tokenizer), own, spans_of(asked, by_text))


def token_rows(texts: Sequence[str], tokenizer: "Tokenizer") -> list[Int[Tensor, "tokens 3"]]:
    """Returns the tokens of texts, each with its start and end in the text."""
    found = tokenizer.encode_batch(list(texts), add_special_tokens=False)
    ids = torch.tensor([token for each in found for token in each.ids], dtype=torch.int32)
    places = torch.tensor([place for each in found for pair in each.offsets for place in pair], dtype=torch.int32)
    rows = torch.cat([ids[:, None], places.view(-1, 2)], dim=1)
    return list(rows.split([len(each.ids) for each in found]))


def spans_of(asked: Sequence[Asked], tokens: Mapping[str, Int[Tensor, "tokens 3"]]) -> list[tuple[int, int] | None]:
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


def windows_of(
    pieces: Pieces, numbers: Sequence[int], frame: Frame, options: SquadOptions, length: int, *, absent: int
) -> tuple[list[Int[Tensor, "tokens 3"]], dict[str, Int[Tensor, " windows"]]]:
    """Returns the tokens of all windows with their places, and of each the columns of `Windows`.

    `absent` is the label of windows that the answer is not in as a whole.
    """
    before, middle, after = (torch.tensor([[token, 0, 0] for token in part], dtype=torch.int32).view(-1, 3) for part in frame)
    rows, columns = [], []
    for number, question, context, span in zip(numbers, *pieces, strict=True):
        question = question[: options.question]
        head, room = len(before) + len(question) + len(middle), length - frame.size - len(question)
        for start in range(0, max(0, len(context) - room) + options.stride, options.stride):
            window = context[start : start + room]
            rows.append(torch.cat([before, question, middle, window, after]))
            inside = span is not None and start <= span[0] and span[1] < start + len(window)
            labels = [head + token - start for token in span] if inside and span else [absent if span else -1] * 2
            columns.append([number, head, head + len(window), *labels])
    table = torch.tensor(columns).T
    return rows, dict(zip(("question", "first", "last", "start", "end"), table, strict=True))
