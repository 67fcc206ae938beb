"""Write docs/results.md, and the charts in docs/results, from the records in results/runs.

python benchmarks/pages/results_page.py
"""

from __future__ import annotations

import json
from typing import Any

import page_helpers
from page_helpers import DOCS, machine_name, write_page

from pomona.lab.recipes import bundled as shelf
from pomona.lab.sweeps.result_table import format_mean
from pomona.lab.sweeps.run_store import RunStore, StoredRun
from pomona.lab.tables.definitions import load_table
from pomona.lab.tables.drawings import draw_charts
from pomona.lab.tables.paper_table import PaperTable
from pomona.lab.tables.rendering import completion_status, render_markdown

PAGE = DOCS / "results.md"
DRAWINGS = DOCS / "results"

INTRODUCTION = """# Results

This page compares the accuracies that Pomona reached with those printed in the papers. One command prints one of its
tables (with `--json` for a program):

```console
$ pomona table dpf-onepass
```

`pomona sweep dpf-onepass --only-missing` trains the runs that are missing from that table.

How to read the tables:

- An accuracy is that of the last epoch, in per cent: the mean over seeds ± the standard deviation, × the number of
  runs. The last line of a cell shows the value printed in the paper, and the difference.
- *fresh* is the last epoch with batch-norm statistics re-estimated after the last mask update. Cells without it have
  statistics that are not stale, so that both are the same. *best* is the best epoch at the final sparsity, by test
  accuracy, of runs that were evaluated after every epoch. `pomona table NAME --measure fresh` (or `best`) compares runs
  by it.
- *DPF* is the method of the paper, which updates the mask until the last step.
- *DPF settled* keeps the mask fixed during the last tenth of the same epochs.
- *DPF soft* is DPF settled with soft thresholds.
- *DPF default* is `pm.DPF(sparsity=…)` as it comes: DPF soft with a bound on the gradient of weak outputs.
  Rows of filters have options of their own, which the note under their table gives.
- *cosine* is a cosine learning-rate schedule. The other columns use the steps of the paper.
- The options of *settled*, *soft* and *cosine* were chosen on held-out images. The tables `dpf-options`, `dpf-rate` and
  `dpf-default` below show the comparison.
- *DPF bounded* is DPF settled with a bound on the gradient of removed filters.
- *ResNet-56* has bottleneck blocks in the tables of DPF, and all ResNets have shortcuts of 1×1 convolutions, as in the
  public code of the paper's first author. The paper states neither.
- A cell with – was not trained.

`python benchmarks/pages/results_page.py` writes this page from the records in `results/runs/`. There is one record for
each finished run.
"""

# The argument has figures of one cell of table 1, at two sparsities.
REPORTED = """## Which accuracy does the DPF paper report?

The paper does not say, but it cannot be the last epoch of the algorithm that it prints. There the mask is updated every
16 steps until training ends, so the last evaluation comes a few steps after a mask update, and the batch-norm
statistics are those of other masks. ResNet-20 as printed:

| | 90 % | 95 % |
|---|---:|---:|
| last epoch | {last} |
| last epoch, fresh statistics | {fresh} |
| the paper | {paper} |

Even with fresh statistics the last epoch is below the paper's. A mask that is fixed before the end would reach such
figures (*DPF settled*), but the paper's figure 4 shows that entries change until the end. What remains is the best
epoch. The public training code of the paper's first author (LocalSGD-Code) evaluates the test images after every epoch
and keeps the best accuracy. So the paper's figures must be those of the best epoch, chosen on test images, and the
figures of this page, of the last epoch, are compared with them at that disadvantage. The table `dpf-printed` trains the
printed algorithm with an evaluation after every epoch, and shows all three.

DSR's * in tables 1 and 4 has another reason, which [methods.md](methods.md#where-they-differ-from-the-authors-code)
explains: the authors move 20,000 weights at each update, and fewer than that are left.
"""

NOT_STARTED = """
## Tables without any run

| table | | paper | runs |
|---|---|---|---:|
"""

QUEUE = "dpf-first"  # repeats cells of other tables, in the order in which they should be trained

CELL_IDENTITY = ("label", "column", "model", "method", "sparsity", "mean", "paper")

RUNS = """
## Runs

| run | accuracy | sparsity | epochs | seconds | machine | commit |
|---|---:|---:|---:|---:|---|---|
"""


def load_run_store() -> RunStore:
    """Return a store of the runs whose records are in results/runs, and no others."""
    return RunStore(folders=(), records=(page_helpers.RESULTS / "runs",))


def load_bundled_table(name: str) -> PaperTable:
    """Return the table of a name."""
    return load_table(shelf.bundled_tables()[name])


def compare_with_paper(name: str, runs: RunStore) -> dict[str, Any]:
    """Return a paper's table with the results of `runs`."""
    return load_bundled_table(name).compare(runs)


def format_reported(store: RunStore) -> str:
    """Return the section on which accuracy the paper reports, with the figures of DPF as printed."""
    cells = load_bundled_table("dpf-table1").select(["label=ResNet-20", "column=DPF", "sparsity=0.9,0.95"])
    found = cells.compare(store)["cells"]
    rows = {
        "last": [format_mean(cell) for cell in found],
        "fresh": [f"{cell['fresh']:.2f}" for cell in found],
        "paper": [cell["paper_text"] for cell in found],
    }
    return REPORTED.format(**{name: " | ".join(texts) for name, texts in rows.items()})


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


def table_names() -> list[str]:
    """Return the names of the tables on this page: tables, and then figures."""
    return sorted(shelf.bundled_tables().keys() - {QUEUE}, key=lambda name: ("figure" in name, name))


def render_drawings() -> dict[str, str]:
    """Return the charts of all tables by file name."""
    store = load_run_store()
    drawings = [draw_charts(load_bundled_table(name), store) for name in table_names()]
    return {file: chart for charts in drawings for file, chart in charts.items()}


def render() -> str:
    """Return the text of the page."""
    store = load_run_store()
    sections, shown_cells, not_started = [], set(), []
    for table in map(load_bundled_table, table_names()):
        result = table.compare(store)
        cells = {json.dumps([c[key] for key in CELL_IDENTITY]) for c in result["cells"] if c["runs"]}
        if cells - shown_cells or (cells and result["show"]):  # it has something that no table before it has
            charts = [f"![{table.title}](results/{file})\n" for file in draw_charts(table, store)]
            sections.append("\n".join([f"## {table.title}\n\n{format_trained_rows(result)}", *charts]))
        elif not cells:
            not_started.append(f"| `{result['name']}` | {result['title']} | {result['paper']} | {result['runs']} |")
        shown_cells |= cells
    runs = sorted((run for run in store.runs.values() if run.summary is not None), key=lambda run: run.recipe.name)
    tables = NOT_STARTED + "\n".join(not_started), RUNS + "\n".join(map(format_run, runs)) + "\n"
    return "\n".join([INTRODUCTION, format_reported(store), *sections, *tables])


if __name__ == "__main__":
    write_page(PAGE, render())
    for name, drawing in render_drawings().items():
        write_page(DRAWINGS / name, drawing)
