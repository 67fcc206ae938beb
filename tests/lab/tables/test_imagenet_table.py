"""The table of ImageNet is trained by one command, here on a small folder of images in ImageNet's layout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from image_helpers import make_image_folder

from pomona.cli import main

SMALLER = ["train.epochs=1", "train.batch_size=8", "data.size=32", "data.stream=true"]


@pytest.mark.slow
def test_two_processes_train_cells_of_the_table_from_a_folder(tmp_path: Path) -> None:
    images, out = make_image_folder(tmp_path / "images", train=24), tmp_path / "runs"
    sweep = ["sweep", "dpf-table3", "--only-missing", "--data-dir", str(images), "--out", str(out)]
    cells = ["--only", "column=dense,DPF", "--only", "sparsity=0,0.8"]
    settings = [part for setting in SMALLER for part in ("--set", setting)]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*launch, "-m", "pomona", *sweep, *cells, *settings]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "2 of 2 cells complete" in done.stdout
    assert sorted(path.name.split("-epochs")[0] for path in out.glob("resnet50-*")) == [
        "resnet50-dense",
        "resnet50-dpf-80-settle0",
    ]
    assert all((folder / "summary.json").is_file() for folder in out.glob("resnet50-*"))


def test_every_run_of_the_table_fits_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = make_image_folder(tmp_path)
    assert main(["sweep", "dpf-table3", "--data-dir", str(images), "--dry-run", "--out", str(tmp_path / "runs")]) == 0
    shown = capsys.readouterr().out
    assert shown.count("missing") == 11
