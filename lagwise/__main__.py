"""`python -m lagwise` is the command line."""

from lagwise.cli import app

app()
