"""Tokenizers: loaded from files or by name, or trained on a text; and tasks that keep theirs in the folder of a run."""

import hashlib
import json
from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lagwise.lab.tasks.base import HUB, Task
from lagwise.lab.tasks.files import cache_folder, write_whole

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER = "tokenizer.json"
VOCABULARY = "vocab.txt"
"""The two files that a folder may have a tokenizer in."""

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
ENDS = ("[SEP]", "</s>", "<|endoftext|>", "<eos>")

VERSION = 2
"""Changes whenever the same text and options give other tokens, so that stored ones of before are not used."""


class TokenizerTask(Task):
    """A task whose texts become tokens by a tokenizer, which a run keeps."""

    folder: Path | None = None

    def attach(self, folder: Path) -> None:
        """Keeps the tokenizer in a run's folder, or takes the one that is there."""
        self.folder = folder
        if not (folder / TOKENIZER).is_file():
            write_whole(folder / TOKENIZER, self.tokenizer.to_str())

    @cached_property
    def tokenizer(self) -> "Tokenizer":
        """That of the run's folder, or else the task's own."""
        stored = None if self.folder is None else self.folder / TOKENIZER
        made = load_tokenizer(str(stored)) if stored is not None and stored.is_file() else self.find_tokenizer()
        # Words of the text that look like special tokens are words.
        made.encode_special_tokens = True
        return made

    @abstractmethod
    def find_tokenizer(self) -> "Tokenizer":
        """Returns the tokenizer that the options or the data have, or one that is trained on the training text."""

    def data_tokenizer(self, *names: str) -> str:
        """Returns the path of the first of some files that the data folder has, or ""."""
        folder = None if self.data in (None, HUB) else Path(str(self.data))
        return next((str(folder / name) for name in names if (folder / name).is_file()), "") if folder else ""


def load_tokenizer(name: str) -> "Tokenizer":
    """Loads a tokenizer from a folder, a file, or by its name on the Hugging Face Hub."""
    path = Path(name)
    path = next((path / file for file in (TOKENIZER, VOCABULARY) if (path / file).is_file()), path)
    if path.suffix == ".txt" and path.is_file():
        return read_vocabulary(path)
    made = read_tokenizer(path) if path.is_file() else hub_tokenizer(name)
    made.no_padding()
    made.no_truncation()
    if made.num_special_tokens_to_add(True) == 0 and None not in map(made.token_to_id, ("[CLS]", "[SEP]")):
        # One that was trained for language modelling has the tokens, and puts them nowhere.
        add_frame(made)
    return made


def read_tokenizer(path: Path) -> "Tokenizer":
    """Reads a file of the tokenizers library."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    # The library raises nothing more special.
    except Exception as error:
        raise ValueError(f"{path} must be a tokenizer of the tokenizers library, but cannot be read: {error}") from error


def hub_tokenizer(name: str) -> "Tokenizer":
    """Loads the tokenizer of a Hugging Face model."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name).backend_tokenizer
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(
            f"tokenizer must be 'words', a folder or file with a tokenizer.json or vocab.txt, or the name of one on the Hub, "
            f"but is {name!r}: {error}"
        ) from error


def read_vocabulary(path: Path) -> "Tokenizer":
    """Makes BERT's tokenizer of a vocabulary; letters become small where the vocabulary has no others."""
    from tokenizers.models import WordPiece

    vocabulary = {word: number for number, word in enumerate(path.read_text(encoding="utf-8").splitlines())}
    missing = [word for word in ("[UNK]", "[CLS]", "[SEP]") if word not in vocabulary]
    if missing:
        raise ValueError(f"{path} must have a line for each token, but {missing[0]} is missing")
    lowercase = all(word == word.lower() for word in vocabulary if not word.startswith("["))
    return bert_tokenizer(WordPiece(vocabulary, unk_token="[UNK]"), lowercase=lowercase)


