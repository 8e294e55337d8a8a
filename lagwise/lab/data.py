"""Which examples a step trains on: a function of the seed and the step, so that a run can go on anywhere."""

import signal
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lagwise.lab.tasks.base import Batch, Examples


class Order:
    """The order of the examples: one permutation after the other.

    >>> order = Order(examples=5, batch=3, seed=0)
    >>> sorted(order.indices(0) + order.indices(1)[:2])
    [0, 1, 2, 3, 4]
    """

    def __init__(self, *, examples: int, batch: int, seed: int):
        if examples < 1:
            raise ValueError("a task needs at least one training example, but has none")
        self.examples, self.batch, self.seed = examples, batch, seed
        self.permutation = lru_cache(maxsize=2)(self._permutation)

    def indices(self, step: int) -> list[int]:
        """Returns the examples of a step."""
        found: list[int] = []
        while len(found) < self.batch:
            epoch, place = divmod(step * self.batch + len(found), self.examples)
            found += self.permutation(epoch)[place : place + self.batch - len(found)].tolist()
        return found

    def _permutation(self, epoch: int) -> Tensor:
        # A generator mixes its seed, so that neighbouring ones have nothing in common.
        return torch.randperm(self.examples, generator=torch.Generator().manual_seed(self.seed * 1_000_003 + epoch))


class Source(Dataset):
    """Examples as a DataLoader asks for them: a batch at a time."""

    def __init__(self, examples: Examples):
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitems__(self, indices: list[int]) -> Batch:
        return self.examples.batch(indices)


def training_batches(
    examples: Examples,
    order: Order,
    first: int,
    last: int,
    *,
    rank: int = 0,
    processes: int = 1,
    workers: int = 0,
    pin: bool = False,
) -> Iterator[Batch]:
    """Yields the batches of the steps from `first` to before `last`: of each the share of one of several processes."""
    share = order.batch // processes
    steps = (order.indices(step)[rank * share : (rank + 1) * share] for step in range(first, last))
    return iter(loader(examples, Lazy(steps, last - first), workers=workers, pin=pin))


def evaluation_batches(
    examples: Examples,
    batch: int,
    *,
    limit: int | None = None,
    rank: int = 0,
    processes: int = 1,
    workers: int = 0,
    pin: bool = False,
) -> Iterator[Batch]:
    """Yields all examples in their order: of several processes each has every other batch."""
    count = len(examples) if limit is None else min(limit, len(examples))
    starts = range(rank * batch, count, batch * processes)
    return iter(loader(examples, [list(range(start, min(start + batch, count))) for start in starts], workers=workers, pin=pin))


class Lazy:
    """Lists of indices that are made when they are asked for."""

    def __init__(self, steps: Iterator[list[int]], count: int):
        self.steps, self.count = steps, count

    def __iter__(self) -> Iterator[list[int]]:
        return self.steps

    def __len__(self) -> int:
        return self.count


def loader(examples: Examples, indices: list[list[int]] | Lazy, *, workers: int, pin: bool) -> DataLoader:
    """Returns a loader of batches; it draws no number of the default generator, on which weights and dropout depend."""
    return DataLoader(
        Source(examples), batch_sampler=indices, collate_fn=as_it_is, num_workers=workers, pin_memory=pin,
        generator=torch.Generator().manual_seed(0), worker_init_fn=leave_interrupts,
    )  # fmt: skip


def leave_interrupts(number: int) -> None:
    """Leaves Ctrl-C, which a terminal sends to all processes, to the one that trains: it needs batches until it has stopped."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def is_dead_worker(error: RuntimeError) -> bool:
    """Says whether an error is that a process which makes batches has ended; torch has no class of its own for it."""
    return str(error).startswith("DataLoader worker (pid")


def as_it_is(batch: Any) -> Any:
    """Returns what is a batch already, in memory that can be copied as a whole."""
    return {name: x.contiguous() for name, x in batch.items()}
