"""The recipes and tables that come with pomona, by name. A table is a TOML file with [[part]]s."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path

from pomona.errors import PomonaError, unknown_name_error


def find(given: str) -> Path:
    """A recipe or table by its path, or by its name among those that come with pomona."""
    path = Path(given)
    shipped = files()
    if path.is_file():
        return path
    if path.name == given and path.stem in shipped and path.suffix in ("", ".toml"):
        return shipped[path.stem]
    if path.suffix == ".toml" or path.name != given:
        raise PomonaError(f"there is no recipe '{given}': give a TOML file, or one of {', '.join(recipes())}.")
    raise unknown_name_error("recipe", given, shipped)


def recipes() -> dict[str, Path]:
    """The recipes of runs and of sweeps."""
    return {name: file for name, file in files().items() if not is_table(file) and not has(file, "[private]")}


def tables() -> dict[str, Path]:
    """The tables of the papers."""
    return {name: file for name, file in files().items() if is_table(file)}


def is_table(file: Path) -> bool:
    """Whether a TOML file is a table and not a recipe."""
    return has(file, "[[part]]")


def has(file: Path, section: str) -> bool:
    """Whether a TOML file has a section."""
    try:
        return any(line.startswith(section) for line in file.read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError):
        return False  # whoever reads it as a recipe will say why


def files() -> dict[str, Path]:
    """All that comes with pomona: beside the package in a checkout, under share/pomona when installed."""
    beside = Path(__file__).resolve().parents[3]  # of a checkout, or what pip was given by --target
    user = sysconfig.get_path("data", sysconfig.get_preferred_scheme("user"))
    shared = [Path(place) / "share" / "pomona" / "recipes" for place in (user, sysconfig.get_path("data"), beside)]
    found = {file.stem: file for folder in (*shared, beside / "recipes") for file in folder.glob("*.toml")}
    return dict(
        sorted(found.items(), key=lambda item: [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", item[0])])
    )
