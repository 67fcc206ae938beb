"""The recipes, table definitions and results that ship with Pomona. A table definition has sections [[part]].

In a checkout they are the folders recipes/ and results/ beside the package. An installation has copies of them in
pomona/bundled/, where the records of runs are the files of one archive, results/runs.zip (see setup.py).
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from importlib.resources.abc import Traversable
from pathlib import Path

from pomona.errors import PomonaError, unknown_name_error

PACKAGE = Path(__file__).resolve().parents[2]
BUNDLED = PACKAGE / "bundled" if (PACKAGE / "bundled").is_dir() else PACKAGE.parent  # of an installation, a checkout
RECIPES = Path("recipes")


def find_recipe(given: str) -> Path:
    """Return the file of a recipe or table definition, given as a path or as the name of a bundled one."""
    path = Path(given)
    bundled = bundled_files()
    if path.is_file():
        return path
    if given in (path.stem, f"{path.stem}.toml", str(RECIPES / f"{path.stem}.toml")) and path.stem in bundled:
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
    """Return name → file of every bundled TOML file, in natural order."""
    files = (BUNDLED / RECIPES).glob("*.toml")
    return {file.stem: file for file in sorted(files, key=lambda file: _natural_order(file.stem))}


def list_json_files(folder: Path) -> Iterator[Traversable]:
    """Yield the JSON files of a folder, or of the archive FOLDER.zip where there is no such folder, sorted by name."""
    archive = folder.with_name(f"{folder.name}.zip")
    if not folder.is_dir() and not archive.is_file():
        return
    files = folder.iterdir() if folder.is_dir() else zipfile.Path(archive).iterdir()
    yield from sorted((file for file in files if file.name.endswith(".json")), key=lambda file: file.name)


def _natural_order(name: str) -> list[int | str]:
    """Return a sort key that compares the numbers in a name by value, so that table2 comes before table10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
