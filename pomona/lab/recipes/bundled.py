"""The recipes and table definitions that ship with Pomona, by name. A table definition has sections [[part]]."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path

from pomona.errors import PomonaError, unknown_name_error


def find_recipe(given: str) -> Path:
    """Return the file of a recipe or table definition, given as a path or as the name of a bundled one."""
    path = Path(given)
    bundled = bundled_files()
    if path.is_file():
        return path
    if path.name == given and path.stem in bundled and path.suffix in ("", ".toml"):
        return bundled[path.stem]
    if path.suffix == ".toml" or path.name != given:
        names = ", ".join(bundled_recipes())
        raise PomonaError(f"there is no recipe '{given}': give a TOML file, or one of {names}.")
    raise unknown_name_error("recipe", given, bundled)


def bundled_recipes() -> dict[str, Path]:
    """Return name → file of the bundled recipes of runs and sweeps, without those of private runs."""
    files = bundled_files().items()
    return {name: file for name, file in files if not is_table_file(file) and not has_section(file, "[private]")}


def bundled_tables() -> dict[str, Path]:
    """Return name → file of the bundled table definitions, one for each table of a paper."""
    return {name: file for name, file in bundled_files().items() if is_table_file(file)}


def is_table_file(file: Path) -> bool:
    """Return whether a TOML file defines a table and not a recipe."""
    return has_section(file, "[[part]]")


def has_section(file: Path, section: str) -> bool:
    """Return whether a TOML file has a section; False if it cannot be read, which reading it as a recipe reports."""
    try:
        return any(line.startswith(section) for line in file.read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError):
        return False


def bundled_files() -> dict[str, Path]:
    """Return name → file of every bundled TOML file, in natural order.

    They lie beside the package in a checkout, and under share/pomona in an installation.
    """
    root = Path(__file__).resolve().parents[3]  # the root of a checkout, or the folder of `pip install --target`
    user = sysconfig.get_path("data", sysconfig.get_preferred_scheme("user"))
    shared = [Path(place) / "share" / "pomona" / "recipes" for place in (user, sysconfig.get_path("data"), root)]
    found = {file.stem: file for folder in (*shared, root / "recipes") for file in folder.glob("*.toml")}
    return dict(sorted(found.items(), key=lambda item: _natural_order(item[0])))


def _natural_order(name: str) -> list[int | str]:
    """Return a sort key that compares the numbers in a name by value, so that table2 comes before table10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
