"""The `private` command: train under differential privacy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from .application import app
from .options import RUNS, AutoResume, DataDir, DryRun, Json, Resume, RunFolder, RunName, Settings, Track
from .output import facts_table, print_json, print_note, print_table
from .single_run import continues_run, find_recipe, recipe_overrides, resume_hint

AS_GOOD_AS_RANDOM = 0.95  # share of a random draw's loss above which the drawn indices are called as good as random


@app.command()
def private(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE",
            help="A TOML file or the name of a bundled recipe, with a [private] section, or the folder of a run to "
            "resume.",
        ),
    ],
    settings: Settings = None,
    name: RunName = None,
    out: RunFolder = None,
    resume: Resume = False,
    auto_resume: AutoResume = False,
    data_dir: DataDir = None,
    track: Track = "",
    dry_run: DryRun = False,
    shares: Annotated[
        bool, typer.Option("--shares", help="Show the predicted error for other shares of ε; train nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Train under differential privacy, within a privacy budget.

    The noise scale is solved for before the run, which needs dp-accounting (the extra `privacy`). --dry-run prints a
    recipe that holds the solved budget; a machine without dp-accounting can train from it.
    """
    from pomona.integrations.trackers import parse_names
    from pomona.lab import describe_run, train
    from pomona.lab.recipes.private_recipe import PrivateRecipe
    from pomona.lab.runs import private as lab
    from pomona.lab.runs.progress import make_reporter
    from pomona.lab.runs.train import validate_folder

    path, place = find_recipe(recipe, out, resume or auto_resume)
    resolved = PrivateRecipe.load(path, recipe_overrides(settings, name))
    folder = place or RUNS / resolved.recipe.name
    resume = continues_run(folder, resume, auto_resume)
    trackers = parse_names(track)
    if shares:
        found = lab.compare_budget_shares(resolved, data_dir=data_dir)
        print_json(found) if as_json else print_table(shares_table(found))
        return
    strategy = lab.PrivateStrategy(resolved)
    if dry_run:
        validate_folder(strategy, folder, resume)
        plan = describe_run(strategy, data_dir=data_dir)
        if as_json:
            print_json({"folder": str(folder), **plan})
        else:
            print(PrivateRecipe.load(plan["recipe"]).to_toml())
            promise = privacy_facts(plan["private"], plan["params"])
            print_table(facts_table({"folder": folder, "steps": f"{plan['steps']:,}", **promise}))
        return
    with resume_hint("private", folder, data_dir, trackers):
        summary = train(
            strategy,
            folder,
            resume=resume,
            data_dir=data_dir,
            progress=None if as_json else make_reporter(Console(stderr=True)),
            note=print_note,
            trackers=trackers,
        )
    if as_json:
        print_json(summary)
    else:
        promise = privacy_facts(summary["private"], summary["params"])
        print_table(facts_table({"accuracy": f"{summary['accuracy']:.2f} %", **promise, "folder": str(folder)}))


def shares_table(splits: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of shares of ε for the indices and their predicted errors, with the least error marked."""
    grid = Table("share of ε", "θ", "top-k lost", "σ", "pruning error", "noise", "together", box=None, pad_edge=False)
    least = min(split["error"] for split in splits)
    for split in splits:
        together = f"{split['error']:.4g}{' ★' if split['error'] == least else ''}"
        numbers = f"{split['theta']:.2g}", f"{split['lost']:.2%}", f"{split['sigma']:.3f}"
        grid.add_row(f"{split['share']:g}", *numbers, f"{split['pruning']:.4g}", f"{split['noise']:.4g}", together)
    grid.caption = "squared error of the gradient of one step, assuming Gaussian gradients of the clipping norm"
    return grid


def privacy_facts(private: Mapping[str, Any], params: int) -> dict[str, str]:
    """Return the privacy guarantee of a run as names and texts for a person."""
    facts = {
        "method": private["method"],
        "privacy": f"ε = {private['target']:.4g} at δ = {private['delta']:g}, one example added or removed",
        "noise": f"σ = {private['sigma']:.4g} times the norm {private['clip']:g}, to which each example is clipped",
        "randomness": "secure" if private["secure"] else "seeded, for experiments only: the seed reveals the noise",
    }
    if private["method"] != "dpsgd":
        facts["kept"] = f"{private['keep']:.1%} of {params:,} coordinates at the end"
    if private["method"] == "gip":
        lost, chance = private["lost"]["end"], private["random_loses"]["end"]
        facts["index draws"] = f"ε = {private['index_epsilon']:.3g} each, on its sample"
        facts["top-k lost"] = f"{lost:.2%} (E[i]/m); indices drawn at random lose {chance:.2%}"
        if lost > AS_GOOD_AS_RANDOM * chance:
            facts["warning"] = "the indices are as good as random: at this ε the draw ignores the gradient"
    return facts
