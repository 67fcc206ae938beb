"""Time how long a sweep of many finished runs takes to list: nothing is trained, every run is read and compared.

    python benchmarks/measure/sweep_listing.py --cells 10000 --json results/sweep-listing.json

One run is trained. The folders of the others are copies of it with their own recipe, seed and fingerprint.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from record_file import write_record

from pomona import lab
from pomona.lab.recipes.stored_text import mark_end
from pomona.lab.runs.folder import RECIPE_FILE, SUMMARY_FILE
from pomona.lab.sweeps.axes import SweepRun, expand_runs
from pomona.lab.sweeps.sweep import sweep

SETTINGS: dict[str, Any] = {
    "name": "listing",
    "model": "mlp",
    "data": {"name": "digits"},
    "train": {"epochs": 1},
    "method": {"name": "dpf"},
}


def make_axes(cells: int, seeds: int) -> dict[str, list[Any]]:
    """Return axes with a cell for each of so many sparsities, each with some seeds."""
    sparsities = [round(0.5 + 0.4 * i / cells, 6) for i in range(cells)]
    return {"method.sparsity": sparsities, "seed": list(range(seeds))}


def copy_run(source: SweepRun, target: SweepRun) -> None:
    """Copy a finished run as if the target's recipe had been trained; files that stay the same are linked."""
    own = shutil.ignore_patterns(RECIPE_FILE, SUMMARY_FILE)
    shutil.copytree(source.folder, target.folder, ignore=own, copy_function=os.link)
    (target.folder / RECIPE_FILE).write_bytes(mark_end(target.recipe.to_toml()))
    summary = json.loads((source.folder / SUMMARY_FILE).read_text(encoding="utf-8"))
    summary |= {"seed": target.recipe.seed, "fingerprint": target.recipe.fingerprint()}
    (target.folder / SUMMARY_FILE).write_text(json.dumps(summary), encoding="utf-8")


def main() -> None:
    """Make the folders, list them twice, and print the seconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=int, default=10_000)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = {}
    axes = make_axes(options.cells, options.seeds)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        first, *others = expand_runs(SETTINGS, axes, out)
        lab.train(first.recipe, first.folder)
        for run in others:
            copy_run(first, run)
        count = 1 + len(others)
        print(f"{count:,} finished runs in folders", flush=True)
        for attempt in ("first", "second"):
            started = time.perf_counter()
            result = sweep(SETTINGS, axes, out, only_missing=True)
            seconds = time.perf_counter() - started
            found[attempt] = seconds
            assert not result["failed"]
            assert sum(len(cell["setting"]["seeds"]) for cell in result["cells"]) == count
            print(f"{attempt} listing: {seconds:.1f} s, {len(result['cells']):,} cells", flush=True)
    write_record(options.json, runs=count, cells=len(result["cells"]), seconds=found)


if __name__ == "__main__":
    main()
