"""What this process has drawn and released with each key, so that no noise is used for two gradients.

A ledger keeps the same on the disk, for all processes. This memory needs none: it notices a private step that was set
back to an earlier state, or made again with its key, in one process. It holds digests only.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from ..errors import require

MOST_STEPS = 1 << 17  # of all runs together, about 50 MB; the runs that were used the longest time ago are forgotten

Release = tuple[str, str]  # digests of the weights before a step, or "" where unknown, and of its noisy sum


@dataclass
class KnownRun:
    """What was drawn and released with one key, by the step of its random numbers."""

    drawn: int = 0
    released: dict[int, Release] = field(default_factory=dict)


_runs: OrderedDict[str, KnownRun] = OrderedDict()  # by the digest of the key, the last used one at the end


def known_run(run: str) -> KnownRun:
    """Return what is known about a run, by the digest of its key."""
    known = _runs.setdefault(run, KnownRun())
    _runs.move_to_end(run)
    return known


def remember_release(run: str, step: int, release: Release) -> None:
    """Remember a release, and forget the runs that were used the longest time ago where there are too many steps."""
    known_run(run).released.setdefault(step, release)
    while len(_runs) > 1 and sum(len(known.released) for known in _runs.values()) > MOST_STEPS:
        _runs.popitem(last=False)


def require_same_release(step: int, known: Release | None, release: Release) -> None:
    """Raise PomonaError if a step was released before and is another one now."""
    if known is None:
        return
    (weights, total), (new_weights, new_total) = known, release
    are_weights_equal = weights == new_weights or not (weights and new_weights)
    require(
        are_weights_equal and total == new_total,
        f"step {step} of this run was taken before with other {'gradients' if are_weights_equal else 'weights'}, and "
        "the same noise for both would reveal the difference: resume with the data, options, code and machine of the "
        "first time, or begin a new run.",
    )
