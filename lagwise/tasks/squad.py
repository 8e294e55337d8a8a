"""SQuAD 1.1: the words of a paragraph that answer a question (Rajpurkar, Zhang, Lopyrev, Liang 2016)."""

import gzip
import hashlib
import json
import lzma
import warnings
import zlib
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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

from lagwise.encodings.base import require_sizes
from lagwise.encodings.scalar import AT5
from lagwise.tasks.base import HUB, SPLITS, Batch, Facts, Sampling, Sequences, Split, Task
from lagwise.tasks.files import OPENERS, from_hub, required_file
from lagwise.tasks.listops import cache_folder
from lagwise.tasks.lm import SPECIAL, TOKENIZER, write_whole
from lagwise.tasks.models import encoder_of
from lagwise.train.config import Config

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Part = Literal["train", "dev"]
ModelName = Literal["encoder", "qanet", "hf"]
Absolute = Literal["remove", "keep"]

FILES: dict[Part, str] = {"train": "train-v1.1.json", "dev": "dev-v1.1.json"}
SOURCE = (
    "get train-v1.1.json and dev-v1.1.json from https://rajpurkar.github.io/SQuAD-explorer/, or divide one file with "
    "task.split_articles=0.8 task.split_file=NAME"
)
WORDS = "words"
ARTICLES = "articles.json"

VERSION = 1
"""Changes whenever the same text gives another tokenizer, so that stored ones of before are not used."""


@dataclass(frozen=True)
class SquadOptions:
    """What can be chosen of SQuAD.

    Args:
        model: "encoder" (a stack of this library over question and paragraph), "qanet" (five of them, and attention between
            question and paragraph, without convolutions), or "hf" (a Hugging Face encoder that is converted to the encoding).
        path: Folder or name of the Hugging Face model.
        absolute: What becomes of its absolute positions; "keep" with encoding "none" leaves the model as it is.
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
    """

    model: ModelName = "encoder"
    path: str = ""
    absolute: Absolute = "remove"
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

    def __post_init__(self) -> None:
        require_sizes(
            vocabulary=self.vocabulary, length=self.length, stride=self.stride, question=self.question,
            longest_answer=self.longest_answer,
        )  # fmt: skip
        for name, value, allowed in (("model", self.model, ModelName), ("absolute", self.absolute, Absolute)):
            if value not in get_args(allowed):
                raise ValueError(f"{name} must be one of {', '.join(get_args(allowed))}, but is {value!r}")
        for name, share in (("average", self.average), ("split_articles", self.split_articles)):
            if not 0.0 <= share < 1.0:
                raise ValueError(f"{name} must be at least 0 and less than 1, but is {share}")
        if bool(self.path) != (self.model == "hf"):
            needed = "the folder or name of a model with model='hf', and left out without"
            raise ValueError(f"path must be {needed}, but is {self.path!r} with model={self.model!r}")


class Asked(NamedTuple):
    """A question, where its answer is looked for, and the answers that count."""

    key: str
    text: str
    context: str
    answers: tuple[str, ...]
    start: int
    """Where in the context the first answer begins."""


class Article(NamedTuple):
    """The questions on an article."""

    title: str
    asked: list[Asked]


class Frame(NamedTuple):
    """The special tokens before a question, between question and paragraph, and after it."""

    before: list[int]
    middle: list[int]
    after: list[int]

    @property
    def size(self) -> int:
        return len(self.before) + len(self.middle) + len(self.after)


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
        hub="rajpurkar/squad",
    )
    defaults: ClassVar[dict[str, Any]] = {
        "dim": 128, "layers": 2, "batch": 16, "steps": 500, "warmup": 50, "dropout": 0.1, "evaluate_batch": 32,
        "evaluate_examples": 1000,
    }  # fmt: skip
    # The number of blocks, the steps and the limit of answers are those of the public QANet that the paper's program changes.
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
        """Keeps the tokenizer and the titles of the articles of both parts in a run's folder, or takes the tokenizer there."""
        self.folder = folder
        if not (folder / TOKENIZER).is_file():
            write_whole(folder / TOKENIZER, self.tokenizer.to_str())
        if not (folder / ARTICLES).is_file():
            titles = {part: [article.title for article in articles] for part, articles in self.articles.items()}
            write_whole(folder / ARTICLES, as_json(titles))

    def examples(self, split: Split, length: int | None = None) -> Windows:
        """Returns the windows of a split, the validation split being dev as well; with `length`, windows of that length."""
        length = self.options.length if length is None else length
        part: Part = "train" if split == "train" else "dev"
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
        """The articles of both parts."""
        options, parts = self.options, get_args(Part)
        if self.data is None:
            return {part: sample(part) for part in parts}
        if not options.split_articles:
            return {part: read(self.data, FILES[part]) for part in parts}
        return divided(read(self.data, options.split_file), options.split_articles, options.split_seed)

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
        if config.start and options.model != "encoder":
            raise ValueError(f"start must be left out with model={options.model!r}, but is {config.start!r}")
        symbols = max(self.tokenizer.get_vocab().values()) + 1
        if options.model == "encoder":
            model: nn.Module = SpanEncoder(config, symbols=symbols)
        elif options.model == "qanet":
            model = QANet(config, symbols=symbols, frame=self.frame)
        else:
            model = HuggingFaceSpans(config, options.path, absolute=options.absolute, symbols=symbols)
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
        self.encoder = encoder_of(config)
        self.span = nn.Linear(config.dim, 2)

    def forward(self, batch: Batch) -> Float[Tensor, "batch time 2"]:
        x = self.embedding(batch["tokens"]) + self.side(sides_of(batch))
        return self.span(self.encoder(x, lengths=batch["lengths"]))


