"""`demo`, `train` and `retrain`: single runs."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pomona.errors import require

from .base import DEMO, RUNS, DataDir, Json, app, dump, facts, note, say, show

if TYPE_CHECKING:
    from pomona.lab.recipes.recipe import Recipe


@app.command()
def demo(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer epochs and fewer cells: some seconds.")] = False,
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where the runs and the picture go.")] = DEMO,
    seed: Annotated[int, typer.Option("--seed", min=0, help="The first seed.")] = 0,
    as_json: Json = False,
) -> None:
    """Compare ways to prune, in about a minute.

    A small convolutional network is trained on scikit-learn's digits, dense and then pruned by each
    method, each time for as long. Nothing is downloaded. The table is also in FOLDER/demo.json, and
    as a picture in FOLDER/demo.svg.
    """
    from pomona.lab import Interrupted
    from pomona.lab import demo as lab
    from pomona.lab.runs.progress import SeriesProgress

    plan = lab.QUICK if quick else lab.FULL
    progress = None if as_json else SeriesProgress(Console(stderr=True), len(plan.recipes(seed)))
    try:
        result = lab.run(out, plan, seed=seed, progress=progress)
    except Interrupted as stopped:
        say("stopped: the demo is short and starts over when it is called again.")
        raise typer.Exit(130) from stopped
    finally:
        if progress is not None:
            progress.end()
    if as_json:
        dump(result)
        return
    show(lab.table(result["cells"]))
    print(f"{result['seconds']:.0f} s in all; the picture is {out / 'demo.svg'}")


@app.command()
def train(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE", help="A TOML file, a recipe that comes with pomona, or a run's folder to resume."
        ),
    ],
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Change a setting, such as method.sparsity=0.95; may be repeated."
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="The run's name instead of the recipe's; its folder is runs/NAME.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FOLDER", help="The run's folder.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run's last checkpoint.")] = False,
    data_dir: DataDir = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything and show it; write nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Train what a recipe says, in a folder.

    Ctrl-C stops a run so that it can be resumed: `pomona train --resume FOLDER`.
    """
    from pomona import lab
    from pomona.lab.runs.progress import make_reporter

    resolved, folder = resolve(recipe, settings or [], name, out, resume)
    if dry_run:
        rehearse(resolved, folder, resume, data_dir, as_json)
        return
    with resumable(folder, data_dir):
        summary = lab.train(
            resolved,
            folder,
            resume=resume,
            data_dir=data_dir,
            progress=None if as_json else make_reporter(Console(stderr=True)),
            note=note,
        )
    if os.environ.get("RANK", "0") != "0":  # under torchrun one process speaks for all
        return
    if as_json:
        dump(summary)
    else:
        show(facts(reached(summary, folder)))


def resolve(given: str, settings: list[str], name: str | None, out: Path | None, resume: bool) -> tuple[Recipe, Path]:
    """The recipe with its settings, and the folder of its run."""
    from pomona.lab.recipes.bundled import find_recipe
    from pomona.lab.recipes.recipe import Recipe

    folder = Path(given)
    if folder.is_dir():  # of a run
        require(resume, f"'{given}' is a folder: give a recipe, or resume the run in it with --resume.")
        require((folder / "recipe.toml").is_file(), f"there is no run to resume in '{given}': it has no recipe.toml.")
        out, path = out or folder, folder / "recipe.toml"
    else:
        path = find_recipe(given)
    recipe = Recipe.load(path, [*settings, *([f"name={json.dumps(name)}"] if name else [])])
    return recipe, out or RUNS / recipe.name


def rehearse(recipe: Recipe, folder: Path, resume: bool, data_dir: Path | None, as_json: bool) -> None:
    """What --dry-run shows: the recipe with every default, then what would be done."""
    if not as_json:
        print(recipe.to_toml())
    plan = preview(recipe, folder, resume, data_dir)
    if as_json:
        dump({"recipe": recipe.to_dict(), **plan})
    else:
        show(facts(planned(plan)))


@contextlib.contextmanager
def resumable(folder: Path, data_dir: Path | None) -> Iterator[None]:
    """Around a run: where it is stopped, say how to go on."""
    from pomona.lab import Interrupted

    try:
        yield
    except (Interrupted, KeyboardInterrupt) as stopped:
        say(parting(stopped, folder, data_dir))
        raise typer.Exit(130) from stopped


