"""Random choices for the samples that the tasks have built in."""

from collections.abc import Sequence
from typing import TypeVar

import torch

Option = TypeVar("Option")


class Chooser:
    """Chooses one of some options, each as likely as the others; the same seed chooses the same.

    >>> one_of, again = Chooser(seed=0), Chooser(seed=0)
    >>> [one_of("abc") for _ in range(4)] == [again("abc") for _ in range(4)]
    True
    """

    def __init__(self, seed: int):
        self.rng = torch.Generator().manual_seed(seed)

    def __call__(self, options: Sequence[Option]) -> Option:
        return options[int(torch.randint(len(options), (), generator=self.rng))]
