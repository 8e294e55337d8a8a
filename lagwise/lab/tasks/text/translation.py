"""Translation: an encoder reads a sentence, a decoder writes it in another language, and beam search looks for the best one."""

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric

import lagwise
from lagwise.errors import require_sizes
from lagwise.extras import install_command
from lagwise.lab.config import Config
from lagwise.lab.tasks.base import SPLITS, Batch, Examples, Facts, Sampling, Sequences, Split
from lagwise.lab.tasks.files import cache_folder, cached_tensors
from lagwise.lab.tasks.lra.presets import largest_rate
from lagwise.lab.tasks.models import TokenModel, decoder_of, encoder_of
from lagwise.lab.tasks.text.beam import Search, Translation, beam_search
from lagwise.lab.tasks.text.parallel_texts import HUB_NAME, Parallel, read_lines, read_parallel
from lagwise.lab.tasks.text.tokenization import (
    ENDS,
    TOKENIZER,
    TokenizerTask,
    load_tokenizer,
    special_token,
    text_digest,
    trained_tokenizer,
)
from lagwise.lab.tasks.token_prediction import Perplexity

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ENCODED = 4096
"""Sentences that are encoded at a time."""


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
        beam: See `Search`.
        length_penalty: See `Search`.
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
        Search(self.beam, self.length_penalty)

    @property
    def search(self) -> Search:
        """How translations are looked for."""
        return Search(self.beam, self.length_penalty)


WORDS = ("13a", "intl", "char", "zh", "none")
"""Of the ways in which sacrebleu splits words, those that need nothing else."""


class Told(NamedTuple):
    """What the metrics are told beside the loss of each token."""

    correct: Bool[Tensor, " tokens"]
    """Whether the likeliest token was the right one, with the right ones before it."""
    translations: list[str]
    references: list[str]


