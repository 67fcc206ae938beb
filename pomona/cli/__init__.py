"""The `pomona` command line: each module holds one command or a few related ones and only parses, calls and prints.

`application` holds the group of commands, `options` the options that commands share, `output` the functions that
print, and `single_run` the parts that are common to commands which train one run.
"""

from . import demo, train, retrain, sweep, table, report, shrink, bench, export, hub, bound, private, info  # noqa: F401, I001  the order of `pomona --help`
from .application import app, main

__all__ = ["app", "main"]
