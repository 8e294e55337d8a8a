"""Long-Range Arena's Pathfinder: whether a line joins two dots among other lines."""

import warnings
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from lagwise.lab.tasks.base import SPLITS, Facts, Split
from lagwise.lab.tasks.files import binary_label, fixed_order, read_picture
from lagwise.lab.tasks.lra.pixels import PIXELS, SIDE, Pictures, PixelTask
from lagwise.lab.tasks.lra.presets import lra_presets

LEVEL = "curv_contour_length_14"
SOURCE = "the files are in lra_release.gz of https://github.com/google-research/long-range-arena"
ARRAYS: dict[Split, str] = {"train": "train", "validation": "val", "test": "test"}
"""What the file of arrays calls the splits."""

COMMON = {
    "realizations": 32, "batch": 512, "rate": 1e-3, "schedule": "cosine", "warmup": 312, "steps": 62_400, "weight_decay": 0.0,
    "dropout": 0.2,
}  # fmt: skip
PERFORMER = lra_presets(**COMMON, layers=4, heads=8, dim=32, head_dim=2, hidden=32)
RELU = lra_presets(**COMMON, layers=1, heads=2, dim=128, head_dim=32, hidden=128)
PRESETS = {name: preset if name.startswith("performer") else RELU[name] for name, preset in PERFORMER.items()}


class Pathfinder(PixelTask):
    """Pictures of dashed lines and two dots, in two classes."""

    classes = 2
    pooling = "mean"
    facts: ClassVar[Facts] = Facts(
        words="does a dashed line join two dots? Tokens are the 1,024 pixels",
        metric="accuracy",
        source="Pathfinder (Kim et al. 2020), the hard level at 32 x 32, as in the Long-Range Arena (Tay et al. 2021)",
        size="80 % training, 10 % validation and 10 % test pictures of all in the files, in one fixed random order",
        licence="none stated; the pictures are generated",
        published="none by Liutkus et al. 2021, who released no runs; the presets have the sizes of the Long-Range Arena",
        files="pathfinder32/curv_contour_length_14 with metadata/*.npy and imgs, or one .npz of image, label and split",
    )
    defaults: ClassVar[dict[str, Any]] = {
        "dim": 64, "layers": 2, "heads": 2, "batch": 16, "steps": 300, "warmup": 30, "evaluate_examples": 500,
    }  # fmt: skip
    presets = PRESETS

    def load(self, split: Split) -> dict[Split, Pictures]:
        if self.data is None:
            return {split: sample_paths(split)}
        folder = Path(self.data)
        for level in (folder / "pathfinder32" / LEVEL, folder / LEVEL):
            if level.is_dir():
                return split_pictures(read_level(level))
        arrays = sorted(folder.glob("*.npz"))
        if len(arrays) != 1:
            raise ValueError(
                f"data must be a folder with pathfinder32/{LEVEL} or one .npz file, but {folder} has "
                f"{len(arrays)} .npz files: {SOURCE}"
            )
        return read_arrays(arrays[0])


def split_pictures(pictures: Pictures) -> dict[Split, Pictures]:
    """Returns 80 %, 10 % and 10 % of the pictures.

    The Long-Range Arena has the same shares of the order in which its files were stored, which is not known: here it is fixed.
    """
    order = torch.tensor(fixed_order(len(pictures.label)))
    first, second = len(order) * 8 // 10, len(order) * 9 // 10
    parts = (order[:first], order[first:second], order[second:])
    return {split: Pictures(pictures.tokens[part], pictures.label[part]) for split, part in zip(SPLITS, parts, strict=True)}


