"""`lagwise bench loop`: does the input keep up? Training steps on new batches, beside steps on one that lies on the device."""

import time
from collections.abc import Iterator
from itertools import repeat
from typing import Any

import torch

from lagwise.lab.config import Config
from lagwise.lab.data import Order, training_batches
from lagwise.lab.environment import machine
from lagwise.lab.loop import Session, Settings, to_device
from lagwise.lab.tasks.base import Batch

WARMUP, TURNS = 5, 3


def measure_loop(config: Config, settings: Settings, *, steps: int) -> dict[str, Any]:
    """Returns the milliseconds of a step with the input and on a fixed batch, and the share of the speed that the input leaves.

    The two take turns, and the fastest turn of each counts: what else a machine does makes steps slower, never faster.
    """
    session = Session(config, settings)
    session.model.train()
    examples = session.task.examples("train")
    order = Order(examples=len(examples), batch=config.batch, seed=config.seed)
    held = to_device(next(training_batches(examples, order, 0, 1)), session.device)
    found: dict[str, list[float]] = {"loop": [], "fixed": []}
    for turn in range(TURNS):
        first = turn * (WARMUP + steps)
        batches = training_batches(examples, order, first, first + WARMUP + steps, **session.input)
        found["loop"].append(seconds(session, batches))
        found["fixed"].append(seconds(session, repeat(held, WARMUP + steps)))
    loop, fixed = min(found["loop"]), min(found["fixed"])
    return {
        "bench": "loop", "config": config.to_json(), "data": str(settings.data), "workers": session.input["workers"],
        "steps": steps, "loop_ms": 1e3 * loop, "fixed_ms": 1e3 * fixed, "share": fixed / loop, **machine(session.device),
    }  # fmt: skip


def seconds(session: Session, batches: Iterator[Batch]) -> float:
    """Returns the seconds of a training step, with the reports of the loss, after some that warm up."""
    start, steps = 0.0, 0
    for number, batch in enumerate(batches):
        if number == WARMUP:
            start = now(session.device)
        session.train_step(batch)
        if session.step % session.settings.report_every == 0:
            session.report()
        steps = number + 1 - WARMUP
    return (now(session.device) - start) / steps


def now(device: torch.device) -> float:
    """Returns the time when a device has done what it was asked to."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
