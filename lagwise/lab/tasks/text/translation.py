"""Translation: an encoder reads a sentence, a decoder writes it in another language, and beam search looks for the best one."""

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import Metric

from lagwise.errors import require_sizes
from lagwise.lab.config import Config
from lagwise.lab.tasks.base import SPLITS, Batch, Facts, Sampling, Sequences, Split
from lagwise.lab.tasks.files import cache_folder, cached_tensors
from lagwise.lab.tasks.text.beam import BeamOptions
from lagwise.lab.tasks.text.bleu import WORDS, Bleu, MeasuredTranslations, TokenAccuracy
from lagwise.lab.tasks.text.parallel_texts import HUB_NAME, Parallel, read_lines, read_parallel
from lagwise.lab.tasks.text.sentence_pairs import Buckets, encode_sentences, group_by_size
from lagwise.lab.tasks.text.tokenization import (
    ENDS,
    TOKENIZER,
    TokenizerTask,
    load_tokenizer,
    special_token,
    text_digest,
    trained_tokenizer,
)
from lagwise.lab.tasks.text.translator import Translator
from lagwise.lab.tasks.token_prediction import Perplexity

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class TranslationOptions:
    """What can be chosen of translation.

    Args:
        source: The language that is read, as the files' names end.
        target: The language that is written.
        vocabulary: Number of tokens, which both languages share.
        length: Tokens of a sentence, its end counted. Longer pairs are left out of training; in evaluation what is read and
            what is told beforehand is cut there, and references stay whole.
        tokens: Tokens of a bucket, padding counted: its pairs times the longest sentence of either side. One example of the
            engine is one bucket, so that `batch=1` is one bucket a step.
        label_smoothing: The share of the target's probability that the loss spreads over all tokens.
        first_only: The first layers of encoder and decoder alone have the encoding.
        beam: See `BeamOptions`.
        length_penalty: See `BeamOptions`.
        longer: How many tokens a translation may have more than its source.
        lowercase: BLEU does not tell large letters from small ones.
        words: How BLEU splits words: "13a", "intl", "char", "zh", or "none" for text that has spaces between all words.
    """

    source: str = "en"
    target: str = "de"
    vocabulary: int = 8192
    length: int = 256
    tokens: int = 4096
    label_smoothing: float = 0.1
    first_only: bool = False
    beam: int = 4
    length_penalty: float = 0.6
    longer: int = 50
    lowercase: bool = False
    words: str = "13a"

    def __post_init__(self) -> None:
        require_sizes(vocabulary=self.vocabulary, length=self.length, longer=self.longer)
        if self.source == self.target:
            raise ValueError(f"target must be another language than source, but both are {self.source!r}")
        if self.tokens < self.length:
            raise ValueError(f"tokens must be at least length={self.length}, the longest sentence, but is {self.tokens}")
        if not 0.0 <= self.label_smoothing < 1.0:
            raise ValueError(f"label_smoothing must be at least 0 and less than 1, but is {self.label_smoothing}")
        if self.words not in WORDS:
            raise ValueError(f"words must be one of {', '.join(WORDS)}, but is {self.words!r}")
        BeamOptions(self.beam, self.length_penalty)

    @property
    def search(self) -> BeamOptions:
        """How translations are looked for."""
        return BeamOptions(self.beam, self.length_penalty)


PAPER: dict[str, Any] = {
    "task_options": {
        "vocabulary": 32_000, "length": 256, "tokens": 25_000, "label_smoothing": 0.1, "first_only": True, "beam": 4,
        "length_penalty": 0.6, "lowercase": True, "words": "none",
    },
    "dim": 512, "hidden": 2048, "heads": 8, "layers": 6, "norm": "pre", "activation": "relu", "dropout": 0.1,
    "attention_dropout": 0.1, "batch": 1, "steps": 250_000, "warmup": 4000, "schedule": "rsqrt",
    "rate": 512**-0.5 / 4000**0.5, "beta2": 0.98, "clip": 0.0,
}  # fmt: skip


