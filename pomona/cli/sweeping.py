"""`sweep` and `table`: many runs, compared with each other and with the papers."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pomona.errors import PomonaError, require

from .base import RUNS, DataDir, Json, app, dump, note, say, show

if TYPE_CHECKING:
    from pomona.lab.sweeps.sweep import Cell

Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of every run; may be repeated."),
]
Only = Annotated[
    list[str] | None,
    typer.Option(
        "--only",
        metavar="KEY=VALUE,VALUE",
        help="Some cells of a table, by label, column, model, method, sparsity, seed or what its rows differ in, "
        "as ρ=1; may be repeated.",
    ),
]
Keep = Annotated[bool, typer.Option("--keep", help="Keep a small record of each finished run in results/runs.")]


@app.command()
def sweep(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="A TOML file, or a recipe or table that comes with pomona.")
    ],
    over: Annotated[
        list[str] | None,
        typer.Option(
            "--over",
            metavar="KEY=VALUE,VALUE",
            help="An axis, such as method=dpf,rigl or method.sparsity=0.8,0.9 or seed=0,1; may be repeated. "
            "It takes the place of the recipe's own axis of that name.",
        ),
    ] = None,
    settings: Settings = None,
    only: Only = None,
    tune: Annotated[
        str | None,
        typer.Option(
            "--tune",
            metavar="KEY[=VALUE,VALUE]",
            help="Choose a number, such as lr, by a validation part of the training data: a linear grid, widened "
            "while the best is at its end.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FOLDER", help="Where the runs go instead of runs/RECIPE, or runs/tables."),
    ] = None,
    only_missing: Annotated[
        bool, typer.Option("--only-missing", help="Leave complete cells alone, and go on with begun ones.")
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", min=1, help="Processes of one thread each; one a core, or one in all on a GPU."),
    ] = None,
    packed: Annotated[
        int | None, typer.Option("--packed", metavar="K", min=1, help="Train K runs at once on one GPU.")
    ] = None,
    keep: Keep = False,
    data_dir: DataDir = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything and show it; write nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Run a recipe for every combination of some settings, or all that a paper's table needs, and compare.

    The axes are the recipe's [sweep] table and --over. Each cell is an ordinary run in FOLDER/NAME-FINGERPRINT;
    the comparison is also in FOLDER/sweep.json. Ctrl-C stops so that --only-missing can go on.
    """
    from pomona.lab.recipes import bundled as shelf
    from pomona.lab.runs.progress import make_reporter
    from pomona.lab.sweeps import sweep as lab

    path = shelf.find_recipe(recipe)
    follow = not as_json and sys.stderr.isatty() and jobs == 1
    how: dict[str, Any] = {
        "jobs": jobs,
        "packed": packed,
        "data_dir": data_dir,
        "report": None if as_json else ended,
        "progress": (lambda: make_reporter(Console(stderr=True))) if follow else None,
        "note": note,
    }
    axes, changes = dict(map(lab.axis, over or [])), settings or []
    kind = "table" if shelf.is_table_file(path) else "recipe" if tune is None else "tuning"
    misplaced: dict[str, dict[str, Any]] = {
        "table": {"--over": over, "--tune": tune},
        "recipe": {"--only": only},
        "tuning": {"--only": only, "--keep": keep},
    }
    for option, given in misplaced[kind].items():
        require(not given, f"{option} is not for a {kind}: leave it out.".replace("a tuning", "tuning"))
    with one_voice():
        try:
            if kind == "table":
                failed = fill(path, only or [], changes, out, only_missing, keep, dry_run, as_json, how)
            elif kind == "tuning":
                failed = tuned(path, str(tune), axes, changes, out or RUNS / f"{path.stem}-tune", dry_run, as_json, how)
            else:
                failed = swept(path, axes, changes, out or RUNS / path.stem, only_missing, keep, dry_run, as_json, how)
        except lab.Stopped as stopped:
            say(str(stopped))
            raise typer.Exit(130) from stopped
        for cell in failed:
            say(f"failed: {cell['name']}: {cell['error']}")
    if failed:
        raise typer.Exit(1)