def preview(recipe: Recipe, folder: Path, resume: bool, data_dir: Path | None) -> dict[str, Any]:
    """What a run would do, after all its checks."""
    from pomona.lab import describe_run
    from pomona.lab.runs.train import validate_folder

    done = validate_folder(recipe, folder, resume)
    would = "nothing: the run is complete" if done else "go on" if resume else "train"
    return {"would": would, "folder": str(folder), **describe_run(recipe, data_dir=data_dir)}


def planned(plan: Mapping[str, Any]) -> dict[str, str]:
    """A plan in words."""
    pruned = plan["pruned"]
    return {
        "would": plan["would"],
        "folder": plan["folder"],
        "device": plan["device"],
        "data": f"{plan['data']['train']:,} rows to train, {plan['data']['test']:,} to test",
        "steps": f"{plan['steps']:,}, {plan['steps_per_epoch']:,} an epoch",
        "parameters": f"{plan['params']:,}, with {plan['macs']:,} MACs",
        "to prune": f"{sum(pruned.values()):,} of them, in {len(pruned)} tensors" if pruned else "nothing",
    }


def parting(stopped: BaseException, folder: Path, data_dir: Path | None) -> str:
    """What is said when a run was stopped: how to go on."""
    from pomona.lab import Interrupted
    from pomona.lab.runs import checkpoint

    place = ["--data-dir", str(data_dir)] if data_dir else []
    again = shlex.join(["pomona", "train", "--resume", str(folder), *place])
    if isinstance(stopped, Interrupted):
        return f"stopped after step {stopped.step} of {stopped.total}; to go on: {again}"
    if checkpoint.exists(folder):  # a second Ctrl-C, or one outside the training itself
        return f"stopped at once; to go on from the last checkpoint: {again}"
    return "stopped before there was anything to resume."


def reached(summary: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """A summary in words."""
    quality = {k: f"{summary[k]:.2f}{unit}" for k, unit in (("accuracy", " %"), ("perplexity", "")) if k in summary}
    return {
        **quality,
        "sparsity": f"{summary['sparsity']:.2%} of what is pruned, {summary['model_sparsity']:.2%} of the model",
        "parameters left": f"{summary['nonzeros']:,} of {summary['params']:,}",
        "MACs left": f"{summary['macs_left']:,} of {summary['macs']:,}",
        "seconds": f"{summary['seconds']:.1f}",
        "folder": str(folder),
    }


@app.command()
def retrain(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run that pruned.")],
    start: Annotated[
        str,
        typer.Option("--from", metavar="START", help="init (the run's own first weights), random, or final."),
    ] = "init",
    budget: Annotated[
        str, typer.Option("--budget", help="epochs (as many as the run), or flops (as many as cost the same).")
    ] = "epochs",
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="The seed of a random start.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FOLDER", help="The new run's folder instead of RUN-retrain-START.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint.")] = False,
    data_dir: DataDir = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything and show it; write nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Train the mask that a run found from scratch, and compare.

    Is the mask a lottery ticket? The mask is fixed, and the learning rate begins anew.
    """
    from pomona.lab.runs import retrain as again
    from pomona.lab.runs.progress import make_reporter

    recipe, folder = again.prepare_retraining(run, start, budget, out=out, seed=seed)
    if dry_run:
        rehearse(recipe, folder, resume, data_dir, as_json)
        return
    with resumable(folder, data_dir):
        result = again.retrain(
            run,
            start,
            budget,
            out=folder,
            seed=seed,
            resume=resume,
            data_dir=data_dir,
            progress=None if as_json else make_reporter(Console(stderr=True)),
            note=note,
        )
    if as_json:
        dump(result)
    else:
        show(compared(result["runs"]))


def compared(runs: Sequence[Mapping[str, Any]]) -> Table:
    """A run and its retraining side by side; costs are in epochs of dense training."""
    measure = "accuracy" if "accuracy" in runs[0] else "perplexity"
    grid = Table("run", "", measure, "sparsity", "epochs", "cost in dense epochs", box=None, pad_edge=False)
    for one in runs:
        value = f"{one[measure]:.2f}{' %' if measure == 'accuracy' else ''}"
        numbers = value, f"{one['sparsity']:.2%}", f"{one['epochs']}", f"{one['cost']:.1f}"
        grid.add_row(escape(Path(one["run"]).name), one["how"], *numbers)
    return grid