def sides_of(batch: Batch) -> Int[Tensor, "batch time"]:
    """Returns 0 for the question and 1 for the window, with the special tokens that follow each."""
    time = torch.arange(batch["tokens"].shape[1], device=batch["tokens"].device)
    return (time >= batch["first"][:, None]).long()


class QANet(nn.Module):
    """The model of the paper on scalar encodings: a QANet without convolutions, so that the encoding is all that knows order.

    Five encoders: one layer for the question and one for the paragraph, and three stacks of `config.layers`, one on the other.
    Scores of the start are made of the first and the second, those of the end of the first and the third. AT5 has its slopes in
    common in all five.
    """

    def __init__(self, config: Config, *, symbols: int, frame: Frame):
        super().__init__()
        self.before, self.middle = len(frame.before), len(frame.middle)
        self.embedding = nn.Embedding(symbols, config.dim)
        shallow = replace(config, layers=1)
        self.encoders = nn.ModuleList(encoder_of(each) for each in (shallow, shallow, config, config, config))
        share_slopes([encoder.encoding for encoder in self.encoders])
        self.between = ContextQueryAttention(config.dim)
        self.start, self.end = nn.Linear(2 * config.dim, 1), nn.Linear(2 * config.dim, 1)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, batch: Batch) -> Float[Tensor, "batch time 2"]:
        asked, reads, *stacks = self.encoders
        sizes, question_sizes = batch["last"] - batch["first"], batch["first"] - self.before - self.middle
        x = self.dropout(self.embedding(batch["tokens"]))
        question, _ = part_of(x, torch.full_like(question_sizes, self.before), question_sizes)
        context, places = part_of(x, batch["first"], sizes)
        question, context = asked(question, lengths=question_sizes), reads(context, lengths=sizes)
        x = self.between(context, question, sizes, question_sizes)
        found = []
        for stack in stacks:
            x = stack(self.dropout(x), lengths=sizes)
            found.append(x)
        ends = [self.start(torch.cat([found[0], found[1]], dim=-1)), self.end(torch.cat([found[0], found[2]], dim=-1))]
        scores = torch.cat(ends, dim=-1)
        length = batch["tokens"].shape[1]
        whole = scores.new_zeros(len(scores), length + scores.shape[1], 2)
        return whole.scatter(1, places[..., None].expand_as(scores), scores)[:, :length]


def part_of(
    x: Float[Tensor, "batch time dim"], first: Int[Tensor, " batch"], sizes: Int[Tensor, " batch"]
) -> tuple[Float[Tensor, "batch part dim"], Int[Tensor, "batch part"]]:
    """Returns the vectors from `first` on, as many as the longest part has, and their places, which may be beyond the end."""
    places = first[:, None] + torch.arange(max(1, int(sizes.max())), device=x.device)
    inside = places.clamp(max=x.shape[1] - 1)
    return x.gather(1, inside[..., None].expand(-1, -1, x.shape[2])), places


def share_slopes(encodings: Iterable[Any]) -> None:
    """Gives all AT5 encodings the slopes of the first."""
    adaptive = [encoding for encoding in encodings if isinstance(encoding, AT5)]
    for encoding in adaptive[1:]:
        encoding.slope = adaptive[0].slope


