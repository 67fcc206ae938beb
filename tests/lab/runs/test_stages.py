"""Stages: fine-tuning and lottery rounds as parts of one run, resumed across their borders bit for bit."""

from __future__ import annotations

import dataclasses
import json
from contextlib import suppress
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from run_helpers import StopAfter, read_metrics, untimed_metrics, without_timings
from safetensors.torch import load_file
from slow_cases import slow_after

import pomona as pm
from pomona import models
from pomona.errors import PomonaError
from pomona.lab import Interrupted, Recipe, describe_run, train
from pomona.lab.runs import checkpoint, masks
from pomona.lab.runs.evaluate import cross_entropy
from pomona.lab.runs.run_inputs import load_data, model_options

SMALL = "digits_cnn(rho=0.25)"


def recipe(
    method="oneshot(sparsity=0.8, at=1)", epochs=1, finetune=None, model=SMALL, origin=None, **options
) -> Recipe:
    """Three steps an epoch."""
    training = {"epochs": epochs, "batch_size": 450, "device": "cpu", "reestimate": 2, **options}
    given = {"name": "test", "data": "digits", "model": model, "method": method, "train": training}
    return Recipe.load(given | {"finetune": finetune or {}, "origin": origin or {}})


def quiet(text: str) -> None: ...


# ---- fine-tuning

