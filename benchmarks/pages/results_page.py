"""Write docs/results.md from the records in results/runs.

python benchmarks/pages/results_page.py
"""

from __future__ import annotations

import json
from typing import Any

import page_helpers
from page_helpers import DOCS, machine_name, write_page

from pomona.lab.recipes import bundled as shelf
from pomona.lab.sweeps.run_store import RunStore, StoredRun
from pomona.lab.tables.definitions import load_table
from pomona.lab.tables.rendering import completion_status, render_markdown

PAGE = DOCS / "results.md"

INTRODUCTION = """# Results

This page compares the accuracies that Pomona reached with those printed in the papers. One command prints one of its
tables (with `--json` for a program):

```console
$ pomona table dpf-onepass
```

`pomona sweep dpf-onepass --only-missing` trains the runs that are missing from that table.

How to read the tables:

- An accuracy is that of the last epoch, in per cent: the mean over seeds ± the standard deviation, × the number of
  runs. The second line of a cell shows the value printed in the paper, and the difference.
- *DPF* is the method of the paper, which updates the mask until the last step.
- *DPF settled* keeps the mask fixed during the last tenth of the same epochs.
- *DPF soft* is DPF settled with soft thresholds.
- *DPF default* is `pm.DPF(sparsity=…)` as it comes: DPF soft with a bound on the gradient of weak outputs.
- *cosine* is a cosine learning-rate schedule. The other columns use the steps of the paper.
- The options of *settled*, *soft* and *cosine* were chosen on held-out images. The tables `dpf-options`, `dpf-rate` and
  `dpf-default` below show the comparison.
- *DPF bounded* is DPF settled with a bound on the gradient of removed filters.
- A cell with – was not trained.

`python benchmarks/pages/results_page.py` writes this page from the records in `results/runs/`. There is one record for
each finished run.
"""

NOT_STARTED = """
## Tables without any run

| table | | paper | runs |
|---|---|---|---:|
"""

QUEUE = "dpf-first"  # repeats cells of other tables, in the order in which they should be trained

CELL_IDENTITY = ("label", "column", "model", "method", "sparsity", "setting", "mean", "paper")

RUNS = """
## Runs

| run | accuracy | sparsity | epochs | seconds | machine | commit |
|---|---:|---:|---:|---:|---|---|
"""


def load_run_store() -> RunStore:
    """Return a store of the runs whose records are in results/runs, and no others."""
    return RunStore(folders=(), records=(page_helpers.RESULTS / "runs",))


def compare_with_paper(name: str, runs: RunStore) -> dict[str, Any]:
    """Return a paper's table with the results of `runs`."""
    return load_table(shelf.bundled_tables()[name]).compare(runs)


def format_trained_rows(result: dict[str, Any]) -> str:
    """Return the rows of a table that have at least one run, and how much of the table is complete."""
    rows = {(cell["label"], cell["row"]) for cell in result["cells"] if cell["runs"]}
    shown = result | {"cells": [cell for cell in result["cells"] if (cell["label"], cell["row"]) in rows]}
    about = f"`{result['name']}`, {result['paper']}: {completion_status(result)}."
    return f"{about}\n\n{render_markdown(shown)}"


def format_run(run: StoredRun) -> str:
    """Return the table row of one run."""
    summary: dict[str, Any] = run.summary or {}
    measure = "accuracy" if "accuracy" in summary else "perplexity"
    figures = f"{summary[measure]:.2f} | {summary['sparsity']:.2%} | {summary['epoch']} | {summary['seconds']:.0f}"
    machine = f"{machine_name(summary, summary['device'])}, torch {summary['versions']['torch']}"
    return f"| {run.recipe.name} | {figures} | {machine} | {summary['commit']} |"


def render() -> str:
    """Return the text of the page."""
    store = load_run_store()
    names = sorted(shelf.bundled_tables().keys() - {QUEUE}, key=lambda name: ("figure" in name, name))  # tables first
    sections, shown_cells, not_started = [], set(), []
    for result in (compare_with_paper(name, store) for name in names):
        cells = {json.dumps([c[key] for key in CELL_IDENTITY]) for c in result["cells"] if c["runs"]}
        if cells - shown_cells or (cells and result["show"]):  # it has something that no table before it has
            sections.append(f"## {result['title']}\n\n{format_trained_rows(result)}")
        elif not cells:
            not_started.append(f"| `{result['name']}` | {result['title']} | {result['paper']} | {result['runs']} |")
        shown_cells |= cells
    runs = sorted((run for run in store.runs.values() if run.summary is not None), key=lambda run: run.recipe.name)
    tables = NOT_STARTED + "\n".join(not_started), RUNS + "\n".join(map(format_run, runs)) + "\n"
    return "\n".join([INTRODUCTION, *sections, *tables])


if __name__ == "__main__":
    write_page(PAGE, render())
