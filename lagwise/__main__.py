"""`python -m lagwise` is the command line."""

from lagwise.lab.cli import app

app()
