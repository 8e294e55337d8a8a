"""Files of data sets: plain or compressed tables, pictures, and downloads; and files of our own, in the cache."""

import gzip
import lzma
import os
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from jaxtyping import UInt8
from torch import Tensor

from lagwise.extras import install_command
from lagwise.lab.json_files import replace_text

OPENERS: dict[str, Callable[..., Any]] = {"": open, ".xz": lzma.open, ".gz": gzip.open}
"""How a file is opened, by what is added to its name."""


def find_file(folder: Path | str, name: str) -> Path | None:
    """Returns the path of a file, plain or compressed, or None."""
    paths = [Path(folder) / (name + ending) for ending in OPENERS]
    return next((path for path in paths if path.is_file()), None)


def required_file(folder: Path | str, name: str, source: str) -> Path:
    """Returns the path of a file, plain or compressed; a missing one raises, and `source` says where to get it."""
    found = find_file(folder, name)
    if found is None:
        raise ValueError(f"data must be a folder with {name}, plain or as .xz or .gz, but {folder} has none: {source}")
    return found


@contextmanager
def open_bytes(path: Path) -> Iterator[BinaryIO]:
    """Opens a file to read its bytes, plain or compressed, as its name says; a damaged compressed one raises."""
    try:
        with OPENERS[path.suffix if path.suffix in OPENERS else ""](path, "rb") as file:
            yield file
    except (lzma.LZMAError, zlib.error, gzip.BadGzipFile, EOFError) as error:
        raise ValueError(f"{path} must be a whole compressed file, but cannot be read: {error}") from error


def table_rows(path: Path, *columns: str, broken: list[str] | None = None) -> Iterator[tuple[str, list[bytes]]]:
    """Yields the lines of a table with tabs, each with the words that name its place; a wrong number of columns raises.

    With a list `broken`, such a line is left out, and what is wrong with it is put there.
    """
    with open_bytes(path) as file:
        for number, line in enumerate(file, 1):
            fields = line.rstrip(b"\r\n").split(b"\t")
            place = f"{path}, line {number}"
            if len(fields) == len(columns):
                yield place, fields
                continue
            wrong = f"{place}: has {len(fields)} columns, but expected are {len(columns)}: {', '.join(columns)}"
            if broken is None:
                raise ValueError(wrong)
            broken.append(wrong)


def binary_label(place: str, field: bytes) -> int:
    """Returns a label of two classes."""
    labels = {b"0": 0, b"1": 1, b"0.0": 0, b"1.0": 1}
    if field not in labels:
        raise ValueError(f"{place}: the label is {field.decode(errors='replace')!r}, but expected is 0 or 1")
    return labels[field]


def nonempty(place: str, text: bytes) -> bytes:
    """Returns a text that is not empty."""
    if not text:
        raise ValueError(f"{place}: the text is empty, but expected is one byte at least")
    return text


def fixed_order(count: int) -> list[int]:
    """Returns an order that mixes the examples of files sorted by class; it is the same in every run.

    >>> fixed_order(5) == fixed_order(5), sorted(fixed_order(5))
    (True, [0, 1, 2, 3, 4])
    """
    return torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()


def read_picture(path: Path, mode: str) -> UInt8[Tensor, "rows columns *channels"]:
    """Returns the pixels of a picture in a mode of Pillow, "L" for grey and "RGB" for colours."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise ValueError(
            f"the package Pillow must be there to read {path.name}, but is not: {install_command('train')}"
        ) from error
    try:
        with Image.open(path) as picture:
            return pixels_of(picture.convert(mode))
    except (UnidentifiedImageError, OSError) as error:
        raise ValueError(f"{path} must be a picture, but cannot be read: {error}") from error


def pixels_of(image: Any) -> UInt8[Tensor, "rows columns *channels"]:
    """Returns the pixels of an image of Pillow in grey or in colours."""
    channels = {"L": (), "RGB": (3,)}[image.mode]
    return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(image.height, image.width, *channels)


def from_hub(name: str, split: str, config: str | None = None) -> Any:
    """Returns a split of a data set of the Hugging Face Hub, or of one of its configurations."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(f"the package datasets must be there for data='hub', but is not: {install_command('train')}") from error
    return load_dataset(name, *([] if config is None else [config]), split=split)


def write_whole(path: Path, text: str) -> None:
    """Writes a file that is there as a whole or not at all, also where several processes write it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, text)


def cache_folder() -> Path:
    """Returns where made data is stored: LAGWISE_CACHE, or a folder in the user's place for such files."""
    if own := os.environ.get("LAGWISE_CACHE"):
        return Path(own)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "lagwise"
    given = os.environ.get("LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME")
    return (Path(given) if given else Path.home() / ".cache") / "lagwise"


def cached_tensors(path: Path, make: Callable[[], dict[str, Tensor]]) -> dict[str, Any]:
    """Returns the tensors of a file, which are made and stored first if it is not there."""
    if not path.exists():
        save_tensors(path, make())
    return torch.load(path, weights_only=True, mmap=True)


def save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Writes tensors to a file that is there as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as part:
        torch.save(tensors, part)
    os.replace(part.name, path)
