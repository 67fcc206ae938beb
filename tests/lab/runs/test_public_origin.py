"""Private runs that start from public weights: through the command line, refused chains, and the model card."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from pomona.cli import main
from pomona.errors import PomonaError
from pomona.lab import Recipe
from pomona.lab.recipes.private_recipe import PrivateRecipe
from pomona.lab.runs.hub import describe_privacy
from pomona.lab.runs.public_origin import find_training_data
from pomona.privacy import Budget
from pomona.untrusted import parse_toml

ROWS, BATCH, STEPS = 60, 30, 2
BUDGET = Budget(8.0, 1e-5, ROWS, BATCH, STEPS, 0.0, 2.0, 0.0, ((STEPS, 8.0),)).to_dict()
PUBLIC = 'data = "mnist"\nmodel = "mlp(hidden=[8])"\ntrain = {epochs = 1, batch_size = 30, device = "cpu"}\n'


def write_idx(folder: Path, seed: int) -> None:
    """Write a data set of 60 training and 10 test images of 6×6 in the format of MNIST."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    for part, rows in (("train", ROWS), ("t10k", 10)):
        images, labels = rng.integers(0, 256, (rows, 6, 6), dtype=np.uint8), rng.integers(0, 10, rows, dtype=np.uint8)
        for name, array in ((f"{part}-images-idx3-ubyte", images), (f"{part}-labels-idx1-ubyte", labels)):
            head = (0x800 + array.ndim).to_bytes(4, "big") + np.array(array.shape, ">u4").tobytes()
            (folder / name).write_bytes(head + array.tobytes())


@pytest.fixture
def work(tmp_path, monkeypatch):
    """Return a working folder with two data sets, a public run on one of them and a private recipe on the other."""
    monkeypatch.chdir(tmp_path)
    write_idx(tmp_path / "data" / "mnist", seed=1)
    write_idx(tmp_path / "data" / "fashion_mnist", seed=2)
    Path("public.toml").write_text(PUBLIC)
    assert main(["train", "public.toml", "--json", "--data-dir", "data"]) == 0
    recipe = Recipe.load(parse_toml(PUBLIC) | {"name": "mine", "data": "fashion_mnist", "rate": "constant"})
    private = {"method": "dpsgd", "epsilon": 8.0, "budget": BUDGET}
    Path("mine.toml").write_text(PrivateRecipe.load(recipe.to_dict() | {"private": private}).to_toml())
    return tmp_path


def train_private(*options: str) -> int:
    return main(["private", "mine.toml", "--data-dir", "data", "--json", *options])


def test_private_training_starts_from_public_weights_and_names_them(work, capsys):
    capsys.readouterr()
    assert train_private("--set", "origin.run=runs/public", "--set", "optimizer.lr=1e-30") == 0
    summary = json.loads(capsys.readouterr().out)
    origin = summary["private"]["origin"]
    assert origin["fingerprint"] == json.loads(Path("runs/public/summary.json").read_bytes())["fingerprint"]
    assert (origin["run"], origin["name"], origin["data"]) == ("runs/public", "public", ["mnist"])
    assert json.loads(Path("runs/mine/summary.json").read_bytes())["private"]["origin"] == origin
    # At this rate the steps change no weight: they are the public ones.
    weights, public = (load_file(Path("runs") / run / "model.safetensors") for run in ("mine", "public"))
    assert all(torch.allclose(weights[name], public[name], rtol=0, atol=1e-20) for name in public)
    assert "began with the run 'public'" in describe_privacy(summary)[1]
    assert main(["private", "--resume", "runs/mine", "--data-dir", "data"]) == 0
    assert "trained on mnist" in " ".join(capsys.readouterr().out.split())


def test_weights_of_the_private_data_set_are_refused(work, capsys):
    assert main(["train", "public.toml", "--name", "leak", "--set", "data=fashion_mnist", "--data-dir", "data"]) == 0
    assert train_private("--set", "origin.run=runs/leak") == 2
    assert "trained on 'fashion_mnist', the private data set" in capsys.readouterr().err
    assert not Path("runs/mine").exists()
    chain = ["--set", "origin.run=runs/leak", "--data-dir", "data"]
    assert main(["train", "public.toml", "--name", "second", *chain]) == 0
    assert find_training_data(Path("runs/second")) == ["mnist", "fashion_mnist"]
    assert train_private("--set", "origin.run=runs/second") == 2
    assert "the private data set" in capsys.readouterr().err


def test_a_teacher_counts_as_training_data_and_an_unknown_one_is_refused(work, capsys):
    for name, setting in (
        ("leak", "data=fashion_mnist"),
        ("second", "origin.run=runs/leak"),
        ("taught", "teacher.run=runs/second"),
        ("told", "teacher.file=runs/second/model.safetensors"),
    ):
        assert main(["train", "public.toml", "--name", name, "--set", setting, "--data-dir", "data"]) == 0
    assert train_private("--set", "origin.run=runs/taught") == 2
    assert "the private data set" in capsys.readouterr().err
    assert train_private("--set", "origin.run=runs/told") == 2
    assert "a file whose data is unknown" in capsys.readouterr().err


def test_an_origin_whose_own_origin_is_gone_is_refused(work):
    assert main(["train", "public.toml", "--name", "second", "--set", "origin.run=runs/public", "--data-dir=data"]) == 0
    Path("runs/public").rename("elsewhere")
    with pytest.raises(PomonaError, match="the run 'runs/public' is not there, so the data of the weights"):
        find_training_data(Path("runs/second"))


def test_matching_weights_leave_a_new_last_layer(work, capsys):
    assert main(["train", "public.toml", "--name", "wide", "--set", "model.num_classes=12", "--data-dir", "data"]) == 0
    assert train_private("--set", "origin.run=runs/wide") == 2
    assert "of another model" in capsys.readouterr().err
    matching = ["--set", "origin.run=runs/wide", "--set", "origin.weights=matching", "--set", "optimizer.lr=1e-30"]
    assert train_private(*matching) == 0
    weights, wide = (load_file(Path("runs") / run / "model.safetensors") for run in ("mine", "wide"))
    same = {name for name in weights if weights[name].shape == wide[name].shape}
    assert 0 < len(same) < len(weights)
    assert all(torch.allclose(weights[name], wide[name], rtol=0, atol=1e-20) for name in same)
    other = [*matching, "--name", "other", "--set", "model.hidden=[9]"]
    assert train_private(*other) == 2
    assert "has the name and shape of one of this model's" in capsys.readouterr().err


def test_an_origin_without_weights_is_refused(work, capsys):
    assert train_private("--set", "origin.run=runs/public", "--set", "origin.weights=new") == 2
    assert 'origin.weights = "new" takes nothing' in capsys.readouterr().err
