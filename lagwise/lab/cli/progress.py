"""How far a command is: bars, counts, and what became of the runs of an encoding."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypeVar

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from lagwise.lab.cli.console import console

if TYPE_CHECKING:
    from lagwise.lab.config import Config
    from lagwise.lab.jobs import Outcome
    from lagwise.lab.loop import Settings

Item = TypeVar("Item")


def progress_bar(*, hidden: bool = False) -> Progress:
    """Returns a bar with how much is done of how much, some facts, and the time that is left."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[facts]}"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, disable=hidden)


def count_cases(cases: Sequence[Item], words: Callable[[Item], str]) -> Iterator[tuple[Item, Callable[[str], None]]]:
    """Yields cases one by one, each with a function that is told what is being done, and shows their count and the time left.

    Where the output is no terminal, each case that is done leaves a line.
    """
    began = time.perf_counter()
    with progress_bar(hidden=not console.is_terminal) as progress:
        bar = progress.add_task("", total=len(cases), facts="")
        for done, case in enumerate(cases, 1):
            progress.update(bar, description=words(case))
            yield case, lambda name: progress.update(bar, facts=name)
            progress.advance(bar)
            if not console.is_terminal:
                left = (time.perf_counter() - began) / done * (len(cases) - done)
                console.print(f"{done} of {len(cases)}: {words(case)}; about {left:.0f} s left", highlight=False)


@contextmanager
def count_done() -> Iterator[Callable[[str, int, int], None]]:
    """Yields a function that shows what was done last, how much is done, and of how much; a line for each without a terminal."""
    with progress_bar(hidden=not console.is_terminal) as progress:
        bar = progress.add_task("", total=None, facts="")

        def watch(words: str, done: int, of: int) -> None:
            progress.update(bar, total=of, completed=done, facts=words)
            if words and not console.is_terminal:
                console.print(f"{done} of {of}: {words}", highlight=False)

        yield watch


def advance(progress: Progress, bar: TaskID, line: dict[str, Any]) -> None:
    """Shows a line of the metrics."""
    progress.update(bar, completed=line["step"])
    if "split" not in line:
        speed = line["tokens"] / line["seconds"] if line["seconds"] else 0.0
        progress.update(bar, facts=f"loss {line['loss']:.4f}, {speed:,.0f} tokens/s")


def run_with_progress(configs: list["Config"], out: Path, settings: "Settings", jobs: int | None, again: bool) -> "list[Outcome]":
    """Runs all configs with one bar for all steps; the numbers of an encoding appear when its last seed is done."""
    from lagwise.lab import compare as comparing
    from lagwise.lab.threads import use_threads

    jobs = jobs or comparing.default_jobs(settings.device)
    if jobs == 1:
        use_threads(None, configs)
    with progress_bar() as progress:
        bar = progress.add_task("", total=sum(config.steps for config in configs), facts="")
        done: dict[int, int] = {}
        rows = Counter(config.fingerprint(without=["seed"]) for config in configs)
        outcomes: dict[str, list[Outcome]] = {row: [] for row in rows}

        def watch(event: dict[str, Any]) -> None:
            config, line = event["config"], event.get("line")
            done[event["run"]] = config.steps if line is None else line["step"]
            loss = "" if line is None or "split" in line else f"loss {line['loss']:.3f}"
            words = f"{config.encoding}, seed {config.seed} ({event['run'] + 1} of {event['of']})"
            progress.update(bar, completed=sum(done.values()), description=words, facts=loss)
            if line is None:
                row = config.fingerprint(without=["seed"])
                outcomes[row].append(event["outcome"])
                if len(outcomes[row]) == rows[row]:
                    progress.console.print(outcome_words(outcomes[row]), markup=False, highlight=False)

        return comparing.run_all(configs, out, settings, jobs=jobs, again=again, watch=watch)


def outcome_words(outcomes: "Sequence[Outcome]") -> str:
    """Returns what became of the runs of one encoding, in one line."""
    from lagwise.lab.estimates import estimate
    from lagwise.lab.experiment import main_metric

    config = outcomes[0].config
    metric, _ = main_metric(config)
    results = [result for outcome in outcomes if outcome.error is None and (result := outcome.run.result) is not None]
    failed = len(outcomes) - len(results)
    words = [f"{failed} of {len(outcomes)} runs failed"] if failed else []
    if results:
        score = estimate([result["test"][metric] for result in results])
        seconds = fmean(result["seconds"] for result in results)
        words.insert(0, f"test {metric} {score}, {seconds:.1f} s a run")
    return f"{config.encoding:<12} {', '.join(words)}"


def failures(outcomes: "Sequence[Outcome]") -> list[str]:
    """Returns which runs failed, each reason once."""
    found: dict[str, list[str]] = {}
    for outcome in outcomes:
        if outcome.error is not None:
            found.setdefault(outcome.error, []).append(f"{outcome.config.encoding}, seed {outcome.config.seed}")
    return [f"{'all runs' if len(runs) == len(outcomes) else '; '.join(runs)} failed: {error}" for error, runs in found.items()]
