"""Write the tables of docs/privacy.md from the records in results/ and from the theory.

python benchmarks/pages/privacy_page.py
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import page_helpers
from page_helpers import DOCS, NOT_MEASURED, ROOT, fill_page, machine_name, read_record, read_rows, write_page
from scipy.stats import t as student

from pomona.lab.tables import private_table as private
from pomona.privacy import splits
from pomona.theory import gip

PAGE = DOCS / "privacy.md"
RECORDS = "privacy-*.json"
COMPARISON_RECORD = Path("results/private-comparison.json")
ACCURACY_RECORD = Path("results/private-accuracy.json")
STEP_RECORDS = "private-step-*.json"
ARITHMETIC_RECORDS = "private-arithmetic-*.json"
AUDIT_RECORDS = "private-audit-*.json"
STEP_KINDS = {
    "pomona": "Pomona",
    "pomona gip": "Pomona, GIP",
    "opacus plain": "Opacus",
    "opacus fast": "Opacus, fast clipping",
    "opacus ghost": "Opacus, ghost clipping",
}
format_table = partial(page_helpers.format_table, rule="| --- ")

ARMS = {  # of benchmarks/measure/private_cifar.py
    "dpsgd": "DP-SGD",
    "random": "random-k, decreasing k",
    "random held": "random-k, constant k",
    "gip": "GIP, 1 % of ε for indices",
    "gip half": "GIP, 50 % of ε for indices",
    "public": "top-k of public data",
}
COMPARISONS = {
    "the index choice of GIP (GIP − random-k, same schedule)": ("gip", "random"),
    "a larger share of ε for the indices (50 % − 1 %)": ("gip half", "gip"),
    "the schedule (random-k, decreasing k − constant k)": ("random", "random held"),
    "pruning at all (random-k, decreasing k − DP-SGD)": ("random", "dpsgd"),
    "indices without privacy cost (top-k of public data − random-k)": ("public", "random"),
}


# ---- from the theory


def format_index_costs() -> str:
    """Return the ε of one index draw that loses a half or a tenth of the top-k."""
    rows = []
    for d, m in ((100, 10), (256, 26), (10_000, 100), (66_000, 6_600), (2_750_000, 275_000)):
        costs = [gip.epsilon_for_theta(gip.theta_for_swaps(lost * m, d, m), d, m) for lost in (0.5, 0.1)]
        rows.append([f"{d:,}", f"{m:,}", *(f"{cost:,.0f}" for cost in costs)])
    return format_table(["coordinates", "kept", "ε of a draw that loses half", "that loses a tenth"], rows)


def format_best_shares() -> str:
    """Return the share of ε with the smallest predicted error, for three sizes."""
    setting = {"clip": 1.0, "epsilon": 4.0, "delta": 1e-5, "rows": 48_000, "batch_size": 2048, "steps": 368}
    rows = []
    for d, m in ((20, 1), (256, 26), (66_000, 6_600)):
        found = splits([d], [m], shares=(0.01, 0.1, 0.3, 0.5, 0.7, 0.9), **setting)
        best = min(found, key=lambda split: split.error)
        authors = next(split for split in found if split.share == 0.01)
        errors = f"{best.error / authors.error:.3f}", f"{found[0].error / authors.error:.3f}"
        rows.append([f"{d:,}", f"{m:,}", f"{best.share:g}", f"{best.lost:.1%}", f"{authors.lost:.1%}", *errors])
    lost = "E[i]/m at the best share", "E[i]/m at 1 %"
    return format_table(["coordinates", "kept", "best share of ε", *lost, "error, best / 1 %", "random-k / 1 %"], rows)


# ---- from the records


def format_accuracies(record: Path = private.RECORD) -> str:
    """Return the accuracy of each arm at each ε."""
    path = ROOT / record
    if not path.exists():
        return NOT_MEASURED
    cells = private.private_table(path)["cells"]
    epsilons = sorted({cell["setting"]["epsilon"] for cell in cells})
    rows = []
    for arm, name in ARMS.items():
        found = {cell["setting"]["epsilon"]: cell for cell in cells if cell["setting"]["arm"] == arm}
        if found:
            rows.append([name, *(format_accuracy(found[e]) if e in found else "–" for e in epsilons)])
    return format_table(["accuracy in %, E[i]/m at the end", *(f"ε = {e:g}" for e in epsilons)], rows)


def format_accuracy(cell: Mapping[str, Any]) -> str:
    """Return the mean accuracy of a cell, its deviation, and the share of the top-k that the indices miss."""
    lost = cell["setting"]["lost"]["end"]
    spread = "" if cell["std"] is None else f" ± {cell['std']:.2f}"
    shown = "" if lost is None or cell["method"] == "dpsgd" else f", {lost:.4f}"
    return f"{cell['mean']:.2f}{spread}{shown}"


def format_differences() -> str:
    """Return the differences in accuracy between pairs of arms, over runs of the same seed and ε."""
    path = ROOT / private.RECORD
    if not path.exists():
        return NOT_MEASURED
    runs = read_record(path)["runs"]
    accuracies = {(run["arm"], run["private"]["target"], run["seed"]): run["accuracy"] for run in runs}
    rows = []
    for text, pair in COMPARISONS.items():
        difference = compare_arms(accuracies, *pair)
        if difference is not None:
            mean, error = difference
            verdict = "no difference" if abs(mean) < 2 * error else "helps" if mean > 0 else "hurts"
            rows.append([text, f"{mean:+.2f} ± {error:.2f}", verdict])
    heads = ["effect", "accuracy in % points, mean ± standard error", "beyond two standard errors"]
    return format_table(heads, rows)


def format_intervals() -> str:
    """Return the differences between arms at each ε over runs of the same seed, with 95 % intervals."""
    path = ROOT / COMPARISON_RECORD
    if not path.exists():
        return NOT_MEASURED
    runs = read_record(path)["runs"]
    epsilons = sorted({run["private"]["target"] for run in runs})
    rows = []
    for one, other in (("gip", "random"), ("random", "dpsgd"), ("gip", "dpsgd")):
        cells = []
        for epsilon in epsilons:
            chosen = [run for run in runs if run["private"]["target"] == epsilon]
            accuracies = {(run["arm"], epsilon, run["seed"]): run["accuracy"] for run in chosen}
            difference = compare_arms(accuracies, one, other)
            pairs = sum(arm == one and (other, epsilon, seed) in accuracies for arm, _, seed in accuracies)
            cells.append("–" if difference is None else format_interval(*difference, pairs))
        rows.append([f"{ARMS[one].split(',')[0]} − {ARMS[other].split(',')[0]}", *cells])
    return format_table(["difference in % points", *(f"ε = {e:g}" for e in epsilons)], rows)


def format_interval(mean: float, error: float, count: int) -> str:
    """Return a mean with its 95 % interval by Student's t distribution."""
    return f"{mean:+.2f} ± {student.ppf(0.975, count - 1) * error:.2f}"