PAPER: dict[str, Any] = {
    "task_options": {
        "vocabulary": 32_000, "length": 256, "tokens": 25_000, "label_smoothing": 0.1, "first_only": True, "beam": 4,
        "length_penalty": 0.6, "lowercase": True, "words": "none",
    },
    "dim": 512, "hidden": 2048, "heads": 8, "layers": 6, "norm": "pre", "activation": "relu", "dropout": 0.1,
    "attention_dropout": 0.1, "batch": 1, "steps": 250_000, "warmup": 4000, "schedule": "rsqrt",
    "rate": largest_rate(512**-0.5, 4000), "beta2": 0.98, "clip": 0.0,
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

    def examples(self, split: Split, length: int | None = None) -> "Buckets":
        length = self.options.length if length is None else length
        require_sizes(length=length)
        if (split, length) not in self._buckets:
            self._buckets[split, length] = self.make_buckets(split, length)
        return self._buckets[split, length]

    def make_buckets(self, split: Split, length: int) -> "Buckets":
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
        draws = torch.Generator().manual_seed(self.seed if split == "train" else 0)
        for side in (source, target):
            side.sizes = side.sizes.clamp(max=length)
        padded = torch.maximum(source.sizes, target.sizes).numpy()
        groups = [torch.from_numpy(rows[group]) for group in grouped(padded[rows], self.options.tokens, draws)]
        return Buckets(source, target, groups, split=split, end=self.end, limit=length, longer=self.options.longer)

    def model(self, config: Config) -> "Translator":
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

    def measured(self, model: nn.Module, outputs: Tensor, batch: Batch) -> tuple[Tensor, Told]:
        """Returns the loss of each token in nats without smoothing, and what the metrics are told beside it."""
        scores, targets = self.answers(outputs, batch)
        losses = F.cross_entropy(scores.float(), targets, reduction="none")
        translations = self.decoded([found.tokens for found in model(batch, self.options.search)])
        references = [self.texts(SPLITS[split]).target[number] for split, number in batch["numbers"].tolist()]
        return losses, Told(scores.argmax(-1) == targets, translations, references)

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
        for group in grouped(source.sizes.numpy(), self.options.tokens, torch.Generator().manual_seed(0)):
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


class Buckets(Examples):
    """Pairs of sentences in groups of about one length; each group is one example, so that batches have about as many tokens.

    A batch has

        tokens, lengths     the source, padded on the right, and its lengths
        inputs              the target one place later, after an end
        chosen, targets     where its tokens are in all rows end to end, and what they are
        limits              how many tokens a translation may have
        numbers             split and number of each pair

    Several examples are padded to the longest of them.
    """

    def __init__(
        self, source: Sequences, target: Sequences, groups: Sequence[Tensor], *, split: Split, end: int, limit: int, longer: int
    ):  # fmt: skip
        self.source, self.target, self.groups = source, target, groups
        self.split, self.end, self.limit, self.longer = SPLITS.index(split), end, limit, longer

    def __len__(self) -> int:
        return len(self.groups)

    def batch(self, indices: Sequence[int]) -> Batch:
        rows = torch.cat([self.groups[index] for index in indices])
        source, target = self.source.batch(rows.tolist()), self.target.batch(rows.tolist())
        there = torch.arange(target["tokens"].shape[1]) < target["lengths"][:, None]
        chosen = there.flatten().nonzero()[:, 0]
        return {
            **source,
            "inputs": F.pad(target["tokens"], (1, 0), value=self.end)[:, :-1],
            "chosen": chosen,
            "targets": target["tokens"].flatten()[chosen],
            "limits": (source["lengths"] + self.longer).clamp(max=self.limit),
            "numbers": torch.stack([torch.full_like(rows, self.split), rows], dim=1),
        }


def grouped(sizes: Int[np.ndarray, " rows"], tokens: int, draws: torch.Generator) -> list[Int[np.ndarray, " group"]]:
    """Returns groups of rows of about one size, each with at most so many tokens when it is padded, in a mixed order.

    A row that has more is a group of its own.

    >>> groups = grouped(np.array([2, 5, 2, 3, 2]), 6, torch.Generator().manual_seed(0))
    >>> sorted(sorted(group.tolist()) for group in groups)
    [[0, 2, 4], [1], [3]]
    """
    mixed = torch.randperm(len(sizes), generator=draws).numpy()
    order = mixed[np.argsort(sizes[mixed], kind="stable")]
    ascending, start, groups = sizes[order], 0, []
    while start < len(order):
        window = ascending[start : start + max(1, tokens // int(ascending[start]))]
        count = max(1, int((window * np.arange(1, len(window) + 1) <= tokens).sum()))
        groups.append(order[start : start + count])
        start += count
    return [groups[index] for index in torch.randperm(len(groups), generator=draws).tolist()]


class Translator(TokenModel):
    """An encoder of one language and a decoder of the other, with one embedding, and encodings of their own.

    Cross-attention has no positions.
    """

    encoder: lagwise.nn.Encoder

    def __init__(self, config: Config, *, symbols: int, end: int, first_only: bool = False):
        super().__init__(config, symbols=symbols)
        self.end = end
        self.encoder = encoder_of(config, first_only=first_only)
        self.decoder = decoder_of(config, cross=True, first_only=first_only)

    def forward(self, batch: Batch, search: Search | None = None) -> Float[Tensor, "tokens symbols"] | list[Translation]:
        """Returns the scores of the target's tokens; with a search, translations instead, which need no target."""
        if search is None:
            return self.scores(self.hidden(batch).flatten(0, 1)[batch["chosen"]])
        if self.training:
            raise ValueError("model must be in evaluation mode, but is in training, where it is random: call model.eval()")
        with torch.no_grad():
            return beam_search(Decoding(self, batch), batch["limits"], start=self.end, end=self.end, search=search)

    def hidden(self, batch: Batch) -> Float[Tensor, "batch time dim"]:
        """Returns one vector for each token of the target."""
        return self.decoder(self.embedding(batch["inputs"]), self.context(batch), context_lengths=batch["lengths"])

    def context(self, batch: Batch) -> Float[Tensor, "batch time dim"]:
        """Returns one vector for each token of the source."""
        return self.encoder(self.embedding(batch["tokens"]), lengths=batch["lengths"])


class Decoding:
    """A translator in the middle of some translations: a `Step` of beam search, with a cache."""

    def __init__(self, model: Translator, batch: Batch):
        self.model, self.cache = model, model.decoder.new_cache()
        self.context, self.lengths = model.context(batch), batch["lengths"]

    def __call__(self, tokens: Int[Tensor, " now"], origins: Int[Tensor, " now"]) -> Float[Tensor, "now symbols"]:
        self.cache.select(origins)
        self.context, self.lengths = self.context[origins], self.lengths[origins]
        x = self.model.embedding(tokens[:, None])
        return self.model.scores(self.model.decoder(x, self.context, cache=self.cache, context_lengths=self.lengths)[:, 0])


class Bleu(Metric):
    """Corpus BLEU of sacrebleu, in percent: the sums over all sentences that it is made of.

    Args:
        lowercase: Large letters are not told from small ones.
        words: How words are split.
    """

    higher_is_better = True
    is_differentiable = False
    full_state_update = False
    lengths: Tensor
    matched: Tensor
    total: Tensor

    def __init__(self, *, lowercase: bool = False, words: str = "13a"):
        super().__init__()
        try:
            from sacrebleu.metrics.bleu import BLEU
        except ImportError as error:
            raise ValueError(f"the package sacrebleu must be there for BLEU, but is not: {install_command('train')}") from error
        # Text with spaces between all words is what "none" is for, and no mistake to be told about.
        self.bleu = BLEU(lowercase=lowercase, tokenize=words, force=words == "none")
        self.add_state("lengths", default=torch.zeros(2, dtype=torch.int64), dist_reduce_fx="sum")
        for name in ("matched", "total"):
            self.add_state(name, default=torch.zeros(self.bleu.max_ngram_order, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, losses: Float[Tensor, " tokens"], told: Told) -> None:
        own: Any = self.bleu.corpus_score(told.translations, [told.references])
        self.lengths += self.lengths.new_tensor([own.sys_len, own.ref_len])
        self.matched += self.matched.new_tensor(own.counts)
        self.total += self.total.new_tensor(own.totals)

    def compute(self) -> Tensor:
        given, wanted = self.lengths.tolist()
        matched, total = self.matched.tolist(), self.total.tolist()
        score = self.bleu.compute_bleu(matched, total, given, wanted, smooth_method=self.bleu.smooth_method).score
        return torch.tensor(score, dtype=torch.float64)


class TokenAccuracy(MeanMetric):
    """The share of tokens that are the likeliest, with the right ones before them."""

    higher_is_better = True

    def update(self, losses: Float[Tensor, " tokens"], told: Told) -> None:
        super().update(told.correct.float())


# Tokens


def encode_sentences(tokenizer: "Tokenizer", texts: Sequence[str], end: int) -> dict[str, Any]:
    """Returns the `tokens` of sentences end to end, each with an end behind it, and where each sentence `ends`."""
    parts = [
        np.array([*found.ids, end], dtype=np.int32)
        for start in range(0, len(texts), ENCODED)
        for found in tokenizer.encode_batch(list(texts[start : start + ENCODED]), add_special_tokens=False)
    ]
    ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
    return {"tokens": torch.from_numpy(np.concatenate(parts)), "ends": torch.from_numpy(ends)}
