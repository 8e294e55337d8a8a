"""Language modelling: the next token of a text, or tokens that were hidden, over bytes, BPE or WordPiece."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torchmetrics import Metric

from lagwise.errors import require_sizes
from lagwise.lab.config import Config
from lagwise.lab.tasks.base import Batch, Facts, Sampling, Split
from lagwise.lab.tasks.files import cache_folder, cached_tensors
from lagwise.lab.tasks.generation import generate_tokens
from lagwise.lab.tasks.models import CausalModel, MaskedModel
from lagwise.lab.tasks.text.corpora import HUB_NAME, read_splits
from lagwise.lab.tasks.text.pretrained import Absolute, Pretrained, check_pretrained
from lagwise.lab.tasks.text.streams import Alphabet, Stream, alphabet_of, alphabet_of_bytes, encode_bytes, encode_stream
from lagwise.lab.tasks.text.text_rows import CausalRows, MaskedRows
from lagwise.lab.tasks.text.tokenization import TOKENIZER, TokenizerTask, load_tokenizer, text_digest, trained_tokenizer
from lagwise.lab.tasks.token_prediction import BitsPerByte, Perplexity, TokenPrediction, mean_loss_by_position, token_losses

if TYPE_CHECKING:
    from tokenizers import Tokenizer

DEFAULT_VOCABULARY = 8192


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
        model: "stack" (of this library), or "hf" (a Hugging Face encoder that is converted to the encoding and goes on with its
            pre-training: masked, with its own tokenizer, in rows of one stream).
        path: Folder or name of the Hugging Face model.
        absolute: What becomes of its absolute positions. The encoding "learned" leaves the model as it is in any case, and so
            does "none" with "keep".
        fade: With absolute="fade", the training steps after which nothing is left of them.
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
    model: Literal["stack", "hf"] = "stack"
    path: str = ""
    absolute: Absolute = "remove"
    fade: int = 0
    validation: float = 0.05
    test: float = 0.05

    def __post_init__(self) -> None:
        require_sizes(length=self.length)
        for name, known in (
            ("tokens", ("bytes", "bpe", "wordpiece")), ("objective", ("causal", "masked")), ("model", ("stack", "hf")),
        ):  # fmt: skip
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, but is {getattr(self, name)!r}")
        if self.tokens == "bytes" and self.vocabulary is not None:
            raise ValueError(f"vocabulary must be left out with tokens='bytes', which has 256, but is {self.vocabulary}")
        if self.vocabulary is not None:
            require_sizes(vocabulary=self.vocabulary)
        if self.whole_words and self.objective != "masked":
            raise ValueError("whole_words must be left out with objective='causal', which hides nothing: pass objective='masked'")
        check_pretrained(self)
        if self.model == "hf":
            self.check_hugging_face()
        for name in ("hidden", "validation", "test"):
            if not 0.0 < getattr(self, name) < 1.0:
                raise ValueError(f"{name} must be a share between 0 and 1, but is {getattr(self, name)}")

    def check_hugging_face(self) -> None:
        """Raises for what models of Hugging Face do not do here."""
        if self.objective != "masked":
            raise ValueError(f"objective must be 'masked' with model='hf', but is {self.objective!r}")
        if self.packed:
            raise ValueError("packed must be false with model='hf', which attends to all of a row: pass task.packed=false")
        if self.tokens == "bytes" or self.vocabulary is not None or not self.tied:
            raise ValueError(
                "tokens must be 'wordpiece' or 'bpe' with model='hf', and vocabulary and tied be left out: they are the model's"
            )


class LanguageModel(TokenizerTask, TokenPrediction):
    """Texts as tokens, causal or masked."""

    facts: ClassVar[Facts] = Facts(
        words="the next token of a text, or hidden ones: bytes, BPE, WordPiece",
        metric="bits_per_byte",
        source="any text: documents between blank lines, or under `= title =` lines",
        size="that of the text; the last documents are for validation and test",
        licence="that of the text; WikiText-103 of --data hub: CC BY-SA",
        published="none on a text that is here",
        files="train.txt, validation.txt and test.txt, or any .txt files, plain or as .xz or .gz; may hold a tokenizer.json",
        hub=HUB_NAME,
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
        self._pieces: dict[Split, list[str]] = {}
        self._streams: dict[Split, Stream] = {}

    def attach(self, folder: Path) -> None:
        if self.options.tokens != "bytes":
            super().attach(folder)

    @property
    def pieces(self) -> dict[Split, list[str]]:
        """The documents of each split, which are read once."""
        if not self._pieces:
            self._pieces = read_splits(
                self.data, packed=self.options.packed, validation=self.options.validation, test=self.options.test
            )
        return self._pieces

    def find_tokenizer(self) -> "Tokenizer":
        """Returns the tokenizer of the model or of the data, or one that is trained on the training text."""
        if given := self.options.path or self.data_tokenizer(TOKENIZER):
            return load_tokenizer(given)
        assert self.options.tokens != "bytes"
        return trained_tokenizer(self.options.tokens, self.pieces["train"], self.options.vocabulary or DEFAULT_VOCABULARY)

    @property
    def alphabet(self) -> Alphabet:
        """What is to know of the tokens."""
        return alphabet_of_bytes() if self.options.tokens == "bytes" else alphabet_of(self.tokenizer)

    def stream(self, split: Split) -> Stream:
        """Returns the tokens of a split; those of tokenizers are made once and stored in the cache."""
        if split not in self._streams:
            packed, documents = self.options.packed, self.pieces[split]
            if self.options.tokens == "bytes":
                self._streams[split] = encode_bytes(documents, packed)
            else:
                path = cache_folder() / "lm" / f"{text_digest(packed, self.tokenizer.to_str(), *documents)}.pt"
                self._streams[split] = Stream(
                    **cached_tensors(path, lambda: encode_stream(self.tokenizer, documents, self.alphabet.end, packed)._asdict())
                )
        return self._streams[split]

    def examples(self, split: Split, length: int | None = None) -> CausalRows | MaskedRows:
        length = self.options.length if length is None else length
        require_sizes(length=length)
        options, given = self.options, (self.stream(split), self.alphabet, length)
        if options.objective == "causal":
            return CausalRows(*given, packed=options.packed, split=split)
        return MaskedRows(
            *given, packed=options.packed, split=split, seed=self.seed, hidden=options.hidden, whole_words=options.whole_words
        )

    def model(self, config: Config) -> nn.Module:
        if self.options.model == "hf":
            return HuggingFaceMasked(config, self.options, symbols=self.alphabet.symbols)
        kind = CausalModel if self.options.objective == "causal" else MaskedModel
        return kind(config, symbols=self.alphabet.symbols, tied=self.options.tied)

    def metrics(self) -> dict[str, Metric]:
        return {"bits_per_byte": BitsPerByte(), "perplexity": Perplexity()}

    def answers(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns the loss of each token in nats, and the number of bytes that it stands for."""
        return token_losses(outputs, batch), batch["sizes"].flatten()

    def curves(self, model: nn.Module, split: Split, length: int | None, *, batch: int, limit: int | None) -> dict[str, Any]:
        """Returns the mean loss in bins of an eighth of the training length: the first position of each, nats, tokens."""
        length = self.options.length if length is None else length
        bins = -(-length // max(1, self.options.length // 8))
        found = mean_loss_by_position(model, self.examples(split, length), length, bins, batch=batch, limit=limit)
        return {"loss_by_position": [list(each) for each in found]}

    def generate(self, model: nn.Module, prompt: str | None, sampling: Sampling, out: Path) -> list[Path]:
        """Writes texts that go on from a prompt, each to the end of its document or to the length."""
        if not isinstance(model, CausalModel):
            raise ValueError("objective must be 'causal' to generate, but is 'masked': train another model")
        start = [self.alphabet.end, *self.codes(prompt or "")]
        device = next(model.parameters()).device
        prompts = torch.tensor([start] * sampling.count, device=device)
        found = generate_tokens(model, prompts, sampling, end=self.alphabet.end)
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


class HuggingFaceMasked(Pretrained):
    """An encoder of Hugging Face with its head for hidden tokens, which is new where the model was stored without it."""

    head = "AutoModelForMaskedLM"

    def forward(self, batch: Batch) -> Float[Tensor, "chosen symbols"]:
        return self.outputs(batch).logits.flatten(0, 1)[batch["chosen"]]
