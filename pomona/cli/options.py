"""Options that several commands share, each defined once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RUNS = Path("runs")  # parent folder of runs that are given no folder

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
DataDir = Annotated[
    Path | None,
    typer.Option(
        "--data-dir", metavar="FOLDER", help="Folder to search for data, before $POMONA_DATA and the user's cache."
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Validate and show everything; train and write nothing.")]

# A single run: train, private, retrain.
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a setting of the recipe, such as method.sparsity=0.95; may be repeated.",
    ),
]
RunName = Annotated[
    str | None, typer.Option("--name", help="Name of the run instead of the recipe's; its folder is runs/NAME.")
]
RunFolder = Annotated[Path | None, typer.Option("--out", metavar="FOLDER", help="Folder of the run.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue from the last checkpoint of the run.")]
AutoResume = Annotated[
    bool,
    typer.Option(
        "--auto-resume",
        help="Continue the run if its folder has one, else start it; for torchrun and schedulers, that repeat it.",
    ),
]

# Runs that are trained: train, sweep, private.
Track = Annotated[
    str,
    typer.Option(
        "--track",
        metavar="NAME,NAME",
        help="Also write the metrics for tensorboard, mlflow, wandb or trackio, offline, to the run's folder tracking.",
        show_default=False,
    ),
]

# Pictures: demo, train, sweep and table.
Plot = Annotated[
    Path | None, typer.Option("--plot", metavar="FOLDER", help="Draw charts of the results as SVG in a folder.")
]
Report = Annotated[
    Path | None,
    typer.Option("--report", metavar="FILE", help="Write an HTML report of the runs, with interactive charts."),
]

# Many runs: sweep and table.
TableFilter = Annotated[
    list[str] | None,
    typer.Option(
        "--only",
        metavar="KEY=VALUE,VALUE",
        help="Select cells of a table by label, column, model, method, sparsity, seed or a setting of its rows, "
        "such as ρ=1; may be repeated.",
    ),
]
Record = Annotated[bool, typer.Option("--record", help="Write a small record of each finished run to results/runs.")]
RecordAlias = Annotated[bool, typer.Option("--keep", hidden=True)]  # the former name of --record
