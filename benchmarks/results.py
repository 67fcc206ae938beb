"""Write docs/results.md from the records in results/runs, so that no figure on it is typed by hand.

python benchmarks/results.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pomona.lab import papers, shelf, table
from pomona.lab.store import Run, Store

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "results.md"

HEAD = """# What came out

This page is written by `python benchmarks/results.py` from the records in `results/runs/`, one for each finished run.
An accuracy is that of the last epoch, in per cent: the mean over seeds ± its standard deviation, ×the number of runs.
Below it stands what the paper prints, and the difference. *DPF* is as in the paper, where the mask moves to the last
step; *DPF settled* has the mask at rest in the last tenth of the same epochs. What is missing was not trained, and
`pomona sweep NAME --only-missing` would; `pomona table NAME` prints one table.
"""

OTHERS = """
## Not begun yet

| table | | paper | runs |
|---|---|---|---:|
"""

SAME = ("label", "column", "model", "method", "sparsity", "setting", "mean", "paper")  # by which a cell is known again

RUNS = """
## Runs

| run | accuracy | sparsity | epochs | seconds | machine | commit |
|---|---:|---:|---:|---:|---|---|
"""


def section(result: dict[str, Any]) -> str:
    """The rows of a table in which something was trained."""
    rows = {(cell["label"], cell["row"]) for cell in result["cells"] if cell["runs"]}
    begun = result | {"cells": [cell for cell in result["cells"] if (cell["label"], cell["row"]) in rows]}
    about = f"`{result['name']}`, {result['paper']}: {table.state(result)}."
    return f"## {result['title']}\n\n{about}\n\n{table.markdown(begun)}"


def line(run: Run) -> str:
    """A run in a row of a table."""
    summary: dict[str, Any] = run.summary or {}
    gpus = summary["machine"]["gpus"]
    machine = gpus[0]["name"] if gpus and summary["device"] != "cpu" else summary["machine"]["cpu"]
    measure = "accuracy" if "accuracy" in summary else "perplexity"
    figures = f"{summary[measure]:.2f} | {summary['sparsity']:.2%} | {summary['epoch']} | {summary['seconds']:.0f}"
    return f"| {run.recipe.name} | {figures} | {machine}, torch {summary['versions']['torch']} | {summary['commit']} |"


def page(records: Path = ROOT / "results" / "runs") -> str:
    """The whole page."""
    store = Store(folders=(), records=(records,))
    names = sorted(shelf.tables(), key=lambda name: "figure" in name)  # tables first
    results = [papers.load(shelf.tables()[name]).compare(store) for name in names]
    sections, told, rest = [], set(), []
    for result in results:
        cells = {json.dumps([c[key] for key in SAME]) for c in result["cells"] if c["runs"]}
        if cells - told or (cells and result["show"]):  # more than stands above
            sections.append(section(result))
        else:
            rest.append(f"| `{result['name']}` | {result['title']} | {result['paper']} | {result['runs']} |")
        told |= cells
    runs = sorted((run for run in store.runs.values() if run.summary is not None), key=lambda run: run.recipe.name)
    parts = [HEAD, *sections, OTHERS + "\n".join(rest), RUNS + "\n".join(map(line, runs)) + "\n"]
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
