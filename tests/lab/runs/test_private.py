"""Private runs: trained, stopped, resumed and refused, and what their folders hold."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from run_helpers import StopAfter, read_metrics, without_timings
from safetensors.torch import load_file

import pomona.cli.private  # noqa: F401  until the command line lists it
from pomona.cli import main
from pomona.errors import PomonaError
from pomona.integrations.trackers import TRACKERS
from pomona.lab import Interrupted, Recipe, train
from pomona.lab.recipes.bundled import bundled_files
from pomona.lab.recipes.private_recipe import PrivateRecipe
from pomona.lab.runs import private
from pomona.lab.runs import run as run_module
from pomona.lab.runs.private import PrivateStrategy
from pomona.lab.runs.run import Run
from pomona.lab.runs.run_evaluation import evaluate_run
from pomona.lab.runs.stages import Stage
from pomona.privacy import Budget, accounting, budget, random_source
from pomona.privacy.ledger import ledger_folder

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
    curve = ((6, 0.75 * epsilon), (STEPS, epsilon))
    return Budget(epsilon, 1e-5, 1347, 400, STEPS, share, SIGMA, 0.0273 if share else 0.0, curve).to_dict() | change


def recipe(method: str = "gip", **options) -> PrivateRecipe:
    share = 0.01 if method == "gip" else 0.0
    section = {"method": method, "epsilon": 8.0, "keep": 0.5, "budget": settled(share), **options}
    return PrivateRecipe.load({**SETTINGS, "private": section})


def train_private(recipe: PrivateRecipe, folder: Path, **options) -> dict:
    """Train a private recipe and return its summary."""
    return train(PrivateStrategy(recipe), folder, **options)


@pytest.mark.parametrize("method", ["gip", "dpsgd", "random"])
def test_a_private_run_learns_and_records_what_it_spent(tmp_path, method):
    summary = train_private(recipe(method), tmp_path / "run")
    assert summary["accuracy"] > 30
    assert summary["method"] == method
    assert summary["epsilon"] == 8.0
    assert summary["private"]["sigma"] == SIGMA
    assert summary["private"]["delta"] == 1e-5
    if method == "gip":
        assert summary["private"]["lost"]["end"] == pytest.approx(summary["private"]["random_loses"]["end"], abs=0.01)
    epochs = read_metrics(tmp_path / "run", "epoch")
    assert [row["epsilon"] for row in epochs] == [6.0, 8.0, 8.0]
    assert json.loads((tmp_path / "run" / "summary.json").read_bytes())["fingerprint"] == recipe(method).fingerprint()


def test_the_folder_of_a_private_run_has_no_training_loss(tmp_path):
    train_private(recipe(), tmp_path / "run")
    for row in read_metrics(tmp_path / "run"):
        assert "loss" not in row
    summary = json.loads((tmp_path / "run" / "summary.json").read_bytes())
    assert "loss" not in summary
    assert all("loss" not in stage for stage in summary["stages"])
    state = json.loads((tmp_path / "run" / "checkpoint" / "state.json").read_bytes())["state"]
    assert state["loss"] == 0.0


def test_trackers_of_a_private_run_receive_what_is_in_its_metrics(tmp_path, monkeypatch):
    class Listing:
        package, distribution = "json", "json"
        logged: ClassVar[list] = []

        def start(self, folder, name, config, step):
            self.config = config

        def log(self, step, values):
            self.logged.append((step, values))

        def finish(self, complete):
            assert "budget" in self.config["private"]

    monkeypatch.setitem(TRACKERS, "listing", Listing)
    train_private(recipe(), tmp_path / "run", trackers=["listing"], note=pytest.fail)
    rows = read_metrics(tmp_path / "run")
    assert "loss" not in rows[0]
    numbers = [{k: v for k, v in row.items() if k not in ("kind", "stage", "step")} for row in rows]
    assert Listing.logged == [(row["step"], values) for row, values in zip(rows, numbers, strict=True)]


@pytest.mark.parametrize("method", ["gip", "dpsgd"])
def test_a_new_output_of_plain_runs_is_not_recorded_unless_allowed(tmp_path, monkeypatch, method):
    """A private run records what its list names: a new field of plain runs, here a secret, is not on it."""
    end_epoch, result_fields = Run.end_epoch, Stage.result_fields
    describe_environment, collect_state = run_module.describe_environment, run_module.collect_state

    def evaluate(run):
        return {**evaluate_run(run), "secret": 1.0}  # a field of an epoch's row

    def finish(self):
        self.recorder.write_file("secret.json", b"{}")
        return finish_run(self)

    class Listener:
        rows: ClassVar[list] = []

        def start(self, *arguments): ...
        def step(self, loss=None): ...
        def close(self): ...
        def epoch(self, row):
            self.rows.append(row)

    finish_run = Run.finish
    monkeypatch.setattr(run_module, "evaluate_run", evaluate)
    monkeypatch.setattr(run_module, "describe_environment", lambda: {**describe_environment(), "secret": 1.0})
    monkeypatch.setattr(run_module, "collect_state", lambda run: {**collect_state(run), "secret": 1.0})
    monkeypatch.setattr(Stage, "result_fields", lambda self, run: {**result_fields(self, run), "secret_result": 1.0})
    monkeypatch.setattr(Run, "end_epoch", lambda self: {**end_epoch(self), "secret_end": 1.0})
    monkeypatch.setattr(Run, "finish", finish)
    places = ("metrics.jsonl", "summary.json", "env.json", "checkpoint/state.json")

    plain = Recipe.load(SETTINGS | {"optimizer": {"lr": 0.1}})
    summary = train(plain, tmp_path / "plain", progress=Listener())
    assert all("secret" in (tmp_path / "plain" / place).read_text() for place in places)
    assert (tmp_path / "plain" / "secret.json").exists()
    assert "secret_end" in summary
    assert "secret" in Listener.rows[-1]

    summary = train_private(recipe(method), tmp_path / "private", progress=Listener())
    written = [path for path in (tmp_path / "private").rglob("*") if path.is_file()]
    assert {str(path.relative_to(tmp_path / "private")) for path in written} >= set(places)
    assert not [path for path in written if b"secret" in path.read_bytes() or "secret" in path.name]
    assert "secret" not in str(summary)
    assert "secret" not in str(Listener.rows[-1])

    allowed = PrivateStrategy.allowed_outputs
    more = dataclasses.replace(allowed, metrics=allowed.metrics | {"secret"})
    monkeypatch.setattr(PrivateStrategy, "allowed_outputs", more)
    train_private(recipe(method), tmp_path / "allowed")
    assert all(row["secret"] == 1.0 for row in read_metrics(tmp_path / "allowed", "epoch"))
    assert "secret" not in (tmp_path / "allowed" / "summary.json").read_text()


@pytest.fixture
def fixed_key(monkeypatch):
    """Give all runs of a test the same key, as if one was the continuation of the other."""
    monkeypatch.setattr(random_source, "os", SimpleNamespace(urandom=lambda count: bytes(range(count))))


def test_a_resumed_private_run_is_bit_identical(tmp_path, fixed_key):
    whole = train_private(recipe(average=0.9, views=1), tmp_path / "whole")
    with pytest.raises(Interrupted):
        train_private(recipe(average=0.9), tmp_path / "parts", stop=StopAfter(5))
    parts = train_private(recipe(average=0.9), tmp_path / "parts", resume=True)
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert whole["accuracy"] == parts["accuracy"]
    assert parts["epsilon"] == 8.0
    pairs = zip(read_metrics(tmp_path / "whole"), read_metrics(tmp_path / "parts"), strict=True)
    assert all(without_timings(a) == without_timings(b) for a, b in pairs)


def test_a_complete_run_is_not_trained_again(tmp_path):
    done = train_private(recipe(), tmp_path / "run")
    assert train_private(recipe(), tmp_path / "run", resume=True) == done
    with pytest.raises(PomonaError, match="is not empty"):
        train_private(recipe(), tmp_path / "run")


def test_a_run_cannot_be_resumed_with_another_budget(tmp_path):
    with pytest.raises(Interrupted):
        train_private(recipe(), tmp_path / "run", stop=StopAfter(2))
    more = recipe(epsilon=9.0, budget=settled(0.01, 9.0))
    with pytest.raises(PomonaError, match="another budget or method .*epsilon: 9.0, not 8.0"):
        train_private(more, tmp_path / "run", resume=True)
    longer = {**SETTINGS, "train": {**SETTINGS["train"], "epochs": 4}}
    section = recipe().private.to_dict() | {"budget": None}
    with pytest.raises(PomonaError, match="other settings"):
        train_private(PrivateRecipe.load({**longer, "private": section}), tmp_path / "run", resume=True)


def test_a_run_needs_no_accountant_once_its_budget_is_solved(tmp_path, monkeypatch):
    monkeypatch.setattr(budget, "find_spec", lambda name: None)
    monkeypatch.setattr(accounting, "import_dp_accounting", lambda: pytest.fail("the accountant was asked"))
    train_private(recipe(), tmp_path / "run")
    written = PrivateRecipe.load(tmp_path / "run" / "recipe.toml")
    assert written.private.budget == recipe().private.budget
    assert written.fingerprint() == recipe().fingerprint()


def test_a_budget_for_another_run_is_refused(tmp_path):
    for change, message in (
        ({"rows": 1000}, "rows: 1347, not 1000"),
        ({"steps": 100}, "steps: 12, not 100"),
        ({"epsilon": 4.0}, "epsilon: 8.0, not 4.0"),
    ):
        with pytest.raises(PomonaError, match=message):
            train_private(recipe(budget=settled(0.01) | change), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_budget_that_exceeds_delta_is_refused(tmp_path):
    pytest.importorskip("dp_accounting")
    with pytest.raises(PomonaError, match="a budget with σ=0.5 .* not 1e-05: solve the budget again"):
        train_private(recipe(budget=settled(0.01, sigma=0.5)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_public_rows_are_held_out_of_the_training(tmp_path):
    section = {"method": "public", "epsilon": 8.0, "keep": 0.5}
    held = {**SETTINGS, "data": {"name": "digits", "validation": 100}}
    solved = settled() | {"rows": 1247}
    summary = train_private(PrivateRecipe.load({**held, "private": {**section, "budget": solved}}), tmp_path / "a")
    assert summary["private"]["lost"]["end"] is None
    with pytest.raises(PomonaError, match="set data.validation"):
        train_private(PrivateRecipe.load({**SETTINGS, "private": {**section, "budget": settled()}}), tmp_path / "b")


def test_views_are_augmented_copies(tmp_path):
    shaped = {**SETTINGS, "data": {"name": "digits", "augment": "standard(pad=1)"}}
    section = {"method": "dpsgd", "epsilon": 8.0, "views": 3, "budget": settled()}
    made = PrivateRecipe.load({**shaped, "private": section})
    seen = []

    def watch(self, inputs, targets, rows):
        seen.append((inputs.shape[1:], len(inputs), len(targets)))
        return step(self, inputs, targets, rows)

    step = private.PrivateStep.__call__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(private.PrivateStep, "__call__", watch)
        train_private(made, tmp_path / "run")
    assert {shape for shape, *_ in seen} == {(3, 1, 8, 8)}
    assert all(count == labels for _, count, labels in seen)


def test_the_key_of_a_secure_run_is_in_its_checkpoint_only(tmp_path):
    with pytest.raises(Interrupted):
        train_private(recipe(secure=True), tmp_path / "run", stop=StopAfter(2))
    state = json.loads((tmp_path / "run" / "checkpoint" / "state.json").read_bytes())["state"]
    assert (state["private"]["source"]["step"], state["private"]["source"]["secure"]) == (2, True)
    key = state["private"]["source"]["key"].encode()
    assert len(key) == 64
    holders = [path for path in (tmp_path / "run").rglob("*") if path.is_file() and key in path.read_bytes()]
    assert {path.parent.name for path in holders} == {"checkpoint", "checkpoint.previous"}
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "run").glob("checkpoint*/*")} == {0o600}
    train_private(recipe(secure=True), tmp_path / "run", resume=True)
    assert not [path for path in (tmp_path / "run").rglob("*") if path.is_file() and key in path.read_bytes()]
    assert not [path for path in ledger_folder().rglob("*") if key in path.read_bytes()]


def test_the_ledger_shows_every_step_once_and_its_limit_is_kept(tmp_path, capsys):
    with pytest.raises(Interrupted):
        train_private(recipe("dpsgd"), tmp_path / "one", stop=StopAfter(2))
    (tmp_path / "one" / "checkpoint").rename(tmp_path / "kept")  # back to the checkpoint before the first step
    train_private(recipe("dpsgd"), tmp_path / "one", resume=True)
    train_private(recipe("dpsgd", secure=False), tmp_path / "seeded")
    assert main(["private", "ledger", "digits", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert [(run["steps"], run["planned"], run["name"]) for run in found["runs"]] == [(STEPS, STEPS, "tiny")]
    assert found["not_private"] == 1
    assert found["epsilon"] == found["runs"][0]["epsilon"] <= 8.0
    assert main(["private", "ledger", "digits", "--limit", "9"]) == 0
    assert "of 9 at δ = 1e-05" in capsys.readouterr().out
    with pytest.raises(PomonaError, match="'digits' would cost ε=.*its limit is 9"):
        train_private(recipe("dpsgd"), tmp_path / "two")
    assert main(["private", "ledger", "digits", "--limit", "1"]) == 2
    assert "have already spent" in capsys.readouterr().err


def test_files_of_a_private_run_name_no_seed_unless_asked(tmp_path):
    train_private(recipe("dpsgd"), tmp_path / "run")
    for name in ("recipe.toml", "summary.json", "metrics.jsonl"):
        assert "seed" not in (tmp_path / "run" / name).read_text()
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert [path.name for path in files if b'"seed"' in path.read_bytes()] == ["state.json"]
    assert json.loads((tmp_path / "run" / "checkpoint" / "state.json").read_bytes())["state"]["recipe"]["seed"] == 0
    train_private(recipe("dpsgd", secure=False), tmp_path / "seeded")
    assert json.loads((tmp_path / "seeded" / "summary.json").read_bytes())["seed"] == 0
    assert "seed = 0" in (tmp_path / "seeded" / "recipe.toml").read_text()


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
        ({"method": "dpf"}, "no method or finetune"),
        ({"teacher": {"run": "dense", "fingerprint": "abc"}}, "a private run has no teacher: .* outside the budget"),
        ({"train": {"clip": 1.0}}, "leave out train.clip"),
    ],
)
def test_bad_recipes_are_refused(change, message):
    given = {**SETTINGS, "private": {"epsilon": 8.0}} | change
    with pytest.raises(PomonaError, match=message):
        PrivateRecipe.load(given)


def test_models_and_data_that_cannot_be_private_are_refused(tmp_path):
    mixing = {**SETTINGS, "model": "digits_cnn", "private": {"epsilon": 8.0}}
    with pytest.raises(PomonaError, match="BatchNorm2d, which mixes .* private_cnn"):
        train_private(PrivateRecipe.load(mixing), tmp_path / "run")
    for options, message in (({"epsilon": 0.0}, "ε must be above 0"), ({"delta": 0.1}, "δ must lie")):
        with pytest.raises(PomonaError, match=message):
            train_private(recipe(**options, budget=None), tmp_path / "run")


def test_the_private_command_trains_resumes_and_refuses(tmp_path, capsys, monkeypatch):
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


@pytest.mark.slow
def test_the_private_command_compares_shares(tmp_path, capsys, monkeypatch):
    pytest.importorskip("dp_accounting")
    asked = {"epsilon": 8.0, "delta": 1e-5, "rows": 100, "batch_size": 100, "steps": 1}
    splits = private.predict_splits([100], [10], clip=1.0, shares=(0.5,), **asked)
    monkeypatch.setattr(private, "predict_splits", lambda *sizes, **asked: splits)
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


def test_bundled_private_recipes_load():
    found = {name: PrivateRecipe.load(file) for name, file in bundled_files().items() if name.startswith("private-")}
    assert set(found) >= {"private-digits", "private-cifar10", "private-wrn16_4", "private-imdb"}
    authors = found["private-wrn16_4"]
    assert (authors.private.epsilon, authors.private.keep, authors.private.share) == (1.0, 0.1, 0.01)
    assert (authors.recipe.optimizer.lr, authors.recipe.train.batch_size) == (2.0, 4096)
    assert found["private-imdb"].private.epsilon == 4.0


RAMPED = {
    "noise_ramp": {"start": 1.2, "end": 0.9, "parts": 4},
    "clipping": {"layers": True, "quantile": 0.5, "rate": 0.1},
}


def test_options_of_clipping_and_ramps_reach_the_step_and_the_files(tmp_path, capsys):
    solved = settled(0.01) | {"noise_ramp": RAMPED["noise_ramp"], "sigma": 1.1}
    made = recipe(budget=solved, **RAMPED)
    assert made.fingerprint() != recipe().fingerprint()
    assert recipe(clipping={}, noise_ramp=(1, 1)).fingerprint() == recipe().fingerprint()
    assert PrivateRecipe.load(made.to_dict()).private == made.private
    summary = train_private(made, tmp_path / "run")
    assert {key: summary["private"][key] for key in RAMPED} == RAMPED
    written = PrivateRecipe.load(tmp_path / "run" / "recipe.toml")
    assert written.private == made.private
    assert written.private.budget == made.private.budget
    with pytest.raises(PomonaError, match="private.budget was solved for another run .noise_ramp"):
        train_private(recipe(budget=settled(0.01), **RAMPED), tmp_path / "other")
    with pytest.raises(PomonaError, match="clipping.quantile takes float or nothing, got 'half'"):
        recipe(clipping={"quantile": "half"})
    Path(tmp_path / "tiny.toml").write_text(made.to_toml())
    assert main(["private", str(tmp_path / "tiny.toml"), "--dry-run", "--name", "dry"]) == 0
    shown = capsys.readouterr().out
    assert "from 1.2 to 0.9 times its value" in shown
    assert "quantile = 0.5" in shown


def test_run_with_other_clipping_is_not_resumed(tmp_path):
    with pytest.raises(Interrupted):
        train_private(recipe("dpsgd"), tmp_path / "run", stop=StopAfter(2))
    with pytest.raises(PomonaError, match="another budget or method .clipping"):
        train_private(recipe("dpsgd", clipping={"layers": True}), tmp_path / "run", resume=True)


def test_the_private_command_counts_the_steps_of_a_sigma(tmp_path, capsys):
    pytest.importorskip("dp_accounting")
    Path(tmp_path / "tiny.toml").write_text(recipe("dpsgd").to_toml())
    assert main(["private", str(tmp_path / "tiny.toml"), "--sigma", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    pair = accounting.Pair(400 / 1347, 2.0)
    assert pair.epsilon(found["steps"], 1e-5) <= 8.0 < pair.epsilon(found["steps"] + 1, 1e-5)
    assert (found["steps_per_epoch"], found["epochs"]) == (4, found["steps"] // 4)
    assert main(["private", str(tmp_path / "tiny.toml"), "--sigma", "2"]) == 0
    assert f"{found['steps']}" in capsys.readouterr().out
