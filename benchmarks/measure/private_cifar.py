"""Measure whether the index choice of GIP helps: private training on CIFAR-10 at ε = 1, 2, 4 and 8 with three seeds.

    dpsgd          all coordinates
    random         random coordinates; their number decreases during training
    random held    random coordinates; their number is constant
    gip            GIP with the authors' 1 % of ε for the indices; the number of coordinates decreases
    gip half       GIP with half of ε for the indices
    public         the top-k of a gradient of 2000 held-out images, which costs no ε

All arms have the same steps, samples, model and ε. The budgets are solved once, on a machine with dp-accounting, and
stored in results/private-budgets.json. The runs need no accountant.

    python benchmarks/measure/private_cifar.py budgets                       some minutes on a CPU
    python benchmarks/measure/private_cifar.py run --jobs 6 [--device cuda]  all runs, into results/private-cifar10.json
    python benchmarks/pages/privacy_page.py                                  docs/privacy.md's tables, from the records

With --recipe, --budgets and --out another recipe is compared: results/private-comparison.json is that of
recipes/private-comparison.toml at ε = 1, 3 and 8.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from record_file import RESULTS, write_record

from pomona.lab import describe_run, train
from pomona.lab.recipes.overrides import read_recipe
from pomona.lab.recipes.private_recipe import PrivateRecipe
from pomona.lab.runs.private import PrivateStrategy

RECIPE = Path(__file__).parents[2] / "recipes" / "private-cifar10.toml"
RECORD, BUDGETS = RESULTS / "private-cifar10.json", RESULTS / "private-budgets.json"

PUBLIC_ROWS = 2000
CPU_MICRO_BATCH, GPU_MICRO_BATCH = 256, 4096  # a GPU takes a whole sample at once
RUN_KEYS = (
    "name",
    "fingerprint",
    "data",
    "model",
    "method",
    "epoch",
    "step",
    "accuracy",
    "valid_accuracy",  # on the images that are held out for the method `public`: settings are chosen by it
    "test_loss",
    "epsilon",
)
RUN_KEYS += ("private", "params", "seconds", "device")
ARMS: dict[str, dict[str, Any]] = {
    "dpsgd": {"method": "dpsgd"},
    "random": {"method": "random"},
    "random held": {"method": "random", "schedule": {"name": "constant"}},
    "gip": {"method": "gip", "share": 0.01},
    "gip half": {"method": "gip", "share": 0.5},
    "public": {"method": "public"},
}


def iterate_recipes(
    options: argparse.Namespace, budgets: Mapping[str, Any] | None
) -> Iterator[tuple[str, PrivateRecipe]]:
    """Yield every run with its arm. No arm trains on the public rows, so all arms train on the same data."""
    micro = options.micro or (CPU_MICRO_BATCH if options.device == "cpu" else GPU_MICRO_BATCH)
    common = ["train.checkpoint_every=0", f"train.device={options.device}", f"private.micro={micro}"]
    changes = [*common, *options.settings]
    for seed, epsilon, arm in itertools.product(options.seeds, options.epsilons, options.arms):
        choice = ARMS[arm]
        given = read_recipe(options.recipe, [f"data.validation={PUBLIC_ROWS}", *changes])
        section = {key: value for key, value in given["private"].items() if key not in ("method", "share")}
        given["private"] = section | choice | {"epsilon": epsilon}
        given |= {"seed": seed, "name": f"{arm.replace(' ', '-')}-{epsilon:g}-seed{seed}"}
        if budgets is not None:
            given["private"]["budget"] = budgets[budget_key(epsilon, choice.get("share", 0.0))]
        yield arm, PrivateRecipe.load(given)


def budget_key(epsilon: float, share: float) -> str:
    """Return the key of a budget in results/private-budgets.json."""
    return f"epsilon {epsilon:g}, share {share:g}"


def solve_budgets(options: argparse.Namespace) -> None:
    """Solve each budget once and write them all to `options.budgets`."""
    budgets: dict[str, Any] = {}
    for _, recipe in iterate_recipes(options, None):
        key = budget_key(recipe.private.epsilon, recipe.private.share)
        if key not in budgets:
            budgets[key] = describe_run(PrivateStrategy(recipe), data_dir=options.data_dir)["recipe"]["private"][
                "budget"
            ]
            print(f"{key}: σ = {budgets[key]['sigma']:.4f}, index draw ε = {budgets[key]['index']:.3g}", flush=True)
    options.budgets.write_text(json.dumps(budgets, indent=1) + "\n")


def train_run(arm: str, recipe: PrivateRecipe, data_dir: str | None) -> dict[str, Any]:
    """Train one run in a temporary folder and return its entry in the record."""
    folder = Path(tempfile.mkdtemp(prefix="private-"))
    try:
        done = train(PrivateStrategy(recipe, folder / "ledger"), folder / "run", data_dir=data_dir)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {"arm": arm, "seed": recipe.recipe.seed, **{key: done[key] for key in RUN_KEYS}}


def train_runs(options: argparse.Namespace) -> None:
    """Train the runs that are not in the record yet, `options.jobs` at a time on one device."""
    started = time.perf_counter()
    every = list(iterate_recipes(options, json.loads(options.budgets.read_text())))
    old = json.loads(options.out.read_text()) if options.out.exists() else {"runs": [], "settings": options.settings}
    if old["settings"] != options.settings:
        raise SystemExit(f"{options.out} has runs with other settings ({old['settings']}): give another --out")
    runs, have = old["runs"], {done["fingerprint"] for done in old["runs"]}
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        missing = [(arm, recipe) for arm, recipe in every if recipe.fingerprint() not in have]
        todo = [pool.submit(train_run, arm, recipe, options.data_dir) for arm, recipe in missing]
        for done in as_completed(todo):
            if time.perf_counter() - started > options.seconds:
                pool.shutdown(wait=False, cancel_futures=True)
                break
            runs.append(done.result())
            last = runs[-1]
            print(f"{last['name']}: {last['accuracy']:.2f} % in {last['seconds']:.1f} s", flush=True)
            write_record(options.out, settings=options.settings, runs=sorted(runs, key=lambda run: run["name"]))
    print(f"{len(todo)} runs in {time.perf_counter() - started:.0f} s; {options.out}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("budgets", "run"))
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("--micro", type=int, help="rows whose gradients are held in memory at a time")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no run after this time")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE")
    parser.add_argument("--epsilons", type=float, nargs="+", default=[1.0, 2.0, 4.0, 8.0])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS, metavar="ARM")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--budgets", type=Path, default=BUDGETS)
    parser.add_argument("--out", type=Path, default=RECORD)
    parser.add_argument("--data-dir")
    options = parser.parse_args()
    {"budgets": solve_budgets, "run": train_runs}[options.what](options)


if __name__ == "__main__":
    main()
