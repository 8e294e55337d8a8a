"""The command line: `lagwise`, or `python -m lagwise`."""

try:
    import typer
    from rich.table import Table
except ImportError as error:
    raise SystemExit(f"the command line needs {error.name}: pip install 'lagwise[cli]'") from error

from lagwise.bench import commands as bench
from lagwise.console import console
from lagwise.lens import commands as lens
from lagwise.train import commands as train

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Relative positions for attention: compare encodings, train models with them, measure their speed and memory.",
)
train.register(app)
lens.register(app)
app.add_typer(bench.app, name="bench")


@app.command()
def encodings() -> None:
    """List all encodings, with the options that each takes.

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