class ContextQueryAttention(nn.Module):
    """Attention from a paragraph to a question and back, with a similarity that is linear in both and in their product.

    c' = W [c, a, c a, c b],   a = S q,   b = S T^T c,   S and T the softmax of u c + v q + w (c q) over the question and over the
    paragraph.
    """

    def __init__(self, dim: int):
        super().__init__()
        self.similarity = nn.Parameter(torch.randn(3, dim) / dim**0.5)
        self.merge = nn.Linear(4 * dim, dim)

    def forward(
        self,
        context: Float[Tensor, "batch context dim"],
        question: Float[Tensor, "batch question dim"],
        sizes: Int[Tensor, " batch"],
        question_sizes: Int[Tensor, " batch"],
    ) -> Float[Tensor, "batch context dim"]:
        u, v, w = self.similarity
        similar = (context @ u)[:, :, None] + (question @ v)[:, None] + (context * w) @ question.mT
        least = torch.finfo(similar.dtype).min
        there, asked = exists(context, sizes), exists(question, question_sizes)
        to_question = similar.masked_fill(~asked[:, None], least).softmax(2)
        to_context = similar.masked_fill(~there[:, :, None], least).softmax(1)
        a = to_question @ question
        b = to_question @ (to_context.mT @ context)
        return self.merge(torch.cat([context, a, context * a, context * b], dim=-1))


def exists(x: Float[Tensor, "batch time dim"], sizes: Int[Tensor, " batch"]) -> Bool[Tensor, "batch time"]:
    """Returns which vectors are no padding."""
    return torch.arange(x.shape[1], device=x.device) < sizes[:, None]


DROPOUTS = {
    "dropout": ("hidden_dropout_prob", "dropout", "resid_pdrop", "embd_pdrop"),
    "attention_dropout": ("attention_probs_dropout_prob", "attention_dropout", "attn_pdrop"),
}
"""What the models of Hugging Face call our two kinds of dropout."""


class HuggingFaceSpans(nn.Module):
    """An encoder of Hugging Face with its head for questions, converted to the encoding of a config.

    Its sizes are its own; dropout, the encoding with its options, and the kind of attention are the config's.
    """

    def __init__(self, config: Config, path: str, *, absolute: Absolute, symbols: int):
        super().__init__()
        if config.per_layer == "gate":
            raise ValueError("per_layer must be true or false with model='hf', but is 'gate'")
        self.inner = converted(with_dropout(path, config), config, absolute)
        if symbols > self.inner.config.vocab_size:
            raise ValueError(
                f"tokenizer must be the model's, which has {self.inner.config.vocab_size:,} tokens, but it has {symbols:,}"
            )
        self.has_sides = getattr(self.inner.config, "type_vocab_size", 1) > 1

    def forward(self, batch: Batch) -> Float[Tensor, "batch time 2"]:
        time = torch.arange(batch["tokens"].shape[1], device=batch["tokens"].device)
        sides = {"token_type_ids": sides_of(batch)} if self.has_sides else {}
        mask = (time < batch["lengths"][:, None]).long()
        found = self.inner(input_ids=batch["tokens"], attention_mask=mask, **sides)
        return torch.stack([found.start_logits, found.end_logits], dim=-1)


def with_dropout(path: str, config: Config) -> Any:
    """Loads a model with the dropout of a config."""
    from transformers import AutoConfig, AutoModelForQuestionAnswering

    try:
        own = AutoConfig.from_pretrained(path)
        for field, names in DROPOUTS.items():
            for name in names:
                if hasattr(own, name):
                    setattr(own, name, getattr(config, field))
        return AutoModelForQuestionAnswering.from_pretrained(path, config=own)
    except OSError as error:
        raise ValueError(f"path must be the folder or the name of a Hugging Face model, but is {path!r}: {error}") from error


def converted(model: Any, config: Config, absolute: Absolute) -> Any:
    """Returns a model with the encoding of a config; without one, and with absolute positions, as it is."""
    if config.encoding == "none" and absolute == "keep" and config.attention == "softmax":
        return model
    from lagwise.hf import convert

    linear = config.attention == "linear"
    return convert(
        model, config.encoding, absolute=absolute, attention=config.attention, per_layer=bool(config.per_layer),
        feature_map=config.feature_map if linear else None, **config.encoding_options,
    )  # fmt: skip


