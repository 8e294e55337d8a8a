"""Language modelling: the next token of a text, or tokens that were hidden, over bytes, BPE or WordPiece."""

import gzip
import hashlib
import json
import lzma
import math
import os
import re
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torchmetrics import Metric

from lagwise import noise
from lagwise.encodings.base import require_sizes
from lagwise.tasks.base import HUB, SPLITS, Batch, Examples, Facts, Sampling, Split, Task
from lagwise.tasks.files import OPENERS, required_file
from lagwise.tasks.listops import cache_folder, store
from lagwise.tasks.models import CausalModel, MaskedModel, generate
from lagwise.train.config import Config

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BYTES = 256
BYTE_END, BYTE_MASK = 0xFF, 0xFE
"""Bytes that no UTF-8 text has, so that they can stand for the end of a document and for a hidden byte."""

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
ENDS = ("[SEP]", "</s>", "<|endoftext|>", "<eos>")
MASKS = ("[MASK]", "<mask>")

TOKENIZER = "tokenizer.json"
HUB_CONFIG = "wikitext-103-raw-v1"
SOURCE = "give a folder with train.txt, validation.txt and test.txt, or with any .txt files"

TITLE = re.compile(r"^ ?= [^=\n]+ = ?$", flags=re.MULTILINE)
BLANK = re.compile(r"\n[ \t]*\n\s*")

COPIES = 10
"""How many different masks each row of the training text has, as in BERT's own data."""

VERSION = 2
"""Changes whenever the same text and options give other tokens, so that stored ones of before are not used."""

DEFAULT_VOCABULARY = 8192
ENCODED = 256
"""Documents that are encoded at a time."""


