"""The measured latency of a run, plain and packed."""

from __future__ import annotations

import json

import pytest
from run_helpers import digits_recipe

from pomona.lab import train
from pomona.report import latency
from pomona.report.run_data import read_run


@pytest.mark.slow
def test_the_latency_of_a_trained_run_is_kept_in_its_folder(tmp_path):
    train(digits_recipe(epochs=1), tmp_path / "run")
    found = latency.measure_latency(tmp_path / "run")
    assert found["milliseconds"] == min(found["measured"].values()) > 0
    assert found["measured"].keys() <= {"plain", "packed"}
    assert read_run(tmp_path / "run").latency == json.loads(json.dumps(found))


def test_the_faster_form_counts(tmp_path, monkeypatch):
    class Packed:
        class compression:
            layers = (type("Layer", (), {"packed": True}),)

    monkeypatch.setattr(latency, "load_finished_model", lambda run: ("model", [1, 8, 8]))
    monkeypatch.setattr(latency, "make_example_batch", lambda model, shape: [0, 1])
    monkeypatch.setattr(latency, "compress", lambda *given, **options: Packed())
    monkeypatch.setattr(latency, "measure_median_seconds", lambda models, batch: [0.004, 0.001])
    found = latency.measure_latency(tmp_path)
    assert (found["form"], found["milliseconds"], found["measured"]) == ("packed", 1.0, {"plain": 4.0, "packed": 1.0})