def read_level(level: Path) -> Pictures:
    """Returns the pictures that the lists of a level name, without empty files, which the Long-Range Arena leaves out too."""
    lists = sorted(level.glob("metadata/*.npy"), key=lambda path: (len(path.stem), path.stem))
    if not lists:
        raise ValueError(
            f"data must be a folder with lists of pictures in {level / 'metadata'}, but there is no .npy file: {SOURCE}"
        )
    tokens, labels, empty = [], [], 0
    for path in lists:
        # In spite of the ending they are lines of text.
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            place, fields = f"{path}, line {number}", line.split(b" ")
            if len(fields) < 4:
                raise ValueError(f"{place}: has {len(fields)} words, but expected are folder, file, number and label at least")
            image = level / fields[0].decode() / fields[1].decode()
            label = binary_label(place, fields[3])
            if not image.is_file():
                raise ValueError(f"{place}: names {image}, which is missing, but expected is a picture: {SOURCE}")
            if image.stat().st_size == 0:
                empty += 1
                continue
            tokens.append(read_pixels(image))
            labels.append(label)
    if empty:
        warnings.warn(f"{level} has {empty} empty files, which are left out", stacklevel=2)
    return Pictures(torch.stack(tokens), torch.tensor(labels))


def read_pixels(path: Path) -> Tensor:
    """Returns the pixels of a picture of the right size, row by row."""
    image = read_picture(path, "L")
    if image.shape != (SIDE, SIDE):
        raise ValueError(f"{path} must have {SIDE} x {SIDE} pixels, but has {image.shape[1]} x {image.shape[0]}")
    return image.flatten()


def read_arrays(path: Path) -> dict[Split, Pictures]:
    """Returns the pictures of a file of arrays, in its own splits."""
    import numpy

    with numpy.load(path, allow_pickle=False) as arrays:
        missing = {"image", "label", "split"} - set(arrays.files)
        if missing:
            raise ValueError(f"{path} must have the arrays image, label and split, but has no {', '.join(sorted(missing))}")
        image, label, split = (arrays[name] for name in ("image", "label", "split"))
    if image.dtype != numpy.uint8 or image.shape != (len(label), SIDE, SIDE) or split.shape != label.shape:
        raise ValueError(
            f"{path} must have pictures [number, {SIDE}, {SIDE}] as uint8 and as many labels and splits, but has {image.dtype} "
            f"{list(image.shape)}, {list(label.shape)} labels and {list(split.shape)} splits"
        )
    if not numpy.isin(label, (0, 1)).all() or not numpy.isin(split, list(ARRAYS.values())).all():
        raise ValueError(f"{path} must have labels 0 and 1, and splits of {', '.join(ARRAYS.values())}, but has others")
    tokens, labels = torch.from_numpy(image).view(-1, PIXELS), torch.from_numpy(label).long()
    parts = [torch.from_numpy(split == ARRAYS[name]) for name in SPLITS]
    return {name: Pictures(tokens[part], labels[part]) for name, part in zip(SPLITS, parts, strict=True)}


SAMPLE_SIZES = {"train": 64, "validation": 32, "test": 32}


def sample_paths(split: Split) -> Pictures:
    """Returns made-up pictures of two dots and a line that wanders from one to the other (1), or breaks off on the way (0)."""
    rng = torch.Generator().manual_seed(SPLITS.index(split))
    count = SAMPLE_SIZES[split]
    label = torch.arange(count) % 2
    columns = torch.arange(3, SIDE - 3)
    start = torch.randint(8, SIDE - 8, (count, 1), generator=rng)
    steps = torch.randint(-1, 2, (count, len(columns)), generator=rng)
    wander = (start + steps.cumsum(1)).clamp(2, SIDE - 3)
    drawn = (label[:, None] == 1) | (columns < 8) | (columns > 23)
    # The line has three pixels in each column, and its ends have a dot of five.
    rows = torch.arange(SIDE)[:, None]
    away = (rows - wander[:, None]).abs()
    ends = (columns == columns[0]) | (columns == columns[-1])
    pictures = torch.zeros(count, SIDE, SIDE, dtype=torch.uint8)
    pictures[:, :, columns] = 255 * (drawn[:, None] & (away <= 1 + ends.long())).to(torch.uint8)
    return Pictures(pictures.view(count, PIXELS), label)
