"""What the tasks of the Long-Range Arena on pictures share: 32 x 32 pixels in grey as tokens."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from jaxtyping import Int, UInt8
from torch import Tensor

from lagwise.lab.config import Config
from lagwise.lab.tasks.base import Batch, Classification, Split, Tensors
from lagwise.lab.tasks.lra.presets import suited_options
from lagwise.lab.tasks.models import Classifier, Pooling

SIDE = 32
PIXELS = SIDE * SIDE
SYMBOLS = 256
GRID_KERNEL_SIZE = 16
"""Taps of filters on each axis of a picture; the papers have none on pictures."""


class Pictures(NamedTuple):
    """Pictures row by row, and their classes."""

    tokens: UInt8[Tensor, "pictures pixels"]
    label: Int[Tensor, " pictures"]


class PixelExamples(Tensors):
    """Pictures as tokens, which are small numbers until they are in a batch."""

    def batch(self, indices: Sequence[int]) -> Batch:
        batch = super().batch(indices)
        return {**batch, "tokens": batch["tokens"].long()}


@dataclass(frozen=True)
class PixelOptions:
    """What can be chosen of a task on pictures.

    Args:
        grid: Give encodings that know grids the rows and columns of a pixel, instead of its place in one long sequence.
    """

    grid: bool = False


class PixelTask(Classification):
    """A task on pictures of 32 x 32 pixels in grey, whose values are the tokens."""

    Options = PixelOptions
    pooling: ClassVar[Pooling]
    """How the published models make one vector of all pixels."""

    def __init__(self, data: Path | str | None = None, *, seed: int = 0, **options: Any):
        super().__init__(data, seed=seed, **options)
        self.pictures: dict[Split, Pictures] = {}

    @abstractmethod
    def load(self, split: Split) -> dict[Split, Pictures]:
        """Returns the pictures of a split, and of those that are read together with it."""

    def examples(self, split: Split, length: int | None = None) -> PixelExamples:
        if length not in (None, PIXELS):
            raise ValueError(f"length must be {PIXELS}, the number of pixels, but is {length}: pictures come in one size")
        if split not in self.pictures:
            self.pictures |= self.load(split)
        return PixelExamples(**self.pictures[split]._asdict())

    def model(self, config: Config) -> Classifier:
        # A vector before the pixels would move each of them by one column.
        pooling = "mean" if self.options.grid else self.pooling
        return Classifier(config, symbols=SYMBOLS, classes=self.classes, pooling=pooling)

    def encoding_options(self, encoding: str) -> dict[str, Any]:
        options = suited_options(encoding, self.presets, PIXELS)
        if self.options.grid and encoding == "conv-spe":
            options |= {"grid": (SIDE,), "kernel_size": GRID_KERNEL_SIZE}
        return options
