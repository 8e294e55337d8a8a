"""`lagwise tasks`."""

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from lagwise.lab.cli.console import console, in_words

if TYPE_CHECKING:
    from lagwise.lab.tasks import Task


@in_words()
def command(
    name: Annotated[str | None, typer.Argument(metavar="[TASK]", help="Tell more about this one, or about a family.")] = None,
) -> None:
    """List all tasks, or tell about one: its data, its fields and presets, and what was published on it.

        lagwise tasks
        lagwise tasks glue
        lagwise tasks listops

    Fields of a task are set as task.NAME=VALUE, in compare and in train.
    """
    from lagwise.lab.tasks import TASKS

    family = [each for each in TASKS if name is not None and each.startswith(f"{name}/")]
    if name is None:
        show_tasks(TASKS, families=True)
        console.print("Without --data, a task generates its data or uses a small built-in sample.")
        console.print("`lagwise tasks TASK` tells more about one.")
    elif family:
        show_tasks({each: TASKS[each] for each in family})
    else:
        show_task(name)


def show_tasks(tasks: "Mapping[str, type[Task]]", *, families: bool = False) -> None:
    """Prints a line for each task; with `families`, one for all of those whose names begin alike."""
    grid = Table.grid(padding=(0, 2))
    rows: dict[str, list[str]] = {}
    for name, kind in tasks.items():
        family, slash, member = name.partition("/")
        if families and slash:
            rows.setdefault(f"{family}/...", []).append(member)
        else:
            rows[name] = [kind.facts.words]
    for name, words in rows.items():
        grid.add_row(name, ", ".join(words))
    console.print(grid, highlight=False)


def show_task(name: str) -> None:
    """Prints all that is known about a task, with a command that trains on it."""
    from lagwise.lab.experiment import main_metric, make_config, make_task
    from lagwise.lab.grouping import as_argument
    from lagwise.lab.tasks import task_named
    from lagwise.lab.tasks.files import cache_folder

    kind = task_named(name)
    facts = kind.facts
    config = make_config(name)
    metric, higher_is_better = main_metric(config)
    known = {
        "": " ".join((kind.__doc__ or "").split("\n\n")[0].split()),
        "metric": f"{metric}, {'higher' if higher_is_better else 'lower'} is better",
        "data": facts.source,
        "size": facts.size,
        "--data DIR": facts.files,
        "--data hub": facts.hub and f"downloads {facts.hub}",
        "cache": facts.files and f"{cache_folder()}, or the folder LAGWISE_CACHE, keeps what is made of the data once",
        "licence": facts.licence,
        "published": facts.published,
        "presets": ", ".join(kind.presets),
        "fields": ", ".join(f"task.{field.name}={as_argument(field.default)}" for field in fields(kind.Options)),
    }
    grid = Table.grid(padding=(0, 2))
    grid.add_row(name, facts.words, style="bold")
    for label, words in known.items():
        if words:
            grid.add_row(label, words)
    console.print(grid, markup=False, highlight=False)
    data = " --data DIR" if make_task(config, None).is_sample else ""
    console.print(f"\n  lagwise compare --task {name}{data}\n  lagwise train {name} --fields", markup=False, highlight=False)
