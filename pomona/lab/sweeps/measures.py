"""What runs are compared by: the last epoch, the last epoch with fresh batch-norm statistics, or the best epoch.

A mask update changes what every layer computes, but not the running statistics of its batch norm. After an update in
the last steps of a run they are stale, and the summary of the run has a second accuracy, with statistics that were
estimated anew: `accuracy_reestimated`. Where they are not stale, both are the same. The best epoch is known of runs
that were evaluated after every epoch: `accuracy_best`. Of a language model the perplexity takes the place of the
accuracy.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from pomona.errors import require, unknown_name_error

SUFFIXES = {"last": "", "fresh": "_reestimated", "best": "_best"}  # of the keys in a summary
DETAILS = ("fresh", "best")  # measures that are shown beside the last epoch

Summary = Mapping[str, Any]


def measured_key(base: str, measure: str) -> str:
    """Return the key of a measure, "last", "fresh" or "best", given that of the last epoch.

    Raises:
        PomonaError: for another measure, or where runs are compared on held-out images, of which only the last epoch
            is recorded.
    """
    if measure not in SUFFIXES:
        raise unknown_name_error("measure", measure, SUFFIXES)
    require(
        measure == "last" or not base.startswith("valid_"),
        f"runs are compared on held-out images here, and '{measure}' is recorded on test images: leave out --measure.",
    )
    return base + SUFFIXES[measure]


def measured_value(summary: Summary, key: str) -> float | None:
    """Return the value that a run has under the key of a measure; None where it was not recorded.

    Statistics that were not re-estimated are not stale, so the value of the last epoch is the fresh one.
    """
    key = key.replace("accuracy", "perplexity") if "perplexity" in summary else key
    value = summary.get(key, summary.get(key.removesuffix(SUFFIXES["fresh"])))
    return None if value is None else float(value)


def describe_details(base: str, summaries: Sequence[Summary]) -> dict[str, float]:
    """Return the means of `DETAILS` over runs: "fresh" where some have stale statistics, "best" where all have it."""
    found = {}
    for measure in DETAILS if base == "accuracy" else ():
        key = measured_key(base, measure)
        values = [measured_value(summary, key) for summary in summaries]
        known = [value for value in values if value is not None]
        if len(known) == len(values) and (measure != "fresh" or any(key in s for s in summaries)):
            found[measure] = statistics.mean(known)
    return found
