"""Sweeps on Slurm: the submitted job files, and runs through submitit with a Slurm of one machine."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import fake_slurm
import pytest
import torch
from sweep_recipe import SMALL_RECIPE

from pomona.errors import PomonaError
from pomona.lab import Recipe
from pomona.lab.sweeps.axes import SweepRun
from pomona.lab.sweeps.engine import SweepSubmitted
from pomona.lab.sweeps.slurm_engine import SlurmEngine, parse_minutes
from pomona.lab.sweeps.sweep import sweep, train_runs

pytest.importorskip("submitit")

SEEDS = {"seed": [0, 1]}


@pytest.fixture
def slurm(tmp_path, monkeypatch) -> Iterator[Path]:
    """Yield the folder of the jobs of a Slurm without jobs, with this process in an empty folder."""
    monkeypatch.chdir(tmp_path)
    jobs = fake_slurm.install(tmp_path / "slurm", monkeypatch)
    yield jobs
    (jobs / "closed").touch()


def sbatch_options(jobs: Path, identifier: int = 1) -> dict[str, str]:
    """Return the options of sbatch in a submitted job file."""
    text = (jobs / f"{identifier}.sh").read_text()
    assert text.startswith("#!/bin/bash\n")
    return dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", text, flags=re.MULTILINE))


def submit(recipe: dict, **options) -> SweepSubmitted:
    """Submit a sweep over two seeds without waiting for it."""
    with pytest.raises(SweepSubmitted, match="2 runs are submitted") as submitted:
        sweep(recipe, SEEDS, "out", engine=SlurmEngine(wait=False, **options))
    return submitted.value


def test_the_submitted_job_file_has_the_array_and_its_options(slurm):
    options = {"partition": "long", "time": "1-12", "mem": "8GB", "account": "me", "reservation": "night"}
    submitted = submit(SMALL_RECIPE, options=options, jobs=1)
    assert (submitted.count, submitted.identifiers) == (2, ["1"])
    found = sbatch_options(slurm)
    folder = Path("out/slurm").resolve()
    assert found == {
        "account": "me",
        "array": "0-1%1",
        "error": f"{folder}/%A_%a_0_log.err",
        "job-name": "pomona",
        "mem": "8GB",
        "nodes": "1",
        "open-mode": "append",
        "output": f"{folder}/%A_%a_0_log.out",
        "partition": "long",
        "reservation": "night",
        "signal": "USR2@90",
        "time": "2160",
        "wckey": "submitit",
    }
    text = (slurm / "1.sh").read_text()
    assert re.search(rf"^srun .* -u -m submitit.core._submit {folder}$", text, flags=re.MULTILINE)


@pytest.mark.parametrize(
    ("device", "options", "expected"),
    [
        ("auto", {}, {"gpus-per-node": "1", "time": "240"}),
        ("cuda", {"gpus": 2}, {"gpus-per-node": "2"}),
        ("cuda", {"gres": "gpu:a100:1"}, {"gres": "gpu:a100:1"}),
        ("auto", {"gpus": 0}, {}),
    ],
)
def test_a_run_asks_for_one_gpu_unless_told_otherwise(slurm, device, options, expected):
    submit(SMALL_RECIPE | {"train": SMALL_RECIPE["train"] | {"device": device}}, options=options)
    found = sbatch_options(slurm)
    assert expected.items() <= found.items()
    assert ("gpus-per-node" in found) == ("gpus-per-node" in expected)


def test_a_run_that_needs_another_one_is_submitted_after_it(slurm):
    teacher = Recipe.load(SMALL_RECIPE)
    student = Recipe.load(SMALL_RECIPE | {"teacher": {"run": "out/teacher", "fingerprint": teacher.fingerprint()}})
    runs = [SweepRun(student, Path("out/student"), {}), SweepRun(teacher, Path("out/teacher"), {})]
    with pytest.raises(SweepSubmitted) as submitted:
        list(train_runs(runs, engine=SlurmEngine(wait=False)))
    assert submitted.value.identifiers == ["1", "2"]
    assert "dependency" not in sbatch_options(slurm, 1)
    assert sbatch_options(slurm, 2)["dependency"] == "afterany:1"


def test_what_slurm_refuses_is_one_sentence(slurm, monkeypatch):
    with pytest.raises(PomonaError, match="sbatch refuses the jobs .*invalid partition specified: closed"):
        sweep(SMALL_RECIPE, SEEDS, "out", engine=SlurmEngine({"partition": "closed"}))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(PomonaError, match="there is no srun here"):
        sweep(SMALL_RECIPE, SEEDS, "out", engine=SlurmEngine())


@pytest.mark.parametrize(
    ("text", "minutes"), [(90, 90), ("90", 90), ("90:30", 90), ("8:00:00", 480), ("2-12", 3600), ("1-0:30", 1470)]
)
def test_times_are_read_as_sbatch_reads_them(text, minutes):
    assert parse_minutes(text) == minutes


@pytest.mark.parametrize("text", ["soon", "0", "-5", "1:2:3:4", 1.5])
def test_other_times_are_refused(text):
    with pytest.raises(PomonaError, match="time takes minutes, HH:MM:SS or DAYS-HH"):
        parse_minutes(text)


def model_files(out: str) -> dict[str, bytes]:
    """Return the trained weights of every run below a folder."""
    return {file.parent.name: file.read_bytes() for file in Path(out).glob("*/model.safetensors")}


@pytest.mark.slow
def test_a_repeated_sweep_waits_for_its_queued_jobs_and_equals_the_plain_one(slurm):
    torch.set_num_threads(1)
    plain = sweep(SMALL_RECIPE, SEEDS, "plain", jobs=1)
    submit(SMALL_RECIPE)
    (slurm / "open").touch()
    notes: list[str] = []
    result = sweep(SMALL_RECIPE, SEEDS, "out", only_missing=True, engine=SlurmEngine(), note=notes.append)
    assert notes == ["2 runs are queued already: they are not submitted again."]
    assert not (slurm / "2.sh").exists()
    assert result["cells"][0]["mean"] == plain["cells"][0]["mean"]
    assert model_files("out") == model_files("plain")
    again = sweep(SMALL_RECIPE, SEEDS, "out", only_missing=True, engine=SlurmEngine(wait=False))
    assert again["cells"] == result["cells"]  # nothing is missing, so nothing is submitted


@pytest.mark.slow
def test_a_run_whose_time_is_up_is_queued_again_and_gives_the_same_weights(slurm):
    torch.set_num_threads(1)
    options = SMALL_RECIPE["train"] | {"epochs": 400, "eval_every": 400, "checkpoint_every": 0}
    recipe = SMALL_RECIPE | {"train": options}
    sweep(recipe, {"seed": [0]}, "plain", jobs=1)
    (slurm / "open").touch()
    restarts: list[int] = []

    def warn() -> None:
        """Send the signal that Slurm sends before the time is up, once the run has begun."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not restarts:
            for status in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    command = status.read_bytes().split(b"\0")
                except OSError:  # the process has ended
                    continue
                begun = list(Path("out").glob("*/metrics.jsonl"))
                if (
                    begun
                    and b"submitit.core._submit" in command
                    and str(Path("out/slurm").resolve()).encode() in command
                ):
                    os.kill(int(status.parent.name), signal.SIGUSR2)
                    restarts.append(1)
                    break
            time.sleep(0.05)

    signaller = threading.Thread(target=warn)
    signaller.start()
    result = sweep(recipe, {"seed": [0]}, "out", engine=SlurmEngine())
    signaller.join()
    assert restarts == [1]
    assert result["failed"] == []
    assert (slurm / "requeued").read_text() == "1\n"
    assert model_files("out") == model_files("plain")