@contextlib.contextmanager
def one_voice() -> Iterator[None]:
    """Under torchrun one process speaks for all."""
    from pomona.lab.runs.distributed import distributed_context

    with contextlib.ExitStack() as silence:
        if not distributed_context().is_first:
            nowhere = silence.enter_context(open(os.devnull, "w"))
            silence.enter_context(contextlib.redirect_stdout(nowhere))
            silence.enter_context(contextlib.redirect_stderr(nowhere))
        yield


Failed = list[dict[str, Any]]


def swept(
    path: Path,
    axes: Mapping[str, Any],
    changes: Sequence[str],
    out: Path,
    only_missing: bool,
    keep: bool,
    dry_run: bool,
    as_json: bool,
    how: dict[str, Any],
) -> Failed:
    """A recipe over its axes."""
    from pomona.lab.sweeps import sweep as lab
    from pomona.lab.sweeps.result_table import table
    from pomona.lab.sweeps.run_store import RECORDS

    if dry_run:
        cells = lab.cells(path, axes, out, changes)
        outline([(c.recipe.name, c.state(), c.folder) for c in cells], as_json)
        for line in [] if as_json else omissions(cells):
            say(line)
        return []
    records = RECORDS if keep else None
    result = lab.sweep(path, axes, out, overrides=changes, only_missing=only_missing, records=records, **how)
    if as_json:
        dump(result)
    else:
        show(table(result["cells"]))
        print(f"{result['seconds']:.0f} s in all; the runs are in {out}")
    return list(result["failed"])


def fill(
    path: Path,
    only: Sequence[str],
    changes: Sequence[str],
    out: Path | None,
    only_missing: bool,
    keep: bool,
    dry_run: bool,
    as_json: bool,
    how: dict[str, Any],
) -> Failed:
    """What is missing of a paper's table."""
    from pomona.lab.sweeps.result_table import paper
    from pomona.lab.sweeps.run_store import RECORDS, RUNS, Store
    from pomona.lab.tables import definitions as papers
    from pomona.lab.tables import paper_table as tables

    asked, place = papers.load(path, changes).only(only), out or tables.OUT
    if dry_run:
        store = Store((RUNS, place))
        outline([(task.name, task.state(store), task.folder(store)) for task in asked.tasks()], as_json)
        return []
    result = tables.fill(asked, place, only_missing=only_missing, records=RECORDS if keep else None, **how)
    dump(result) if as_json else show(paper(result))
    return list(result["failed"])


def tuned(
    path: Path,
    tune: str,
    axes: dict[str, Any],
    changes: Sequence[str],
    out: Path,
    dry_run: bool,
    as_json: bool,
    how: dict[str, Any],
) -> Failed:
    """The best value of a setting."""
    from pomona.lab.sweeps import sweep as lab
    from pomona.lab.sweeps import tune as tuning
    from pomona.lab.sweeps.result_table import number

    key, grid = lab.axis(tune) if "=" in tune else (tune.strip(), None)
    seeds = axes.pop("seed", None)
    require(not axes, f"tuning has one setting, and seeds: leave out --over {next(iter(axes), '')}.")
    if dry_run:
        key, values = tuning.plan(path, key, grid, changes)
        dump({"key": key, "grid": values}) if as_json else print(f"{key}: {', '.join(f'{v:g}' for v in values)}")
        return []
    how["report"] = None if as_json else judged
    result = tuning.tune(path, key, grid, out, seeds=seeds, overrides=changes, **how)
    if as_json:
        dump(result)
        return []
    chart = Table(result["key"], "validation", box=None, pad_edge=False)
    for one in result["points"]:
        reached = one["error"] or number(one)
        chart.add_row(f"{one['value']:g}", escape(f"{reached} ★" if one["value"] == result["best"] else reached))
    show(chart)
    where = "" if result["inside"] else ", which is at an end of what was tried"
    print(f"the best is {result['best']:g}{where}; to use it: --set {result['key']}={result['best']:g}")
    return []


