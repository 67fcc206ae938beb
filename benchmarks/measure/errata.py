"""Simulate every erratum of benchmarks/errata.toml, and write results/errata.json.

    python benchmarks/measure/errata.py           (about a minute)
    python benchmarks/pages/errata_page.py        writes docs/errata.md from the record

Every comparison is checked: the corrected form must agree with the simulated value within four standard errors
(and the slack that an erratum states, where its formula is a limit), and the printed form must not.
"""

from __future__ import annotations

import argparse
import math
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import errata_other_papers
import errata_pruning_bounds
import numpy as np
from errata_comparison import MEASUREMENTS, SEED, Comparison
from record_file import RESULTS, write_record

from pomona.theory import bounds, gip

STATEMENTS = Path(__file__).parents[1] / "errata.toml"
RECORD = RESULTS / "errata.json"
STANDARD_ERRORS = 4


@dataclass(frozen=True)
class Erratum:
    """An error in a paper. A `bound` must not be below the simulated value; a value must agree, up to `slack`."""

    paper: str
    place: str
    printed: str
    right: str
    note: str
    measurement: str
    bound: bool = False
    slack: float = 0.0

    def measure(self) -> Iterator[Comparison]:
        """Yield the comparisons of this erratum, from a generator with the seed of the record."""
        return MEASUREMENTS[self.measurement](np.random.default_rng(SEED))

    def is_supported_by(self, comparison: Comparison) -> bool:
        """Return whether a comparison confirms the corrected form and contradicts the printed one, if known."""
        drawn, right, printed = comparison.drawn, comparison.right, comparison.printed
        margin = STANDARD_ERRORS * comparison.error + 1e-9 * abs(drawn)
        if printed is None:
            return abs(right - drawn) <= margin + self.slack
        if self.bound:
            return right >= drawn - margin and printed < drawn - margin
        return abs(right - drawn) <= margin + self.slack < abs(printed - drawn)

    def as_record(self, comparisons: list[Comparison]) -> dict[str, Any]:
        """Return the entry of this erratum in the record."""
        facts = {key: value for key, value in asdict(self).items() if key not in ("paper", "measurement")}
        return {"document": self.paper, **facts, "rows": [asdict(comparison) for comparison in comparisons]}


def load_errata() -> list[Erratum]:
    """Return the errata of errata.toml in their order."""
    papers = tomllib.loads(STATEMENTS.read_text(encoding="utf-8"))["paper"]
    return [Erratum(paper["citation"], **entry) for paper in papers for entry in paper["erratum"]]


def measure_errata() -> list[dict[str, Any]]:
    """Return the entries of all errata. Raise SystemExit at a comparison that does not support its erratum."""
    entries = []
    for erratum in load_errata():
        comparisons = list(erratum.measure())
        for comparison in comparisons:
            if not erratum.is_supported_by(comparison):
                raise SystemExit(f"{erratum.paper}, {erratum.place}: not supported by {comparison}.")
        entries.append(erratum.as_record(comparisons))
    return entries


def measure_figures(draw: np.random.Generator) -> dict[str, Any]:
    """Return the figures that notes and remarks of errata.toml quote."""
    d = 2_750_000
    theta = gip.theta_for_epsilon(1.4e-4, d, d // 10)
    alphas = errata_pruning_bounds.ALPHAS
    kept = [math.sqrt(1 - bounds.distinct(math.floor(32 ** (2 - a)), 32**2)) for a in alphas]
    width, alpha, C = 512, 0.1, 0.63
    draws = math.ceil(32 * math.log(32))
    W = draw.uniform(-1, 1, (width, width)) / math.sqrt(width)
    share = width ** (-2 * alpha)
    removed = np.where(np.abs(W) <= np.quantile(np.abs(W), share), W, 0)
    return {
        "theta": theta,
        "lost": gip.expected_swaps(theta, d, d // 10) / (d // 10),
        "zero": math.prod(errata_other_papers.SCALES),
        "lemma6": -math.log(bounds.lemma6(10)) / math.log(10),
        "kept": ", ".join(f"{k:.3f}" for k in kept[:-1]) + f" and {kept[-1]:.3f}",
        "C": bounds.LATALA,
        "draws": draws,
        "fresh": math.exp(bounds.no_repeat(draws, 32**2)),
        "width": width,
        "alpha": alpha,
        "drawn": float(np.linalg.norm(removed, 2)),
        "near": bounds.removed_norm(width, width, share, bounds.Uniform(K=1.0)),
        "loose": C * (2 * math.sqrt(2) + 24**0.25) * share,
    }


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    figures = measure_figures(np.random.default_rng(SEED))
    write_record(RECORD, seed=SEED, errata=measure_errata(), figures=figures)


if __name__ == "__main__":
    main()