def format_from_scratch() -> str:
    """Return the accuracy of the runs after De et al. (2022)."""
    path = ROOT / ACCURACY_RECORD
    if not path.exists():
        return NOT_MEASURED
    record = read_record(path)
    rows = []
    for run in sorted(record["runs"], key=lambda run: -run["epsilon"]):
        private_facts, settings = run["private"], run["recipe"]
        rows.append(
            [
                f"{private_facts['target']:g}",
                f"{run['accuracy']:.2f} %",
                f"{run['step']:,}",
                str(settings["private"]["views"]),
                f"{private_facts['sigma']:.2f}",
                f"{run['seconds']:.0f} s",
            ]
        )
    return format_table(["ε", "accuracy", "steps of 4,096 rows", "views", "σ", f"time, {machine_name(record)}"], rows)


def format_gpu_steps(key: str) -> str:
    """Return the time and memory of ways to take a step on a GPU."""
    rows = []
    for _, row in read_rows(STEP_RECORDS, key):
        if "milliseconds" in row:
            times = f"{row['milliseconds']:.1f}", f"{row['views_per_second']:,.0f}", f"{row['gigabytes']:.1f}"
            rows.append([row["step"], str(row["rows"]), str(row["views"]), *times])
    return format_table(["step", "rows", "views", "ms", "views per second", "GB"], rows) if rows else NOT_MEASURED


def format_independence() -> str:
    """Return in which arithmetic the gradients of a row were found to depend on other rows."""
    rows = [
        [row["arithmetic"], str(row["rows"]), "none" if row["dependent"] is None else f"`{row['dependent']}`"]
        for _, row in read_rows(STEP_RECORDS, "independent")
    ]
    return format_table(["arithmetic", "rows of 4 views", "gradients that change"], rows) if rows else NOT_MEASURED


