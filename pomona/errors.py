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
    wanted, by_lower_case = str(given).lower(), {name.lower(): name for name in reversed(names)}
    close = difflib.get_close_matches(wanted, by_lower_case, n=MAX_SUGGESTIONS, cutoff=MIN_SIMILARITY)

    def closeness(name: str) -> tuple[float, int]:
        # The longest common prefix decides among equals: for resnet2 it suggests resnet20, not resnet32.
        return difflib.SequenceMatcher(None, name, wanted).ratio(), shared_prefix_length(name, wanted)

    best = by_lower_case.get(max(close, key=closeness, default=""))
    hint = f"did you mean '{best}'?" if best else f"choose one of {', '.join(names)}."
    return PomonaError(f"unknown {kind} '{given}': {hint}")


def shared_prefix_length(a: str, b: str) -> int:
    """Return the length of the longest common prefix of two strings."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def require(condition: bool, message: str) -> None:
    """Raise `PomonaError(message)` unless the condition holds."""
    if not condition:
        raise PomonaError(message)
