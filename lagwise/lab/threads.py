"""How many threads a run has on a CPU."""

import os
from collections.abc import Sequence

import torch

from lagwise.lab.config import Config
from lagwise.lab.experiment import make_task

SMALL_STEP = 2**20
"""Numbers of a layer's output in a training step, below which one thread is enough."""


def use_threads(given: int | None, configs: Sequence[Config]) -> None:
    """Sets the threads of runs in this process: as many as given, one where all steps are small, or else what torch has.

    Threads of a small step mostly wait for each other, and they wait by spinning. On an idle machine a second one is worth
    little; where other processes have the cores, it can make a step thirty times as slow. The choice depends on the configs
    alone, so that a run that goes on has the threads that it began with. `OMP_NUM_THREADS` counts more.
    """
    if given is not None:
        torch.set_num_threads(given)
    elif "OMP_NUM_THREADS" not in os.environ and all(map(is_small, configs)):
        torch.set_num_threads(1)


def is_small(config: Config) -> bool:
    """Says whether a training step has too little to do for several threads; a task without a length says nothing of it."""
    length = make_task(config, None).length
    return length is not None and config.batch * length * config.dim < SMALL_STEP


def cores() -> int:
    """Returns how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
