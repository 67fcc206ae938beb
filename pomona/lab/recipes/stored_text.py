"""The text of a stored recipe, which shows whether it is whole: a file that was cut off is never another recipe."""

from __future__ import annotations

from pathlib import Path

from pomona.errors import PomonaError
from pomona.untrusted import MAX_TOML_BYTES, read_bytes

# A stored recipe begins and ends with these lines. Files of earlier versions, and recipes of users, have neither.
HEAD = b'# All settings of a run. A whole file ends with the line "# end".\n'
END = b"\n# end\n"


class CutRecipe(PomonaError):
    """Raised where a stored recipe has lost its end."""


def mark_end(text: str) -> bytes:
    """Return the text of a recipe with the lines by which `require_whole` knows its end."""
    return HEAD + text.encode() + END


def require_whole(data: bytes, path: Path) -> None:
    """Raise CutRecipe where a stored recipe has lost its end."""
    if (data.startswith(HEAD) or HEAD.startswith(data)) and END not in data:
        raise CutRecipe(
            f"the recipe '{path}' was cut off after {len(data)} bytes: to go on, give the recipe that the run was "
            f"started with, and --resume --out {path.parent}."
        )


def is_whole(path: Path) -> bool:
    """Return whether a stored recipe is there and has not lost its end."""
    try:
        require_whole(read_bytes(path, MAX_TOML_BYTES), path)
    except (OSError, PomonaError):
        return False
    return True
