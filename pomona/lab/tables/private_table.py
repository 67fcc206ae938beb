"""The table `gip`: private training on CIFAR-10, from the record that benchmarks/measure/private_cifar.py writes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pomona.errors import PomonaError

from ..recipes.bundled import BUNDLED
from ..sweeps.result_table import mean_and_deviation

RECORD = Path("results/private-cifar10.json")


def private_table(record: Path | str | None = None) -> dict[str, Any]:
    """Private training on CIFAR-10: the accuracy of each arm at each ε over its seeds, with E[i]/m.

    The first line is the title in the list of tables. The record is looked for in the working directory, then among
    the bundled results. The tables of Yang et al. (2023) are not available for comparison.
    """
    places = [Path(record)] if record is not None else [RECORD, BUNDLED / RECORD]
    found = next((place for place in places if place.is_file()), None)
    try:
        cells = [] if found is None else table_cells(json.loads(found.read_bytes())["runs"])
    except (ValueError, KeyError, TypeError) as error:
        raise PomonaError(
            f"the record '{found}' is damaged: `python benchmarks/measure/private_cifar.py run` makes it again."
        ) from error
    return {
        "title": "Private training on CIFAR-10: does choosing the indices help? Accuracy in %",
        "paper": "Yang et al., Gradients Index Pruning, 2023, whose tables are not at hand",
        "notes": "E[i]/m is the share of the true top-k that the indices of the last step are expected to miss.",
        "columns": list(dict.fromkeys(cell["column"] for cell in cells)),
        "across": False,
        "cells": cells,
    }


def table_cells(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one cell for each arm at each ε; the row label of an arm gives the range of its E[i]/m over all ε."""
    groups: dict[tuple[float, str], list[Mapping[str, Any]]] = {}
    lost: dict[str, list[float]] = {}
    for run in sorted(runs, key=lambda run: (run["private"]["target"], run["seed"])):
        groups.setdefault((run["private"]["target"], run["arm"]), []).append(run)
        lost.setdefault(run["arm"], []).append(run["private"]["lost"]["end"])
    ranges = {arm: dict.fromkeys(f"{end:.3f}" for end in (min(ends), max(ends))) for arm, ends in lost.items()}
    rows = {arm: f"E[i]/m = {' to '.join(ranges[arm])}" if any(ends) else "" for arm, ends in lost.items()}
    return [table_cell(arm, rows[arm], group) for (_, arm), group in groups.items()]


def table_cell(arm: str, row: str, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the cell of runs that differ in their seeds only; its sparsity is that of the last step's gradient."""
    first = runs[0]
    private = first["private"]
    return {
        "label": arm,
        "row": row,
        "own": row,
        "column": f"ε = {private['target']:g}",
        "model": first["model"],
        "method": first["method"],
        "sparsity": 1 - private["keep"],
        "setting": {
            "data": first["data"],
            "arm": arm,
            "epsilon": private["target"],
            "delta": private["delta"],
            "share": private["share"],
            "schedule": private["schedule"]["name"],
            "sigma": private["sigma"],
            "lost": private["lost"],  # E[i] / m
            "random_loses": private["random_loses"],
            "epochs": first["epoch"],
            "seeds": [run["seed"] for run in runs],
        },
        **mean_and_deviation([run["accuracy"] for run in runs]),
    }


TABLES = {"gip": private_table}
