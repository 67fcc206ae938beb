"""Write docs/results.md from the records in results/runs, so that no figure on it is typed by hand.

python benchmarks/results.py
"""

from __future__ import annotations

import json
from typing import Any

import pages
from pages import DOCS, machine, write

from pomona.lab.recipes import bundled as shelf
from pomona.lab.sweeps.run_store import RunStore, StoredRun
from pomona.lab.tables.definitions import load_table
from pomona.lab.tables.rendering import completion_status, render_markdown

PAGE = DOCS / "results.md"

HEAD = """# What came out

This page is written by `python benchmarks/results.py` from the records in `results/runs/`, one for each finished run.
An accuracy is that of the last epoch, in per cent: the mean over seeds ± its standard deviation, ×the number of runs.
Below it stands what the paper prints, and the difference. *DPF* is as in the paper, where the mask moves to the last
step; *DPF settled* has the mask at rest in the last tenth of the same epochs, and *DPF soft* soft thresholds besides;
*cosine* is the learning rate's path, where others have the paper's steps (all chosen on held-out images: `dpf-options`
and `dpf-rate`, below). *DPF bounded* is DPF settled with a bound on the gradient of removed filters. What is missing
was not trained, and `pomona sweep NAME --only-missing` would; `pomona table NAME` prints one table.
"""

OTHERS = """
## Not begun yet

| table | | paper | runs |
|---|---|---|---:|
"""

QUEUE = "dpf-first"  # cells of other tables

SAME = ("label", "column", "model", "method", "sparsity", "setting", "mean", "paper")  # by which a cell is known again

RUNS = """
## Runs

| run | accuracy | sparsity | epochs | seconds | machine | commit |
|---|---:|---:|---:|---:|---|---|
"""


def store() -> RunStore:
    """The runs whose records are here, and no others."""
    return RunStore(folders=(), records=(pages.RESULTS / "runs",))


def compare(name: str, runs: RunStore) -> dict[str, Any]:
    """A paper's table beside what runs reached."""
    return load_table(shelf.bundled_tables()[name]).compare(runs)


def begun(result: dict[str, Any]) -> str:
    """The rows of a table in which something was trained, and how much of it that is."""
    rows = {(cell["label"], cell["row"]) for cell in result["cells"] if cell["runs"]}
    shown = result | {"cells": [cell for cell in result["cells"] if (cell["label"], cell["row"]) in rows]}
    about = f"`{result['name']}`, {result['paper']}: {completion_status(result)}."
    return f"{about}\n\n{render_markdown(shown)}"


def line(run: StoredRun) -> str:
    """A run in a row of a table."""
    summary: dict[str, Any] = run.summary or {}
    measure = "accuracy" if "accuracy" in summary else "perplexity"
    figures = f"{summary[measure]:.2f} | {summary['sparsity']:.2%} | {summary['epoch']} | {summary['seconds']:.0f}"
    where = f"{machine(summary, summary['device'])}, torch {summary['versions']['torch']}"
    return f"| {run.recipe.name} | {figures} | {where} | {summary['commit']} |"


def page() -> str:
    """The whole page."""
    kept = store()
    names = sorted(shelf.bundled_tables().keys() - {QUEUE}, key=lambda name: ("figure" in name, name))  # tables first
    results = [compare(name, kept) for name in names]
    sections, told, rest = [], set(), []
    for result in results:
        cells = {json.dumps([c[key] for key in SAME]) for c in result["cells"] if c["runs"]}
        if cells - told or (cells and result["show"]):  # more than stands above
            sections.append(f"## {result['title']}\n\n{begun(result)}")
        elif not cells:
            rest.append(f"| `{result['name']}` | {result['title']} | {result['paper']} | {result['runs']} |")
        told |= cells
    runs = sorted((run for run in kept.runs.values() if run.summary is not None), key=lambda run: run.recipe.name)
    parts = [HEAD, *sections, OTHERS + "\n".join(rest), RUNS + "\n".join(map(line, runs)) + "\n"]
    return "\n".join(parts)


if __name__ == "__main__":
    write(PAGE, page())
