"""Reading one run: its curves, what it stores, and when its mask settled."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_runs import LAYERS, write_run
from run_helpers import StopAfter, digits_recipe, read_metrics

from pomona.lab import Interrupted, train
from pomona.report.run_data import read_rows, read_run, thin_updates


def test_a_finished_run_is_read(tmp_path):
    run = read_run(write_run(tmp_path / "run", sparsity=0.8, seed=3, accuracy=91.5))
    assert (run.name, run.seed, run.method, run.network) == ("dpf-80-seed3", 3, "dpf", "digits_cnn on digits")
    assert (run.result, run.measure, run.reached_sparsity) == (91.5, "accuracy", 0.8)
    assert run.label == "dpf-80-seed3"
    assert [row["epoch"] for row in run.epochs] == [1, 2, 3]
    assert run.layer_names == list(LAYERS)
    assert dict(run.layers) == dict.fromkeys(LAYERS, 0.8)


def test_a_run_under_way_has_its_epochs_and_no_result(tmp_path):
    folder = write_run(tmp_path / "run", complete=False)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "epoch", "epo')  # being written
    run = read_run(folder)
    assert (run.result, run.summary, len(run.epochs), run.total_epochs) == (None, None, 3, 3)
    assert run.reached_sparsity == pytest.approx(0.9)


def test_a_folder_without_a_recipe_is_no_run(tmp_path):
    (tmp_path / "recipe.toml").write_text("nonsense = 1")
    assert read_run(tmp_path) is None
    assert read_rows(tmp_path / "absent") == []


def test_bytes_are_values_and_mask_bits(tmp_path):
    # 1,000 parameters: dense 4 bytes each; at 90 % 100 values of 4 bytes, and 1,000 bits.
    assert read_run(write_run(tmp_path / "a", "dense")).stored_bytes == 4000
    assert read_run(write_run(tmp_path / "b", sparsity=0.9)).stored_bytes == 400 + 125


def test_settled_entries_are_exact_where_they_are_recorded(tmp_path):
    run = read_run(write_run(tmp_path / "run", settled=[0.25, 0.5, 1.0, 1.0]))
    assert run.settled() == ([0, 1, 2, 3], [25, 50, 100, 100], True)


def test_settled_entries_are_bounded_by_the_flips_that_follow(tmp_path):
    # 400 entries, of which updates at the steps 0, 10 and 20 change 40 each.
    epochs, shares, exact = read_run(write_run(tmp_path / "run")).settled()
    assert (epochs, exact) == ([0, 1, 2], False)
    assert shares == pytest.approx([80, 90, 100])


def test_a_trained_run_records_what_is_pruned_and_its_bound_holds(tmp_path):
    summary = train(digits_recipe(epochs=4, track=True), tmp_path / "run")
    (targets,) = read_metrics(tmp_path / "run", "targets")
    assert list(targets["sizes"]) == list(summary["stages"][0]["layers"])
    run = read_run(tmp_path / "run")
    assert (run.sizes, run.settled()[2]) == (targets["sizes"], True)
    del summary["settled"]
    (tmp_path / "run" / "summary.json").write_text(json.dumps(summary))
    bound = read_run(tmp_path / "run")
    assert not bound.settled()[2]
    exact = dict(zip(*run.settled()[:2], strict=True))
    for epoch, share in zip(*bound.settled()[:2], strict=True):
        assert share <= exact[-(-epoch // 1)] + 1e-4  # the exact share is computed in float32
    assert bound.settled()[1][-1] == 100


def test_a_resumed_run_records_what_is_pruned_once(tmp_path):
    with pytest.raises(Interrupted):
        train(digits_recipe(epochs=2), tmp_path / "run", stop=StopAfter(7))
    train(digits_recipe(epochs=2), tmp_path / "run", resume=True)
    assert len(read_metrics(tmp_path / "run", "targets")) == 1


@given(st.integers(0, 50), st.integers(1, 20))
def test_thinned_updates_keep_the_last_masks_and_the_mean_of_flips(count, limit):
    updates = [{"step": k, "flips": k, "iou": 1.0, "delta": 0.0, "layers": [k]} for k in range(count)]
    found = thin_updates(updates, limit)
    assert len(found) == min(count, limit)
    if count:
        assert found[-1]["layers"] == [count - 1]
    sizes = [b["step"] - a for a, b in zip([-1, *(row["step"] for row in found)], found, strict=False)]
    assert sum(size * row["flips"] for size, row in zip(sizes, found, strict=True)) == pytest.approx(sum(range(count)))
