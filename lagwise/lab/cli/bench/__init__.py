"""The commands of `lagwise bench`, one file each."""

import typer

from lagwise.lab.cli.bench import attention, compare, compiled, hf, host, linear, loop, models, plot
from lagwise.lab.cli.console import help_of

app = typer.Typer(
    no_args_is_help=True,
    help="Measure speed and memory beside what people run without us.\n\nlagwise bench attention --quick",
)


for name, module in {
    "attention": attention, "host": host, "compiled": compiled, "linear": linear, "hf": hf, "models": models, "loop": loop,
    "compare": compare, "plot": plot,
}.items():  # fmt: skip
    app.command(name, help=help_of(module.command))(module.command)
