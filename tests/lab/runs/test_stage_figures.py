"""Figures of a stage over its epochs: the best epoch at the final sparsity, δ and IoU by epoch."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_helpers import StopAfter, digits_recipe, read_metrics

from pomona.errors import PomonaError
from pomona.lab import train
from pomona.lab.runs.interruption import Interrupted
from pomona.lab.runs.stage_figures import best_epoch, mean_by_epoch


def make_rows(*results: tuple[float, float], measure: str = "accuracy") -> list[dict]:
    """Return the lines of epochs 1, 2, … with these sparsities and results."""
    return [{"epoch": k, "sparsity": s, measure: value} for k, (s, value) in enumerate(results, 1)]


def test_the_best_epoch_is_as_sparse_as_the_last():
    rows = make_rows((0.0, 95.0), (0.9, 80.0), (0.9, 91.0), (0.9, 90.0))
    assert best_epoch(rows) == {"accuracy_best": 91.0, "epoch_best": 3}
    assert best_epoch(make_rows((0.5, 9.0), (0.9, 4.0), (0.9, 5.0), measure="perplexity")) == {
        "perplexity_best": 4.0,
        "epoch_best": 2,
    }


def test_without_an_evaluation_of_every_epoch_there_is_no_best_one():
    rows = make_rows((0.9, 90.0), (0.9, 91.0))
    del rows[0]["accuracy"]
    assert best_epoch(rows) == best_epoch([]) == {}


@given(st.integers(1, 7), st.integers(1, 5), st.data())
def test_the_mean_by_epoch_is_that_of_the_updates_after_its_steps(steps, epochs, data):
    updates = data.draw(st.lists(st.integers(0, steps * epochs), unique=True).map(sorted))
    history = [{"step": step, "delta": float(step**2)} for step in updates]
    for epoch, mean in enumerate(mean_by_epoch(history, "delta", steps, epochs), 1):
        last_steps = range((epoch - 1) * steps + 1, epoch * steps + 1)
        own = [s**2 for s in updates if s in last_steps or (s == 0 and epoch == 1)]
        assert mean == (pytest.approx(statistics.mean(own), rel=1e-5) if own else None)


def test_a_run_records_its_best_epoch(complete_run, tmp_path):
    folder, _, summary = complete_run
    rows = [row for row in read_metrics(folder, "epoch") if row["sparsity"] == summary["sparsity"]]
    assert summary["accuracy_best"] == max(row["accuracy"] for row in rows) >= summary["accuracy"]
    assert rows[-1]["epoch"] >= summary["epoch_best"] >= rows[0]["epoch"]
    assert "accuracy_best" not in train(digits_recipe(eval_every=2), tmp_path / "rare")


def test_delta_and_iou_are_recorded_by_epoch_across_a_stop(tmp_path):
    made = digits_recipe("dpf(sparsity=0.8, every=2, settle=0.4, schedule='cubic(until=0.5)')", epochs=5, track=True)
    with pytest.raises(Interrupted):
        train(made, tmp_path / "run", stop=StopAfter(8))
    summary = train(made, tmp_path / "run", resume=True)
    updates = read_metrics(tmp_path / "run", "update")
    for key in ("delta", "iou"):
        second = [row[key] for row in updates if 6 < row["step"] <= 12]
        assert len(second) == 3
        assert summary[key][1] == pytest.approx(statistics.mean(second), rel=1e-5)
        assert (len(summary[key]), summary[key][-1]) == (5, None)  # the mask is fixed in the last two epochs
        assert key not in summary["stages"][0]


def test_tracking_has_no_effect_on_the_fingerprint_but_a_run_is_resumed_as_it_was_begun(tmp_path):
    plain, tracked = digits_recipe(), digits_recipe(track=True)
    assert plain.fingerprint() == tracked.fingerprint()
    with pytest.raises(Interrupted):
        train(plain, tmp_path / "run", stop=StopAfter(3))
    with pytest.raises(PomonaError, match=r"started with other settings \(train.track: True, not False\)"):
        train(tracked, tmp_path / "run", resume=True)