@dataclass(frozen=True)
class LanguageModelOptions:
    """What can be chosen of language modelling.

    Args:
        tokens: "bytes", "bpe" or "wordpiece".
        vocabulary: Number of tokens of "bpe" and "wordpiece", 8,192 unless given; bytes have 256.
        objective: "causal", the next token, or "masked", hidden ones.
        length: Tokens of a row.
        packed: Nothing attends across the end of a document; otherwise the text is one stream that is cut into rows.
        whole_words: Of "masked": hide all tokens of a word or none.
        hidden: Of "masked": the share of tokens that are asked for.
        tied: Scores are products with the embedding.
        validation: The share of the text, its last documents but those of the test, that is kept for validation.
        test: The share of the text, its last documents, that is kept for the test.
    """

    tokens: Literal["bytes", "bpe", "wordpiece"] = "bytes"
    vocabulary: int | None = None
    objective: Literal["causal", "masked"] = "causal"
    length: int = 256
    packed: bool = True
    whole_words: bool = False
    hidden: float = 0.15
    tied: bool = True
    validation: float = 0.05
    test: float = 0.05

    def __post_init__(self) -> None:
        require_sizes(length=self.length)
        for name, known in (("tokens", ("bytes", "bpe", "wordpiece")), ("objective", ("causal", "masked"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, but is {getattr(self, name)!r}")
        if self.tokens == "bytes" and self.vocabulary is not None:
            raise ValueError(f"vocabulary must be left out with tokens='bytes', which has 256, but is {self.vocabulary}")
        if self.vocabulary is not None:
            require_sizes(vocabulary=self.vocabulary)
        if self.whole_words and self.objective != "masked":
            raise ValueError("whole_words must be left out with objective='causal', which hides nothing: pass objective='masked'")
        for name in ("hidden", "validation", "test"):
            if not 0.0 < getattr(self, name) < 1.0:
                raise ValueError(f"{name} must be a share between 0 and 1, but is {getattr(self, name)}")


class Stream(NamedTuple):
    """A text as tokens, with an end before each document."""

    tokens: Int[Tensor, " tokens"]
    sizes: Int[Tensor, " tokens"] | None
    """How many bytes each token stands for; None: one, and none for an end."""


class Alphabet(NamedTuple):
    """What is to know of the tokens of a text."""

    symbols: int
    end: int
    mask: int
    special: Bool[Tensor, " symbols"]
    begins_inside: Bool[Tensor, " symbols"]
    """Whether a token can go on with the word of the one before it."""
    ends_inside: Bool[Tensor, " symbols"]
    """Whether the word of a token can go on."""


class LanguageModel(Task):
    """Texts as tokens, causal or masked."""

    facts: ClassVar[Facts] = Facts(
        words="the next token of a text, or tokens that were hidden; tokens are bytes, BPE or WordPiece",
        metric="bits_per_byte",
        source="any text: documents between blank lines, or under `= title =` lines",
        size="that of the text; the last documents are for validation and test",
        licence="that of the text; WikiText-103 of --data hub: CC BY-SA",
        published="none on a text that is here",
        files="train.txt, validation.txt and test.txt, or any .txt files, plain or as .xz or .gz; may hold a tokenizer.json",
        hub="Salesforce/wikitext",
    )
    defaults: ClassVar[dict[str, Any]] = {
        "dim": 128, "layers": 2, "heads": 4, "batch": 16, "steps": 300, "warmup": 30, "rate": 2e-3,
        "evaluate_examples": 200, "task_options": {"length": 128},
    }  # fmt: skip
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "shakespeare": {
            "task_options": {"length": 256, "packed": False}, "encoding": "rotary", "dim": 192, "layers": 4, "heads": 6,
            "batch": 32, "steps": 2000, "warmup": 100, "rate": 2e-3, "dropout": 0.1, "weight_decay": 0.1, "beta2": 0.99,
        },
        "bert-small": {
            "task_options": {"tokens": "wordpiece", "objective": "masked", "length": 128}, "dim": 256, "layers": 4, "heads": 4,
            "batch": 32, "steps": 20_000, "warmup": 1000, "rate": 5e-4, "schedule": "linear", "dropout": 0.1,
            "weight_decay": 0.01,
        },
    }  # fmt: skip
    Options: ClassVar[type] = LanguageModelOptions
    options: LanguageModelOptions

    def __init__(self, data: Path | str | None = None, *, seed: int = 0, **options: Any):
        super().__init__(data, seed=seed, **options)
        self.folder: Path | None = None
        self._pieces: dict[Split, list[str]] = {}
        self._streams: dict[Split, Stream] = {}
        self._tokenizer: Tokenizer | None = None

    def attach(self, folder: Path) -> None:
        """Keeps the tokenizer in a run's folder, or takes the one that is there."""
        self.folder = folder
        if self.options.tokens != "bytes" and not (folder / TOKENIZER).is_file():
            write_whole(folder / TOKENIZER, self.tokenizer.to_str())

    @property
    def pieces(self) -> dict[Split, list[str]]:
        """The documents of each split, which are read once."""
        if not self._pieces:
            self._pieces = read_splits(self.data, self.options)
        return self._pieces

    @property
    def tokenizer(self) -> "Tokenizer":
        """That of the run's folder, of the data's, or one that is trained on the training text and stored in the cache."""
        if self._tokenizer is None:
            self._tokenizer = self.find_tokenizer()
            # Words of the text that look like special tokens are words.
            self._tokenizer.encode_special_tokens = True
        return self._tokenizer

    def find_tokenizer(self) -> "Tokenizer":
        """Returns the tokenizer from the first place that has one."""
        given = [] if self.folder is None else [self.folder / TOKENIZER]
        given += [Path(self.data) / TOKENIZER] if self.data not in (None, HUB) else []
        for path in given:
            if path.is_file():
                return load_tokenizer(path)
        size = self.options.vocabulary or DEFAULT_VOCABULARY
        path = cache_folder() / "lm" / f"{digest(self.options.tokens, size, *self.pieces['train'])}-{TOKENIZER}"
        if not path.is_file():
            trained = train_tokenizer(self.options.tokens, size, self.pieces["train"])
            write_whole(path, trained.to_str())
        return load_tokenizer(path)

    @property
    def alphabet(self) -> Alphabet:
        """What is to know of the tokens."""
        return alphabet_of_bytes() if self.options.tokens == "bytes" else alphabet_of(self.tokenizer)

    def stream(self, split: Split) -> Stream:
        """Returns the tokens of a split; those of tokenizers are made once and stored in the cache."""
        if split not in self._streams:
            packed = self.options.packed
            if self.options.tokens == "bytes":
                self._streams[split] = stream_of_bytes(self.pieces[split], packed)
            else:
                key = digest(packed, self.tokenizer.to_str(), *self.pieces[split])
                path = cache_folder() / "lm" / f"{key}.pt"
                if not path.exists():
                    made = encoded(self.tokenizer, self.pieces[split], self.alphabet.end, packed)
                    store(path, {"tokens": made[0], "sizes": made[1]})
                self._streams[split] = Stream(**torch.load(path, weights_only=True, mmap=True))
        return self._streams[split]

    def examples(self, split: Split, length: int | None = None) -> "Rows":
        length = self.options.length if length is None else length
        require_sizes(length=length)
        kind = CausalRows if self.options.objective == "causal" else MaskedRows
        return kind(self.stream(split), self.alphabet, length, self.options, seed=self.seed, split=split)

    def model(self, config: Config) -> CausalModel | MaskedModel:
        kind = CausalModel if self.options.objective == "causal" else MaskedModel
        return kind(config, symbols=self.alphabet.symbols, tied=self.options.tied)

    def loss(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        losses = token_losses(outputs, batch)
        return losses.sum(), losses.new_tensor(losses.numel())

    def metrics(self) -> dict[str, Metric]:
        return {"bits_per_byte": BitsPerByte(), "perplexity": Perplexity()}

    def answers(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns the loss of each token in nats, and the number of bytes that it stands for."""
        return token_losses(outputs, batch), batch["sizes"].flatten()

    def curves(self, model: nn.Module, split: Split, length: int | None, *, batch: int, limit: int | None) -> dict[str, Any]:
        """Returns the mean loss in bins of an eighth of the training length: the first position of each, nats, tokens."""
        examples = self.examples(split, length)
        bins = -(-examples.length // max(1, self.options.length // 8))
        found = position_losses(model, examples, bins, batch=batch, limit=limit)
        return {"loss_by_position": [list(each) for each in found]}

    def generate(self, model: nn.Module, prompt: str | None, sampling: Sampling, out: Path) -> list[Path]:
        """Writes texts that go on from a prompt, each to the end of its document or to the length."""
        if not isinstance(model, CausalModel):
            raise ValueError("objective must be 'causal' to generate, but is 'masked': train another model")
        start = [self.alphabet.end, *self.codes(prompt or "")]
        device = next(model.parameters()).device
        prompts = torch.tensor([start] * sampling.count, device=device)
        found = generate(model, prompts, sampling, end=self.alphabet.end)
        out.mkdir(parents=True, exist_ok=True)
        paths = [out / f"text-{number}.txt" for number in range(sampling.count)]
        for path, row in zip(paths, found.tokens.tolist(), strict=True):
            path.write_text(self.decoded(row), encoding="utf-8")
        return paths

    def codes(self, text: str) -> list[int]:
        """Returns the tokens of a text."""
        if self.options.tokens == "bytes":
            return list(text.encode())
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decoded(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens, without ends and masks; bytes that make no character become the sign for that."""
        special = self.alphabet.special
        kept = [token for token in tokens if not special[token]]
        return bytes(kept).decode(errors="replace") if self.options.tokens == "bytes" else self.tokenizer.decode(kept)

    def token_names(self, tokens: Sequence[int]) -> list[str]:
        alphabet = self.alphabet
        names = {token: "[special]" for token in alphabet.special.nonzero()[:, 0].tolist()} | {alphabet.mask: "[mask]"}
        return [names[token] if token in names else self.decoded([token]) for token in tokens]

    def text_batch(self, text: str) -> Batch:
        row = torch.tensor([[self.alphabet.end, *self.codes(text)]])
        return {"tokens": row, "chosen": torch.arange(row.shape[1])}

    def encoding_options(self, encoding: str) -> dict[str, Any]:
        return {"length": self.options.length} if encoding == "learned" else {}


class Rows(Examples):
    """Rows of a text. What is left at its end, less than a row, is left out."""

    def __init__(
        self, stream: Stream, alphabet: Alphabet, length: int, options: LanguageModelOptions, *, seed: int, split: Split
    ):  # fmt: skip
        self.stream, self.alphabet, self.length, self.options = stream, alphabet, length, options
        self.seed, self.split = torch.tensor(seed), split
        self.count = (len(stream.tokens) - 1) // length
        if not self.count:
            raise ValueError(
                f"length must be less than the {len(stream.tokens)} tokens of the {split} text, but is {length}: "
                "choose a shorter one, or give more text"
            )

    def __len__(self) -> int:
        return self.count

    def cut(self, column: Tensor, rows: Sequence[int]) -> Int[Tensor, "batch length+1"]:
        """Returns rows of a column, each with the first entry of the next one."""
        return torch.stack([column[row * self.length : (row + 1) * self.length + 1] for row in rows]).long()

    def sizes(self, tokens: Int[Tensor, "batch length+1"], rows: Sequence[int]) -> Int[Tensor, "batch length+1"]:
        """Returns how many bytes the tokens of rows stand for."""
        return (tokens != self.alphabet.end).long() if self.stream.sizes is None else self.cut(self.stream.sizes, rows)

    def places(self, tokens: Int[Tensor, "batch length"]) -> tuple[Int[Tensor, "batch length"], Batch]:
        """Returns the position of each token in its sequence, and the sequences' ends if they are packed."""
        time = torch.arange(tokens.shape[1]).expand_as(tokens)
        if not self.options.packed:
            return time, {}
        begins = tokens == self.alphabet.end
        begins[:, 0] = True
        first = torch.where(begins, time, 0).cummax(1).values
        ends = torch.cat([begins.flatten().nonzero()[:, 0], torch.tensor([tokens.numel()])])
        return time - first, {"cu_seqlens": ends}


class CausalRows(Rows):
    """Rows whose targets are the tokens one further: each token of the text but the first is a target once."""

    def batch(self, indices: Sequence[int]) -> Batch:
        tokens = self.cut(self.stream.tokens, indices)
        inputs = tokens[:, :-1].contiguous()
        positions, ends = self.places(inputs)
        sizes = self.sizes(tokens, indices)[:, 1:]
        return {"tokens": inputs, "targets": tokens[:, 1:], "sizes": sizes, "positions": positions, **ends}


class MaskedRows(Rows):
    """Rows in which some tokens are hidden: of those that are asked for 80 % are masks, 10 % any token, 10 % themselves.

    What is hidden depends on the seed and the number of the example. Training rows come with several masks.
    """

    def __len__(self) -> int:
        return self.count * COPIES if self.split == "train" else self.count

    def batch(self, indices: Sequence[int]) -> Batch:
        rows = [index % self.count for index in indices]
        whole = self.cut(self.stream.tokens, rows)
        tokens = whole[:, :-1].contiguous()
        positions, ends = self.places(tokens)
        draws = self.draws(indices)
        asked = self.asked(tokens, draws[0])
        hidden, other = asked & (draws[1] < 0.8), asked & (draws[1] >= 0.9)
        inputs = torch.where(hidden, self.alphabet.mask, tokens)
        ordinary = (~self.alphabet.special).nonzero()[:, 0]
        inputs = torch.where(other, ordinary[(draws[2] * len(ordinary)).long()], inputs)
        chosen = asked.flatten().nonzero()[:, 0]
        columns = {"targets": tokens, "sizes": self.sizes(whole, rows)[:, :-1], "positions": positions}
        return {"tokens": inputs, "chosen": chosen, **{name: x.flatten()[chosen] for name, x in columns.items()}, **ends}

    def draws(self, indices: Sequence[int]) -> Float[Tensor, "3 batch length"]:
        """Returns numbers from 0 to 1: whether a token is asked for, what becomes of it, and by what it is replaced."""
        stream = noise.bits(self.seed, SPLITS.index(self.split))
        counters = torch.arange(3)[:, None, None], torch.as_tensor(indices)[:, None], torch.arange(self.length)
        # 24 bits are exact in float32.
        return ((noise.bits(stream, *counters) >> 40) & (2**24 - 1)).float() / 2**24

    def asked(self, tokens: Int[Tensor, "batch length"], draws: Float[Tensor, "batch length"]) -> Bool[Tensor, "batch length"]:
        """Returns which tokens are asked for: in each row at least one that is not special."""
        special = self.alphabet.special[tokens]
        if self.options.whole_words:
            draws = draws.gather(1, self.first_of_word(tokens))
        draws = draws.masked_fill(special, 1.0)
        least = draws.amin(1, keepdim=True)
        return (draws <= least.clamp(min=self.options.hidden)) & ~special

    def first_of_word(self, tokens: Int[Tensor, "batch length"]) -> Int[Tensor, "batch length"]:
        """Returns for each token where its word begins."""
        goes_on = self.alphabet.begins_inside[tokens]
        goes_on[:, 1:] &= self.alphabet.ends_inside[tokens[:, :-1]]
        goes_on[:, 0] = False
        return torch.where(goes_on, 0, torch.arange(tokens.shape[1])).cummax(1).values


def token_losses(outputs: Float[Tensor, "*items symbols"], batch: Batch) -> Float[Tensor, " tokens"]:
    """Returns the loss of each target in nats."""
    return F.cross_entropy(outputs.flatten(0, -2).float(), batch["targets"].flatten(), reduction="none")


class BitsPerByte(Metric):
    """The bits that a model needs for each byte of the text, whatever its tokens are."""

    higher_is_better = False
    full_state_update = False
    nats: Tensor
    bytes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("nats", default=torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("bytes", default=torch.tensor(0), dist_reduce_fx="sum")

    def update(self, losses: Float[Tensor, " tokens"], sizes: Int[Tensor, " tokens"]) -> None:
        self.nats += losses.double().sum()
        self.bytes += sizes.sum()

    def compute(self) -> Tensor:
        return self.nats / math.log(2.0) / self.bytes


class Perplexity(Metric):
    """The exponential of the mean loss of a token."""

    higher_is_better = False
    full_state_update = False
    nats: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("nats", default=torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", default=torch.tensor(0), dist_reduce_fx="sum")

    def update(self, losses: Float[Tensor, " tokens"], sizes: Int[Tensor, " tokens"]) -> None:
        self.nats += losses.double().sum()
        self.count += losses.numel()

    def compute(self) -> Tensor:
        return (self.nats / self.count).exp()


class Bin(NamedTuple):
    """The mean loss of the tokens at some positions."""

    first: int
    nats: float
    tokens: int


@torch.no_grad()
def position_losses(model: nn.Module, examples: Rows, bins: int, *, batch: int = 16, limit: int | None = None) -> list[Bin]:
    """Returns the mean loss against the position in the sequence, in bins of equal width; empty bins are left out.

    Args:
        model: Of the task, in evaluation mode.
        examples: Rows of a text.
        bins: Number of bins over the length of a row.
        batch: Rows at a time.
        limit: How many rows are taken; all unless given.
    """
    require_sizes(bins=bins, batch=batch)
    device = next(model.parameters()).device
    width = -(-examples.length // bins)
    nats, count = torch.zeros(2, bins, dtype=torch.float64).unbind()
    rows = range(len(examples) if limit is None else min(limit, len(examples)))
    for start in rows[::batch]:
        given = {name: x.to(device) for name, x in examples.batch(rows[start : start + batch]).items()}
        losses, where = token_losses(model(given), given).double().cpu(), given["positions"].flatten().cpu() // width
        nats.index_add_(0, where, losses)
        count.index_add_(0, where, torch.ones_like(losses))
    there = [number for number in range(bins) if count[number] > 0]
    return [Bin(number * width, float(nats[number] / count[number]), int(count[number])) for number in there]


def alphabet_of_bytes() -> Alphabet:
    """Returns what is to know of bytes; letters, digits and bytes of longer characters make words."""
    special = torch.zeros(BYTES, dtype=torch.bool)
    special[[BYTE_END, BYTE_MASK]] = True
    inside = torch.tensor([in_word(code) for code in range(BYTES)]) & ~special
    return Alphabet(BYTES, BYTE_END, BYTE_MASK, special, inside, inside)


def in_word(code: int) -> bool:
    """Says whether a byte is part of a word."""
    return code >= 0x80 or chr(code).isalnum()


def alphabet_of(tokenizer: "Tokenizer") -> Alphabet:
    """Returns what is to know of the tokens of a tokenizer."""
    words = [tokenizer.id_to_token(code) or "" for code in range(tokenizer.get_vocab_size())]
    special = torch.zeros(len(words), dtype=torch.bool)
    special[[code for code, token in tokenizer.get_added_tokens_decoder().items() if token.special]] = True
    if any(word.startswith("##") for word in words):
        begins, ends = torch.tensor([word.startswith("##") for word in words]), ~special
    else:
        # Tokens of bytes are written with one letter for each byte; those of spaces and marks are no letters or these two.
        begins = torch.tensor([bool(word) and word_letter(word[0]) for word in words]) & ~special
        ends = torch.tensor([bool(word) and word_letter(word[-1]) for word in words]) & ~special
    end, mask = (special_token(tokenizer, names) for names in (ENDS, MASKS))
    return Alphabet(len(words), end, mask, special, begins, ends)


def word_letter(letter: str) -> bool:
    """Says whether a letter of a token of bytes stands for part of a word."""
    return letter.isalnum() if letter.isascii() else letter not in "ĠĊĉč"


def special_token(tokenizer: "Tokenizer", names: Sequence[str]) -> int:
    """Returns the first of some special tokens that a tokenizer has."""
    found = [code for name in names if (code := tokenizer.token_to_id(name)) is not None]
    if not found:
        raise ValueError(f"{TOKENIZER} must have one of the tokens {', '.join(names)}, but has none: add one and train it again")
    return found[0]


def train_tokenizer(kind: str, size: int, documents: Sequence[str]) -> "Tokenizer":
    """Returns a tokenizer that is trained on a text: BPE over bytes, or WordPiece in lower case."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    if kind == "bpe":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
        tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
        options: dict[str, Any] = {"vocab_size": size, "special_tokens": list(SPECIAL), "show_progress": False}
        trainer = trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **options)
        tokenizer.train_from_iterator(documents, trainer)
    else:
        vocabulary = piece_vocabulary(documents, size)
        tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))  # pyright: ignore[reportCallIssue]
        tokenizer.normalizer = normalizers.BertNormalizer()  # pyright: ignore[reportAttributeAccessIssue]
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()  # pyright: ignore[reportAttributeAccessIssue]
        tokenizer.decoder = decoders.WordPiece()  # pyright: ignore[reportAttributeAccessIssue]
        tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def piece_vocabulary(texts: Sequence[str], size: int) -> dict[str, int]:
    """Returns the pieces of WordPiece that is trained on texts in lower case, the same each time."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    draft: Any = Tokenizer(models.WordPiece(unk_token="[UNK]"))  # pyright: ignore[reportCallIssue]
    draft.normalizer, draft.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    words = {word for text in texts for word in draft.normalizer.normalize_str(text).split()}
    # Left to itself the library numbers letters inside words in an order that differs from run to run, and with it ties.
    inner = [f"##{letter}" for letter in sorted({letter for word in words for letter in word[1:]})]
    trainer: Any = trainers.WordPieceTrainer
    draft.train_from_iterator(texts, trainer(vocab_size=size, special_tokens=[*SPECIAL, *inner], show_progress=False))
    return draft.get_vocab()


def load_tokenizer(path: Path) -> "Tokenizer":
    """Reads a tokenizer."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    # The library raises nothing more special.
    except Exception as error:
        raise ValueError(f"{path} must be a tokenizer of the tokenizers library, but cannot be read: {error}") from error


def stream_of_bytes(documents: Sequence[str], packed: bool) -> Stream:
    """Returns texts as bytes, with an end before each, or before the first alone where they are not packed.

    >>> stream_of_bytes(["a", "b"], packed=True).tokens.tolist()
    [255, 97, 255, 98, 255]
    """
    mark = bytes([BYTE_END])
    joined = (mark if packed else b"").join(document.encode() for document in documents)
    return Stream(torch.frombuffer(bytearray(mark + joined + mark), dtype=torch.uint8), None)


def encoded(tokenizer: "Tokenizer", documents: Sequence[str], end: int, packed: bool) -> tuple[Tensor, Tensor]:
    """Returns the tokens of texts as `stream_of_bytes` does, and the bytes of each, which add up to those of the texts."""
    tokens, sizes = [np.array([end])], [np.array([0])]
    for start in range(0, len(documents), ENCODED):
        some = documents[start : start + ENCODED]
        for text, found in zip(some, tokenizer.encode_batch(some, add_special_tokens=False), strict=True):
            own, left = bytes_of_tokens(text, np.array([last for _, last in found.offsets], dtype=np.int64))
            tokens.append(np.array(found.ids, dtype=np.int64))
            sizes.append(own)
            if packed:
                tokens.append(np.array([end]))
                sizes.append(np.array([left]))
            else:
                sizes[-1][-1:] += left
    if not packed:
        tokens.append(np.array([end]))
        sizes.append(np.array([0]))
    return torch.from_numpy(np.concatenate(tokens).astype(np.int32)), torch.from_numpy(np.concatenate(sizes).astype(np.int32))


def bytes_of_tokens(text: str, ends: np.ndarray) -> tuple[np.ndarray, int]:
    """Returns how many bytes lie between the end of each token and that of the one before, and how many after the last.

    >>> bytes_of_tokens("é  x ", np.array([1, 4]))
    (array([2, 3]), 1)
    """
    raw = np.frombuffer(text.encode(), dtype=np.uint8)
    # Each character but those bytes that go on with one begins a place.
    places = np.append(np.flatnonzero((raw & 0xC0) != 0x80), len(raw))
    reached = np.maximum.accumulate(places[ends]) if len(ends) else ends
    return np.diff(reached, prepend=0), len(raw) - (int(reached[-1]) if len(reached) else 0)


def read_splits(data: Path | str | None, options: LanguageModelOptions) -> dict[Split, list[str]]:
    """Returns the documents of all splits: those of their own files, or shares of one text."""
    if data is None:
        return shared_out(pieces_of(sample(), options.packed), options)
    if data == HUB:
        return {split: pieces_of(from_wikitext(split), options.packed) for split in SPLITS}
    paths = sorted(path for ending in OPENERS for path in Path(data).glob(f"*.txt{ending}"))
    if any(path.name.split(".")[0] == "train" for path in paths):
        return {split: pieces_of(text_of(required_file(data, f"{split}.txt", SOURCE)), options.packed) for split in SPLITS}
    if not paths:
        raise ValueError(f"data must be a folder with .txt files, plain or as .xz or .gz, but {data} has none: {SOURCE}")
    return shared_out([piece for path in paths for piece in pieces_of(text_of(path), options.packed)], options)


def from_wikitext(split: Split) -> str:
    """Returns a split of WikiText-103 from the Hugging Face Hub."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError("the package datasets must be there for data='hub', but is not: pip install datasets") from error
    return "".join(load_dataset(LanguageModel.facts.hub, HUB_CONFIG, split=split)["text"])


def text_of(path: Path) -> str:
    """Returns the text of a file, plain or compressed; bytes that are no UTF-8 raise."""
    try:
        with OPENERS[path.suffix if path.suffix in OPENERS else ""](path, "rb") as opened:
            raw: bytes = opened.read()
    except (lzma.LZMAError, zlib.error, gzip.BadGzipFile, EOFError) as error:
        raise ValueError(f"{path} must be a whole compressed file, but cannot be read: {error}") from error
    try:
        return raw.decode().replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}, line {line}: byte 0x{raw[error.start]:02x} is no UTF-8, but expected is UTF-8 text") from None


def pieces_of(text: str, packed: bool) -> list[str]:
    """Returns the documents of a text; unpacked ones keep what separates them, so that they make the whole text again.

    Where there are titles they begin the documents, otherwise blank lines end them.

    >>> pieces_of("a\\n\\nb", packed=True), pieces_of("a\\n\\nb", packed=False)
    (['a', 'b'], ['a\\n\\n', 'b'])
    """
    cuts = [found.start() for found in TITLE.finditer(text)] or [found.end() for found in BLANK.finditer(text)]
    bounds = [0, *cuts, len(text)]
    found = [text[start:stop] for start, stop in pairwise(bounds)]
    return [piece for piece in (each.strip("\n") if packed else each for each in found) if piece]


def shared_out(documents: Sequence[str], options: LanguageModelOptions) -> dict[Split, list[str]]:
    """Returns the last documents for validation and test, by their share of the text, and the others for training."""
    ends = np.cumsum([len(document) for document in documents])
    total = ends[-1] if len(ends) else 0
    first, second = (int(np.searchsorted(ends, total * share, side="right")) for share in (
        1.0 - options.validation - options.test, 1.0 - options.test
    ))  # fmt: skip
    found: dict[Split, list[str]] = {
        "train": list(documents[:first]), "validation": list(documents[first:second]), "test": list(documents[second:])
    }  # fmt: skip
    for split, own in found.items():
        if not own:
            raise ValueError(
                f"the text must have documents for all splits, but {len(documents)} leave none for {split}: separate them by "
                "blank lines or titles, or choose other shares"
            )
    return found


def digest(*parts: Any) -> str:
    """Returns digits that tell texts and options apart."""
    found = hashlib.sha256(json.dumps(VERSION).encode())
    for part in parts:
        own = part.encode() if isinstance(part, str) else json.dumps(part).encode()
        found.update(len(own).to_bytes(8, "little") + own)
    return found.hexdigest()[:16]


def write_whole(path: Path, text: str) -> None:
    """Writes a file that is there as a whole or not at all, also where several processes write it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False, encoding="utf-8") as part:
        part.write(text)
    os.replace(part.name, path)


PEOPLE = ("The baker", "A ferryman", "My neighbour", "The clockmaker", "An old gardener", "The night porter", "A tall girl")
DEEDS = ("carried", "mended", "forgot", "painted", "sold", "hid", "found", "weighed")
THINGS = ("a copper kettle", "the blue ladder", "two wet umbrellas", "a sack of flour", "the broken lamp", "a map of the hills")
PLACES = ("behind the mill", "on the long bridge", "at the station", "under the stairs", "beside the river", "in the market")
SAMPLE_DOCUMENTS = 240


def sample() -> str:
    """Returns made-up documents of a few sentences, with blank lines between."""
    draws = torch.Generator().manual_seed(0)

    def one_of(words: Sequence[str]) -> str:
        return words[int(torch.randint(len(words), (), generator=draws))]

    def sentences() -> Iterator[str]:
        for _ in range(int(torch.randint(2, 7, (), generator=draws))):
            yield f"{one_of(PEOPLE)} {one_of(DEEDS)} {one_of(THINGS)} {one_of(PLACES)}."

    return "\n\n".join(" ".join(sentences()) for _ in range(SAMPLE_DOCUMENTS))
