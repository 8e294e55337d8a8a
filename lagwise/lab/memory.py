"""The peak memory of a call, on a GPU and on a CPU."""

import gc
import os
from collections.abc import Callable
from typing import Any

import torch


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
