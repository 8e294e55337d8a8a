"""SQuAD 1.1: the words of a paragraph that answer a question (Rajpurkar, Zhang, Lopyrev, Liang 2016)."""

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import Metric

from lagwise.errors import require_sizes
from lagwise.lab.config import Config
from lagwise.lab.tasks.base import SPLITS, Batch, Facts, Sampling, Split, batches_on
from lagwise.lab.tasks.files import write_whole
from lagwise.lab.tasks.text.pretrained import EncoderOptions
from lagwise.lab.tasks.text.qanet import Averaged, QANet
from lagwise.lab.tasks.text.questions import (
    FILES,
    ON_THE_HUB,
    Article,
    Part,
    Question,
    divide_articles,
    read_articles,
    sample_articles,
)
from lagwise.lab.tasks.text.span_models import HuggingFaceSpans, SpanEncoder
from lagwise.lab.tasks.text.spans import SpanMetric, best_spans, mask_scores
from lagwise.lab.tasks.text.tokenization import (
    TOKENIZER,
    VOCABULARY,
    TokenizerTask,
    load_tokenizer,
    piece_names,
    trained_tokenizer,
)
from lagwise.lab.tasks.text.windows import Frame, QuestionTokens, Windows, cut_windows, encode_questions, frame_of, window_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ARTICLES = "articles.json"

WORDS = "words"
"""The value of `tokenizer` that asks for whole words."""


@dataclass(frozen=True)
class SquadOptions(EncoderOptions):
    """What can be chosen of SQuAD beside `EncoderOptions`.

    Args:
        model: "encoder" (a stack of this library over question and paragraph), "qanet" (five of them, and attention between
            question and paragraph, without convolutions), or "hf" (a Hugging Face encoder that is converted to the encoding).
        tokenizer: May also be "words". Unless given that of the Hugging Face model, tokenizer.json or vocab.txt in the data
            folder, or WordPiece that is trained on the training text.
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

    models: ClassVar[tuple[str, ...]] = ("encoder", "qanet", "hf")
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
        super().__post_init__()
        require_sizes(length=self.length, stride=self.stride, question=self.question, longest_answer=self.longest_answer)
        for name in ("average", "split_articles", "validation_articles"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} must be at least 0 and less than 1, but is {getattr(self, name)}")


class Squad(TokenizerTask):
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
        self.asked: list[Question] = []
        """All questions that were read; a question's number is its place here."""
        self.numbers: dict[Part, range] = {}
        self.tokens_of: dict[Part, QuestionTokens] = {}
        self.windows: dict[tuple[Part, int], Windows] = {}

    def attach(self, folder: Path) -> None:
        """Keeps the tokenizer and the titles of the articles of all parts in a run's folder, or takes the tokenizer there."""
        super().attach(folder)
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
        rows, columns = cut_windows(
            self.question_tokens(part), self.numbers[part], frame, length=length, stride=options.stride,
            longest_question=options.question, absent=0 if self.can_decline else -1,
        )  # fmt: skip
        if part == "train":
            kept = (columns["start"] >= 0).nonzero()[:, 0].tolist()
            if not kept:
                raise ValueError("data must have an answer to train on, but no window has one: check the offsets of the file")
            rows, columns = [rows[index] for index in kept], {name: column[kept] for name, column in columns.items()}
        ends = torch.tensor([len(row) for row in rows]).cumsum(0)
        return Windows(torch.cat(rows), ends, padding=0, max_length=None, **columns)

    def question_tokens(self, part: Part) -> QuestionTokens:
        """Returns the tokens of a part, which is read and numbered at its first use."""
        if part not in self.tokens_of:
            found = [asked for article in self.articles[part] for asked in article.questions]
            tokens = encode_questions(found, self.tokenizer)
            wrong = sum(span is None for span in tokens.spans)
            if wrong:
                warnings.warn(
                    f"{wrong:,} of {len(found):,} first answers of {part} are not the text of whole tokens where they should "
                    "begin: they are asked, but not trained on",
                    stacklevel=2,
                )
            self.numbers[part] = range(len(self.asked), len(self.asked) + len(found))
            self.asked += found
            self.tokens_of[part] = tokens
        return self.tokens_of[part]

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

    def find_tokenizer(self) -> "Tokenizer":
        """Returns the tokenizer that is named, or that of the data, or one that is trained on the training text."""
        named = self.options.tokenizer or self.options.path or self.data_tokenizer(TOKENIZER, VOCABULARY)
        if named and named != WORDS:
            return load_tokenizer(named)
        asked = [asked for article in self.articles["train"] for asked in article.questions]
        texts = [*dict.fromkeys(each.context for each in asked), *(each.text for each in asked)]
        return trained_tokenizer("words" if named else "wordpiece", texts, self.options.vocabulary)

    @cached_property
    def frame(self) -> Frame:
        """The special tokens around a question and a window."""
        return frame_of(self.tokenizer)

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
        scores = mask_scores(outputs, allowed)
        labels = torch.stack([batch["start"], batch["end"]], dim=1)
        total = F.cross_entropy(scores, labels, ignore_index=-1, reduction="sum") / 2
        return total, (batch["start"] >= 0).sum()

    def metrics(self) -> dict[str, Metric]:
        return {"f1": SpanMetric(self.asked, "f1"), "em": SpanMetric(self.asked, "exact_match")}

    def answers(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns of each window the score of its best span and where that begins and ends, and the question's number."""
        score, first, last = best_spans(mask_scores(outputs, window_of(batch)), self.options.longest_answer)
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
        for batch in batches_on(device, examples, PREDICTED):
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
