"""The first call of a kind: all kernels that it and its gradient need are compiled at once, before the first is launched.

Triton compiles a kernel where it is first launched, so that a call would compile its kernels one after the other, those of its
gradient last. Here a launch that finds no compiled kernel first goes through the whole call on tensors without data,
a rehearsal: its launches are noted, not made. What was noted is compiled on several threads. Triton's passes and its assembler
leave Python's lock to others, so that kernels are compiled side by side.
"""

import gc
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial, wraps
from threading import Lock, local
from time import sleep
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from triton import AsyncCompileMode, FutureKernel, knobs

from lagwise.ops.lowering import OPERANDS, Lowered, wanted_gradients


class Launch(NamedTuple):
    """What a kernel would be launched with, but for its grid."""

    kernel: Any
    values: Sequence[Any]
    warps: int
    stages: int

    def warm_up(self) -> Any:
        """Has Triton compile the kernel; launches nothing."""
        return self.kernel.warmup(*self.values, grid=(1,), num_warps=self.warps, num_stages=self.stages)


class Present(local):
    """What this thread is about."""

    rehearsal: Callable[[], object] | None = None  # of the call under way, until it has been held
    noted: list[Launch] | None = None  # launches of the rehearsal under way


_present = Present()


def rehearsed(backward: Callable[[], Callable[..., Any]] | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a decorator of a pass of an implementation, whose kernels are then compiled together.

    Args:
        backward: Returns the pass that follows where gradients are wanted; its kernels are compiled too.
    """

    def decorated(compute: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(compute)
        def computed(*arguments: Any) -> Any:
            if _present.noted is not None:
                return compute(*arguments)
            _present.rehearsal = partial(rehearse, compute, backward, arguments)
            try:
                return compute(*arguments)
            finally:
                # It holds the tensors of the call.
                _present.rehearsal = None

        return computed

    return decorated


def rehearse(compute: Callable[..., Any], backward: Callable[[], Callable[..., Any]] | None, arguments: Sequence[Any]) -> None:
    """Goes through a pass, and through the one that follows, on tensors without data."""
    given = [without_data(x) for x in arguments]
    results = compute(*given)
    lowered = given[0]
    if backward is not None and any(getattr(lowered, name).requires_grad for name in ("q", "k", "v")):
        learned = any(x.requires_grad for name, x in wanted_gradients(lowered, True) if name not in OPERANDS)
        backward()(lowered, results, without_data(results[0]), None, learned)


def without_data(x: Any) -> Any:
    """Returns tensors like those given, in lists and calls too, on the meta device, and aligned as they are."""
    if isinstance(x, Tensor):
        nothing = torch.empty(0, dtype=x.dtype, device="meta")
        skipped = x.data_ptr() % 16 // x.itemsize
        return nothing.set_(nothing.untyped_storage(), skipped, x.shape, x.stride()).requires_grad_(x.requires_grad)
    if isinstance(x, Lowered):
        # Plans of the call itself launch kernels.
        return Lowered._make(map(without_data, x))._replace(plans={})
    if isinstance(x, list):
        return [without_data(each) for each in x]
    if is_dataclass(x) and not isinstance(x, type):
        return replace(x, **{each.name: without_data(getattr(x, each.name)) for each in fields(x)})
    return x


def is_rehearsing() -> bool:
    """Says whether this thread goes through a call without data."""
    return _present.noted is not None


def note(kernel: Any, values: Sequence[Any], warps: int, stages: int) -> bool:
    """Notes a launch and says so, in a rehearsal; elsewhere it does nothing."""
    if _present.noted is None:
        return False
    _present.noted.append(Launch(kernel, values, warps, stages))
    return True


def launches_of(rehearsal: Callable[[], object]) -> list[Launch]:
    """Returns the launches of a rehearsal, of which nobody learns who counts, saves or hides operations."""
    _present.noted = noted = []
    try:
        with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
            rehearsal()
    finally:
        _present.noted = None
    return noted


def compiled_kernel(kernel: Any, values: Sequence[Any], warps: int, stages: int) -> Any:
    """Returns a kernel compiled for some arguments. All others of the call under way are compiled with it, once."""
    rehearsal, _present.rehearsal = _present.rehearsal, None
    if rehearsal is not None:
        compile_all(foreseen(rehearsal))
    found = Launch(kernel, values, warps, stages).warm_up()
    # Triton 3.7 keeps what a thread has promised; it raises what the thread raised.
    return found.result() if isinstance(found, FutureKernel) else found


def foreseen(rehearsal: Callable[[], object]) -> list[Launch]:
    """Returns the launches of a rehearsal. One that fails must not fail the call, which can do without: it warns."""
    try:
        return launches_of(rehearsal)
    except Exception as error:
        words = "kernels of this call are compiled one after the other, because going through it without data failed"
        warnings.warn(f"{words}: {error!r}. Please report this; results are not affected", RuntimeWarning, stacklevel=2)
        return []


def compile_all(launches: Sequence[Launch]) -> None:
    """Compiles kernels on some more threads than there are cores; one that fails is left to its launch, which raises.

    Those with the most arguments take longest, and come first. The first one is compiled while the next is read.
    """
    with one_after_the_other(), ThreadPoolExecutor() as threads, AsyncCompileMode(threads, ignore_errors=True):
        for each in sorted(launches, key=lambda each: -len(each.values)):
            each.warm_up()
            # Its thread has its turn now.
            sleep(0.001)


_alone = Lock()


@contextmanager
def one_after_the_other() -> Iterator[None]:
    """Lets Triton read kernels one after the other: it does so in Python, whose threads would take turns every few milliseconds.

    All of them would have been read only at the end, and none would be compiled before. Nor does Python look for garbage
    meanwhile, which takes it a fifth of that time. Other threads of a program may have to wait until a kernel has been read.
    """
    with _alone:
        interval, collects = sys.getswitchinterval(), gc.isenabled()
        sys.setswitchinterval(1.0)
        gc.disable()
        try:
            yield
        finally:
            sys.setswitchinterval(interval)
            if collects:
                gc.enable()


@dataclass
class Kernels:
    """Kernels that were asked for, by their hashes: those that were compiled, and those that Triton had on disk."""

    made: set[str] = field(default_factory=set)
    found: set[str] = field(default_factory=set)


@contextmanager
def counted_kernels() -> Iterator[Kernels]:
    """Counts the kernels that Triton compiles, or finds compiled, on all threads."""
    kernels, before = Kernels(), knobs.compilation.listener

    def listen(**event: Any) -> None:
        hashes = kernels.found if event["cache_hit"] else kernels.made
        hashes.add(event["metadata"]["hash"])
        if before is not None:
            before(**event)

    knobs.compilation.listener = listen
    try:
        yield kernels
    finally:
        knobs.compilation.listener = before
