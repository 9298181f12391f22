"""`python -m acclimate`: the command line."""

from .cli import app

app()