@app.command()
def table(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="A table that comes with pomona, or its TOML file.")
    ] = None,
    only: Only = None,
    settings: Settings = None,
    runs: Annotated[
        list[Path] | None,
        typer.Option("--runs", metavar="FOLDER", help="Look for finished runs here too; may be repeated."),
    ] = None,
    keep: Keep = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown for a page.")] = False,
    as_json: Json = False,
) -> None:
    """Show a table of a paper: ours, by the last epoch's accuracy, beside what is printed there.

    Finished runs are looked for under runs/ and among the records in results/runs; `pomona sweep NAME
    --only-missing` trains what is missing. Without a name all tables are listed.
    """
    from pomona.lab.sweeps import result_table as lab
    from pomona.lab.sweeps.run_store import RUNS, Store
    from pomona.lab.tables import definitions as papers
    from pomona.lab.tables import paper_table as tables

    given = {"--only": only, "--set": settings, "--runs": runs, "--keep": keep, "--markdown": markdown}
    if name is None:
        for option in (option for option, value in given.items() if value):
            raise PomonaError(f"{option} is for one table: say which, as in pomona table dpf-table1.")
        found = papers.overview()
        dump(found) if as_json else show(listing(found))
        return
    require(not (markdown and as_json), "a table is printed as Markdown or as JSON: give --markdown or --json.")
    for folder in runs or ():
        require(folder.is_dir(), f"--runs takes a folder of runs, and '{folder}' is none.")
    asked = papers.find(name, settings or [])
    if isinstance(asked, tables.Table):
        asked, store = asked.only(only or []), Store((RUNS, *(runs or ())))
        if keep:
            say(f"{len(tables.kept(asked, store))} records written to results/runs.")
        result = asked.compare(store)
    else:
        require(not (only or keep or runs), f"{name} is computed, not trained: leave out --only, --runs and --keep.")
        follow = not as_json and sys.stderr.isatty()
        result = papers.compute(asked, (lambda done, total: say(f"{done} of {total}")) if follow else None)
    if as_json:
        dump(result)
    elif markdown:
        print(f"### {lab.heading_of(result)}\n\n{lab.markdown(result)}\n{lab.state(result)}")
    else:
        show(lab.paper(result))


def listing(found: Sequence[Mapping[str, Any]]) -> Table:
    """All tables, and how much of them is there."""
    grid = Table("table", "what", "cells", "runs", box=None, pad_edge=False)
    for one in found:
        cells, runs = f"{one['complete']} of {one['cells']}", f"{one['runs'] - one['missing']} of {one['runs']}"
        grid.add_row(one["name"], escape(one["title"]), *((cells, runs) if one["runs"] else ("computed", "")))
    return grid


def ended(done: int, total: int, cell: Cell, outcome: Mapping[str, Any]) -> None:
    """One line for each cell of a sweep."""
    from pomona.lab.runs.progress import format_measurements

    told = (
        ["failed: " + outcome["error"]]
        if "error" in outcome
        else [*format_measurements(outcome), f"{outcome['seconds']:.1f} s"]
    )
    say(" · ".join([f"{done} of {total}", cell.recipe.name, *told]))


def judged(done: int, total: int, cell: Cell, outcome: Mapping[str, Any]) -> None:
    """The same of a point of a search, by the validation part alone."""
    hidden = {key: value for key, value in outcome.items() if key not in ("accuracy", "perplexity", "test_loss")}
    valid = {key.removeprefix("valid_"): value for key, value in outcome.items() if key.startswith("valid_")}
    ended(done, total, cell, hidden | valid)


def outline(runs: Sequence[tuple[str, str, Path | None]], as_json: bool) -> None:
    """The runs of a sweep, and which are there."""
    if as_json:
        dump([{"name": n, "state": state, "folder": None if f is None else str(f)} for n, state, f in runs])
        return
    grid = Table("cell", "state", "folder", box=None, pad_edge=False)
    for name, state, folder in runs:
        grid.add_row(escape(name), state, escape(str(folder or "")))
    show(grid)


def omissions(cells: Sequence[Cell]) -> list[str]:
    """Which options the methods of a sweep do not have, said once each."""
    lost: dict[str, list[str]] = {}
    for cell in cells:
        for key in cell.dropped:
            lost.setdefault(key, []).append(cell.recipe.method["name"])
    return [f"note: {key} is not for {', '.join(dict.fromkeys(names))}." for key, names in lost.items()]