class Averaged(nn.Module):
    """A model that is evaluated with the exponential moving average of its weights.

    The average is taken before each step, so that the last step is not in it. In the first steps it decays faster, by
    (1 + n) / (10 + n) after n of them. It needs whole weights, and so no sharded ones.
    """

    steps: Tensor

    def __init__(self, model: nn.Module, decay: float):
        super().__init__()
        self.inner, self.decay = model, decay
        self.averages = nn.Module()
        for name, parameter in model.named_parameters():
            # A buffer's name has no dots.
            self.averages.register_buffer(name.replace(".", "/"), parameter.detach().clone())
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, batch: Batch) -> Any:
        if self.training:
            self.update()
            return self.inner(batch)
        averages = {name.replace("/", "."): x for name, x in self.averages.named_buffers()}
        return torch.func.functional_call(self.inner, averages, (batch,))

    @torch.no_grad()
    def update(self) -> None:
        """Moves the averages towards the weights."""
        weight = 1.0 - ((1.0 + self.steps) / (10.0 + self.steps)).clamp(max=self.decay)
        for average, parameter in zip(self.averages.buffers(), self.inner.parameters(), strict=True):
            average.lerp_(parameter, weight.to(average.dtype))
        self.steps += 1


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


# Tokenizers


def tokenizer_files(folder: Path) -> list[Path]:
    """Returns where a folder may have a tokenizer."""
    return [folder / "tokenizer.json", folder / "vocab.txt"]


def loaded_tokenizer(name: str) -> "Tokenizer":
    """Loads a tokenizer from a folder, a file, or by its name on the Hugging Face Hub."""
    from tokenizers import Tokenizer

    path = Path(name)
    found = next((file for file in tokenizer_files(path) if file.is_file()), path)
    if found.suffix == ".txt" and found.is_file():
        return wordpiece_of(found)
    if found.is_file():
        try:
            made = Tokenizer.from_file(str(found))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"tokenizer must be a tokenizer.json or a vocab.txt, but {found} cannot be read: {error}") from error
    else:
        made = tokenizer_named(name)
    made.no_padding()
    made.no_truncation()
    if (
        made.num_special_tokens_to_add(True) == 0
        and made.token_to_id("[CLS]") is not None
        and made.token_to_id("[SEP]") is not None
    ):
        # One that was trained for language modelling has the tokens, and puts them nowhere.
        add_frame(made)
    return made


def tokenizer_named(name: str) -> "Tokenizer":
    """Loads the tokenizer of a Hugging Face model."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name).backend_tokenizer
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(
            f"tokenizer must be 'words', a folder or file with a tokenizer.json or vocab.txt, or the name of one on the Hub, "
            f"but is {name!r}: {error}"
        ) from error


def wordpiece_of(path: Path) -> "Tokenizer":
    """Makes BERT's tokenizer of a vocabulary; letters become small where the vocabulary has no others."""
    from tokenizers.models import WordPiece

    vocabulary = {word: number for number, word in enumerate(path.read_text(encoding="utf-8").splitlines())}
    missing = [word for word in ("[UNK]", "[CLS]", "[SEP]") if word not in vocabulary]
    if missing:
        raise ValueError(f"{path} must have a line for each token, but {missing[0]} is missing")
    model = WordPiece(vocabulary, unk_token="[UNK]")
    return around(model, lowercase=all(word == word.lower() for word in vocabulary if not word.startswith("[")))


def around(model: Any, *, lowercase: bool) -> "Tokenizer":
    """Puts what BERT does before and after around a model of tokens."""
    from tokenizers import Tokenizer
    from tokenizers.normalizers import BertNormalizer
    from tokenizers.pre_tokenizers import BertPreTokenizer

    made: Any = Tokenizer(model)
    made.normalizer = BertNormalizer(lowercase=lowercase)
    made.pre_tokenizer = BertPreTokenizer()
    if made.token_to_id("[CLS]") is not None:
        add_frame(made)
    return made


def add_frame(tokenizer: Any) -> None:
    """Lets a tokenizer put [CLS] and [SEP] around questions and paragraphs."""
    from tokenizers.processors import TemplateProcessing

    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(word, tokenizer.token_to_id(word)) for word in ("[CLS]", "[SEP]")],
    )  # fmt: skip


def trained_tokenizer(texts: Sequence[str], kind: Literal["pieces", "words"], vocabulary: int) -> "Tokenizer":
    """Returns a tokenizer that is trained on texts, or was before: it is stored in the cache folder."""
    from tokenizers import Tokenizer

    digest = hashlib.sha256(json.dumps([VERSION, kind, vocabulary, texts]).encode()).hexdigest()[:12]
    path = cache_folder() / "squad" / f"{kind}-{digest}.json"
    if path.is_file():
        return Tokenizer.from_file(str(path))
    made = trained_words(texts, vocabulary) if kind == "words" else trained_pieces(texts, vocabulary)
    write_whole(path, made.to_str())
    return made


