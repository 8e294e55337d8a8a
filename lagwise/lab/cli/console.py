"""What all commands share: where they print, how they count, and how they end."""

import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from textwrap import dedent
from typing import Any

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from lagwise.extras import install_command
from lagwise.lab.signals import ignore_signals, interrupt, on_signal

# A table that is piped to a file keeps its columns. Brackets in names of files and in messages are no markup.
console = Console(width=None if sys.stdout.isatty() else 160, markup=False)
errors = Console(stderr=True, soft_wrap=True, markup=False)


@contextmanager
def in_words() -> Iterator[None]:
    """Ends a command in words instead of a traceback.

    Exit status 2 says that what was asked for cannot be done, 1 that it went wrong on the way, 130 that the user stopped it.
    """
    try:
        with warnings.catch_warnings(), on_signal(interrupt):
            warnings.showwarning = lambda message, *_, **__: console.print(f"warning: {message}")
            yield
    except KeyboardInterrupt as error:
        ignore_signals()
        console.print(str(error) or "stopped")
        raise typer.Exit(130) from error
    except ValueError as error:
        raise failed(str(error), 2) from error
    except ArithmeticError as error:
        raise failed(str(error), 1) from error
    except ModuleNotFoundError as error:
        raise failed(f"this needs {error.name}: {install_command('train')}", 1) from error
    except ImportError as error:
        raise failed(str(error), 1) from error
    except OSError as error:
        raise failed(f"{error.filename}: {error.strerror}" if error.filename else str(error), 1) from error


def failed(words: str, status: int) -> typer.Exit:
    """Says what went wrong, and returns what ends the command."""
    errors.print(f"error: {words}", highlight=False)
    return typer.Exit(status)


def print_whole(table: Table, where: Console = console) -> None:
    """Prints a table in lines as long as they have to be, so that a narrow screen breaks them and cuts nothing off."""
    table.width = Measurement.get(where, where.options.update(max_width=1000), table).maximum
    where.print(table, crop=False, soft_wrap=True)


def help_of(command: Callable[..., Any]) -> str:
    """Returns the help of a command: its docstring, whose paragraphs fill any width and whose indented examples keep their lines.

    Examples lose their indentation, which typer would take from the first of them alone.

    >>> def command():
    ...     '''Counts
    ...     words.
    ...
    ...         count FILE
    ...     '''
    >>> help_of(command)
    'Counts words.\\n\\ncount FILE'
    """
    paragraphs = (inspect.getdoc(command) or "").split("\n\n")
    return "\n\n".join(dedent(each) if each.startswith(" ") else each.replace("\n", " ") for each in paragraphs)
