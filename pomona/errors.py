"""The error class for invalid input and the helpers that raise it.

A message is one sentence with the value that was given, the limit, and what to do instead.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MAX_SUGGESTIONS = 3
MIN_SIMILARITY = 0.5  # difflib's ratio, below which a name is not suggested


class PomonaError(ValueError):
    """Invalid input from the user. The command line prints the message and exits with code 2."""


def unknown_name_error(kind: str, given: object, known: Iterable[str]) -> PomonaError:
    """Return the error for a name that does not exist, with a suggestion of the most similar known name."""
    names = sorted(known)
    close = difflib.get_close_matches(str(given), names, n=MAX_SUGGESTIONS, cutoff=MIN_SIMILARITY)
    # The longest common prefix decides among similar names: for resnet2 it suggests resnet20, not resnet32.
    best = max(close, key=lambda name: shared_prefix_length(str(given), name), default=None)
    hint = f"did you mean '{best}'?" if best else f"choose one of {', '.join(names)}."
    return PomonaError(f"unknown {kind} '{given}': {hint}")


def shared_prefix_length(a: str, b: str) -> int:
    """Return the length of the longest common prefix of two strings."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def require(condition: bool, message: str) -> None:
    """Raise `PomonaError(message)` unless the condition holds."""
    if not condition:
        raise PomonaError(message)
