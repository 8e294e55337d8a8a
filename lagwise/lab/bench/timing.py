"""Times and peak memory of functions that are measured in turns, so that a busy machine disturbs all of them alike."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lagwise.lab.memory import peak_memory

# On a GPU a turn is as many calls as fill TURN_SECONDS, at most MOST_CALLS, and all turns together take about ALL_SECONDS. In one
# call alone the GPU would wait for the host; in a row of them, as in training, the host is ahead.
TURN_SECONDS, MOST_CALLS = 0.04, 200
ALL_SECONDS, FEWEST_TURNS = 0.5, 3


@dataclass(frozen=True)
class Measured:
    """Seconds of a call, one number per turn, and the most memory in bytes that it took beyond what was there before it.

    A function that failed has no seconds, and says why in `error`.
    """

    seconds: list[float]
    peak: int = 0
    error: str | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def measure(
    functions: dict[str, Callable[[], object]],
    device: torch.device,
    repeats: int,
    progress: Callable[[str], None] = lambda name: None,
    *,
    graph: bool = False,
) -> dict[str, Measured]:
    """Calls each function once to warm up and once for its memory, then all of them in turns.

    With `graph` a turn replays a CUDA graph of the call; the memory is that of the call itself. What fails before its first
    turn is left out of them, and its error returned.
    """
    measured: dict[str, Measured] = {}
    ready: dict[str, tuple[Callable[[], object], int, int]] = {}
    for name, function in functions.items():
        progress(name)
        try:
            function()
            measured[name] = Measured([], peak_memory(function, device))
            call = graphed(function, device) if graph else function
            turns, calls = turns_and_calls(seconds_of(call, device), repeats) if device.type == "cuda" else (repeats, 1)
            ready[name] = call, turns, calls
        except Exception as error:
            measured[name] = Measured([], error=error_words(error))
    for turn in range(repeats):
        for name, (call, turns, calls) in ready.items():
            if turn < turns:
                progress(name)
                measured[name].seconds.append(seconds_of(call, device, calls))
    return measured


def turns_and_calls(seconds: float, repeats: int) -> tuple[int, int]:
    """Returns the number of turns, and of calls in a turn, for a function on a GPU that takes so many seconds.

    >>> turns_and_calls(0.0001, repeats=7), turns_and_calls(0.004, repeats=7), turns_and_calls(1.0, repeats=7)
    ((7, 200), (7, 10), (3, 1))
    """
    calls = min(max(int(TURN_SECONDS / seconds), 1), MOST_CALLS)
    return min(max(int(ALL_SECONDS / (calls * seconds)), FEWEST_TURNS), repeats), calls


def error_words(error: Exception) -> str:
    """Returns the kind and the beginning of the message of an error, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]


def ratios(measured: dict[str, Measured], anchor: str) -> dict[str, float]:
    """Returns the median over the turns of each function's time by the anchor's in the same turn, of all that have both."""
    by = measured[anchor].seconds
    return {
        # A slow function has fewer turns than others, the first ones.
        name: statistics.median(own / base for own, base in zip(result.seconds, by, strict=False))
        for name, result in measured.items()
        if result.seconds and by
    }


def seconds_of(function: Callable[[], object], device: torch.device, calls: int = 1) -> float:
    """Returns the seconds of one call, the mean over several in a row."""
    if device.type == "cuda":
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        start.record()
        for _ in range(calls):
            function()
        stop.record()
        torch.cuda.synchronize(device)
        return start.elapsed_time(stop) / 1000.0 / calls
    began = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - began) / calls


def graphed(function: Callable[[], object], device: torch.device) -> Callable[[], None]:
    """Returns the replay of a CUDA graph of a call, which first runs on the graph's stream to warm up."""
    stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream(device))
    try:
        # Entered here too, because torch does not go back to the stream before when a capture fails.
        with torch.cuda.stream(stream):
            for _ in range(2):
                function()
            with torch.cuda.graph(graph, stream=stream):
                function()
    except Exception as error:
        # A capture that fails leaves the default generator waiting for its end, and every later use of it would fail too.
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        generator.graphsafe_set_state(generator.clone_state())
        # Ending the capture fails as well, and would hide the reason.
        raise (error.__context__ or error) from None
    torch.cuda.current_stream(device).wait_stream(stream)
    return graph.replay
