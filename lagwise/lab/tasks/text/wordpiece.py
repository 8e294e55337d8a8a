"""Tokenizers of words and pieces of words: loaded from files, or trained on a text."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from lagwise.lab.tasks.files import cache_folder, write_whole
from lagwise.lab.tasks.text.streams import SPECIAL, load_tokenizer, piece_vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer


VERSION = 1
"""Changes whenever the same text gives another tokenizer, so that stored ones of before are not used."""
WORDS = "words"


class Frame(NamedTuple):
    """The special tokens before a question, between question and paragraph, and after it."""

    before: list[int]
    middle: list[int]
    after: list[int]

    @property
    def size(self) -> int:
        return len(self.before) + len(self.middle) + len(self.after)


def tokenizer_files(folder: Path) -> list[Path]:
    """Returns where a folder may have a tokenizer."""
    return [folder / "tokenizer.json", folder / "vocab.txt"]


def loaded_tokenizer(name: str) -> "Tokenizer":
    """Loads a tokenizer from a folder, a file, or by its name on the Hugging Face Hub."""
    path = Path(name)
    found = next((file for file in tokenizer_files(path) if file.is_file()), path)
    if found.suffix == ".txt" and found.is_file():
        return wordpiece_of(found)
    made = load_tokenizer(found) if found.is_file() else tokenizer_named(name)
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


def piece_names(tokenizer: "Tokenizer", tokens: Sequence[int]) -> list[str]:
    """Returns the pieces of text that tokens stand for, and the numbers of those that a tokenizer does not know."""
    return [tokenizer.id_to_token(token) or str(token) for token in tokens]


def trained_tokenizer(texts: Sequence[str], kind: Literal["pieces", "words"], vocabulary: int) -> "Tokenizer":
    """Returns a tokenizer that is trained on texts, or was before: it is stored in the cache folder."""
    from tokenizers import Tokenizer

    digest = hashlib.sha256(json.dumps([VERSION, kind, vocabulary, texts]).encode()).hexdigest()[:12]
    path = cache_folder() / "tokenizers" / f"{kind}-{digest}.json"
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

    return around(WordPiece(piece_vocabulary(texts, vocabulary), unk_token="[UNK]"), lowercase=True)
