"""Ctrl-C and requests to end (SIGTERM): several in a row are one."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

STOPPING = (signal.SIGINT, signal.SIGTERM)

PATIENCE = 5.0
"""Seconds in which further signals are the same request: launchers and impatient fingers send several."""


class Interrupted(KeyboardInterrupt):
    """Training was stopped by the user; the words say what is saved."""


class Handler:
    """Acts on a signal, unless it repeats one that it, or a handler around it, has acted on."""

    def __init__(self, act: Callable[[], None], around: Any):
        self.act = act
        self.acted: list[float] = around.acted if isinstance(around, Handler) else []

    def __call__(self, number: int, frame: Any) -> None:
        now = time.monotonic()
        if self.acted and now - self.acted[-1] < PATIENCE:
            return
        self.acted.append(now)
        self.act()


@contextmanager
def on_signal(act: Callable[[], None]) -> Iterator[None]:
    """Acts on Ctrl-C and requests to end, until it is left."""
    handler = Handler(act, signal.getsignal(signal.SIGINT))
    try:
        before = {number: signal.signal(number, handler) for number in STOPPING}
    except ValueError:
        # Signals belong to the main thread.
        yield
        return
    try:
        yield
    finally:
        for number, own in before.items():
            signal.signal(number, own)


def ignore_signals() -> None:
    """Lets Ctrl-C and requests to end pass, in a process that is ending."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)


def interrupt() -> None:
    """Ends what is being done, as Ctrl-C does by itself."""
    raise KeyboardInterrupt


@contextmanager
def stop_on_signal() -> Iterator[list[bool]]:
    """Collects requests to stop, so that a step can be finished; one that is repeated later ends at once."""
    received: list[bool] = []

    def remember() -> None:
        if received:
            interrupt()
        received.append(True)

    with on_signal(remember):
        yield received
