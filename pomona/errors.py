"""The error class for invalid input and the helpers that raise it.

A message is one sentence with the value that was given, the limit, and what to do instead.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

MAX_SUGGESTIONS = 3
MIN_SIMILARITY = 0.5  # difflib's ratio, below which a name is not suggested
MAX_NAME_LENGTH = 200  # characters of an unknown name that a message repeats
MAX_MESSAGE_LENGTH = 2000
# What a terminal obeys instead of showing it, or cannot show: control characters but for tabs and line ends, marks that
# reverse the direction of text, and halves of surrogate pairs.
UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class PomonaError(ValueError):
    """Invalid input from the user. The command line prints the message and exits with code 2.

    The message may repeat what a file of a stranger holds: characters that a terminal obeys are escaped, and a text
    that is too long is cut.
    """

    def __str__(self) -> str:
        text = super().__str__()
        if len(text) > MAX_MESSAGE_LENGTH:
            text = f"{text[: MAX_MESSAGE_LENGTH // 2]} … {text[-MAX_MESSAGE_LENGTH // 2 :]}"
        return escape_unprintable(text.replace("\n", " "))


def escape_unprintable(text: str) -> str:
    """Return a text with every character that a terminal would obey written as \\uXXXX."""
    return UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def unknown_name_error(kind: str, given: object, known: Iterable[str]) -> PomonaError:
    """Return the error for a name that does not exist, with a suggestion of the most similar known name."""
    names, given = sorted(known), shorten(given)
    wanted, by_lower_case = given.lower(), {name.lower(): name for name in reversed(names)}
    close = difflib.get_close_matches(wanted, by_lower_case, n=MAX_SUGGESTIONS, cutoff=MIN_SIMILARITY)

    def closeness(name: str) -> tuple[float, int]:
        # The longest common prefix decides among equals: for resnet2 it suggests resnet20, not resnet32.
        return difflib.SequenceMatcher(None, name, wanted).ratio(), shared_prefix_length(name, wanted)

    best = by_lower_case.get(max(close, key=closeness, default=""))
    hint = f"did you mean '{best}'?" if best else f"choose one of {', '.join(names)}."
    return PomonaError(f"unknown {kind} '{given}': {hint}")


def shorten(given: object) -> str:
    """Return a value as text that is short enough for a message."""
    text = str(given)
    return text if len(text) <= MAX_NAME_LENGTH else f"{text[:MAX_NAME_LENGTH]}…"


def shared_prefix_length(a: str, b: str) -> int:
    """Return the length of the longest common prefix of two strings."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def require(condition: bool, message: str) -> None:
    """Raise `PomonaError(message)` unless the condition holds."""
    if not condition:
        raise PomonaError(message)
