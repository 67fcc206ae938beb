"""Elastic restarts: `torchrun --max-restarts` with `--auto-resume` continues a run after a rank was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from run_helpers import DPF, digits_recipe, have_same_weights, untimed_metrics


def start_torchrun(recipe: Path, folder: Path) -> subprocess.Popen[str]:
    """Start a data-parallel run of two processes that may be restarted twice."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2"]
    command = [*launch, "-m", "pomona", "train", str(recipe), "--auto-resume", "--out", str(folder), "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, *command], env=environment, stderr=subprocess.PIPE, text=True)


def find_rank(rank: int, folder: Path) -> int | None:
    """Return the process of a rank that trains in a folder."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().split(b"\0")
            variables = (process / "environ").read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        if f"RANK={rank}".encode() in variables and bytes(folder) in command:
            return int(process.name)
    return None


@pytest.mark.slow
def test_a_rank_that_is_killed_is_restarted_and_the_run_is_the_same(tmp_path):
    recipe = tmp_path / "recipe.toml"
    options = {"batch_size": 400, "drop_last": True, "eval_every": 50, "checkpoint_every": 10}
    recipe.write_text(digits_recipe(DPF, epochs=100, **options).to_toml())
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    process = start_torchrun(recipe, killed)
    deadline = time.monotonic() + 240
    while not (killed / "checkpoint" / "state.json").exists():
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    victim = find_rank(1, killed)
    assert victim is not None
    os.kill(victim, signal.SIGKILL)
    _, errors = process.communicate(timeout=400)
    assert process.returncode == 0, errors
    assert "SIGKILL" in errors or "-9" in errors  # torchrun reports the rank that it restarts
    assert start_torchrun(recipe, whole).wait(timeout=400) == 0
    assert have_same_weights(killed, whole)
    assert untimed_metrics(killed) == untimed_metrics(whole)
