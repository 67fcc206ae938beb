"""The note about an accuracy that falls while the masks still change: where it is true, and once in a stage."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from run_helpers import RecordingListener, digits_recipe, read_metrics

from pomona.core.method import TrainingProgress
from pomona.lab import train
from pomona.lab.runs import run as run_module
from pomona.lab.runs.dips import DipWatcher, last_update
from pomona.methods import METHODS

EVERY, EPOCH, EPOCHS = 4, 6, 10


def make_run(step: int, last_change: int, method: str = f"dpf(every={EVERY})") -> SimpleNamespace:
    """Return what the note reads of a run of ten epochs of six steps."""
    pruner = SimpleNamespace(method=METHODS.resolve(method), last_change=last_change)
    return SimpleNamespace(pruner=pruner, step=step, stage_start=0, steps_per_epoch=EPOCH, stage_steps=EPOCH * EPOCHS)


def watch(*rows: dict, run: SimpleNamespace | None = None) -> list[str | None]:
    """Return the notes about consecutive rows, each evaluated two steps after a mask change."""
    watcher = DipWatcher()
    return [watcher.explain(run or make_run(12, 10), {"sparsity": 0.5, **row}) for row in rows]


def test_stale_statistics_are_named_with_the_accuracy_that_new_ones_have():
    before, note = watch({"accuracy": 97.0}, {"accuracy": 22.9, "accuracy_reestimated": 98.7})
    assert before is None
    assert note == (
        "accuracy fell to 22.90 %: the masks still change, and the batch-norm statistics are those of earlier masks. "
        "With new statistics it is 98.70 %. The masks are fixed from epoch 9 on."  # the last update is at step 52 of 60
    )


def test_without_batch_norm_the_note_says_only_that_the_masks_changed():
    _, note = watch({"accuracy": 97.0}, {"accuracy": 60.0})
    assert note is not None
    assert note.startswith("accuracy fell to 60.00 %: the masks changed a few steps before it was measured. ")


@pytest.mark.parametrize(
    ("row", "run"),
    [
        ({"accuracy": 88.0, "accuracy_reestimated": 98.0}, make_run(12, 10)),  # a small dip
        ({"accuracy": 20.0, "accuracy_reestimated": 21.0}, make_run(12, 10)),  # another cause
        ({"accuracy": 20.0}, make_run(12, 7)),  # the change is longer ago than one interval
        ({"accuracy": 20.0}, make_run(12, 10, "dpf")),  # so it is here, as 60 steps have an update at each step
        ({"accuracy": 20.0, "sparsity": 0.0}, make_run(12, 10)),  # nothing is pruned yet
        ({"perplexity": 900.0}, make_run(12, 10)),
    ],
)
def test_no_note_where_it_would_not_be_true(row, run):
    assert watch({"accuracy": 97.0}, row, run=run) == [None, None]


def test_one_note_in_a_stage():
    dip = {"accuracy": 20.0, "accuracy_reestimated": 95.0}
    assert [note is None for note in watch({"accuracy": 97.0}, dip, {"accuracy": 96.0}, dip)] == [
        True,
        False,
        True,
        True,
    ]


@pytest.mark.parametrize("name", [name for name in METHODS if name != "lottery"])
def test_the_last_update_is_that_of_the_training(name):
    method = METHODS[name]()
    due = [step for step in range(1, 601) if method.is_update_due(TrainingProgress(step, 600, 60))]
    expected = None if method.weights == "score" else max(due, default=0)
    assert last_update(method, 600, 60) == expected


def test_masks_that_move_to_the_end_are_said_to():
    _, note = watch({"accuracy": 97.0}, {"accuracy": 60.0}, run=make_run(12, 10, "dpf(every=4, printed=True)"))
    assert note is not None
    assert note.endswith("The masks change until the end of this stage.")


def test_the_note_is_reported_with_its_epoch_and_not_recorded(tmp_path, monkeypatch):
    scores = iter([{"accuracy": 90.0}, {"accuracy": 20.0, "accuracy_reestimated": 89.0}, {"accuracy": 91.0}])
    monkeypatch.setattr(run_module, "evaluate_run", lambda run: next(scores))
    listener = RecordingListener()
    train(digits_recipe(epochs=3), tmp_path / "run", progress=listener)
    notes = [call[1].get("note") for call in listener.calls if call[0] == "epoch"]
    assert [note is None for note in notes] == [True, False, True]
    assert notes[1].endswith("With new statistics it is 89.00 %. The masks are fixed from epoch 3 on.")
    assert not any("note" in row for row in read_metrics(tmp_path / "run"))