def trained_words(texts: Sequence[str], vocabulary: int) -> "Tokenizer":
    """Returns a tokenizer for the most frequent words and signs of texts."""
    from tokenizers.models import WordLevel
    from tokenizers.trainers import WordLevelTrainer

    made = around(WordLevel(unk_token="[UNK]"), lowercase=True)
    trainer: Any = WordLevelTrainer
    made.train_from_iterator(texts, trainer(vocab_size=vocabulary, special_tokens=list(SPECIAL), show_progress=False))
    add_frame(made)
    return made


def trained_pieces(texts: Sequence[str], vocabulary: int) -> "Tokenizer":
    """Returns WordPiece that is trained on texts, the same each time."""
    from tokenizers.models import WordPiece
    from tokenizers.trainers import WordPieceTrainer

    draft: Any = around(WordPiece(unk_token="[UNK]"), lowercase=True)
    words = {word for text in texts for word in draft.normalizer.normalize_str(text).split()}
    # Left to itself the library numbers letters inside words in an order that differs from run to run, and with it ties.
    inner = [f"##{letter}" for letter in sorted({letter for word in words for letter in word[1:]})]
    trainer: Any = WordPieceTrainer
    draft.train_from_iterator(texts, trainer(vocab_size=vocabulary, special_tokens=[*SPECIAL, *inner], show_progress=False))
    return around(WordPiece(draft.get_vocab(), unk_token="[UNK]"), lowercase=True)


# Files


def read(data: Path | str, name: str) -> list[Article]:
    """Returns the articles of an official file, or of the same part on the Hub."""
    if data == HUB:
        return from_rows(from_hub(Squad.facts.hub, "train" if name == FILES["train"] else "validation"))
    path = required_file(data, name.removesuffix(".xz").removesuffix(".gz"), SOURCE)
    found = [article_of(f"{path}, {place}", entry) for place, entry in items(str(path), json_of(path), "data")]
    counts = Counter(asked.key for article in found for asked in article.asked)
    twice = [key for key, count in counts.items() if count > 1]
    if twice:
        raise ValueError(f"{path}: the id {twice[0]!r} is there twice, but expected is another one for each question")
    return found


def json_of(path: Path) -> Any:
    """Returns the content of a JSON file, plain or compressed."""
    try:
        with OPENERS[path.suffix if path.suffix in OPENERS else ""](path, "rb") as opened:
            return json.loads(opened.read())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {error.lineno}: {error.msg}, but expected is a JSON file of SQuAD 1.1") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}, line 1: the text is not UTF-8 ({error}), but expected is a JSON file of SQuAD 1.1") from error
    except (lzma.LZMAError, zlib.error, gzip.BadGzipFile, EOFError) as error:
        raise ValueError(f"{path} must be a whole compressed file, but cannot be read: {error}") from error


def field(place: str, entry: Any, name: str, kind: type) -> Any:
    """Returns a field of an entry, which must be of a type."""
    if not isinstance(entry, dict) or not isinstance(entry.get(name), kind) or isinstance(entry[name], bool):
        shown = repr(entry.get(name))[:40] if isinstance(entry, dict) and name in entry else "missing"
        words = {str: "a text", int: "a whole number", list: "a list"}[kind]
        raise ValueError(f"{place}: {name} is {shown}, but expected is {words}, as in the files of SQuAD 1.1")
    return entry[name]


def items(place: str, entry: Any, name: str) -> list[tuple[str, Any]]:
    """Returns the entries of a list in an entry, each with its place in it; an empty list raises."""
    found = field(place, entry, name, list)
    if not found:
        raise ValueError(f"{place}: {name} is empty, but expected is one entry at least, as in the files of SQuAD 1.1")
    return [(f"{name}[{number}]", each) for number, each in enumerate(found)]


def article_of(place: str, entry: Any) -> Article:
    """Returns the questions of an article of an official file."""
    asked = []
    for paragraph_place, paragraph in items(place, entry, "paragraphs"):
        context_place = f"{place}.{paragraph_place}"
        context = field(context_place, paragraph, "context", str)
        for question_place, question in items(context_place, paragraph, "qas"):
            asked.append(asked_of(f"{context_place}.{question_place}", question, context))
    return Article(field(place, entry, "title", str), asked)


