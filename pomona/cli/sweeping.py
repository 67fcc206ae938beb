"""`sweep`: many runs, compared."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .base import RUNS, DataDir, Json, app, dump, note, say, show

if TYPE_CHECKING:
    from pomona.lab.sweep import Cell


@app.command()
def sweep(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A TOML file, or a recipe that comes with pomona.")],
    over: Annotated[
        list[str] | None,
        typer.Option(
            "--over",
            metavar="KEY=VALUE,VALUE",
            help="An axis, such as method=dpf,rigl or method.sparsity=0.8,0.9 or seed=0,1; may be repeated. "
            "It takes the place of the recipe's own axis of that name.",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of every cell; may be repeated."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FOLDER", help="Where the runs go instead of runs/RECIPE.")
    ] = None,
    only_missing: Annotated[
        bool, typer.Option("--only-missing", help="Leave complete cells alone, and go on with begun ones.")
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", min=1, help="Processes of one thread each; one a core, or one in all on a GPU."),
    ] = None,
    data_dir: DataDir = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything and show it; write nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Run a recipe for every combination of some settings, and compare.

    The axes are the recipe's [sweep] table and --over. Each cell is an ordinary run in FOLDER/NAME-FINGERPRINT;
    the table is also in FOLDER/sweep.json. Ctrl-C stops so that --only-missing can go on.
    """
    from pomona.lab import sweep as lab
    from pomona.lab.progress import reporter
    from pomona.lab.shelf import find
    from pomona.lab.table import table

    path = find(recipe)
    axes, place = dict(map(lab.axis, over or [])), out or RUNS / path.stem
    if dry_run:
        cells = lab.cells(path, axes, place, settings or [])
        if as_json:
            dump([{"name": c.recipe.name, "folder": str(c.folder), "state": c.state()} for c in cells])
        else:
            show(outline(cells))
            for line in omissions(cells):
                say(line)
        return
    follow = not as_json and sys.stderr.isatty() and jobs == 1
    try:
        result = lab.sweep(
            path,
            axes,
            place,
            overrides=settings or [],
            only_missing=only_missing,
            jobs=jobs,
            data_dir=data_dir,
            report=None if as_json else ended,
            progress=(lambda: reporter(Console(stderr=True))) if follow else None,
            note=note,
        )
    except lab.Stopped as stopped:
        say(str(stopped))
        raise typer.Exit(130) from stopped
    if as_json:
        dump(result)
    else:
        show(table(result["cells"]))
        print(f"{result['seconds']:.0f} s in all; the runs are in {place}")
    for cell in result["failed"]:
        say(f"failed: {cell['name']}: {cell['error']}")
    if result["failed"]:
        raise typer.Exit(1)


def ended(done: int, total: int, cell: Cell, outcome: Mapping[str, Any]) -> None:
    """One line for each cell of a sweep."""
    from pomona.lab.progress import numbers

    told = ["failed: " + outcome["error"]] if "error" in outcome else [*numbers(outcome), f"{outcome['seconds']:.1f} s"]
    say(" · ".join([f"{done} of {total}", cell.recipe.name, *told]))


def outline(cells: Sequence[Cell]) -> Table:
    """The cells of a sweep, and which are there."""
    grid = Table("cell", "state", "folder", box=None, pad_edge=False)
    for cell in cells:
        grid.add_row(escape(cell.recipe.name), cell.state(), escape(str(cell.folder)))
    return grid


def omissions(cells: Sequence[Cell]) -> list[str]:
    """Which options the methods of a sweep do not have, said once each."""
    lost: dict[str, list[str]] = {}
    for cell in cells:
        for key in cell.dropped:
            lost.setdefault(key, []).append(cell.recipe.method["name"])
    return [f"note: {key} is not for {', '.join(dict.fromkeys(names))}." for key, names in lost.items()]
