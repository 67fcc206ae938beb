"""Plugins: modules of the user that register methods, patterns, schedules, models or data sets when they are imported.

They are named by `pomona --plugin MODULE` or in the environment variable POMONA_PLUGINS, which worker processes
inherit.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable

from pomona.errors import PomonaError

VARIABLE = "POMONA_PLUGINS"


def add_plugins(modules: Iterable[str]) -> None:
    """Add modules to those in POMONA_PLUGINS, and import all of them."""
    named = [*filter(None, os.environ.get(VARIABLE, "").split(",")), *modules]
    if named:
        os.environ[VARIABLE] = ",".join(dict.fromkeys(named))
    load_plugins()


def load_plugins() -> None:
    """Import the modules named in POMONA_PLUGINS; modules of the current folder are found too."""
    for module in filter(None, os.environ.get(VARIABLE, "").split(",")):
        if os.getcwd() not in sys.path:  # a console script does not look there
            sys.path.append(os.getcwd())
        try:
            importlib.import_module(module)
        except Exception as error:  # a user's module may fail in any way
            raise PomonaError(
                f"plugin '{module}' cannot be imported ({type(error).__name__}: {error}): give a module that Python "
                "can import, such as my_methods for my_methods.py in the current folder."
            ) from error
