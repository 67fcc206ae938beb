"""The recipes with the settings of the authors of GIP, trained through the command line on a few rows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pomona.cli import main
from pomona.data.cifar import Cifar10
from pomona.data.imdb import Imdb

ROWS_PER_FILE, REVIEWS = 8, 20


def train_recipe(name: str, capsys, *settings: str) -> dict:
    """Train a bundled recipe on the data in the working folder and return its summary."""
    options = [word for setting in settings for word in ("--set", setting)]
    assert main(["private", name, "--data-dir", ".", "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture(autouse=True)
def work_folder(tmp_path, monkeypatch):
    pytest.importorskip("dp_accounting")
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
def test_wide_resnet_recipe_takes_its_steps(capsys, monkeypatch):
    for key in ("rows_per_file", "test_rows"):
        monkeypatch.setattr(Cifar10, key, ROWS_PER_FILE)
    folder, rng = Path("cifar-10-batches-bin"), np.random.default_rng(0)
    folder.mkdir()
    for name in (*Cifar10.train_files, "test_batch"):
        images = rng.integers(0, 256, (ROWS_PER_FILE, 3072), dtype=np.uint8)
        labels = rng.integers(0, 10, (ROWS_PER_FILE, 1), dtype=np.uint8)
        (folder / f"{name}.bin").write_bytes(np.hstack([labels, images]).tobytes())
    (folder / "batches.meta.txt").write_text("airplane\nautomobile\n")
    summary = train_recipe(
        "private-wrn16_4", capsys, "train.epochs=1", "train.batch_size=8", "private.views=2", "private.micro=8"
    )
    private = summary["private"]
    assert (private["method"], private["grouping"], private["group"]) == ("gip", "parameter", 256)
    assert summary["params"] > 2_700_000
    assert 0 < summary["epsilon"] <= 1.0
    assert summary["step"] == 5


def test_imdb_recipe_takes_its_steps(capsys, monkeypatch):
    monkeypatch.setattr(Imdb, "reviews", REVIEWS)
    rng = np.random.default_rng(0)
    for part in ("train/neg", "train/pos", "test/neg", "test/pos"):
        folder = Path("aclImdb") / part
        folder.mkdir(parents=True)
        for k in range(REVIEWS):
            (folder / f"{k}_1.txt").write_text(" ".join(rng.choice(["good", "bad", "film", "plot", "actor"], 30)))
    summary = train_recipe("private-imdb", capsys, "train.epochs=2", "train.batch_size=10", "data.maxlen=12")
    private = summary["private"]
    assert (private["method"], private["grouping"], private["group"]) == ("gip", "parameter", 128)
    assert private["not_covered"] == "the vocabulary"
    assert private["coordinates"] < 20_000 < 200_000 < summary["params"]  # the embedding is frozen
    assert 0 < summary["epsilon"] <= 4.0
    assert summary["step"] == 8
