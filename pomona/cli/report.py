"""The `report` and `watch` commands: look at runs in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .application import app
from .options import Json
from .output import print_json, print_status
from .run_outputs import write_report_file

Sources = Annotated[
    list[str],
    typer.Argument(metavar="RUNS...", help="Folders of runs or sweeps, record files, or names of tables."),
]


@app.command()
def report(
    runs: Sources,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The HTML file.")] = Path("report.html"),
    title: Annotated[str | None, typer.Option("--title", help="Title of the page.")] = None,
    latency: Annotated[
        bool,
        typer.Option("--latency", help="Measure the latency of runs without one first; it is kept in their folders."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Write an HTML report of runs: one file that opens offline.

    It shows accuracy against sparsity, MACs, bytes and measured latency, beside the paper's figures where the runs are
    those of a table, learning curves, the masks over time, and what differs between the recipes. The charts need
    plotly: pip install 'pomona[report]'.
    """
    from pomona.report import collect_runs
    from pomona.report.collection import with_title
    from pomona.report.latency import measure_latency

    found = collect_runs(runs)
    if latency:
        for run in (run for run in found.runs if run.summary is not None and run.folder is not None):
            if not run.latency and run.folder is not None:
                print_status(f"{run.name}: {measure_latency(run.folder)['milliseconds']:.3g} ms")
        found = collect_runs(runs)
    facts = write_report_file(with_title(found, title), out)
    if as_json:
        print_json(facts)


@app.command()
def watch(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, which may still be training.")],
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port of the page; 0 takes a free one.")] = 8765,
    as_json: Json = False,
) -> None:
    """Serve a live report of runs on this machine until Ctrl-C.

    The page follows the metrics of the runs while they train. Only this machine can open it (127.0.0.1).
    """
    from pomona.report import serve

    def announce(url: str) -> None:
        if as_json:
            print_json({"url": url})
        print_status(f"watching {', '.join(map(str, runs))} at {url} (Ctrl-C ends it)")

    serve(runs, port, announce)
