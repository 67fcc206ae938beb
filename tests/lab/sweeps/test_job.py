"""A job whose folder another process has: it waits, and takes up what the other one left."""

from __future__ import annotations

import threading

import pytest
from sweep_recipe import SMALL_RECIPE

from pomona.lab import Interrupted, Recipe, train
from pomona.lab.runs.folder import locked_folder
from pomona.lab.sweeps import job as job_module
from pomona.lab.sweeps.job import Job


def test_a_job_waits_for_the_process_that_trains_its_run(tmp_path, monkeypatch):
    monkeypatch.setattr(job_module, "POLL_SECONDS", 0.01)
    recipe, folder = Recipe.load(SMALL_RECIPE), tmp_path / "run"
    results: list[dict] = []
    waiting = threading.Thread(target=lambda: results.append(Job(recipe, folder).run()))
    with locked_folder(folder):  # as another sweep does
        waiting.start()
        waiting.join(1)
        assert waiting.is_alive()
    waiting.join(60)
    assert results[0]["accuracy"] == train(recipe, folder, resume=True)["accuracy"]


def test_a_job_that_waits_can_be_stopped(tmp_path):
    with locked_folder(tmp_path / "run"), pytest.raises(Interrupted):
        Job(Recipe.load(SMALL_RECIPE), tmp_path / "run").run(stop=lambda: True)
