"""The mean of the weights over the last epochs of a stage."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from run_helpers import StopAfter, read_metrics, without_timings
from safetensors.torch import load_file
from slow_cases import slow_after
from torch import nn

from pomona.errors import PomonaError
from pomona.lab import Interrupted, Recipe, train
from pomona.lab.runs import checkpoint
from pomona.lab.runs import run as run_module
from pomona.lab.runs import train as train_module
from pomona.lab.runs.evaluate import reestimate_batchnorm
from pomona.lab.runs.run import Run
from pomona.lab.runs.run_evaluation import score_model
from pomona.lab.runs.weight_average import WeightAverage

DPF = "dpf(sparsity=0.9, every=4, settle=0.5, schedule='cubic(until=0.25)')"
RECORDS = Path(__file__).parents[3] / "results" / "runs"


def recipe(method=DPF, device="cpu", finetune=0, **options) -> Recipe:
    options = {"epochs": 4, "batch_size": 512, "device": device, "average": 0.5, **options}
    given = {"name": "test", "data": "digits", "model": "digits_cnn(rho=0.5)", "method": method}
    return Recipe.load({**given, "train": options, "finetune": {"epochs": finetune}})


class Watcher(Run):
    """Remembers the weights at the end of every epoch, and what is left in the end."""

    seen: list[dict[str, torch.Tensor]]

    def update_average(self) -> None:
        self.seen.append({name: p.detach().clone() for name, p in self.model.named_parameters()})
        super().update_average()

    def finish(self):
        type(self).last = self
        return super().finish()


@pytest.fixture
def watched(monkeypatch) -> type[Watcher]:
    monkeypatch.setattr(train_module, "Run", Watcher)
    monkeypatch.setattr(Watcher, "seen", [], raising=False)
    return Watcher


def test_the_average_by_hand() -> None:
    layer = nn.Linear(2, 1)
    mean = WeightAverage(layer)
    for weight in ([1.0, 2.0], [2.0, 4.0], [6.0, 0.0]):
        layer.weight.data.copy_(torch.tensor([weight]))
        mean.add()
    copied = WeightAverage(layer)
    copied.load_state_dict(mean.state_dict())
    copied.install()
    assert layer.weight.tolist() == [[3.0, 2.0]]
    assert mean.count == copied.count == 3


@pytest.mark.parametrize(
    ("device", "loop"),
    [("cpu", "eager"), *(pytest.param("cuda", loop, marks=pytest.mark.gpu) for loop in ("eager", "captured"))],
)
def test_a_run_ends_with_the_average_of_its_last_epochs(watched, tmp_path, device, loop) -> None:
    summary = train(recipe(device=device, loop=loop), tmp_path / "run")
    run, third, fourth = watched.last, *watched.seen[2:]
    masks = run.masks
    for name, value in run.model.named_parameters():
        expected = (third[name] + fourth[name]) / 2
        assert not torch.equal(value, fourth[name])
        assert torch.allclose(value, expected, rtol=1e-5, atol=1e-8)
        if name in masks:
            assert torch.equal(value != 0, masks[name])
    fresh = reestimate_batchnorm(run.model, run.training_batches().epoch(3), 32)
    for ours, theirs in zip(run.model.buffers(), fresh.buffers(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)
    stored = load_file(tmp_path / "run" / "model.safetensors")
    assert all(torch.equal(stored[name], value.cpu()) for name, value in run.model.state_dict().items())
    assert summary["accuracy"] == score_model(run, run.model, "test")["accuracy"]
    assert summary["sparsity"] == pytest.approx(0.9, abs=1e-3)


def test_averaging_does_not_change_training(watched, tmp_path) -> None:
    train(recipe(), tmp_path / "on")
    on = list(watched.seen)
    watched.seen.clear()
    train(recipe(average=0.0), tmp_path / "off")
    assert all(torch.equal(a[name], b[name]) for a, b in zip(on, watched.seen, strict=True) for name in a)
    final = dict(watched.last.model.named_parameters())
    assert all(torch.equal(final[name], value) for name, value in watched.seen[-1].items())
    ends = [json.loads((tmp_path / run / "summary.json").read_bytes()) for run in ("on", "off")]
    assert (ends[0]["accuracy_last"], ends[0]["test_loss_last"]) == (ends[1]["accuracy"], ends[1]["test_loss"])
    assert ends[0]["test_loss"] != ends[1]["test_loss"]
    both = [[without_timings(row) for row in read_metrics(tmp_path / run, "epoch")][:-1] for run in ("on", "off")]
    assert both[0] == both[1]
    assert checkpoint.load(tmp_path / "off")["mean"] == {"count": 0, "values": {}}


def test_averaged_weights_obey_the_final_masks(watched, tmp_path) -> None:
    method = "dpf(sparsity=0.5, every=4, settle=0, schedule='cubic(until=0.9)', pattern='filter')"
    train(recipe(method, average=1.0), tmp_path / "run")
    modules, removed = list(watched.last.model.features), 0
    for layer, norm in pairwise(modules):
        if isinstance(layer, nn.Conv2d):
            gone = ~layer.weight.flatten(1).any(1)
            removed += int(gone.sum())
            assert not norm.weight[gone].any()
            assert not norm.bias[gone].any()
    assert removed > 0
    for name, mask in watched.last.masks.items():
        assert not watched.last.model.get_parameter(name)[~mask].any()


@pytest.mark.parametrize("at", [4, 8, 9, 11])  # before, within, at an epoch's end, one step before the last
def test_a_resumed_run_with_averaging_is_bit_identical(tmp_path, at) -> None:
    whole = train(recipe(), tmp_path / "whole")
    assert whole["step"] == 12  # four epochs of three steps
    with pytest.raises(Interrupted):
        train(recipe(), tmp_path / "parts", stop=StopAfter(at))
    parts = train(recipe(), tmp_path / "parts", resume=True)
    assert parts["accuracy"] == whole["accuracy"]
    one, other = (load_file(tmp_path / run / "model.safetensors") for run in ("whole", "parts"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_killed_between_the_last_step_and_the_average(tmp_path, monkeypatch) -> None:
    train(recipe(), tmp_path / "whole")

    def killed(run) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run_module, "install_average", killed)
        with pytest.raises(KeyboardInterrupt):
            train(recipe(), tmp_path / "parts")
    train(recipe(), tmp_path / "parts", resume=True)
    one, other = (load_file(tmp_path / run / "model.safetensors") for run in ("whole", "parts"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_checkpoint_without_an_average_resumes(tmp_path) -> None:
    with pytest.raises(Interrupted):
        train(recipe(average=0.0), tmp_path / "run", stop=StopAfter(5))
    state = checkpoint.load(tmp_path / "run")
    del state["mean"], state["recipe"]["train"]["average"]
    checkpoint.save(tmp_path / "run", state)
    assert train(recipe(average=0.0), tmp_path / "run", resume=True)["step"] == 12


def test_every_stage_has_its_own_average(watched, tmp_path) -> None:
    train(recipe(finetune=2), tmp_path / "run")
    (last,) = watched.seen[5:]  # half of two epochs is one
    assert all(torch.equal(value, last[name]) for name, value in watched.last.model.named_parameters())


@pytest.mark.parametrize("epochs", [1, 2])
def test_short_stages_are_averaged_over_one_epoch(tmp_path, epochs) -> None:
    summary = train(recipe(epochs=epochs, finetune=1, average=0.2), tmp_path / "run")
    assert all("accuracy_last" in stage for stage in summary["stages"])


@pytest.mark.parametrize("at", slow_after(2, [2, 5, 6, 7, 9, 13]))
def test_a_resumed_lottery_is_bit_identical(tmp_path, at) -> None:
    made = recipe("lottery(sparsity=0.8, retrainings=1, rewind=2)", epochs=2, finetune=1, average=1.0)
    train(made, tmp_path / "whole")
    with pytest.raises(Interrupted):
        train(made, tmp_path / "parts", stop=StopAfter(at))
    train(made, tmp_path / "parts", resume=True)
    one, other = (load_file(tmp_path / run / "model.safetensors") for run in ("whole", "parts"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_without_reestimation_statistics_are_unchanged(watched, tmp_path) -> None:
    train(recipe(average=0.0), tmp_path / "off")
    before = dict(watched.last.model.named_buffers())
    train(recipe(reestimate=0), tmp_path / "on")
    assert all(torch.equal(value, before[name]) for name, value in watched.last.model.named_buffers())


def test_fingerprints_of_earlier_runs_are_unchanged() -> None:
    plain = recipe(average=0.0).to_dict()
    assert plain["train"].pop("average") == 0.0
    before = Recipe.load(plain)
    assert before.fingerprint() == recipe(average=0).fingerprint() == recipe(average=0.0).fingerprint()
    assert recipe(average=0.25).fingerprint() != before.fingerprint()
    assert recipe(average=0.25).differences(before) == ["train.average: 0.25, not None"]
    records = [json.loads(path.read_text()) for path in RECORDS.glob("*.json")]
    told = {r["fingerprint"]: Recipe.load_stored(r["recipe"]).fingerprint() for r in records if "recipe" in r}
    assert told
    assert all(name == now for name, now in told.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"average": 1.5}, r"share of the epochs in \[0, 1\], got 1.5"),
        ({"average": -0.1}, "got -0.1"),
        ({"average": "half"}, "train.average takes float, got 'half'"),
        ({"method": "edge_popup"}, "edge_popup selects among random ones"),
    ],
)
def test_bad_averages_are_refused(change, message) -> None:
    with pytest.raises(PomonaError, match=message):
        recipe(**change)


def test_an_exponential_average_by_hand() -> None:
    layer = nn.Linear(2, 1)
    mean = WeightAverage(layer)
    for weight in ([1.0, 2.0], [2.0, 4.0], [6.0, 0.0]):
        layer.weight.data.copy_(torch.tensor([weight]))
        mean.add(0.25)
    mean.install()
    assert layer.weight.tolist() == [[0.75 * 1.25 + 0.25 * 6, 0.75 * 2.5]]


def test_a_run_ends_with_its_exponential_average_and_is_resumed_bit_for_bit(tmp_path) -> None:
    given = recipe("dense", average=0.0, ema=0.9, epochs=2)
    whole = train(given, tmp_path / "whole")
    with pytest.raises(Interrupted):
        train(given, tmp_path / "parts", stop=StopAfter(4))  # within the second epoch
    assert train(given, tmp_path / "parts", resume=True)["accuracy"] == whole["accuracy"]
    found = [load_file(tmp_path / run / "model.safetensors") for run in ("whole", "parts")]
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())
    train(recipe("dense", average=0.0, epochs=2), tmp_path / "plain")
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    assert any(not torch.equal(value, plain[name]) for name, value in found[0].items())
    assert "accuracy_last" in whole


def test_an_exponential_average_is_part_of_the_fingerprint_and_checked() -> None:
    plain = recipe("dense", average=0.0)
    assert recipe("dense", average=0.0, ema=0.0).fingerprint() == plain.fingerprint()
    assert recipe("dense", average=0.0, ema=0.999).fingerprint() != plain.fingerprint()
    with pytest.raises(PomonaError, match=r"train.ema must be in \[0, 1\), such as 0.9999, got 1.0"):
        recipe("dense", average=0.0, ema=1.0)
    with pytest.raises(PomonaError, match=r"give train.average \(0.5\) or train.ema \(0.99\)"):
        recipe("dense", ema=0.99)
    with pytest.raises(PomonaError, match="train.ema averages trained weights"):
        recipe("edge_popup", average=0.0, ema=0.99)
