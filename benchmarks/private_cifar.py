"""Does choosing the indices help? Private training on CIFAR-10 at ε = 1, 2, 4 and 8, every arm with three seeds.

    dpsgd          all coordinates
    random         coordinates drawn at random, ever fewer
    random held    the same, as few from the first step on
    gip            GIP with the authors' 1 % of ε for the indices, ever fewer
    gip half       with half of ε for the indices
    public         the top-k of a gradient of 2000 held-out images: an index choice for nothing

All arms have the same steps, samples, model and ε. Budgets are solved once, where dp-accounting is, and lie in
results/private-budgets.json; the runs need no accountant.

    python benchmarks/private_cifar.py budgets                       some minutes on a CPU
    python benchmarks/private_cifar.py run --jobs 6 [--device cuda]  all runs, into results/private-cifar10.json
    python benchmarks/private_cifar.py page                          docs/privacy.md's tables, from the records
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

import record

from pomona.lab import describe_run, train
from pomona.lab.recipes.overrides import read_recipe
from pomona.lab.recipes.private_recipe import PrivateRecipe
from pomona.lab.runs.private import PrivateStrategy

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "private-cifar10.toml"
RESULTS, BUDGETS = ROOT / "results" / "private-cifar10.json", ROOT / "results" / "private-budgets.json"

PUBLIC = 2000  # rows
ARMS: dict[str, dict[str, Any]] = {
    "dpsgd": {"method": "dpsgd"},
    "random": {"method": "random"},
    "random held": {"method": "random", "schedule": {"name": "constant"}},
    "gip": {"method": "gip", "share": 0.01},
    "gip half": {"method": "gip", "share": 0.5},
    "public": {"method": "public"},
}


def recipes(options: argparse.Namespace, budgets: Mapping[str, Any] | None) -> Iterator[tuple[str, PrivateRecipe]]:
    """Every run. All arms lack the rows that are public to one, so that they train on the same."""
    micro = 256 if options.device == "cpu" else 4096  # on a GPU all of a sample at once
    here = ["train.checkpoint_every=0", f"train.device={options.device}", f"private.micro={micro}"]
    changes = [*here, *options.settings]
    for epsilon, arm, seed in itertools.product(options.epsilons, options.arms, options.seeds):
        choice = ARMS[arm]
        given = read_recipe(RECIPE, [f"data.validation={PUBLIC}", *changes])
        section = {key: value for key, value in given["private"].items() if key not in ("method", "share")}
        given["private"] = section | choice | {"epsilon": epsilon}
        given |= {"seed": seed, "name": f"{arm.replace(' ', '-')}-{epsilon:g}-seed{seed}"}
        if budgets is not None:
            given["private"]["budget"] = budgets[key_of(epsilon, choice.get("share", 0.0))]
        yield arm, PrivateRecipe.load(given)


def key_of(epsilon: float, share: float) -> str:
    return f"epsilon {epsilon:g}, share {share:g}"


def solve(options: argparse.Namespace) -> None:
    """Solve every budget there is, each once."""
    budgets: dict[str, Any] = {}
    for _, recipe in recipes(options, None):
        key = key_of(recipe.private.epsilon, recipe.private.share)
        if key not in budgets:
            budgets[key] = describe_run(PrivateStrategy(recipe), data_dir=options.data_dir)["recipe"]["private"][
                "budget"
            ]
            print(f"{key}: σ = {budgets[key]['sigma']:.4f}, index draw ε = {budgets[key]['index']:.3g}", flush=True)
    options.budgets.write_text(json.dumps(budgets, indent=1) + "\n")


def one(arm: str, recipe: PrivateRecipe, data_dir: str | None) -> dict[str, Any]:
    """A run in a folder that is not kept."""
    folder = Path(tempfile.mkdtemp(prefix="private-"))
    try:
        done = train(PrivateStrategy(recipe), folder / "run", data_dir=data_dir)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    kept = (
        "name",
        "fingerprint",
        "seed",
        "data",
        "model",
        "method",
        "epoch",
        "step",
        "accuracy",
        "test_loss",
        "epsilon",
    )
    return {"arm": arm, **{key: done[key] for key in (*kept, "private", "params", "seconds", "device")}}


def run(options: argparse.Namespace) -> None:
    """All runs that are not in the record yet, some at a time on one device."""
    started = time.perf_counter()
    every = list(recipes(options, json.loads(options.budgets.read_text())))
    old = json.loads(options.out.read_text()) if options.out.exists() else {"runs": [], "settings": options.settings}
    if old["settings"] != options.settings:
        raise SystemExit(f"{options.out} has runs with other settings ({old['settings']}): give another --out")
    runs, have = old["runs"], {done["fingerprint"] for done in old["runs"]}
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        todo = [pool.submit(one, arm, made, options.data_dir) for arm, made in every if made.fingerprint() not in have]
        for done in as_completed(todo):
            runs.append(done.result())
            told = runs[-1]
            print(f"{told['name']}: {told['accuracy']:.2f} % in {told['seconds']:.1f} s", flush=True)
            record.write(options.out, settings=options.settings, runs=sorted(runs, key=lambda run: run["name"]))
    print(f"{len(todo)} runs in {time.perf_counter() - started:.0f} s; {options.out}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("budgets", "run", "page"))
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE")
    parser.add_argument("--epsilons", type=float, nargs="+", default=[1.0, 2.0, 4.0, 8.0])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS, metavar="ARM")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--budgets", type=Path, default=BUDGETS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--data-dir")
    options = parser.parse_args()
    if options.what == "page":
        import pages
        import private_page

        pages.write(private_page.PAGE, private_page.page())
    else:
        {"budgets": solve, "run": run}[options.what](options)


if __name__ == "__main__":
    main()