def asked_of(place: str, entry: Any, context: str) -> Asked:
    """Returns a question of an official file."""
    answers = []
    for answer_place, answer in items(place, entry, "answers"):
        own_place = f"{place}.{answer_place}"
        text, start = field(own_place, answer, "text", str), field(own_place, answer, "answer_start", int)
        if not 0 <= start <= len(context) - len(text):
            raise ValueError(
                f"{own_place}: answer_start is {start}, but expected is a place in the context of {len(context)} "
                f"characters that leaves room for the answer of {len(text)}"
            )
        answers.append((text, start))
    texts = tuple(text for text, _ in answers)
    return Asked(field(place, entry, "id", str), field(place, entry, "question", str), context, texts, answers[0][1])


def from_rows(rows: Iterable[Mapping[str, Any]]) -> list[Article]:
    """Returns the articles of rows with one question each, as the Hub has them."""
    found: dict[str, list[Asked]] = {}
    for row in rows:
        answers = row["answers"]
        asked = Asked(row["id"], row["question"], row["context"], tuple(answers["text"]), answers["answer_start"][0])
        found.setdefault(row["title"], []).append(asked)
    return [Article(title, asked) for title, asked in found.items()]


def divided(articles: Sequence[Article], share: float, seed: int) -> dict[Part, list[Article]]:
    """Returns a share of the articles to train on, and the others, both by title: a function of the titles and the seed."""
    by_title = sorted(articles, key=lambda article: article.title)
    count = round(share * len(by_title))
    if not 0 < count < len(by_title):
        raise ValueError(
            f"split_articles must leave an article on both sides of {len(by_title)}, but is {share}: choose another share or file"
        )
    order = torch.randperm(len(by_title), generator=torch.Generator().manual_seed(seed)).tolist()
    return {
        "train": [by_title[index] for index in sorted(order[:count])],
        "dev": [by_title[index] for index in sorted(order[count:])],
    }


# The sample

PEOPLE = ("Ada", "Bruno", "Cora", "Dario", "Elsa", "Fabio", "Greta", "Henk", "Ines", "Jonas", "Katya", "Luis")
FAMILIES = ("Marsh", "Novak", "Olsen", "Pereira", "Quist", "Rossi", "Sato", "Tamm")
PLACES = ("Arlem", "Bostra", "Cavell", "Dunmoor", "Eskvik", "Farrow", "Gilan", "Hestad", "Istria", "Jurby")
JOBS = ("baker", "clock maker", "ship's doctor", "teacher", "map printer", "gardener", "glass blower", "surveyor")
SAMPLE_SIZES: dict[Part, int] = {"train": 48, "dev": 16}


def sample(part: Part) -> list[Article]:
    """Returns made-up lives of made-up people, with four questions each. Nobody is in both parts."""
    generator = torch.Generator().manual_seed(0)
    names = [f"{first} {last}" for last in FAMILIES for first in PEOPLE]
    order = torch.randperm(len(names), generator=generator).tolist()
    lives = [life(names[index], generator) for index in order[: sum(SAMPLE_SIZES.values())]]
    return lives[: SAMPLE_SIZES["train"]] if part == "train" else lives[SAMPLE_SIZES["train"] :]


def life(name: str, generator: torch.Generator) -> Article:
    """Returns one of them; in the texts answers stand between stars."""

    def two_of(words: Sequence[str]) -> list[str]:
        return [words[int(index)] for index in torch.randperm(len(words), generator=generator)[:2]]

    (home, town), (job, other) = two_of(PLACES), two_of(JOBS)
    year = 1700 + int(torch.randint(150, (), generator=generator))
    facts = [
        (f"{name} was born in *{home}* in {year}.", f"Where was {name} born?"),
        (f"The first work of {name} was that of a *{job}*.", f"What was the first work of {name}?"),
        (f"After {year + 20}, {name} moved to *{town}* and became a {other}.", f"Where did {name} move?"),
        (f"{name} died in {town} in *{year + 60}*.", f"When did {name} die?"),
    ]
    starred = " ".join(facts[index][0] for index in torch.randperm(len(facts), generator=generator).tolist())
    context = starred.replace("*", "")
    asked = []
    for number, (text, question) in enumerate(facts):
        before, answer, _ = text.split("*")
        start = context.index(text.replace("*", "")) + len(before)
        asked.append(Asked(f"{name.lower().replace(' ', '-')}-{number}", question, context, (answer,), start))
    return Article(name, asked)