class Translate(TokenizerTask):
    """Sentences of two languages, with tokens that both share."""

    facts: ClassVar[Facts] = Facts(
        words="a sentence in another language, found by beam search",
        metric="bleu",
        source="any parallel text, two files with a sentence a line; the sample is an invented pair of languages",
        size="that of the files; the test of WMT17 En-De has 3,004 sentences",
        licence="that of the text; that of WMT17 is stated as unknown",
        published="none: the BLEU tables of Wu et al. 2021 (WMT17 En-De) could not be found",
        files="train, valid and test, each as .SOURCE and .TARGET, such as train.en and train.de, plain or as .xz or .gz",
        hub=HUB_NAME,
    )
    defaults: ClassVar[dict[str, Any]] = {
        "dim": 64, "layers": 2, "heads": 4, "batch": 1, "steps": 400, "warmup": 50, "rate": 3e-3, "schedule": "rsqrt",
        "beta2": 0.98, "task_options": {"length": 128, "tokens": 1024},
    }  # fmt: skip
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {**PAPER, "encoding": "t5", "encoding_options": {"buckets": 64, "max_lag": 128}},
        "paper-at5": {
            **PAPER, "encoding": "at5",
            "encoding_options": {
                "max_lag": None, "reach": 256, "slopes": [1.0, 15.0], "widths": [32, 4], "activation": "sigmoid",
                "dropout": 0.5, "std": 0.1,
            },
        },
    }  # fmt: skip
    Options: ClassVar[type] = TranslationOptions
    options: TranslationOptions

    def __init__(self, data: Path | str | None = None, *, seed: int = 0, **options: Any):
        super().__init__(data, seed=seed, **options)
        self._texts: dict[Split, Parallel] = {}
        self._buckets: dict[tuple[Split, int], Buckets] = {}

    def texts(self, split: Split) -> Parallel:
        """Returns the sentences of a split, which are read once."""
        if split not in self._texts:
            self._texts[split] = read_parallel(self.data, split, (self.options.source, self.options.target))
        return self._texts[split]

    def find_tokenizer(self) -> "Tokenizer":
        """Returns the tokenizer of the data, or one that is trained on both languages."""
        if given := self.data_tokenizer(TOKENIZER):
            return load_tokenizer(given)
        return trained_tokenizer("bpe", [*self.texts("train").source, *self.texts("train").target], self.options.vocabulary)

    @property
    def end(self) -> int:
        """The token after each sentence; it begins translations too, and fills what is behind an end."""
        return special_token(self.tokenizer, ENDS)

    def side(self, texts: Sequence[str]) -> Sequences:
        """Returns sentences as tokens, which are made once and stored in the cache."""
        path = cache_folder() / "translation" / f"{text_digest(self.tokenizer.to_str(), *texts)}.pt"
        made = cached_tensors(path, lambda: encode_sentences(self.tokenizer, texts, self.end))
        return Sequences(**made, padding=self.end)

    def examples(self, split: Split, length: int | None = None) -> Buckets:
        length = self.options.length if length is None else length
        require_sizes(length=length)
        if (split, length) not in self._buckets:
            self._buckets[split, length] = self.make_buckets(split, length)
        return self._buckets[split, length]

    def make_buckets(self, split: Split, length: int) -> Buckets:
        """Returns the buckets of a split, and says how many pairs are too long."""
        source, target = (self.side(texts) for texts in self.texts(split))
        whole = torch.maximum(source.sizes, target.sizes).numpy() <= length
        if not whole.all():
            what = "left out" if split == "train" else "cut there, but for the references of BLEU"
            long = int((~whole).sum())
            warnings.warn(f"{long} of {len(whole)} pairs of {split} have more than {length} tokens and are {what}", stacklevel=2)
        rows = np.flatnonzero(whole) if split == "train" else np.arange(len(whole))
        if not len(rows):
            raise ValueError(f"length must leave some pairs of {split}, but all of {len(whole)} have more than {length} tokens")
        # Those that evaluate do not depend on the seed, so that a part of them is the same for all.
        rng = torch.Generator().manual_seed(self.seed if split == "train" else 0)
        for side in (source, target):
            side.sizes = side.sizes.clamp(max=length)
        padded = torch.maximum(source.sizes, target.sizes).numpy()
        groups = [torch.from_numpy(rows[group]) for group in group_by_size(padded[rows], self.options.tokens, rng)]
        return Buckets(source, target, groups, split=split, end=self.end, limit=length, longer=self.options.longer)

    def model(self, config: Config) -> Translator:
        symbols = self.tokenizer.get_vocab_size()
        return Translator(config, symbols=symbols, end=self.end, first_only=self.options.first_only)

    def loss(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        smoothing = self.options.label_smoothing
        total = F.cross_entropy(outputs.float(), batch["targets"], reduction="sum", label_smoothing=smoothing)
        return total, total.new_tensor(len(batch["targets"]))

    def metrics(self) -> dict[str, Metric]:
        bleu = Bleu(lowercase=self.options.lowercase, words=self.options.words)
        return {"bleu": bleu, "accuracy": TokenAccuracy(), "perplexity": Perplexity()}

    def answers(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns the scores of each token of the translations with the right ones before it, and the right ones."""
        return outputs, batch["targets"]

    def measured(self, model: nn.Module, outputs: Tensor, batch: Batch) -> tuple[Tensor, MeasuredTranslations]:
        """Returns the loss of each token in nats without smoothing, and what the metrics are told beside it."""
        scores, targets = self.answers(outputs, batch)
        losses = F.cross_entropy(scores.float(), targets, reduction="none")
        translations = self.decoded([found.tokens for found in model(batch, self.options.search)])
        references = [self.texts(SPLITS[split]).target[number] for split, number in batch["numbers"].tolist()]
        return losses, MeasuredTranslations(scores.argmax(-1) == targets, translations, references)

    def decoded(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Returns the text of tokens, each in one line."""
        texts = self.tokenizer.decode_batch([list(row) for row in rows])
        return [" ".join(text.splitlines()) for text in texts]

    def generate(self, model: nn.Module, prompt: str | None, sampling: Sampling, out: Path) -> list[Path]:
        """Translates a text, or the lines of a file, into `translation.txt`, line by line; empty lines stay empty."""
        if prompt is None:
            raise ValueError("prompt must be a text to translate, or a file with a sentence a line, but is missing")
        plain = Sampling()
        for name in ("count", "temperature", "nucleus"):
            if getattr(sampling, name) != getattr(plain, name):
                raise ValueError(
                    f"{name} must be left out, but is {getattr(sampling, name)}: nothing is drawn, a search finds translations"
                )
        lines = read_lines(Path(prompt)) if os.path.isfile(prompt) else prompt.splitlines()
        found = self.translated(model, lines, limit=min(sampling.length, self.options.length))
        out.mkdir(parents=True, exist_ok=True)
        path = out / "translation.txt"
        path.write_text("".join(line + "\n" for line in found), encoding="utf-8")
        return [path]

    def translated(self, model: nn.Module, lines: Sequence[str], *, limit: int) -> list[str]:
        """Returns the translations of sentences, each of at most `limit` tokens; that of an empty one is empty."""
        filled = [number for number, line in enumerate(lines) if line.strip()]
        translations = [""] * len(lines)
        if not filled:
            return translations
        tokens = encode_sentences(self.tokenizer, [lines[number] for number in filled], self.end)
        source = Sequences(**tokens, padding=self.end)
        longest = int(source.sizes.max())
        if longest > self.options.length:
            raise ValueError(f"sentences must have at most {self.options.length} tokens, but one has {longest}: split it")
        device = next(model.parameters()).device
        for group in group_by_size(source.sizes.numpy(), self.options.tokens, torch.Generator().manual_seed(0)):
            batch = source.batch(group.tolist())
            batch["limits"] = (batch["lengths"] + self.options.longer).clamp(max=limit)
            found = model({name: x.to(device) for name, x in batch.items()}, self.options.search)
            for number, text in zip(group.tolist(), self.decoded([each.tokens for each in found]), strict=True):
                translations[filled[number]] = text
        return translations

    def encoding_options(self, encoding: str) -> dict[str, Any]:
        return {"learned": {"length": self.options.length}, "at5": {"reach": self.options.length}}.get(encoding, {})

    def token_names(self, tokens: Sequence[int]) -> list[str]:
        return [self.tokenizer.decode([token], skip_special_tokens=False) for token in tokens]

    def tokens(self, batch: Batch) -> int:
        """Returns how many tokens of both languages a batch has."""
        return int(batch["lengths"].sum()) + len(batch["targets"])