def trained_tokenizer(kind: Literal["bpe", "wordpiece", "words"], texts: Sequence[str], vocabulary: int) -> "Tokenizer":
    """Returns a tokenizer that is trained on texts, or was before: it is stored in the cache folder."""
    train = {"bpe": train_bpe, "wordpiece": train_wordpiece, "words": train_words}[kind]
    path = cache_folder() / "tokenizers" / f"{kind}-{text_digest(vocabulary, *texts)}.json"
    if not path.is_file():
        write_whole(path, train(texts, vocabulary).to_str())
    return read_tokenizer(path)


def train_bpe(texts: Sequence[str], size: int) -> "Tokenizer":
    """Returns BPE over bytes that is trained on texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made: Any = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(texts, trainers.BpeTrainer(initial_alphabet=letters, **trainer_options(size, SPECIAL)))
    return made


def train_words(texts: Sequence[str], size: int) -> "Tokenizer":
    """Returns a tokenizer for the most frequent words and signs of texts, in lower case."""
    from tokenizers import models, trainers

    made, trainer = bert_tokenizer(models.WordLevel(unk_token="[UNK]"), lowercase=True), trainers.WordLevelTrainer
    made.train_from_iterator(texts, trainer(**trainer_options(size, SPECIAL)))
    add_frame(made)
    return made


def train_wordpiece(texts: Sequence[str], size: int) -> "Tokenizer":
    """Returns WordPiece in lower case that is trained on texts, the same each time."""
    from tokenizers import models, trainers

    draft = bert_tokenizer(models.WordPiece(unk_token="[UNK]"), lowercase=True)  # pyright: ignore[reportCallIssue]
    words = {word for text in texts for word in draft.normalizer.normalize_str(text).split()}
    # Left to itself the library numbers letters inside words in an order that differs from run to run, and with it ties.
    inner = [f"##{letter}" for letter in sorted({letter for word in words for letter in word[1:]})]
    trainer: Any = trainers.WordPieceTrainer
    draft.train_from_iterator(texts, trainer(**trainer_options(size, [*SPECIAL, *inner])))
    return bert_tokenizer(models.WordPiece(draft.get_vocab(), unk_token="[UNK]"), lowercase=True)


def trainer_options(size: int, special: Sequence[str]) -> dict[str, Any]:
    """Returns what all trainers of the library are told."""
    return {"vocab_size": size, "special_tokens": list(special), "show_progress": False}


def bert_tokenizer(model: Any, *, lowercase: bool) -> Any:
    """Puts what BERT does before and after around a model of tokens."""
    from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers

    made: Any = Tokenizer(model)
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(lowercase=lowercase), pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.add_special_tokens([word for word in SPECIAL if made.token_to_id(word) is not None])
    if made.token_to_id("[CLS]") is not None:
        add_frame(made)
    return made


def add_frame(tokenizer: Any) -> None:
    """Lets a tokenizer put [CLS] and [SEP] around a text or two."""
    from tokenizers.processors import TemplateProcessing

    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(word, tokenizer.token_to_id(word)) for word in ("[CLS]", "[SEP]")],
    )  # fmt: skip


def special_token(tokenizer: "Tokenizer", names: Sequence[str]) -> int:
    """Returns the first of some special tokens that a tokenizer has."""
    codes = [code for name in names if (code := tokenizer.token_to_id(name)) is not None]
    if not codes:
        raise ValueError(f"{TOKENIZER} must have one of the tokens {', '.join(names)}, but has none: add one and train it again")
    return codes[0]


def piece_names(tokenizer: "Tokenizer", tokens: Sequence[int]) -> list[str]:
    """Returns the pieces of text that tokens stand for, and the numbers of those that a tokenizer does not know."""
    return [tokenizer.id_to_token(token) or str(token) for token in tokens]


def text_digest(*parts: Any) -> str:
    """Returns digits that tell texts and options apart."""
    digest = hashlib.sha256(json.dumps(VERSION).encode())
    for part in parts:
        own = part.encode() if isinstance(part, str) else json.dumps(part).encode()
        digest.update(len(own).to_bytes(8, "little") + own)
    return digest.hexdigest()[:16]
