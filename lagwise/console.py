"""Where the command line prints."""

import sys

from rich.console import Console

# A table that is piped to a file keeps its columns.
console = Console(width=None if sys.stdout.isatty() else 160)
