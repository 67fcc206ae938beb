"""The `retrain` command: train the mask of a finished run again and compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .application import app
from .options import DataDir, DryRun, Json, Resume
from .output import print_json, print_note, print_table
from .single_run import print_preview, resume_hint


@app.command()
def retrain(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run that pruned.")],
    start: Annotated[
        str,
        typer.Option(
            "--from", metavar="START", help="Initial weights: init (those the run started with), random, or final."
        ),
    ] = "init",
    budget: Annotated[
        str,
        typer.Option("--budget", help="epochs: as many epochs as the run; flops: as many as cost the same."),
    ] = "epochs",
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Random seed of a random start.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FOLDER", help="Folder of the new run instead of RUN-retrain-START.")
    ] = None,
    resume: Resume = False,
    data_dir: DataDir = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Train again with the final mask of a run, and compare.

    Tests whether the mask is a lottery ticket: the mask is fixed, and the learning-rate schedule starts over.
    """
    from pomona.lab.runs import retrain as lab
    from pomona.lab.runs.progress import make_reporter

    recipe, folder = lab.prepare_retraining(run, start, budget, out=out, seed=seed)
    if dry_run:
        print_preview(recipe, folder, resume, data_dir, as_json)
        return
    with resume_hint("train", folder, data_dir):
        result = lab.retrain(
            run,
            start,
            budget,
            out=folder,
            seed=seed,
            resume=resume,
            data_dir=data_dir,
            progress=None if as_json else make_reporter(Console(stderr=True)),
            note=print_note,
        )
    if as_json:
        print_json(result)
    else:
        print_table(comparison_table(result["runs"]))


def comparison_table(runs: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of a run and its retraining; costs are in epochs of dense training."""
    measure = "accuracy" if "accuracy" in runs[0] else "perplexity"
    grid = Table("run", "", measure, "sparsity", "epochs", "cost in dense epochs", box=None, pad_edge=False)
    for run in runs:
        value = f"{run[measure]:.2f}{' %' if measure == 'accuracy' else ''}"
        numbers = value, f"{run['sparsity']:.2%}", f"{run['epochs']}", f"{run['cost']:.1f}"
        grid.add_row(escape(Path(run["run"]).name), run["how"], *numbers)
    return grid
