"""Texts for language modelling: read from files or the Hub, divided into documents and splits, and a sample of our own."""

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from lagwise.lab.tasks.base import HUB, SPLITS, Split
from lagwise.lab.tasks.choices import Chooser
from lagwise.lab.tasks.files import OPENERS, from_hub, open_bytes, required_file

HUB_NAME = "Salesforce/wikitext"
HUB_CONFIG = "wikitext-103-raw-v1"
SOURCE = "give a folder with train.txt, validation.txt and test.txt, or with any .txt files"

TITLE = re.compile(r"^ ?= [^=\n]+ = ?$", flags=re.MULTILINE)
BLANK = re.compile(r"\n[ \t]*\n\s*")


def read_splits(data: Path | str | None, *, packed: bool, validation: float, test: float) -> dict[Split, list[str]]:
    """Returns the documents of all splits: those of their own files, or shares of one text; see `split_documents`."""
    if data is None:
        return split_documents(documents_of(sample_text(), packed), validation, test)
    if data == HUB:
        return {split: documents_of(from_wikitext(split), packed) for split in SPLITS}
    paths = sorted(path for ending in OPENERS for path in Path(data).glob(f"*.txt{ending}"))
    if any(path.name.split(".")[0] == "train" for path in paths):
        return {split: documents_of(text_of(required_file(data, f"{split}.txt", SOURCE)), packed) for split in SPLITS}
    if not paths:
        raise ValueError(f"data must be a folder with .txt files, plain or as .xz or .gz, but {data} has none: {SOURCE}")
    return split_documents([each for path in paths for each in documents_of(text_of(path), packed)], validation, test)


def from_wikitext(split: Split) -> str:
    """Returns a split of WikiText-103 from the Hugging Face Hub."""
    return "".join(from_hub(HUB_NAME, split, HUB_CONFIG)["text"])


def text_of(path: Path) -> str:
    """Returns the text of a file, plain or compressed; bytes that are no UTF-8 raise."""
    with open_bytes(path) as file:
        raw = file.read()
    try:
        return raw.decode().replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}, line {line}: byte 0x{raw[error.start]:02x} is no UTF-8, but expected is UTF-8 text") from None


def documents_of(text: str, packed: bool) -> list[str]:
    """Returns the documents of a text; unpacked ones keep what separates them, so that they make the whole text again.

    Where there are titles they begin the documents, otherwise blank lines end them.

    >>> documents_of("a\\n\\nb", packed=True), documents_of("a\\n\\nb", packed=False)
    (['a', 'b'], ['a\\n\\n', 'b'])
    """
    cuts = [found.start() for found in TITLE.finditer(text)] or [found.end() for found in BLANK.finditer(text)]
    bounds = [0, *cuts, len(text)]
    found = [text[start:stop] for start, stop in pairwise(bounds)]
    return [piece for piece in (each.strip("\n") if packed else each for each in found) if piece]


def split_documents(documents: Sequence[str], validation: float, test: float) -> dict[Split, list[str]]:
    """Returns the last documents for validation and test, by their share of the text, and the others for training."""
    ends = np.cumsum([len(document) for document in documents])
    total = ends[-1] if len(ends) else 0
    first, second = (int(np.searchsorted(ends, total * share, side="right")) for share in (
        1.0 - validation - test, 1.0 - test
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


PEOPLE = ("The baker", "A ferryman", "My neighbour", "The clockmaker", "An old gardener", "The night porter", "A tall girl")
DEEDS = ("carried", "mended", "forgot", "painted", "sold", "hid", "found", "weighed")
THINGS = ("a copper kettle", "the blue ladder", "two wet umbrellas", "a sack of flour", "the broken lamp", "a map of the hills")
PLACES = ("behind the mill", "on the long bridge", "at the station", "under the stairs", "beside the river", "in the market")
SAMPLE_DOCUMENTS = 240


def sample_text() -> str:
    """Returns made-up documents of a few sentences, with blank lines between."""
    one_of = Chooser(seed=0)

    def sentences() -> Iterator[str]:
        for _ in range(one_of(range(2, 7))):
            yield f"{one_of(PEOPLE)} {one_of(DEEDS)} {one_of(THINGS)} {one_of(PLACES)}."

    return "\n\n".join(" ".join(sentences()) for _ in range(SAMPLE_DOCUMENTS))
