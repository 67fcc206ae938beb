"""Write the tables of docs/privacy.md from the records in results/ and from the theory; no figure is typed by hand.

python benchmarks/private_cifar.py page
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pages
from pages import DOCS, MISSING, ROOT

from pomona.lab.tables import private_table as private
from pomona.privacy import splits
from pomona.theory import gip

PAGE = DOCS / "privacy.md"
RECORDS = "privacy-*.json"
grid = partial(pages.grid, rule="| --- ")

NAMES = {
    "dpsgd": "DP-SGD",
    "random": "random-k, ever fewer",
    "random held": "random-k, few throughout",
    "gip": "GIP, 1 % of ε for indices",
    "gip half": "GIP, 50 % of ε for indices",
    "public": "top-k of public data",
}


# ---- what the indices can know


def price() -> str:
    """What one draw costs that loses a tenth or half of the top-k."""
    rows = []
    for d, m in ((100, 10), (256, 26), (10_000, 100), (66_000, 6_600), (2_750_000, 275_000)):
        costs = [gip.epsilon_for_theta(gip.theta_for_swaps(lost * m, d, m), d, m) for lost in (0.5, 0.1)]
        rows.append([f"{d:,}", f"{m:,}", *(f"{cost:,.0f}" for cost in costs)])
    return grid(["coordinates", "kept", "ε of a draw that loses half", "that loses a tenth"], rows)


def shares() -> str:
    """Where the split pays, and where not."""
    setting = {"clip": 1.0, "epsilon": 4.0, "delta": 1e-5, "rows": 48_000, "batch_size": 2048, "steps": 368}
    rows = []
    for d, m in ((20, 1), (256, 26), (66_000, 6_600)):
        found = splits([d], [m], shares=(0.01, 0.1, 0.3, 0.5, 0.7, 0.9), **setting)
        best = min(found, key=lambda split: split.error)
        authors = next(split for split in found if split.share == 0.01)
        rows.append(
            [
                f"{d:,}",
                f"{m:,}",
                f"{best.share:g}",
                f"{best.lost:.1%}",
                f"{authors.lost:.1%}",
                f"{best.error / authors.error:.3f}",
                f"{found[0].error / authors.error:.3f}",
            ]
        )
    head = [
        "coordinates",
        "kept",
        "best share of ε",
        "E[i]/m there",
        "E[i]/m at 1 %",
        "error, best / 1 %",
        "random-k / 1 %",
    ]
    return grid(head, rows)


# ---- what was measured


def accuracies() -> str:
    cells = private.private_table(ROOT / private.RECORD)["cells"]
    epsilons = sorted({cell["setting"]["epsilon"] for cell in cells})
    rows = []
    for arm, name in NAMES.items():
        found = {cell["setting"]["epsilon"]: cell for cell in cells if cell["setting"]["arm"] == arm}
        if found:
            rows.append([name, *(number(found[e]) if e in found else "–" for e in epsilons)])
    return grid(["accuracy in %, E[i]/m at the end", *(f"ε = {e:g}" for e in epsilons)], rows)


def number(cell: Mapping[str, Any]) -> str:
    lost = cell["setting"]["lost"]["end"]
    spread = "" if cell["std"] is None else f" ± {cell['std']:.2f}"
    shown = "" if lost is None or cell["method"] == "dpsgd" else f", {lost:.4f}"
    return f"{cell['mean']:.2f}{spread}{shown}"


def answer() -> str:
    """The question, answered by differences between runs of the same seed and ε."""
    path = ROOT / private.RECORD
    if not path.exists():
        return MISSING
    runs = pages.read(path)["runs"]
    by = {(run["arm"], run["private"]["target"], run["seed"]): run["accuracy"] for run in runs}

    def compare(one: str, other: str) -> tuple[float, float] | None:
        gaps = [by[one, e, s] - by[other, e, s] for arm, e, s in by if arm == one and (other, e, s) in by]
        if len(gaps) < 2:
            return None
        return statistics.mean(gaps), statistics.stdev(gaps) / len(gaps) ** 0.5

    questions = {
        "the index choice of GIP (GIP − random-k, same schedule)": ("gip", "random"),
        "more of ε for the indices (50 % − 1 %)": ("gip half", "gip"),
        "the schedule (random-k, ever fewer − few throughout)": ("random", "random held"),
        "pruning at all (random-k, ever fewer − DP-SGD)": ("random", "dpsgd"),
        "indices for nothing (top-k of public data − random-k)": ("public", "random"),
    }
    rows = []
    for text, pair in questions.items():
        found = compare(*pair)
        if found is not None:
            mean, error = found
            verdict = "no difference" if abs(mean) < 2 * error else "helps" if mean > 0 else "hurts"
            rows.append([text, f"{mean:+.2f} ± {error:.2f}", verdict])
    return grid(["what", "accuracy in % points, mean ± standard error", "beyond two standard errors"], rows)


def sampler() -> str:
    rows = []
    for record, row in pages.rows(RECORDS, "sampler"):
        threads = f"CPU, {row['threads']} thread{'s' * (row['threads'] > 1)}"
        where = pages.machine(record) if row["device"] == "cuda" else threads
        rows.append([where, row["case"], f"{row['size']:,}", f"{row['kept']:,}", f"{row['milliseconds']:.1f}"])
    return grid(["machine", "case", "coordinates", "kept", "ms"], rows)


def steps() -> str:
    rows = []
    for _, row in pages.rows(RECORDS, "steps"):
        times, sizes = row["milliseconds"], row["megabytes"]
        figures = [times["pomona"], times["opacus"], times["pomona gip"], sizes["pomona"], sizes["opacus"]]
        rows.append(
            [row["model"], str(row["batch"]), *(f"{value:.0f}" for value in figures), f"{row['difference']:.1e}"]
        )
    head = ["model", "batch", "Pomona, ms", "Opacus, ms", "GIP, ms", "Pomona, MB", "Opacus, MB", "gradients differ by"]
    return grid(head, rows)


def audited() -> str:
    rows = [
        [row["method"], f"{row['rate']:g}", str(row["steps"]), f"{row['epsilon']:g}", f"{row['audited']:.2f}"]
        for _, row in pages.rows(RECORDS, "audit")
    ]
    return grid(["method", "q", "steps", "promised ε", "audited: at least"], rows)


PARTS: dict[str, Callable[[], str]] = {
    "price": price,
    "shares": shares,
    "accuracies": accuracies,
    "answer": answer,
    "sampler": sampler,
    "steps": steps,
    "audit": audited,
}


def page() -> str:
    """The page with its tables."""
    return pages.filled(PAGE, {name: make() for name, make in PARTS.items()})
