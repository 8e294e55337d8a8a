"""`lagwise encodings`."""

from rich.table import Table

from lagwise.lab.cli.console import console


def command() -> None:
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
