"""The public weights that a private run starts from: the data sets they were trained on, none of them the private one.

A privacy guarantee is about the rows that a run draws. Weights that were trained on the same rows without noise give
them away before the first private step, whatever noise is added later. So every run that led to the weights is looked
up, over origins and teachers, and a run on the private data set is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pomona.errors import PomonaError, require
from pomona.untrusted import reading

from ..recipes.overrides import read_recipe
from ..recipes.recipe import Recipe
from .folder import RECIPE_FILE, read_summary


def describe_origin(recipe: Recipe) -> dict[str, Any] | None:
    """Return where the first weights of a private run come from; None if they are drawn at random.

    Raises PomonaError if a run that led to them was trained on the private data set, or is not there to tell.
    """
    origin = recipe.origin
    if origin.run is None:
        return None
    datasets = find_training_data(Path(origin.run))
    require(
        recipe.data.name not in datasets,
        f"the weights of '{origin.run}' were trained on '{recipe.data.name}', the private data set, so they are not "
        "public: start from a run on other data, or without origin.",
    )
    return {
        "run": origin.run,
        "name": str((read_summary(Path(origin.run)) or {}).get("name", "")),
        "fingerprint": origin.fingerprint,
        "weights": origin.weights,
        "data": datasets,
    }


def find_training_data(run: Path) -> list[str]:
    """Return the names of the data sets that decided the weights of a run, its own first, then those it started from.

    Raises PomonaError where one cannot be known.
    """
    found, waiting, seen = [], [run], set()
    while waiting:
        folder = waiting.pop(0)
        if folder.resolve() in seen:
            continue
        seen.add(folder.resolve())
        require(
            (folder / RECIPE_FILE).is_file(),
            f"the run '{folder}' is not there, so the data of the weights of '{run}' is unknown: restore it, or start "
            "from a run whose origin and teacher are there.",
        )
        with reading(f"the run in '{folder}'"):
            given = read_recipe(folder / RECIPE_FILE)
            data = given["data"]
            found.append(str(data["name"] if isinstance(data, Mapping) else data))
            origin, teacher = (given.get(section) or {} for section in ("origin", "teacher"))
            runs = [section.get("run") for section in (origin, teacher)]
        if teacher.get("file"):
            raise PomonaError(
                f"the run '{folder}' had the teacher '{teacher['file']}', a file whose data is unknown: start from a "
                "run whose teacher is a run."
            )
        waiting += [Path(other) for other in runs if other]
    return list(dict.fromkeys(found))


def format_origin(origin: Mapping[str, Any]) -> str:
    """Return where public weights come from, as part of a sentence."""
    return f"the run '{Path(origin['run']).name}' ({origin['fingerprint']}), trained on {', '.join(origin['data'])}"
