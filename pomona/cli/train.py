"""The `train` command: train one recipe."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from .application import app
from .options import RUNS, AutoResume, DataDir, DryRun, Json, Plot, Report, Resume, RunFolder, RunName, Settings, Track
from .output import facts_table, print_json, print_note, print_table
from .run_outputs import require_report, write_run_outputs
from .single_run import continues_run, find_recipe, print_preview, recipe_overrides, resume_hint


@app.command()
def train(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE", help="A TOML file, the name of a bundled recipe, or the folder of a run to resume."
        ),
    ],
    settings: Settings = None,
    name: RunName = None,
    out: RunFolder = None,
    resume: Resume = False,
    auto_resume: AutoResume = False,
    data_dir: DataDir = None,
    track: Track = "",
    plot: Plot = None,
    report: Report = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Train a recipe in a run folder.

    Ctrl-C writes a checkpoint and stops; `pomona train --resume FOLDER` continues.
    """
    from pomona import lab
    from pomona.integrations.trackers import parse_names
    from pomona.lab.runs.progress import make_reporter

    require_report(report)
    path, place = find_recipe(recipe, out, resume or auto_resume)
    load = lab.Recipe.load_stored if Path(recipe).is_dir() else lab.Recipe.load
    resolved = load(path, recipe_overrides(settings, name))
    folder = place or RUNS / resolved.name
    resume = continues_run(folder, resume, auto_resume)
    trackers = parse_names(track)
    if dry_run:
        print_preview(resolved, folder, resume, data_dir, as_json)
        return
    with resume_hint("train", folder, data_dir, trackers):
        summary = lab.train(
            resolved,
            folder,
            resume=resume,
            data_dir=data_dir,
            progress=None if as_json else make_reporter(Console(stderr=True)),
            note=print_note,
            trackers=trackers,
        )
    if os.environ.get("RANK", "0") != "0":  # under torchrun only the first process prints
        return
    if as_json:
        print_json(summary)
    else:
        print_table(facts_table(summary_facts(summary, folder)))
    write_run_outputs(folder, plot, report)


def summary_facts(summary: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Return the summary of a run as names and texts for a person."""
    quality = {k: f"{summary[k]:.2f}{unit}" for k, unit in (("accuracy", " %"), ("perplexity", "")) if k in summary}
    pruned, zeros = (f"{summary.get(key, summary['sparsity']):.2%}" for key in ("sparsity", "zeros"))
    targets = f"{pruned} of the targets" + ("" if zeros == pruned else f" ({zeros} are zero)")
    return {
        **quality,
        "sparsity": f"{targets}, {summary['model_sparsity']:.2%} of the model",
        "nonzero parameters": f"{summary['nonzeros']:,} of {summary['params']:,}",
        "nonzero MACs": f"{summary['macs_left']:,} of {summary['macs']:,}",
        "seconds": f"{summary['seconds']:.1f}",
        "folder": str(folder),
    }
