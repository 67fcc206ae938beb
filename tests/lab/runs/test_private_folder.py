"""Attack 1: whoever has the folder of a private run tries to rebuild its noise and to subtract it."""

from __future__ import annotations

import json
import re

import pytest
import sklearn.datasets
import torch
from safetensors.torch import load_file

from pomona import models
from pomona.errors import PomonaError
from pomona.lab import train
from pomona.lab.recipes.private_recipe import PrivateRecipe
from pomona.lab.runs import private
from pomona.lab.runs.evaluate import cross_entropy
from pomona.lab.runs.private import PrivateStrategy
from pomona.privacy import Budget, Source
from pomona.privacy.clipping import UNITS, GradientGrid
from pomona.privacy.ledger import find_ledgers

SIGMA, ROWS, BATCH, RATE = 4.0, 1347, 1347, 1.0


def train_one_step(folder, **options) -> None:
    """Train a private run of one step, and leave its folder."""
    budget = Budget(2.0, 1e-5, ROWS, BATCH, 1, 0.0, SIGMA, 0.0, ((1, 2.0),))
    recipe = {
        "name": "attacked",
        "data": "digits",
        "model": "mlp(hidden=[32])",
        "rate": "constant",
        "optimizer": {"lr": RATE, "momentum": 0.0, "nesterov": False, "weight_decay": 0.0},
        "train": {"epochs": 1, "batch_size": BATCH, "device": "cpu"},
        "private": {"method": "dpsgd", "epsilon": 2.0, "budget": budget.to_dict(), **options},
    }
    train(PrivateStrategy(PrivateRecipe.load(recipe), ledger=folder / "ledger"), folder / "run")


def find_secrets(folder) -> tuple[list[int], list[bytes]]:
    """Return all seeds and all keys of 256 bits that any file under a folder could mean, and seeds everyone tries."""
    seeds, keys = set(range(20)), set()
    for path in folder.rglob("*"):
        if path.is_file():
            text = path.read_bytes().decode("latin-1")
            seeds |= {int(number) for number in re.findall(r"seed\W+(\d+)", text)}
            keys |= {bytes.fromhex(found) for found in re.findall(r"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])", text)}
    return sorted(seeds), sorted(keys)


def explained_noise(folder) -> float:
    """Return how well the noise of any secret in a folder explains what was released: their largest correlation.

    That of the right noise is the norm of the noise over that of the released sum; that of another is near zero.
    """
    summary = json.loads((folder / "run" / "summary.json").read_bytes())
    assert summary["private"]["sigma"] == SIGMA
    released = load_file(folder / "run" / "model.safetensors")
    torch.manual_seed(0)  # the initial weights are public
    start = models.build("mlp", hidden=[32], in_features=64, num_classes=10)
    moved = [start.get_parameter(name).detach() - released[name] for name in dict(start.named_parameters())]
    total = torch.cat([part.flatten() for part in moved]).double() * BATCH * UNITS / RATE
    variance = GradientGrid(1.0, len(total)).noise_variance(SIGMA)
    largest = 0.0
    seeds, keys = find_secrets(folder)
    for secret in [*seeds, *keys]:
        source = Source(seed=secret if isinstance(secret, int) else 0)
        if isinstance(secret, bytes):
            source.key = secret
        source.poisson(ROWS, 1.0)
        noise = source.discrete_gaussian(len(total), variance).double()
        largest = max(largest, float(total @ noise / total.norm() / noise.norm()))
    return largest


@pytest.mark.parametrize(("options", "is_broken"), [({}, False), ({"secure": False}, True)])
def test_noise_is_not_rebuilt_from_a_folder(tmp_path, options, is_broken):
    train_one_step(tmp_path, **options)
    found = explained_noise(tmp_path)
    if is_broken:  # a copy whose noise is that of its seed
        assert found > 0.2
    else:
        assert found < 0.1
        (ledger,) = find_ledgers(tmp_path / "ledger")
        assert [account.steps for account in ledger.accounts.values()] == [1]


def test_attack_succeeds_with_the_key_of_an_open_checkpoint(tmp_path):
    """The search is not blind: a key that is left in any file of the folder is found."""
    train_one_step(tmp_path, secure=False)
    key = Source(seed=0).key
    recipe = tmp_path / "run" / "recipe.toml"
    recipe.write_text(f'key = "{key.hex()}"\n')
    assert key in find_secrets(tmp_path)[1]


def test_example_without_a_finite_loss_does_not_stop_the_run(tmp_path, monkeypatch):
    """A run that stops at the loss of one example tells that it is there."""

    def infinite_for_some(output, target):
        return cross_entropy(output, target) / (target != 3).float().mean()

    monkeypatch.setattr(private, "cross_entropy", infinite_for_some)
    train_one_step(tmp_path)
    assert json.loads((tmp_path / "run" / "summary.json").read_bytes())["step"] == 1
    monkeypatch.setattr(private.torch, "nan_to_num", lambda loss, **options: loss)  # a broken copy
    with pytest.raises(PomonaError, match="the loss is"):
        train_one_step(tmp_path / "broken")


def test_recorded_facts_on_the_data_do_not_depend_on_its_rows(tmp_path, monkeypatch):
    """Who knows all rows but one would compute what a mean over all rows says about that one."""
    train_one_step(tmp_path)
    bunch = sklearn.datasets.load_digits()
    bunch.images[:100] = 0
    monkeypatch.setattr(sklearn.datasets, "load_digits", lambda: bunch)
    train_one_step(tmp_path / "other")
    one, other = (json.loads((tmp_path / name / "env.json").read_bytes())["data"] for name in ("run", "other/run"))
    assert one == other
    assert one["mean"] == [0.30531200416320947]
