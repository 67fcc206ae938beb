"""Measures of runs: the last epoch, the last with fresh statistics, the best, and what is shown of them."""

from __future__ import annotations

import pytest

from pomona.errors import PomonaError
from pomona.lab.sweeps.measures import describe_details, measured_key, measured_value

STALE = {"accuracy": 87.0, "accuracy_reestimated": 89.5, "accuracy_best": 90.0}
SETTLED = {"accuracy": 91.0}
TEXT = {"perplexity": 5.0, "perplexity_best": 4.5}


@pytest.mark.parametrize(
    ("summary", "last", "fresh", "best"),
    [(STALE, 87.0, 89.5, 90.0), (SETTLED, 91.0, 91.0, None), (TEXT, 5.0, 5.0, 4.5)],
)
def test_measured_values(summary, last, fresh, best):
    values = [measured_value(summary, measured_key("accuracy", name)) for name in ("last", "fresh", "best")]
    assert values == [last, fresh, best]


def test_an_unknown_measure_and_one_that_held_out_images_do_not_have_are_refused():
    assert measured_key("valid_accuracy", "last") == "valid_accuracy"
    with pytest.raises(PomonaError, match="unknown measure 'frehs': did you mean 'fresh'"):
        measured_key("accuracy", "frehs")
    with pytest.raises(
        PomonaError, match="runs are compared on held-out images here, and 'best' is recorded on test images"
    ):
        measured_key("valid_accuracy", "best")


def test_details_are_shown_where_statistics_are_stale_and_where_all_runs_know_their_best_epoch():
    assert describe_details("accuracy", [STALE]) == {"fresh": 89.5, "best": 90.0}
    assert describe_details("accuracy", [STALE, SETTLED]) == {"fresh": 90.25}
    assert describe_details("accuracy", [SETTLED]) == {}
    assert describe_details("accuracy", [TEXT]) == {"best": 4.5}
    assert describe_details("accuracy_best", [STALE]) == {}  # it is the result itself
