"""The recipes that come with pomona, by name."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from pomona.core.errors import PomonaError, unknown


def find(given: str) -> Path:
    """A recipe by its path, or by its name among those that come with pomona."""
    path = Path(given)
    shipped = recipes()
    if path.is_file():
        return path
    if path.name == given and path.stem in shipped and path.suffix in ("", ".toml"):
        return shipped[path.stem]
    if path.suffix == ".toml" or path.name != given:
        raise PomonaError(f"there is no recipe '{given}': give a TOML file, or one of {', '.join(shipped)}.")
    raise unknown("recipe", given, shipped)


def recipes() -> dict[str, Path]:
    """The recipes that come with pomona: beside the package in a checkout, in the environment when installed."""
    checkout = Path(__file__).resolve().parents[2] / "recipes"
    installed = Path(sysconfig.get_path("data")) / "share" / "pomona" / "recipes"
    return {file.stem: file for folder in (installed, checkout) for file in sorted(folder.glob("*.toml"))}
