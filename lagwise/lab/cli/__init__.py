"""The command line: `lagwise`, or `python -m lagwise`. Every command is a file of its own."""

from typing import Annotated

from lagwise.extras import install_command

try:
    import rich  # noqa: F401
    import typer
except ImportError as error:
    raise SystemExit(f"the command line needs {error.name}: {install_command('train')}") from error

from lagwise import __version__
from lagwise.lab.cli import (
    ablate,
    bench,
    compare,
    encodings,
    evaluate,
    generate,
    lens,
    repeat,
    results,
    styles,
    tasks,
    train,
    warmup,
)
from lagwise.lab.cli.console import help_of

app = typer.Typer(no_args_is_help=True, add_completion=False)
app.add_typer(bench.app, name="bench")
for name, module in {
    "compare": compare, "repeat": repeat, "train": train, "evaluate": evaluate, "generate": generate, "styles": styles,
    "tasks": tasks, "results": results, "lens": lens, "ablate": ablate, "encodings": encodings,
    "warmup": warmup,
}.items():  # fmt: skip
    app.command(name, help=help_of(module.command))(module.command)


def show_version(wanted: bool) -> None:
    """Prints the version, and stops."""
    if wanted:
        typer.echo(f"lagwise {__version__}")
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


assert app.registered_callback is not None
app.registered_callback.help = help_of(start)
