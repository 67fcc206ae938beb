"""Errors a user can mend: one sentence that names the value, the limit and the way out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PomonaError(ValueError):
    """A mistake in what was asked for. The command line prints it and exits with code 2."""


def unknown(kind: str, given: object, known: Iterable[str]) -> PomonaError:
    """The error for a name that does not exist, with the nearest one that does."""
    names = sorted(known)
    close = difflib.get_close_matches(str(given), names, n=3, cutoff=0.5)
    # Among the close names the one that begins the same way: resnet2 is resnet20, not resnet32.
    best = max(close, key=lambda name: shared_start(str(given), name), default=None)
    hint = f"did you mean '{best}'?" if best else f"choose one of {', '.join(names)}."
    return PomonaError(f"unknown {kind} '{given}': {hint}")


def shared_start(a: str, b: str) -> int:
    """How many letters two words have in common from the start."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def require(condition: bool, message: str) -> None:
    """Raise `PomonaError(message)` unless the condition holds."""
    if not condition:
        raise PomonaError(message)
