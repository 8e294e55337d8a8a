"""Where the command line prints."""

import sys

from rich.console import Console

# A table that is piped to a file keeps its columns. Brackets in names of files and in messages are no markup.
console = Console(width=None if sys.stdout.isatty() else 160, markup=False)