TUNED = {"epochs": 2, "optimizer": {"lr": 0.02}, "rate": "constant"}


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """One-shot pruning after the last step, and two epochs of fine-tuning."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("tuned") / "run"
    return folder, train(recipe(epochs=3, finetune=TUNED), folder)


def test_the_summary_has_the_results_before_and_after_fine_tuning(tuned):
    folder, summary = tuned
    before, after = summary["stages"]
    assert (before["stage"], after["stage"]) == ("train", "finetune")
    assert (before["epoch"], after["epoch"], summary["epoch"], summary["step"]) == (3, 5, 5, 15)
    assert before["accuracy"] != after["accuracy"] == summary["accuracy"]
    assert before["accuracy_reestimated"] > 0  # the cut came with the last step
    assert summary["accuracy"] > before["accuracy"]
    epochs = read_metrics(folder, "epoch")
    assert [row["stage"] for row in epochs] == ["train"] * 3 + ["finetune"] * 2
    assert [row["accuracy"] for row in epochs if row["step"] in (9, 15)] == [before["accuracy"], after["accuracy"]]


def test_the_second_stage_has_its_own_optimizer_and_rate(tuned):
    rates = [row["lr"] for row in read_metrics(tuned[0], "epoch")]
    assert rates == pytest.approx([0.1, 0.01, 0.001, 0.02, 0.02])  # decay after 4.5 and 6.75 of 9 steps


def test_fine_tuning_keeps_the_masks_of_the_first_stage(tuned):
    folder, summary = tuned
    first, second = summary["stages"]
    assert first["layers"] == second["layers"]
    assert first["sparsity"] == second["sparsity"] == pytest.approx(0.8, abs=1e-3)
    found, weights = masks.load(folder), load_file(folder / "model.safetensors")
    assert list(found) == list(first["layers"])
    for name, mask in found.items():
        assert not weights[name][~mask].any()
        assert 1 - mask.double().mean() == pytest.approx(first["layers"][name])


@pytest.mark.parametrize(
    ("method", "finetune"),
    slow_after(
        3,
        [
            ("oneshot(sparsity=0.8, at=1)", 2),
            ({"name": "dpf", "sparsity": 0.5, "every": 1, "pattern": "filter"}, 2),
            ("rigl(sparsity=0.8, every=2, until=1.0)", 1),
            ("sfp(sparsity=0.5)", 1),
            ("snip(sparsity=0.8)", 1),
            ("dense", 1),
            ("lottery(sparsity=0.7, retrainings=2, rewind=2)", 1),
        ],
    ),
)
def test_a_run_resumed_in_any_stage_is_bit_identical(tmp_path, method, finetune):
    made = recipe(method, epochs=2, finetune={"epochs": finetune}, clip=1.0)
    train(made, tmp_path / "whole", note=quiet)
    steps = read_metrics(tmp_path / "whole", "epoch")[-1]["step"]
    folder, stops = tmp_path / "run", 0
    while not (folder / "summary.json").exists():  # within stages, and at their ends
        with suppress(Interrupted):
            stops += 1
            train(made, folder, resume=folder.exists(), stop=StopAfter(1 + stops % 3), note=quiet)
    assert stops > steps / 3
    a, b = (tmp_path / name / "model.safetensors" for name in ("whole", "run"))
    assert a.read_bytes() == b.read_bytes()
    assert untimed_metrics(folder) == untimed_metrics(tmp_path / "whole")
    ours, theirs = (json.loads((tmp_path / n / "summary.json").read_text())["stages"] for n in ("run", "whole"))
    assert [*map(without_timings, ours)] == [*map(without_timings, theirs)]


def test_killed_after_a_stage_ends_resumes_from_its_last_step(tmp_path):
    made = recipe(epochs=1, finetune={"epochs": 1})
    train(made, tmp_path / "whole")
    with pytest.raises(Interrupted):
        train(made, tmp_path / "run", stop=StopAfter(3))  # the last step of the first stage
    kept = checkpoint.load(tmp_path / "run")
    assert (kept["stage"], kept["step"], kept["results"]) == (0, 3, [])
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:  # that the killed process still wrote
        file.write('{"kind": "epoch", "stage": "finetune"')
    train(made, tmp_path / "run", resume=True)
    assert untimed_metrics(tmp_path / "run") == untimed_metrics(tmp_path / "whole")


def test_kept_weights_with_value_zero_are_still_trained(tmp_path):
    # RigL's last update comes with the last step, so that what it grew is zero when the first stage ends.
    summary = train(
        recipe("rigl(sparsity=0.8, every=2, until=1.0)", epochs=1, finetune={"epochs": 1}), tmp_path / "run"
    )
    assert summary["sparsity"] == pytest.approx(0.8, abs=1e-3)
    found, weights = masks.load(tmp_path / "run"), load_file(tmp_path / "run" / "model.safetensors")
    assert all(weights[name][mask].all() for name, mask in found.items())


def test_describe_run_counts_all_stages():
    told = describe_run(recipe("lottery(sparsity=0.75, retrainings=2)", epochs=2, finetune={"epochs": 1}))
    assert told["stages"] == {"round 0": 2, "round 1": 2, "round 2": 2, "finetune": 1}
    assert told["steps"] == 7 * told["steps_per_epoch"] == 21


def test_the_second_stage_defaults_to_the_optimizer_and_rate_of_the_first():
    base = {"data": "digits", "model": "mlp", "optimizer": "adam(lr=0.01, beta1=0.8)", "rate": "cosine(warmup=1)"}
    made = Recipe.load(base, ["finetune.epochs=3", "finetune.optimizer.lr=0.001"])
    assert made.finetune.optimizer == dataclasses.replace(made.optimizer, lr=0.001)
    assert made.finetune.rate == made.rate
    other = Recipe.load(base, ["finetune.optimizer=sgd", "finetune.rate.final=0.5"])
    assert (other.finetune.optimizer.lr, other.finetune.rate.final, other.finetune.rate.warmup) == (0.1, 0.5, 1)
    assert Recipe.load(made.to_dict()) == made
    assert other.fingerprint() == Recipe.load(base).fingerprint() != made.fingerprint()  # without epochs it is idle


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("finetune.epochs=-1", "finetune.epochs must be 0 or more, got -1"),
        ("finetune.epoch=1", "unknown option of finetune 'epoch': did you mean 'epochs'"),
        ("finetune.optimizer.lr=0", "lr must be above 0"),
        ("finetune.optimizer=sdg", "did you mean 'sgd'"),
        ("finetune=5", "finetune is a section of options, got 5"),
        ("finetun.epochs=1", "did you mean 'finetune'"),
        ("origin.weights=old", "unknown origin.weights 'old'"),
        ("origin.run=nowhere", "origin.run names 'nowhere', which is not a finished run"),
        ("train.track=1", "train.track takes bool"),
    ],
)
def test_mistakes_are_refused(change, says):
    with pytest.raises(PomonaError, match=says):
        Recipe.load({"data": "digits", "model": "mlp"}, [change])


def test_fine_tuning_would_undo_a_compressor():
    with pytest.raises(PomonaError, match="finetune would undo"):
        recipe({"name": "dpf", "compressor": "binary"}, finetune={"epochs": 1})


# ---- the lottery


def test_lottery_rounds_match_those_of_the_library(tmp_path):
    made = recipe("lottery(sparsity=0.75, retrainings=2, rewind=1)", epochs=2)
    summary = train(made, tmp_path / "run")
    data = load_data(made, None, torch.device("cpu"))
    batches = data.batches(450, seed=0)
    torch.manual_seed(0)
    model = models.build(**model_options(made, data))

    def one(model, pruner, index):  # the user's loop, with another optimizer each time
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
        pruner.attach(model, optimizer, 6, 3)
        for step in range(6):
            optimizer.param_groups[0]["lr"] = 0.1 * 0.1 ** ((step >= 3) + (step >= 4))  # round(0.75 · 6) is 4
            inputs, labels = next(batches.epoch(2 * index + step // 3, step % 3))
            optimizer.zero_grad()
            cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        pruner.finish()

    done = pm.Lottery(sparsity=0.75, retrainings=2, rewind=1).rounds(model, one)
    weights = load_file(tmp_path / "run" / "model.safetensors")
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    assert [s["stage"] for s in summary["stages"]] == ["round 0", "round 1", "round 2"]
    assert [s["sparsity"] for s in summary["stages"]] == pytest.approx([d["sparsity"] for d in done])
    assert [s["sparsity"] for s in summary["stages"]] == pytest.approx([0, 0.5, 0.75], abs=1e-3)
    assert summary["accuracy"] == summary["stages"][-1]["accuracy"]
    assert not read_metrics(tmp_path / "run", "update")  # masks change between the rounds


def test_a_rewind_past_the_end_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(PomonaError, match="rewind=7 lies past the end of training, which has 6 steps"):
        train(recipe("lottery(rewind=7)", epochs=2), tmp_path / "run")
    with pytest.raises(PomonaError, match="nothing to prune"):
        train(recipe("lottery", model="mlp(hidden=[])"), tmp_path / "run")
    assert not list(tmp_path.iterdir())


# ---- SNIP


def test_snip_takes_no_training_step_for_its_scores(tmp_path):
    made = recipe("snip(sparsity=0.8)", model="mlp(hidden=[12])")
    with pytest.raises(Interrupted):
        train(made, tmp_path / "run", stop=StopAfter(1))
    state = checkpoint.load(tmp_path / "run")
    torch.manual_seed(0)
    data = load_data(made, None, torch.device("cpu"))
    fresh = models.build(**model_options(made, data))
    optimizer = torch.optim.SGD(fresh.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
    inputs, labels = next(data.batches(450, seed=0).epoch(1))  # training has epoch 0 only
    pruner = pm.SNIP(sparsity=0.8)
    pruner.attach(fresh, optimizer, 3, loss=lambda: cross_entropy(fresh(inputs), labels))
    kept = {name: mask.clone() for name, mask in pruner.masks().items()}
    inputs, labels = next(data.batches(450, seed=0).epoch(0))
    cross_entropy(fresh(inputs), labels).backward()
    before = [p.detach().clone() for p in fresh.parameters()]
    optimizer.step()
    assert any(not torch.equal(p, b) for p, b in zip(fresh.parameters(), before, strict=True))
    assert all(torch.equal(state["model"][name], value) for name, value in fresh.state_dict().items())
    train(made, tmp_path / "run", resume=True)
    found = masks.load(tmp_path / "run")
    assert all(torch.equal(found[name], mask) for name, mask in kept.items())
    assert [row["step"] for row in read_metrics(tmp_path / "run", "update")] == [0]


# ---- dynamics


def test_updates_are_in_the_metrics_and_settled_in_the_summary(tmp_path):
    made = recipe("dpf(sparsity=0.8, every=1, settle=0.25)", epochs=4, track=True)
    with pytest.raises(Interrupted):  # what was tracked survives a stop
        train(made, tmp_path / "run", stop=StopAfter(5))
    summary = train(made, tmp_path / "run", resume=True)
    updates = read_metrics(tmp_path / "run", "update")
    assert [row["step"] for row in updates] == list(range(10))
    assert all(row["stage"] == "train" and 0 <= row["iou"] <= 1 for row in updates)
    layers = summary["stages"][0]["layers"]
    assert updates[-1]["layers"] == pytest.approx(list(layers.values()))
    assert [row["flips"] for row in updates[1:]] != [0] * 9

    # The same training by hand, looking at the masks after every step.
    data = load_data(made, None, torch.device("cpu"))
    torch.manual_seed(0)
    model = models.build(**model_options(made, data))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
    pruner = pm.DPF(sparsity=0.8, every=1, settle=0.25)
    pruner.attach(model, optimizer, 12, 3)
    seen = [torch.cat([m.flatten().clone() for m in pruner.masks().values()])]
    for step in range(12):
        optimizer.param_groups[0]["lr"] = 0.1 * 0.1 ** ((step >= 6) + (step >= 9))
        inputs, labels = next(data.batches(450, seed=0).epoch(step // 3, step % 3))
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        seen.append(torch.cat([m.flatten().clone() for m in pruner.masks().values()]))
    flips = [(a != b) for a, b in pairwise(seen)]  # at step k + 1
    assert [row["flips"] for row in updates[1:]] == [int(f.sum()) for f in flips[:9]]
    still = [1 - torch.stack(flips[3 * e :]).any(0).double().mean().item() for e in range(4)]
    assert summary["settled"] == pytest.approx([*still, 1.0], abs=1e-6)
    assert "settled" not in summary["stages"][0]


def test_nothing_is_tracked_by_default(tuned):
    assert "settled" not in tuned[1]


# ---- masks, and runs that begin with another


@settings(deadline=None)  # every example writes a file
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 7)), min_size=1, max_size=3), st.integers(0, 99))
def test_masks_round_trip(tmp_path_factory, shapes, seed):
    generator = torch.Generator().manual_seed(seed)
    written = {f"layer{i}.weight": torch.rand(s, generator=generator) < 0.5 for i, s in enumerate(shapes)}
    folder = tmp_path_factory.mktemp("masks")
    masks.save(folder, written)
    found = masks.load(folder)
    assert list(found) == list(written)
    assert all(torch.equal(found[name], mask) for name, mask in written.items())


def test_missing_or_damaged_masks_are_refused(tmp_path):
    with pytest.raises(PomonaError, match="holds no masks"):
        masks.load(tmp_path)
    masks.save(tmp_path, {"a": torch.ones(40, 40, dtype=torch.bool)})
    path = tmp_path / masks.MASKS_FILE
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(PomonaError, match="masks.safetensors' is damaged"):
        masks.load(tmp_path)


def test_a_run_starts_from_the_weights_of_another(tmp_path):
    train(recipe("dense", epochs=2), tmp_path / "dense")
    made = recipe("oneshot(sparsity=0.5)", origin={"run": str(tmp_path / "dense")}, epochs=1, model=SMALL)
    assert made.origin.fingerprint == json.loads((tmp_path / "dense" / "summary.json").read_text())["fingerprint"]
    assert Recipe.load(made.to_dict()) == made
    with pytest.raises(Interrupted):
        train(made, tmp_path / "run", stop=StopAfter(1))
    weights = load_file(tmp_path / "dense" / "model.safetensors")
    kept = pm.OneShot(sparsity=0.5)
    model = models.build("digits_cnn", rho=0.25)
    model.load_state_dict(weights)
    kept.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), 3)
    train(made, tmp_path / "run", resume=True)
    found = masks.load(tmp_path / "run")
    assert all(torch.equal(found[name], mask) for name, mask in kept.masks().items())


def test_a_missing_or_changed_origin_is_refused(tmp_path):
    train(recipe("dense"), tmp_path / "dense")
    origin = {"run": str(tmp_path / "dense")}
    with pytest.raises(PomonaError, match="'.*dense' holds no masks"):
        train(recipe("finetune", origin=origin), tmp_path / "run")
    with pytest.raises(PomonaError, match="has the fingerprint .*, and this one started from abc"):
        train(recipe("dense", origin={**origin, "fingerprint": "abc"}), tmp_path / "run")
    with pytest.raises(PomonaError, match="is not there"):
        train(recipe("dense", origin={"run": "gone", "fingerprint": "abc"}), tmp_path / "run")
    with pytest.raises(PomonaError, match="of another model: "):
        train(recipe("dense", origin=origin, model="mlp"), tmp_path / "run")
    later = recipe("dense", origin=origin)
    (tmp_path / "dense" / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(PomonaError, match="the weights of the run '.*dense' cannot be read: train it again"):
        train(later, tmp_path / "run")
    (tmp_path / "dense" / "summary.json").write_text("")
    with pytest.raises(PomonaError, match="is not a finished run: it has no summary.json, or a damaged one"):
        recipe("dense", origin=origin)
    assert not (tmp_path / "run").exists()
