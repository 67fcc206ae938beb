"""`private`: training under differential privacy."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from pomona.errors import require

from .base import RUNS, DataDir, Json, app, dump, facts, note, say, show


@app.command()
def private(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE", help="A TOML file or a recipe of pomona's with [private], or a run's folder to resume."
        ),
    ],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a setting (private.epsilon=2); may be repeated."),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="The run's name instead of the recipe's; its folder is runs/NAME.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FOLDER", help="The run's folder.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run's last checkpoint.")] = False,
    data_dir: DataDir = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Solve the budget and show it with the whole recipe; write nothing.")
    ] = False,
    shares: Annotated[
        bool, typer.Option("--shares", help="Show what other shares of ε for the indices would lead to; train nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Train under differential privacy, within a budget.

    The noise is solved for before the run, which needs dp-accounting (the extra `privacy`). What --dry-run prints
    is a recipe with its budget, from which a machine without it trains.
    """
    from pomona.lab import Interrupted, describe_run, train
    from pomona.lab.recipes.bundled import find_recipe
    from pomona.lab.recipes.private_recipe import PrivateRecipe
    from pomona.lab.runs import private as lab
    from pomona.lab.runs.progress import make_reporter
    from pomona.lab.runs.train import validate_folder

    folder = Path(recipe)
    if folder.is_dir():
        require(resume, f"'{recipe}' is a folder: give a recipe, or resume the run in it with --resume.")
        require((folder / "recipe.toml").is_file(), f"there is no run to resume in '{recipe}': it has no recipe.toml.")
        out, path = out or folder, folder / "recipe.toml"
    else:
        path = find_recipe(recipe)
    resolved = PrivateRecipe.load(path, [*(settings or []), *([f"name={json.dumps(name)}"] if name else [])])
    place = out or RUNS / resolved.recipe.name
    if shares:
        found = lab.compare_budget_shares(resolved, data_dir=data_dir)
        dump(found) if as_json else show(predicted(found))
        return
    if dry_run:
        validate_folder(lab.PrivateStrategy(resolved), place, resume)
        plan = describe_run(lab.PrivateStrategy(resolved), data_dir=data_dir)
        if as_json:
            dump({"folder": str(place), **plan})
        else:
            print(PrivateRecipe.load(plan["recipe"]).to_toml())
            show(facts({"folder": place, "steps": f"{plan['steps']:,}", **words(plan["private"], plan["params"])}))
        return
    progress = None if as_json else make_reporter(Console(stderr=True))
    try:
        strategy = lab.PrivateStrategy(resolved)
        summary = train(strategy, place, resume=resume, data_dir=data_dir, progress=progress, note=note)
    except (Interrupted, KeyboardInterrupt) as stopped:
        say(f"{stopped or 'stopped.'} To go on: {shlex.join(['pomona', 'private', '--resume', str(place)])}")
        raise typer.Exit(130) from stopped
    if as_json:
        dump(summary)
    else:
        told = words(summary["private"], summary["params"])
        show(facts({"accuracy": f"{summary['accuracy']:.2f} %", **told, "folder": str(place)}))


def predicted(splits: Sequence[Mapping[str, Any]]) -> Table:
    """Shares of ε side by side; the least error is marked."""
    grid = Table("share of ε", "θ", "top-k lost", "σ", "pruning error", "noise", "together", box=None, pad_edge=False)
    least = min(split["error"] for split in splits)
    for split in splits:
        together = f"{split['error']:.4g}{' ★' if split['error'] == least else ''}"
        numbers = f"{split['theta']:.2g}", f"{split['lost']:.2%}", f"{split['sigma']:.3f}"
        grid.add_row(f"{split['share']:g}", *numbers, f"{split['pruning']:.4g}", f"{split['noise']:.4g}", together)
    grid.caption = "squared error of one step's gradient, were it Gaussian and as large as clipping allows"
    return grid


def words(private: Mapping[str, Any], params: int) -> dict[str, str]:
    """What a run promises, for a person."""
    told = {
        "method": private["method"],
        "privacy": f"ε = {private['target']:.4g} at δ = {private['delta']:g}, one example added or removed",
        "noise": f"σ = {private['sigma']:.4g} times the norm {private['clip']:g}, to which each example is clipped",
    }
    told["randomness"] = "secure" if private["secure"] else "seeded, for experiments: who knows the seed can undo it"
    if private["method"] != "dpsgd":
        told["kept"] = f"{private['keep']:.1%} of {params:,} coordinates at the end"
    if private["method"] == "gip":
        lost, chance = private["lost"]["end"], private["random_loses"]["end"]
        told["index draws"] = f"ε = {private['index_epsilon']:.3g} each, on its sample"
        told["top-k lost"] = f"{lost:.2%} (E[i]/m); indices drawn at random lose {chance:.2%}"
        if lost > 0.95 * chance:
            told["so"] = "the indices are as good as random: at this ε the draw knows next to nothing of the gradient"
    return told
