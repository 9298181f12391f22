"""The command line: parse arguments, call the library, print."""

from .main import app, main

__all__ = ["app", "main"]
