"""What every method promises, as functions that any package can run on its own methods: `acclimate check`."""

from .promises import PROMISES, BrokenPromiseError, Promise
from .subject import Subject, applies, subjects

__all__ = ["PROMISES", "BrokenPromiseError", "Promise", "Subject", "applies", "subjects"]
