"""The command line, one module for each kind of work; `base` has what they share."""

from . import training, sweeping, shipping, bench, bound, private, about  # noqa: F401, I001  the order of `pomona --help`
from .base import app, main

__all__ = ["app", "main"]
