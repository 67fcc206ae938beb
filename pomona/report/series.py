"""Groups and series: runs that differ only in their seeds, and groups that differ only in their sparsity."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .run_data import RunData

SPARSITY = "method.sparsity"
# The seed, and the run that a run starts or learns from, which is another one for each seed.
SEEDS = ("seed", "origin.fingerprint", "teacher.fingerprint")


@dataclass(frozen=True)
class Group:
    """Runs with the same settings and different seeds: one point of a chart, with an error bar."""

    network: str
    series: str
    runs: tuple[RunData, ...]

    @property
    def finished(self) -> list[RunData]:
        """The runs that have a result."""
        return [run for run in self.runs if run.result is not None]

    @property
    def sparsity(self) -> float:
        """The sparsity that was reached, the mean over seeds."""
        return statistics.mean(run.reached_sparsity for run in self.runs)

    @property
    def asked_sparsity(self) -> float:
        """The sparsity that the recipe asks for; where it asks for none, the one that was reached."""
        asked = self.runs[0].sparsity
        return self.sparsity if asked is None else asked

    @property
    def label(self) -> str:
        """The series with its sparsity, as in "dpf 90 %"."""
        return f"{self.series} {format_percent(self.asked_sparsity)}" if self.asked_sparsity else self.series

    def mean(self, key: str) -> float | None:
        """Return the mean of a figure of summaries over the finished runs; None where one of them lacks it."""
        return mean_of([(run.summary or {}).get(key) for run in self.finished])

    def result(self) -> tuple[float, float | None] | None:
        """Return the mean and the standard deviation of the result over seeds; None before there is one."""
        values = [run.result for run in self.runs if run.result is not None]
        if not values:
            return None
        return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else None


def mean_of(values: Sequence[float | None]) -> float | None:
    """Return the mean of numbers; None where there are none or one is missing."""
    known = [value for value in values if value is not None]
    return statistics.mean(known) if known and len(known) == len(values) else None


def group_runs(runs: Sequence[RunData]) -> list[Group]:
    """Return the groups of runs, in the order of their first runs."""
    groups: dict[str, list[RunData]] = {}
    for run in runs:
        key = [run.network, run.series, run.method, without(run.settings, *SEEDS)]
        groups.setdefault(json.dumps(key, sort_keys=True, default=str), []).append(run)
    names = name_series([members[0] for members in groups.values()])
    return [
        Group(members[0].network, name, tuple(members)) for name, members in zip(names, groups.values(), strict=True)
    ]


def name_series(runs: Sequence[RunData]) -> list[str]:
    """Return the names of the series of runs.

    A name is the source's or the method, with the settings in which runs of one method and network differ.
    """
    rivals: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for run in runs:
        rivals.setdefault((run.network, run.method), []).append(run.settings)
    names = []
    for run in runs:
        keys = differing_settings(rivals[run.network, run.method], ignore=(*SEEDS, SPARSITY))
        options = ", ".join(f"{shorten(key)}={format_value(run.settings.get(key))}" for key in keys)
        names.append(run.series or (f"{run.method} ({options})" if options else run.method))
    return names


def differing_settings(settings: Sequence[Mapping[str, Any]], ignore: Iterable[str] = SEEDS) -> list[str]:
    """Return the keys that have different values; settings without a key, as of another method, do not count."""
    keys = dict.fromkeys(key for one in settings for key in one if key not in ignore)
    return [key for key in keys if len({json.dumps(one[key], default=str) for one in settings if key in one}) > 1]


def without(settings: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    """Return settings without some keys."""
    return {key: value for key, value in settings.items() if key not in keys}


def shorten(key: str) -> str:
    """Return a dotted key without the section of the method, where most options are."""
    return key.removeprefix("method.")


def format_value(value: Any) -> str:
    """Return a setting as short text; one that is missing is a dash."""
    return "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def format_percent(share: float) -> str:
    """Return a share in per cent with as many digits as it needs, at most two after the point."""
    return f"{round(100 * share, 2):g} %"
