"""Train CIFAR-10 from scratch with DP-SGD after De et al. (2022), at ε = 8 and ε = 3, and record the accuracy.

The budgets are solved once, on a machine with dp-accounting, and stored in results/private-accuracy-budgets.json. A run
that was interrupted continues in its folder.

    python benchmarks/measure/private_accuracy.py budgets
    python benchmarks/measure/private_accuracy.py run --folder FOLDER [--epsilons 8] [--seconds 500] [--out PATH]

With --seconds a run is stopped after that time; called again, it goes on.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from record_file import RESULTS, write_record

from pomona.lab import describe_run, train
from pomona.lab.recipes.overrides import read_recipe
from pomona.lab.recipes.private_recipe import PrivateRecipe
from pomona.lab.runs.environment import current_commit
from pomona.lab.runs.interruption import Interrupted
from pomona.lab.runs.private import PrivateStrategy

RECIPE = Path(__file__).parents[2] / "recipes" / "private-de2022.toml"
RECORD, BUDGETS = RESULTS / "private-accuracy.json", RESULTS / "private-accuracy-budgets.json"
EPOCHS = {8.0: 100, 3.0: 70}  # of 12 steps
RUN_KEYS = ("name", "fingerprint", "data", "model", "step", "accuracy", "test_loss", "epsilon", "private", "params")
RUN_KEYS += ("seconds", "device")


class PrintedEpochs:
    """Prints a line for each epoch, with the losses of its steps, which are not private."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def start(self, total_epochs: int, steps_per_epoch: int, title: str) -> None:
        """Print the size of the run."""
        print(f"{title}: {total_epochs} epochs of {steps_per_epoch} steps", flush=True)

    def step(self, loss: float | None = None) -> None:
        """Note the loss of a step."""
        self.losses += [] if loss is None else [loss]

    def epoch(self, row: dict[str, Any]) -> None:
        """Print the line of an epoch."""
        shown = {key: round(row[key], 4) for key in ("epoch", "seconds", "loss", "accuracy", "epsilon") if key in row}
        print(shown, [round(loss, 3) for loss in self.losses], flush=True)
        self.losses = []

    def close(self) -> None:
        """Do nothing."""


def make_recipe(epsilon: float, options: argparse.Namespace, budget: dict[str, Any] | None) -> PrivateRecipe:
    """Return the recipe of a run."""
    given = read_recipe(RECIPE, [f"train.epochs={EPOCHS[epsilon]}", *options.settings])
    given["private"] |= {"epsilon": epsilon} | ({} if budget is None else {"budget": budget})
    return PrivateRecipe.load(given | {"name": f"private-de2022-{epsilon:g}"})


def solve_budgets(options: argparse.Namespace) -> None:
    """Solve the budget of each run and write them all to a file."""
    budgets = {}
    for epsilon in options.epsilons:
        strategy = PrivateStrategy(make_recipe(epsilon, options, None))
        described = describe_run(strategy, data_dir=options.data_dir)
        budgets[f"epsilon {epsilon:g}"] = budget = described["recipe"]["private"]["budget"]
        print(f"ε = {epsilon:g}: {budget['steps']} steps, σ = {budget['sigma']:.4f}", flush=True)
    options.budgets.write_text(json.dumps(budgets, indent=1) + "\n")


def train_runs(options: argparse.Namespace) -> None:
    """Train or continue the runs, and add those that are complete to the record."""
    budgets, end = json.loads(options.budgets.read_text()), time.monotonic() + options.seconds
    for epsilon in options.epsilons:
        recipe = make_recipe(epsilon, options, budgets[f"epsilon {epsilon:g}"])
        folder = options.folder / f"epsilon-{epsilon:g}"
        try:
            done = train(
                PrivateStrategy(recipe, options.folder / "ledger"),
                folder,
                resume=folder.exists(),
                data_dir=options.data_dir,
                progress=PrintedEpochs(),
                stop=lambda: time.monotonic() > end,
            )
        except Interrupted as stopped:
            print(stopped, flush=True)
            return
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        curve = [[line["step"], line["epsilon"], line["accuracy"]] for line in lines if "accuracy" in line]
        run = {key: done[key] for key in RUN_KEYS} | {"recipe": recipe.to_dict(), "curve": curve}
        add_run(options.out, run | {"commit": current_commit()})
        print(f"ε = {epsilon:g}: {run['accuracy']:.2f} % in {run['seconds']:.0f} s", flush=True)


def add_run(path: Path, run: dict[str, Any]) -> None:
    """Add a run to a record, in the place of one with its name. Each run keeps the commit that made it."""
    record = json.loads(path.read_text()) if path.exists() else {"commit": None, "runs": []}
    others = [{"commit": record["commit"], **entry} for entry in record["runs"] if entry["name"] != run["name"]]
    write_record(path, runs=sorted([*others, run], key=lambda entry: entry["name"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("budgets", "run"))
    parser.add_argument("--epsilons", type=float, nargs="+", default=list(EPOCHS), choices=list(EPOCHS))
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE")
    parser.add_argument("--folder", type=Path, help="the folder of the runs")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--budgets", type=Path, default=BUDGETS)
    parser.add_argument("--out", type=Path, default=RECORD)
    parser.add_argument("--data-dir")
    options = parser.parse_args()
    {"budgets": solve_budgets, "run": train_runs}[options.what](options)


if __name__ == "__main__":
    main()
