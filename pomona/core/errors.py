"""Errors a user can mend: one sentence that names the value, the limit and the way out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PomonaError(ValueError):
    """A mistake in what was asked for. The command line prints it and exits with code 2."""


def unknown(kind: str, given: object, known: Iterable[str]) -> PomonaError:
    """The error for a name that does not exist, with the nearest one that does."""
    names = sorted(known)
    close = difflib.get_close_matches(str(given), names, n=1, cutoff=0.5)
    hint = f"did you mean '{close[0]}'?" if close else f"choose one of {', '.join(names)}."
    return PomonaError(f"unknown {kind} '{given}': {hint}")


def require(condition: bool, message: str) -> None:
    """Raise `PomonaError(message)` unless the condition holds."""
    if not condition:
        raise PomonaError(message)
