"""The process pool: a run whose process is killed is resumed once."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

from sweep_recipe import SMALL_RECIPE

from pomona.lab import Recipe, train
from pomona.lab.sweeps.job import Job
from pomona.lab.sweeps.process_pool import train_in_processes


@dataclass(frozen=True)
class KillingJob(Job):
    """A job that kills its process once for each file RUN.N beside its folder."""

    def run(self, *args, **options):
        for mark in sorted(self.folder.parent.glob(f"{self.folder.name}.*")):
            mark.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().run(*args, **options)


def test_a_run_whose_process_is_killed_is_resumed_once(tmp_path):
    recipes = [Recipe.load(SMALL_RECIPE, [f"seed={k}"]) for k in range(3)]
    jobs = [KillingJob(recipe, tmp_path / f"run{k}") for k, recipe in enumerate(recipes)]
    (tmp_path / "run0.1").touch()
    (tmp_path / "run1.1").touch()
    (tmp_path / "run1.2").touch()
    results = dict(train_in_processes(jobs, 2, note=lambda text: None))
    assert results.keys() == {0, 1, 2}
    assert "its process ended twice (killed, -9)" in results[1]["error"]
    for k in (0, 2):
        alone = train(recipes[k], tmp_path / "alone" / str(k))
        assert results[k]["accuracy"] == alone["accuracy"]
        a, b = (folder / "model.safetensors" for folder in (tmp_path / f"run{k}", tmp_path / "alone" / str(k)))
        assert a.read_bytes() == b.read_bytes()
