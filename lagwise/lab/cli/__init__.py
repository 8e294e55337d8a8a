"""The command line: `lagwise`, or `python -m lagwise`."""

from typing import Annotated

from lagwise.extras import install_command

try:
    import typer
    from rich.table import Table
except ImportError as error:
    raise SystemExit(f"the command line needs {error.name}: {install_command('train')}") from error

from lagwise import __version__
from lagwise.lab.cli import bench as bench
from lagwise.lab.cli import lens as lens
from lagwise.lab.cli import train as train
from lagwise.lab.cli.console import console, help_of

app = typer.Typer(no_args_is_help=True, add_completion=False)
train.register(app)
lens.register(app)
app.add_typer(bench.app, name="bench")


def show_version(wanted: bool) -> None:
    """Prints the version, and stops."""
    if wanted:
        console.print(f"lagwise {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def start(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version, and stop.", callback=show_version, is_eager=True)
    ] = False,
) -> None:
    """Relative positions for attention: compare encodings, train models with them, measure their speed and memory.

        lagwise compare
        lagwise train process-50 --encoding at5
        lagwise COMMAND --help

    Data that is made once, such as tokenizers and token files, is kept in the folder LAGWISE_CACHE (~/.cache/lagwise unless
    that variable is set). It may be deleted at any time.
    """


@app.command()
def encodings() -> None:
    """List all encodings, with the options that each takes.

        lagwise encodings

    Every one can be made with lagwise.make(NAME, heads=..., head_dim=..., ...). Options without a value must be given; heads,
    head_dim, dim and max_lag may be given to any encoding, which takes those that it knows. NAME may also be one of the names
    in the last column.
    """
    import inspect

    from lagwise.encodings import ALIASES, ENCODINGS, options_of

    table = Table("name", "what it does", "options", "also called")
    for name, kind in ENCODINGS.items():
        options = [
            option if default is inspect.Parameter.empty else f"{option}={default}"
            for option, default in options_of(name).items()
        ]
        first = (kind.__doc__ or "").strip().splitlines()[0]
        table.add_row(name, first, ", ".join(options), ", ".join(alias for alias, of in ALIASES.items() if of == name))
    console.print(table)


for group in (app, bench.app):
    for command in group.registered_commands:
        assert command.callback is not None
        command.help = help_of(command.callback)
assert app.registered_callback is not None
app.registered_callback.help = help_of(start)
