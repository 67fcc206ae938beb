"""The `private` commands: train under differential privacy, and show what was spent on a data set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from pomona.errors import require

from .application import CommandGroup, app
from .options import RUNS, AutoResume, DataDir, DryRun, Json, Resume, RunFolder, RunName, Settings, Track
from .output import facts_table, print_json, print_note, print_table
from .single_run import continues_run, find_recipe, recipe_overrides, resume_hint

DEFAULT_DELTA = 1e-5
AS_GOOD_AS_RANDOM = 0.95  # share of a random draw's loss above which the drawn indices are called as good as random


class PrivateGroup(CommandGroup):
    """A group of commands whose first, `train`, need not be named."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the command `train` where none is named."""
        is_named = bool(args) and (args[0] in self.commands or args == ["--help"])
        return super().parse_args(ctx, args if is_named else ["train", *args])


private = typer.Typer(
    cls=PrivateGroup,
    rich_markup_mode=None,
    help="Train under differential privacy: `pomona private RECIPE`.\n\n`pomona private ledger DATASET` shows what all "
    "runs have spent on a data set.",
)
app.add_typer(private, name="private")


@private.command()
def train(
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
    sigma: Annotated[
        float | None,
        typer.Option(help="Show how many steps noise of this σ allows within the budget; train nothing."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Train under differential privacy, within a privacy budget.

    The noise scale is solved for before the run, which needs dp-accounting (the extra `privacy`). --dry-run prints a
    recipe that holds the solved budget; a machine without dp-accounting can train from it.
    """
    from pomona import lab as laboratory
    from pomona.integrations.trackers import parse_names
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
    if sigma is not None:
        counted = lab.count_steps(resolved, sigma, data_dir=data_dir)
        print_json(counted) if as_json else print_table(facts_table({"σ": f"{sigma:g}", **counted}))
        return
    strategy = lab.PrivateStrategy(resolved)
    if dry_run:
        validate_folder(strategy, folder, resume)
        plan = laboratory.describe_run(strategy, data_dir=data_dir)
        if as_json:
            print_json({"folder": str(folder), **plan})
        else:
            print(PrivateRecipe.load(plan["recipe"]).to_toml())
            promise = privacy_facts(plan["private"], plan["params"])
            print_table(facts_table({"folder": folder, "steps": f"{plan['steps']:,}", **promise}))
        return
    with resume_hint("private", folder, data_dir, trackers):
        summary = laboratory.train(
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
    from pomona.lab.runs.public_origin import format_origin

    trained = private.get(
        "coordinates", params
    )  # frozen ones have no gradient; summaries of old runs do not count them
    facts = {
        "method": private["method"],
        "privacy": f"ε = {private['target']:.4g} at δ = {private['delta']:g}, one example added or removed",
        "noise": f"σ = {private['sigma']:.4g} times the norm {private['clip']:g}, to which each example is clipped",
        "randomness": "secure" if private["secure"] else "NOT PRIVATE: the seed decides the noise, and reveals it",
    }
    if "clipping" in private:
        facts["clipping"] = ", ".join(f"{key} = {value}" for key, value in private["clipping"].items())
    for key, name in (("noise_ramp", "σ over the steps"), ("index_ramp", "ε of index draws over the steps")):
        if key in private:
            facts[name] = f"from {private[key]['start']:.3g} to {private[key]['end']:.3g} times its value"
    if "origin" in private:
        facts["public weights"] = format_origin(private["origin"])
    if "not_covered" in private:
        facts["not covered"] = f"{private['not_covered']}, taken from the training rows without noise"
    if private["method"] == "datalens":
        facts["kept"] = f"the signs of the largest {private['keep']:.1%} of {trained:,} coordinates of each example"
    elif private["method"] != "dpsgd":
        facts["kept"] = f"{private['keep']:.1%} of {trained:,} coordinates at the end"
    if private["method"] == "gip":
        lost, chance = private["lost"]["end"], private["random_loses"]["end"]
        facts["index draws"] = f"ε = {private['index_epsilon']:.3g} each, on its sample"
        facts["top-k lost"] = f"{lost:.2%} (E[i]/m); indices drawn at random lose {chance:.2%}"
        if lost > AS_GOOD_AS_RANDOM * chance:
            facts["warning"] = "the indices are as good as random: at this ε the draw ignores the gradient"
    return facts


@private.command()
def ledger(
    dataset: Annotated[
        str | None,
        typer.Argument(metavar="[DATASET]", help="The name of a data set, or the first digits of its digest."),
    ] = None,
    delta: Annotated[float | None, typer.Option(help="δ at which ε is computed; by default that of the limit.")] = None,
    limit: Annotated[
        float | None, typer.Option(help="Refuse runs with which all together would cost more than this ε.")
    ] = None,
    end: Annotated[
        str | None, typer.Option(metavar="RUN", help="Give up a run that will not be resumed, to free its steps.")
    ] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Show what all runs have spent on a data set, and limit it.

    The ledgers are in the folder that POMONA_LEDGER names, or in ~/.local/share/pomona/ledger.
    """
    from pomona.lab.runs.private import open_ledger
    from pomona.privacy.accounting import validate_delta
    from pomona.privacy.ledger import find_ledgers, ledger_folder, summarize

    if delta is not None:
        validate_delta(delta)
    ledgers = find_ledgers(ledger_folder(), dataset)
    if limit is not None or end is not None:
        require(dataset is not None, "--limit and --end are for one data set: name it.")
        require(len(ledgers) < 2, f"{len(ledgers)} data sets are called '{dataset}': name one by its digest.")
        chosen = ledgers[0] if ledgers else open_ledger(str(dataset), data_dir)
        if end is not None:
            chosen.end(end)
        if limit is not None:
            chosen.set_limit(limit, DEFAULT_DELTA if delta is None else delta)
        ledgers = [chosen]
    default = [one.limit[1] if one.limit else DEFAULT_DELTA for one in ledgers]
    found = [summarize(one, other if delta is None else delta) for one, other in zip(ledgers, default, strict=True)]
    if as_json:
        print_json(found)
    elif not found:
        print(f"nothing was spent on {'any data set' if dataset is None else repr(dataset)} ({ledger_folder()})")
    for one in [] if as_json else found:
        print_table(ledger_table(one))
        print(describe_total(one))
    for name, count in Counter(one["name"] for one in found).items():
        if name and count > 1:
            print_note(f"{count} data sets are called '{name}': the limit of one does not hold for the others.")


def ledger_table(found: Mapping[str, Any]) -> Table:
    """Return a table of the runs on a data set, with their sum."""
    title = f"{found['name']} ({found['digest'][:8]}), ε at δ = {found['delta']:g}"
    grid = Table("run", "name", "started", "steps", "of", "q", "σ", "ε", title=title, box=None, pad_edge=False)
    for run in found["runs"]:
        numbers = f"{run['steps']:,}", f"{run['planned']:,}", f"{run['rate']:.4g}", f"{run['sigma']:.4g}"
        grid.add_row(run["run"][:8], run["name"], run["started"][:16], *numbers, f"{run['epsilon']:.4g}")
    return grid


def describe_total(found: Mapping[str, Any]) -> str:
    """Return what was spent on a data set as a sentence."""
    limit = "" if found["limit"] is None else f" of {found['limit'][0]:g} at δ = {found['limit'][1]:g}"
    total = f"all runs together: ε = {found['epsilon']:.4g}{limit}"
    if not found["not_private"]:
        return total
    return f"{total}; besides, {found['not_private']} runs with a seed, which are not private and not counted"
