"""The privacy loss of several runs on the same data, composed exactly.

Each run is composed over its own steps first. The distribution of its loss is then rounded up to a grid that all runs
share, by the same pessimistic discretization as a step's (Doroshenko et al., 2022), and the runs are composed.

Composition in this form is for mechanisms that were chosen in advance. Runs are usually chosen after looking at the
results of earlier ones. For a fixed list of runs that is adaptive composition, which the bound covers. If the *budget*
of a run, its σ, q or number of steps, depends on earlier results, the bound is the usual approximation and no theorem.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from .accounting import ROUNDING_DELTA, Pair, compose_steps, import_dp_accounting, validate_delta

TAIL_DELTA = 1e-14  # of each run: what its losses beyond the shared grid add to δ
SHARED_GRID_POINTS = 20_000  # from 0 to the sum of all runs' largest losses


def total_epsilon(runs: Iterable[Mapping[Pair, int]], delta: float) -> float:
    """Return the ε at δ of all runs together, from the number of steps of each kind in each run."""
    validate_delta(delta)
    taken = merge_equal_kinds(runs)
    if not taken:
        return 0.0
    with np.errstate(all="ignore"):  # some of dp-accounting's bounds on the tails overflow, and are discarded
        if len(taken) == 1 and len(taken[0]) == 1:
            ((pair, count),) = taken[0].items()
            return pair.epsilon(count, delta)
        composed = [next(compose_steps(run)) for run in taken]
        total = composed[0] if len(composed) == 1 else compose_on_shared_grid(composed)
        return float(np.inf if total is None else total.get_epsilon_for_delta(delta - ROUNDING_DELTA))


def merge_equal_kinds(runs: Iterable[Mapping[Pair, int]]) -> list[Counter[Pair]]:
    """Return the runs that have steps, those of the same kinds of steps as one."""
    merged: dict[frozenset[Pair], Counter[Pair]] = {}
    for run in runs:
        taken = Counter({pair: count for pair, count in run.items() if count})
        if taken:
            merged.setdefault(frozenset(taken), Counter()).update(taken)
    return list(merged.values())


def compose_on_shared_grid(runs: list[Any]) -> Any:
    """Return the privacy-loss distribution of all runs; None if the loss of one has no finite bound."""
    pmf, pld = import_dp_accounting()
    ends = np.array([run.get_epsilon_for_delta(TAIL_DELTA) for run in runs], dtype=np.float64)
    if not np.isfinite(ends).all():
        ends = np.array([largest_finite_loss(run) for run in runs], dtype=np.float64)
        if not np.isfinite(ends).all():
            return None
    interval = max(float(ends.sum()), 1e-6) / SHARED_GRID_POINTS
    total = None
    for run, end in zip(runs, ends, strict=True):
        count = int(np.ceil(end / interval)) + 1
        places = np.arange(-count, count + 1)
        deltas = np.clip(run.get_delta_for_epsilon(places * interval), 0, 1)  # of both directions, the larger
        part = pld.PrivacyLossDistribution(
            pmf.create_pmf_pessimistic_connect_dots(interval, places, np.minimum.accumulate(deltas))
        )
        total = part if total is None else total.compose(part)
    return total


def largest_finite_loss(run: Any) -> float:
    """Return the smallest ε at which δ is that of infinite losses, which no ε lowers, or 1e-9 above it."""
    floor = float(run.get_delta_for_epsilon(1e6))
    return float(run.get_epsilon_for_delta(floor + 1e-9))
