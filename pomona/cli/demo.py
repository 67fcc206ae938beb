"""The `demo` command: compare pruning methods on a small network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .application import app
from .options import RUNS, Json, Report
from .output import print_json, print_note, print_status, print_table
from .run_outputs import has_plotly, require_report, write_run_outputs


@app.command()
def demo(
    quick: Annotated[
        bool, typer.Option("--quick", help="Train fewer epochs and fewer runs; takes some seconds.")
    ] = False,
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Folder for the runs and the chart.")] = RUNS
    / "demo",
    seed: Annotated[int, typer.Option("--seed", min=0, help="First random seed.")] = 0,
    report: Report = None,
    as_json: Json = False,
) -> None:
    """Compare pruning methods on a small network, in about a minute.

    Trains a small convolutional network on scikit-learn's digits: once dense and once with every pruning method,
    each for the same number of epochs. Nothing is downloaded. The table is also written to FOLDER/demo.json, a chart
    to FOLDER/demo.svg, and a report to FOLDER/report.html, or where --report says.
    """
    from pomona.lab import Interrupted
    from pomona.lab import demo as lab
    from pomona.lab.runs.progress import SeriesProgress

    require_report(report)
    grid = lab.QUICK if quick else lab.FULL
    progress = None if as_json else SeriesProgress(Console(stderr=True), len(grid.recipes(seed)))
    try:
        result = lab.run_demo(out, grid, seed=seed, progress=progress)
    except Interrupted as stopped:
        print_status("stopped: the demo cannot be resumed; the next call starts it from the beginning.")
        raise typer.Exit(130) from stopped
    finally:
        if progress is not None:
            progress.end()
    if as_json:
        print_json(result)
    else:
        print_table(lab.render_table(result["cells"]))
        print(f"total time {result['seconds']:.0f} s; chart: {out / 'demo.svg'}")
    if report is None and not has_plotly():
        print_note("no report was written: it needs plotly (pip install 'pomona[report]').")
    else:
        write_run_outputs(out, None, report or out / "report.html")
