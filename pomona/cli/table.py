"""The `table` command: show a paper's table with our results."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from pomona.errors import PomonaError, require

from .application import app
from .options import Json, Plot, Record, RecordAlias, Report, Settings, TableFilter
from .output import print_json, print_status, print_table
from .run_outputs import require_report, write_charts, write_report_file


@app.command()
def table(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="The name of a bundled table, or a TOML file.")
    ] = None,
    only: TableFilter = None,
    settings: Settings = None,
    runs: Annotated[
        list[Path] | None,
        typer.Option("--runs", metavar="FOLDER", help="Another folder to search for finished runs; may be repeated."),
    ] = None,
    measure: Annotated[
        str,
        typer.Option(
            "--measure",
            metavar="last|fresh|best",
            help="Compare runs by the last epoch, by the last epoch with fresh batch-norm statistics, or by the best "
            "epoch of runs that were evaluated after each.",
        ),
    ] = "last",
    weights: Annotated[
        Path | None,
        typer.Option(
            "--weights",
            metavar="FILE",
            help="Compute qian-table1, qian-figure1 or qian-figure2 from a state dict (safetensors or torch.save).",
        ),
    ] = None,
    plot: Plot = None,
    report: Report = None,
    record: Record = False,
    keep: RecordAlias = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    as_json: Json = False,
) -> None:
    """Show a paper's table with our results beside the paper's.

    Runs are compared by the accuracy of the last epoch, or as --measure says. Finished runs are searched under runs/
    and among the records in results/runs. `pomona sweep NAME --only-missing` trains the missing runs. Without a name,
    all tables are listed.
    """
    from pomona.lab.sweeps.run_store import RUNS, RunStore
    from pomona.lab.tables import catalog, drawings, rendering
    from pomona.lab.tables.filling import write_table_records
    from pomona.lab.tables.paper_table import PaperTable
    from pomona.report.collection import collect_table

    record = record or keep
    require_report(report)
    if name is None:
        given = {"--only": only, "--set": settings, "--runs": runs, "--measure": measure != "last", "--plot": plot}
        given |= {"--weights": weights, "--report": report, "--record": record, "--markdown": markdown}
        for option in (option for option, value in given.items() if value):
            raise PomonaError(f"{option} applies to one table: name it, as in pomona table dpf-table1.")
        tables = catalog.list_tables()
        print_json(tables) if as_json else print_table(overview(tables))
        return
    require(not (markdown and as_json), "a table is printed as Markdown or as JSON: give --markdown or --json.")
    for folder in runs or ():
        require(folder.is_dir(), f"--runs takes a folder of runs, and '{folder}' is not a folder.")
    found = catalog.find_table(name, settings or [])
    if isinstance(found, PaperTable):
        require(weights is None, f"{name} is filled from runs: leave out --weights.")
        found, store = found.select(only or []), RunStore((RUNS, *(runs or ())))
        if record:
            print_status(f"{len(write_table_records(found, store))} records written to results/runs.")
        if plot is not None:
            write_charts(drawings.draw_charts(found, store), plot, name)
        if report is not None:
            write_report_file(collect_table(found, store), report)
        result = found.compare(store, measure)
    else:
        require(
            not (only or record or runs or plot or report or measure != "last"),
            f"{name} is computed, not trained: leave out --only, --runs, --measure, --plot, --report and --record.",
        )
        show_progress = not as_json and sys.stderr.isatty()
        progress = (lambda done, total: print_status(f"{done} of {total}")) if show_progress else None
        result = catalog.compute_table(found, progress, weights)
    if as_json:
        print_json(result)
    elif markdown:
        status = rendering.completion_status(result)
        print(f"### {rendering.table_heading(result)}\n\n{rendering.render_markdown(result)}\n{status}")
    else:
        print_table(rendering.render_table(result))


def overview(tables: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of all tables, with how many of their cells and runs are complete."""
    grid = Table("table", "title", "cells", "runs", box=None, pad_edge=False)
    for table in tables:
        cells = f"{table['complete']} of {table['cells']}"
        runs = f"{table['runs'] - table['missing']} of {table['runs']}"
        grid.add_row(table["name"], escape(table["title"]), *((cells, runs) if table["runs"] else ("computed", "")))
    return grid
