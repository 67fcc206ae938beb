"""Private runs: trained, stopped, resumed and refused, and what their folders hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from laboratory import After, lasting, rows
from safetensors.torch import load_file

import pomona.cli.private  # noqa: F401  until the command line lists it
from pomona.cli import main
from pomona.errors import PomonaError
from pomona.lab import Interrupted
from pomona.lab.recipes.bundled import files
from pomona.lab.runs import private
from pomona.privacy import Budget, accounting, budget

SIGMA = 1.0  # will do for ε = 8
STEPS = 12  # 3 epochs of 1347 rows in samples of 400

SETTINGS = {
    "name": "tiny",
    "data": "digits",
    "model": "mlp(hidden=[8])",
    "rate": "constant",
    "optimizer": {"lr": 3.0, "momentum": 0.0, "nesterov": False, "weight_decay": 0.0},
    "train": {"epochs": 3, "batch_size": 400, "device": "cpu"},
}


def settled(share: float = 0.0, epsilon: float = 8.0, **change) -> dict:
    """A budget as it was solved elsewhere, σ rounded up, with a simple curve."""
    curve = ((6, epsilon / 2), (STEPS, epsilon))
    return Budget(epsilon, 1e-5, 1347, 400, STEPS, share, SIGMA, 0.0273 if share else 0.0, curve).to_dict() | change


def recipe(method: str = "gip", **options) -> private.PrivateRecipe:
    share = 0.01 if method == "gip" else 0.0
    section = {"method": method, "epsilon": 8.0, "keep": 0.5, "budget": settled(share), **options}
    return private.PrivateRecipe.load({**SETTINGS, "private": section})


@pytest.mark.parametrize("method", ["gip", "dpsgd", "random"])
def test_a_private_run_learns_and_tells_what_it_spent(tmp_path, method):
    summary = private.train(recipe(method), tmp_path / "run")
    assert summary["accuracy"] > 30
    assert summary["method"] == method
    assert summary["epsilon"] == 8.0
    assert summary["private"]["sigma"] == SIGMA
    assert summary["private"]["delta"] == 1e-5
    if method == "gip":
        assert summary["private"]["lost"]["end"] == pytest.approx(summary["private"]["random_loses"]["end"], abs=0.01)
    epochs = rows(tmp_path / "run", "epoch")
    assert [row["epsilon"] for row in epochs] == [4.0, 8.0, 8.0]
    assert json.loads((tmp_path / "run" / "summary.json").read_bytes())["fingerprint"] == recipe(method).fingerprint()


def test_the_folder_holds_no_training_loss(tmp_path):
    private.train(recipe(), tmp_path / "run")
    for row in rows(tmp_path / "run"):
        assert "loss" not in row
    summary = json.loads((tmp_path / "run" / "summary.json").read_bytes())
    assert "loss" not in summary
    assert all("loss" not in stage for stage in summary["stages"])
    state = json.loads((tmp_path / "run" / "checkpoint" / "state.json").read_bytes())["state"]
    assert state["loss"] == 0.0


def test_a_stopped_run_goes_on_as_if_it_had_not_been(tmp_path):
    whole = private.train(recipe(average=0.9, views=1), tmp_path / "whole")
    with pytest.raises(Interrupted):
        private.train(recipe(average=0.9), tmp_path / "parts", stop=After(5))
    parts = private.train(recipe(average=0.9), tmp_path / "parts", resume=True)
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert whole["accuracy"] == parts["accuracy"]
    assert parts["epsilon"] == 8.0
    pairs = zip(rows(tmp_path / "whole"), rows(tmp_path / "parts"), strict=True)
    assert all(lasting(a) == lasting(b) for a, b in pairs)


def test_a_complete_run_is_not_trained_again(tmp_path):
    done = private.train(recipe(), tmp_path / "run")
    assert private.train(recipe(), tmp_path / "run", resume=True) == done
    with pytest.raises(PomonaError, match="is not empty"):
        private.train(recipe(), tmp_path / "run")


def test_a_run_cannot_be_resumed_with_another_budget(tmp_path):
    with pytest.raises(Interrupted):
        private.train(recipe(), tmp_path / "run", stop=After(2))
    more = recipe(epsilon=9.0, budget=settled(0.01, 9.0))
    with pytest.raises(PomonaError, match="another budget or method .*epsilon: 9.0, not 8.0"):
        private.train(more, tmp_path / "run", resume=True)
    longer = {**SETTINGS, "train": {**SETTINGS["train"], "epochs": 4}}
    section = recipe().private.to_dict() | {"budget": None}
    with pytest.raises(PomonaError, match="other settings"):
        private.train(private.PrivateRecipe.load({**longer, "private": section}), tmp_path / "run", resume=True)


def test_a_run_needs_no_accountant_once_its_budget_is_solved(tmp_path, monkeypatch):
    monkeypatch.setattr(budget, "find_spec", lambda name: None)
    monkeypatch.setattr(accounting, "import_dp_accounting", lambda: pytest.fail("the accountant was asked"))
    private.train(recipe(), tmp_path / "run")
    written = private.PrivateRecipe.load(tmp_path / "run" / "recipe.toml")
    assert written.private.budget == recipe().private.budget
    assert written.fingerprint() == recipe().fingerprint()


def test_a_budget_for_another_run_is_refused(tmp_path):
    for change, message in (
        ({"rows": 1000}, "rows: 1347, not 1000"),
        ({"steps": 100}, "steps: 12, not 100"),
        ({"epsilon": 4.0}, "epsilon: 8.0, not 4.0"),
    ):
        with pytest.raises(PomonaError, match=message):
            private.train(recipe(budget=settled(0.01) | change), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_budget_that_does_not_keep_its_promise_is_refused(tmp_path):
    pytest.importorskip("dp_accounting")
    with pytest.raises(PomonaError, match="a budget with σ=0.5 .* not 1e-05: solve the budget again"):
        private.train(recipe(budget=settled(0.01, sigma=0.5)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_public_rows_are_held_out_of_the_training(tmp_path):
    section = {"method": "public", "epsilon": 8.0, "keep": 0.5}
    held = {**SETTINGS, "data": {"name": "digits", "validation": 100}}
    solved = settled() | {"rows": 1247}
    summary = private.train(
        private.PrivateRecipe.load({**held, "private": {**section, "budget": solved}}), tmp_path / "a"
    )
    assert summary["private"]["lost"]["end"] is None
    with pytest.raises(PomonaError, match="set data.validation"):
        private.train(
            private.PrivateRecipe.load({**SETTINGS, "private": {**section, "budget": settled()}}), tmp_path / "b"
        )


def test_views_are_augmented_copies(tmp_path):
    shaped = {**SETTINGS, "data": {"name": "digits", "augment": "standard(pad=1)"}}
    section = {"method": "dpsgd", "epsilon": 8.0, "views": 3, "budget": settled()}
    made = private.PrivateRecipe.load({**shaped, "private": section})
    seen = []

    def watch(self, inputs, targets):
        seen.append((inputs.shape[1:], len(inputs), len(targets)))
        return step(self, inputs, targets)

    step = private.PrivateStep.__call__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(private.PrivateStep, "__call__", watch)
        private.train(made, tmp_path / "run")
    assert {shape for shape, *_ in seen} == {(3, 1, 8, 8)}
    assert all(count == labels for _, count, labels in seen)


def test_secure_runs_keep_no_generator(tmp_path):
    with pytest.raises(Interrupted):
        private.train(recipe(secure=True), tmp_path / "run", stop=After(2))
    state = json.loads((tmp_path / "run" / "checkpoint" / "state.json").read_bytes())["state"]
    assert state["private"]["source"] == {}
    private.train(recipe(secure=True), tmp_path / "run", resume=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"private": {}}, "needs private.epsilon"),
        ({"private": None}, "has a section \\[private\\]"),
        ({"private": {"epsilon": 8.0, "metod": "gip"}}, "did you mean 'method'"),
        ({"private": {"epsilon": "8"}}, "private.epsilon"),
        ({"private": {"epsilon": 8.0, "method": "gap"}}, "did you mean 'gip'"),
        ({"private": {"epsilon": 8.0, "method": "dpsgd", "share": 0.1}}, "private.share is for gip"),
        ({"private": {"epsilon": 8.0, "average": 1.0}}, "private.average"),
        ({"private": {"epsilon": 8.0, "group": -1}}, "private.group"),
        ({"method": "dpf"}, "no method, finetune or origin"),
        ({"train": {"clip": 1.0}}, "leave out train.clip"),
    ],
)
def test_bad_recipes_are_refused(change, message):
    given = {**SETTINGS, "private": {"epsilon": 8.0}} | change
    with pytest.raises(PomonaError, match=message):
        private.PrivateRecipe.load(given)


def test_models_and_data_that_cannot_be_private_are_refused(tmp_path):
    mixing = {**SETTINGS, "model": "digits_cnn", "private": {"epsilon": 8.0}}
    with pytest.raises(PomonaError, match="BatchNorm2d, which mixes .* private_cnn"):
        private.train(private.PrivateRecipe.load(mixing), tmp_path / "run")
    for options, message in (({"epsilon": 0.0}, "ε must be above 0"), ({"delta": 0.1}, "δ must lie")):
        with pytest.raises(PomonaError, match=message):
            private.train(recipe(**options, budget=None), tmp_path / "run")


def test_the_command_trains_resumes_and_refuses(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(recipe().to_toml())
    assert main(["private", "tiny.toml", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["epsilon"] == 8.0
    assert main(["private", "--resume", "runs/tiny"]) == 0
    out = capsys.readouterr().out
    assert "ε = 8 at δ = 1e-05" in out
    assert "as good as random" in out
    assert main(["private", "tiny.toml", "--set", "private.epsilon=-1", "--name", "other"]) == 2
    assert "error:" in capsys.readouterr().err
    assert main(["private", "runs/tiny"]) == 2
    assert main(["private", "tiny.toml", "--dry-run", "--name", "dry", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["recipe"]["private"]["budget"]["sigma"] == SIGMA
    assert plan["steps"] == STEPS
    assert not Path("runs/dry").exists()
    assert main(["private", "tiny.toml", "--dry-run", "--name", "dry"]) == 0
    assert "budget = {" in capsys.readouterr().out


def test_the_command_compares_shares(tmp_path, capsys, monkeypatch):
    pytest.importorskip("dp_accounting")
    asked = {"epsilon": 8.0, "delta": 1e-5, "rows": 100, "batch_size": 100, "steps": 1}
    splits = private.predict([100], [10], clip=1.0, shares=(0.5,), **asked)
    monkeypatch.setattr(private, "predict", lambda *sizes, **asked: splits)
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(recipe().to_toml())
    assert main(["private", "tiny.toml", "--shares", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [split["share"] for split in found] == [0.0, 0.5]
    assert found[0]["error"] == pytest.approx(found[0]["pruning"] + found[0]["noise"])
    assert main(["private", "tiny.toml", "--shares"]) == 0
    assert capsys.readouterr().out.count("★") == 1
    Path("plain.toml").write_text(recipe("dpsgd").to_toml())
    assert main(["private", "plain.toml", "--shares"]) == 2
    assert "only gip splits" in capsys.readouterr().err


def test_shipped_private_recipes_load():
    found = {name: private.PrivateRecipe.load(file) for name, file in files().items() if name.startswith("private-")}
    assert set(found) >= {"private-digits", "private-cifar10", "private-wrn16_4", "private-imdb"}
    authors = found["private-wrn16_4"]
    assert (authors.private.epsilon, authors.private.keep, authors.private.share) == (1.0, 0.1, 0.01)
    assert (authors.recipe.optimizer.lr, authors.recipe.train.batch_size) == (2.0, 4096)
    assert found["private-imdb"].private.epsilon == 4.0
