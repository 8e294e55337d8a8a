"""Times and peak memory of functions that are measured in turns, so that a busy machine disturbs all of them alike."""

import gc
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Measured:
    """Seconds, one per repeat, and the most memory in bytes that a call took beyond what was there before it."""

    seconds: list[float]
    peak: int

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def measure(
    functions: dict[str, Callable[[], object]],
    device: torch.device,
    repeats: int,
    progress: Callable[[str], None] = lambda name: None,
) -> dict[str, Measured]:
    """Calls each function once to warm up and for its memory, then all of them in turns."""
    peaks = {}
    for name, function in functions.items():
        progress(name)
        function()
        peaks[name] = peak_memory(function, device)
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            progress(name)
            seconds[name].append(once(function, device))
    return {name: Measured(seconds[name], peaks[name]) for name in functions}


def ratios(measured: dict[str, Measured], anchor: str) -> dict[str, float]:
    """Returns the median over the repeats of each function's time by the anchor's in the same turn."""
    by = measured[anchor].seconds
    return {
        name: statistics.median(own / base for own, base in zip(result.seconds, by, strict=True))
        for name, result in measured.items()
    }


def once(function: Callable[[], object], device: torch.device) -> float:
    """Returns the seconds of one call."""
    if device.type == "cuda":
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        start.record()
        function()
        stop.record()
        torch.cuda.synchronize(device)
        return start.elapsed_time(stop) / 1000.0
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def peak_memory(function: Callable[[], object], device: torch.device) -> int:
    """Returns how many bytes of tensors a call holds at most beyond what is there before it.

    A GPU's allocator counts them; on the CPU they are added up from the allocations that the profiler sees.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    # Without this the profiler tells of its start and stop on the screen.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    now = most = 0
    # What the profiler knows of an event is not in its type.
    events: list[Any] = profile.profiler.kineto_results.events()
    for event in events:
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most
