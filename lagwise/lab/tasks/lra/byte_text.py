"""Long-Range Arena's text task: the byte sequence of a film review, and whether it praises the film."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from lagwise.errors import require_sizes
from lagwise.lab.config import Config
from lagwise.lab.tasks.base import HUB, SPLITS, Batch, Classification, Facts, Sequences, Split
from lagwise.lab.tasks.choices import Chooser
from lagwise.lab.tasks.files import binary_label, find_file, fixed_order, from_hub, nonempty, required_file, table_rows
from lagwise.lab.tasks.lra.presets import largest_rate, lra_presets, suited_options
from lagwise.lab.tasks.models import Classifier

SYMBOLS = 256
COLUMNS = ("label", "id", "text")
SOURCE = "unpack aclImdb_v1.tar.gz of https://ai.stanford.edu/~amaas/data/sentiment/ and give its folder aclImdb"

PRESETS = lra_presets(
    realizations=64, task_options={"length": 1000}, layers=4, heads=4, dim=256, hidden=1024, batch=8,
    rate=largest_rate(0.0125, 8000), schedule="rsqrt", warmup=8000, steps=30_000, weight_decay=0.1, dropout=0.1,
)  # fmt: skip
PRESETS["performer-ape"] |= {"batch": 16, "rate": largest_rate(0.025, 8000)}


class Review(NamedTuple):
    """A review and its class."""

    text: bytes
    label: int


class PackedReviews(NamedTuple):
    """Texts end to end, and their classes."""

    tokens: UInt8[Tensor, " bytes"]
    ends: Int[Tensor, " texts"]
    label: Int[Tensor, " texts"]


@dataclass(frozen=True)
class TextOptions:
    """What can be chosen of the text task.

    Args:
        length: How many bytes of a text are read.
        validation: How many of the training texts are kept for validation.
    """

    length: int = 1000
    validation: int = 2500

    def __post_init__(self) -> None:
        require_sizes(length=self.length, validation=self.validation)


class Text(Classification):
    """Film reviews as bytes, in two classes."""

    classes = 2
    facts: ClassVar[Facts] = Facts(
        words="does a film review praise the film? Tokens are its bytes",
        metric="accuracy",
        source="IMDb reviews (Maas et al. 2011), as in the Long-Range Arena (Tay et al. 2021)",
        size="22,500 training, 2,500 validation and 25,000 test reviews, the first 1,000 bytes of each",
        licence="none stated; cite Maas et al. 2011",
        published=(
            "Liutkus et al. 2021, mean and deviation of the released runs: Performer 62.58 ± 0.22 (absolute), 62.60 ± 0.50 "
            "(sines); ReLU 63.98 ± 0.05 (absolute), 64.09 ± 0.62 (sines). They validate on the test "
            "reviews, here a share of the training reviews is kept for that"
        ),
        files="{train,test}/{pos,neg}/*.txt of aclImdb, or train.tsv and test.tsv of label, id and text, plain or as .xz or .gz",
        hub="stanfordnlp/imdb",
    )
    defaults: ClassVar[dict[str, Any]] = {
        "dim": 64, "layers": 2, "batch": 16, "steps": 500, "warmup": 50, "evaluate_examples": 1000,
        "task_options": {"length": 256},
    }  # fmt: skip
    presets = PRESETS
    Options = TextOptions

    def __init__(self, data: Path | str | None = None, *, seed: int = 0, **options: Any):
        super().__init__(data, seed=seed, **options)
        self.texts: dict[Split, PackedReviews] = {}

    def examples(self, split: Split, length: int | None = None) -> Sequences:
        if split not in self.texts:
            self.texts |= {name: join_reviews(texts) for name, texts in self.load(split).items()}
        tokens, ends, label = self.texts[split]
        return Sequences(tokens, ends, max_length=self.options.length if length is None else length, label=label)

    def load(self, split: Split) -> dict[Split, list[Review]]:
        """Returns the texts of a split, and of those that are read together with it."""
        if self.data is None:
            return {split: sample_reviews(split)}
        if split == "test":
            return {"test": shuffle_reviews(read_reviews(self.data, "test"))}
        texts = shuffle_reviews(read_reviews(self.data, "train"))
        kept = self.options.validation
        if kept >= len(texts):
            raise ValueError(f"validation must be less than the number of training texts, {len(texts)}, but is {kept}")
        return {"validation": texts[:kept], "train": texts[kept:]}

    def model(self, config: Config) -> Classifier:
        return Classifier(config, symbols=SYMBOLS, classes=self.classes, pooling="first")

    def encoding_options(self, encoding: str) -> dict[str, Any]:
        return suited_options(encoding, self.presets, self.options.length)

    def token_names(self, tokens: Sequence[int]) -> list[str]:
        return byte_names(tokens)

    def text_batch(self, text: str) -> Batch:
        return Sequences(*pack_bytes([text.encode()])).batch([0])


def byte_names(tokens: Sequence[int]) -> list[str]:
    r"""Returns the characters of bytes; a byte that is none by itself has its number in hexadecimal digits.

    >>> byte_names("é!\n".encode())
    ['\\xc3', '\\xa9', '!', '\\x0a']
    """
    return [chr(token) if 32 <= token < 127 else f"\\x{token:02x}" for token in tokens]


def read_reviews(data: Path | str, part: str) -> list[Review]:
    """Returns the reviews of the official train or test part, in the order of the files."""
    if data == HUB:
        found = from_hub(Text.facts.hub, part)
        return [Review(text.encode(), label) for text, label in zip(found["text"], found["label"], strict=True)]
    folder = Path(data) / part
    if folder.is_dir() and find_file(data, f"{part}.tsv") is None:
        return [review for label, name in enumerate(("neg", "pos")) for review in read_folder(folder / name, label)]
    table = table_rows(required_file(data, f"{part}.tsv", SOURCE), *COLUMNS)
    return [
        Review(nonempty(place, text), binary_label(place, label))
        for place, (label, key, text) in table
        if (label, key) != (b"label", b"id")
    ]


def read_folder(folder: Path, label: int) -> list[Review]:
    """Returns the reviews of a folder of one class."""
    paths = sorted(folder.glob("*.txt"))
    if not paths:
        raise ValueError(f"data must be a folder with reviews in {folder}, but there is no .txt file: {SOURCE}")
    return [Review(nonempty(f"{path}, line 1", path.read_bytes()), label) for path in paths]


def shuffle_reviews(texts: Sequence[Review]) -> list[Review]:
    """Returns the texts in an order that mixes classes, so that any first ones stand for all."""
    return [texts[index] for index in fixed_order(len(texts))]


def join_reviews(texts: Sequence[Review]) -> PackedReviews:
    """Returns texts end to end."""
    return PackedReviews(*pack_bytes([text for text, _ in texts]), torch.tensor([label for _, label in texts]))


def pack_bytes(texts: Sequence[bytes]) -> tuple[UInt8[Tensor, " bytes"], Int[Tensor, " texts"]]:
    """Returns the bytes of texts end to end, and where each text ends.

    >>> pack_bytes([b"ab", b"c"])
    (tensor([97, 98, 99], dtype=torch.uint8), tensor([2, 3]))
    """
    return torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8), torch.tensor([len(text) for text in texts]).cumsum(0)


FILMS = (
    "The comedy",
    "This western",
    "The sequel",
    "A quiet drama",
    "The cartoon",
    "That thriller",
    "The musical",
    "A short film",
)
PARTS = ("its story", "the acting", "the music", "every scene", "the ending", "the dialogue", "the camera work", "its pace")
VERDICTS = (
    ("dull", "clumsy", "tiresome", "hollow", "lifeless", "muddled"),
    ("superb", "charming", "moving", "clever", "vivid", "witty"),
)
SAMPLE_SIZES = {"train": 64, "validation": 32, "test": 32}


def sample_reviews(split: Split) -> list[Review]:
    """Returns made-up reviews of one or two sentences, as many of each class."""
    one_of = Chooser(SPLITS.index(split))

    def review(label: int) -> Review:
        words = VERDICTS[label]
        first = f"{one_of(FILMS)} was {one_of(words)}: {one_of(PARTS)} seemed {one_of(words)} to me"
        return Review(f"{first}, and {one_of(PARTS)} was {one_of(words)}.".encode(), label)

    return [review(index % 2) for index in range(SAMPLE_SIZES[split])]