def compare_arms(
    accuracies: Mapping[tuple[str, float, int], float], one: str, other: str
) -> tuple[float, float] | None:
    """Return the mean difference of two arms and its standard error, or None with fewer than two pairs of runs."""
    pairs = [(e, seed) for arm, e, seed in accuracies if arm == one and (other, e, seed) in accuracies]
    gaps = [accuracies[one, *pair] - accuracies[other, *pair] for pair in pairs]
    if len(gaps) < 2:
        return None
    return statistics.mean(gaps), statistics.stdev(gaps) / len(gaps) ** 0.5


def format_sampler() -> str:
    """Return the time of an index draw."""
    rows = []
    for record, row in read_rows(RECORDS, "sampler"):
        threads = f"CPU, {row['threads']} thread{'s' * (row['threads'] > 1)}"
        machine = machine_name(record) if row["device"] == "cuda" else threads
        rows.append([machine, row["case"], f"{row['size']:,}", f"{row['kept']:,}", f"{row['milliseconds']:.1f}"])
    return format_table(["machine", "case", "coordinates", "kept", "ms"], rows)


def format_steps() -> str:
    """Return the time and memory of a private step, compared with Opacus and each of its kinds of clipping."""
    rows = []
    for _, row in read_rows(RECORDS, "steps"):
        times, sizes = row["milliseconds"], row["megabytes"]
        figures = [f"{times[kind]:,.0f} ms, {sizes[kind]:,.0f} MB" for kind in STEP_KINDS]
        fastest = min(seconds for kind, seconds in times.items() if kind.startswith("opacus"))
        gain = f"{fastest / times['pomona']:.2f}×"
        rows.append([row["model"], str(row["batch"]), *figures, gain, f"{row['difference']:.1e}"])
    heads = ["model", "batch", *STEP_KINDS.values(), "Pomona over the fastest Opacus", "gradients differ by"]
    return format_table(heads, rows)


def format_audits() -> str:
    """Return the ε that the second accountant and the audits found."""
    rows = []
    for _, row in read_rows(AUDIT_RECORDS, "audit"):
        low, high = row["bounds"]
        figures = f"{row['rate']:g}", str(row["steps"]), f"{row['epsilon']:g}", f"{low:.3f} … {high:.3f}"
        rows.append([row["method"], row["setting"], *figures, f"{row['audited']:.2f}"])
    heads = ["method", "setting", "q", "steps", "promised ε", "second accountant", "audited: at least"]
    return format_table(heads, rows)


def format_arithmetic() -> str:
    """Return the time of a step with exact arithmetic, compared with floating-point sums and noise."""
    rows = []
    for record, row in read_rows(ARITHMETIC_RECORDS, "arithmetic"):
        machine = machine_name(record) if row["device"] == "cuda" else "CPU, 1 thread"
        times = (f"{row[key]:.1f}" for key in ("exact_ms", "floats_ms"))
        fixed = f"{row['other_rows_padded']:.0e}" if "other_rows_padded" in row else "–"
        cost, changes = f"{row['cost_percent']:+.1f} %", [f"{row['other_rows']:.0e}", fixed]
        rows.append([machine, row["model"], f"{row['size']:,}", f"{row['batch']:,}", *times, cost, *changes])
    heads = ["machine", "model", "coordinates", "batch", "exact, ms", "floats, ms", "cost"]
    heads += ["other rows, growing batch", "fixed shape"]
    return format_table(heads, rows)


PARTS: dict[str, Callable[[], str]] = {
    "price": format_index_costs,
    "shares": format_best_shares,
    "accuracies": format_accuracies,
    "answer": format_differences,
    "from scratch": format_from_scratch,
    "comparison": partial(format_accuracies, COMPARISON_RECORD),
    "intervals": format_intervals,
    "sampler": format_sampler,
    "gradients": partial(format_gpu_steps, "views"),
    "opacus": partial(format_gpu_steps, "opacus"),
    "independence": format_independence,
    "steps": format_steps,
    "audit": format_audits,
    "arithmetic": format_arithmetic,
}


def render() -> str:
    """Return the text of the page with its tables filled in."""
    return fill_page(PAGE, {name: make() for name, make in PARTS.items()})


if __name__ == "__main__":
    write_page(PAGE, render())
