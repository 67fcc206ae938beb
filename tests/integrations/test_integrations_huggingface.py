"""The callback for Hugging Face's Trainer: best models, early stops, broken-off trainings, logs, saved zeros."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import count_hooks, is_identical
from safetensors.torch import load_file
from slow_cases import slow_after
from torch import nn
from training_stacks import EPOCH_STEPS, STEPS, Batches, Classifier, make_huggingface_trainer

import pomona as pm
from pomona.errors import PomonaError

transformers = pytest.importorskip("transformers")

from accelerate.state import PartialState  # noqa: E402
from accelerate.utils import DistributedType  # noqa: E402

from pomona.integrations.huggingface import PruningCallback  # noqa: E402

PRUNED_EARLY = "ignore:finish.. came at step"


def make_callback(**options: Any) -> PruningCallback:
    """Return a callback whose masks change every two steps until the last, at 80 % from step 18 of 24 on."""
    return PruningCallback(pm.DPF(sparsity=0.8, every=2, settle=0.0), **options)


def count_zeros(model: nn.Module, pruner: pm.Pruner) -> int:
    """Return how many entries of the pruned weights are zero."""
    weights = dict(model.named_parameters())
    return sum(int((weights[name] == 0).sum()) for name in pruner.masks())


def count_pruned(pruner: pm.Pruner) -> int:
    """Return how many entries the masks prune."""
    return sum(int((~mask).sum()) for mask in pruner.masks().values())


class Losses(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """Give evaluations chosen losses, by step, and note what is the best model after each save."""

    def __init__(self, losses: dict[int, float]) -> None:
        self.losses = losses
        self.best: dict[int, int | None] = {}

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **kwargs: Any) -> None:
        metrics["eval_loss"] = self.losses[state.global_step]

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.best[state.global_step] = state.best_global_step


def test_the_best_model_has_the_final_sparsity_and_its_own_masks(tmp_path: Path) -> None:
    # The dense model of step 4 is the best of all; of those with the final sparsity the best is at step 20.
    losses = Losses({4: 0.1, 8: 0.3, 12: 0.4, 16: 0.5, 20: 0.6, 24: 0.7})
    model, callback = Classifier(), make_callback(max_batches=0)
    trainer = make_huggingface_trainer(
        model, tmp_path, [losses, callback], eval_steps=4, save_strategy="steps", save_steps=4,
        load_best_model_at_end=True, metric_for_best_model="eval_loss", greater_is_better=False,
    )  # fmt: skip
    trainer.train()
    assert losses.best == {4: 4, 8: 8, 12: 12, 16: 16, 20: 20, 24: 20}
    best = tmp_path / "huggingface" / "checkpoint-20"
    assert trainer.state.best_model_checkpoint == str(best)
    saved = torch.load(best / "optimizer.pt", weights_only=True)["pomona"]
    last = torch.load(best.with_name("checkpoint-24") / "optimizer.pt", weights_only=True)["pomona"]
    assert callback.pruner.step == saved["step"] == 20
    assert not is_identical(saved["masks"], last["masks"]), "the masks still moved, or nothing is tested"
    assert is_identical(dict(model.state_dict()), load_file(best / "model.safetensors"))
    assert count_zeros(model, callback.pruner) == count_pruned(callback.pruner)
    assert float(callback.pruner.sparsity()) == pytest.approx(0.8, abs=1e-3)


@pytest.mark.slow
def test_a_best_model_that_was_not_loaded_keeps_its_last_masks(tmp_path: Path) -> None:
    class Forgetful(transformers.Trainer):  # type: ignore[misc, name-defined]
        def _load_best_model(self) -> None:
            """Load nothing, as transformers does where it has renamed a model's layers."""

    losses = Losses({4: 0.1, 8: 0.3, 12: 0.4, 16: 0.5, 20: 0.6, 24: 0.7})
    models = [Classifier(), Classifier()]
    for model, kind in zip(models, (Forgetful, None), strict=True):
        trainer = make_huggingface_trainer(
            model, tmp_path, [losses, make_callback()], kind, eval_steps=4, save_strategy="steps", save_steps=4,
            load_best_model_at_end=kind is not None, metric_for_best_model="eval_loss", greater_is_better=False,
        )  # fmt: skip
        with pytest.warns(UserWarning, match="keeps the masks of its last step") if kind else nullcontext():
            trainer.train()
    assert is_identical(models[0].state_dict(), models[1].state_dict())


def test_a_best_model_without_its_masks_is_refused_before_training(tmp_path: Path) -> None:
    trainer = make_huggingface_trainer(
        Classifier(), tmp_path, [make_callback()], eval_steps=4, save_strategy="steps", save_steps=4,
        load_best_model_at_end=True, save_only_model=True,
    )  # fmt: skip
    with pytest.raises(PomonaError, match="set save_only_model=False"):
        trainer.train()


@pytest.mark.filterwarnings(PRUNED_EARLY)
def test_an_early_stop_leaves_the_final_sparsity_and_no_hooks(tmp_path: Path) -> None:
    class Stop(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 9

    model, callback = Classifier(), make_callback()
    trainer = make_huggingface_trainer(model, tmp_path, [callback, Stop()], save_strategy="no")
    before = count_hooks(model, trainer.optimizer)
    trainer.train()
    assert callback.pruner.step == 9
    assert float(callback.pruner.sparsity()) == pytest.approx(0.8, abs=1e-3)
    assert count_zeros(model, callback.pruner) == count_pruned(callback.pruner)
    assert count_hooks(model, trainer.optimizer.optimizer) == before


@pytest.mark.slow
def test_early_stopping_waits_for_the_final_sparsity(tmp_path: Path) -> None:
    losses = Losses({4: 0.1, 8: 0.3, 12: 0.4, 16: 0.5, 20: 0.6, 24: 0.7})
    callback = make_callback()
    stopping = transformers.EarlyStoppingCallback(early_stopping_patience=1)
    trainer = make_huggingface_trainer(
        Classifier(), tmp_path, [losses, callback, stopping], eval_steps=4, save_strategy="steps", save_steps=4,
        load_best_model_at_end=True, metric_for_best_model="eval_loss", greater_is_better=False,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.global_step == 24
    assert callback.pruner.step == 20


def test_max_steps_is_the_length_of_training(tmp_path: Path) -> None:
    callback = make_callback()
    make_huggingface_trainer(Classifier(), tmp_path, [callback], max_steps=7, save_strategy="no").train()
    assert (callback.pruner.step, callback.pruner.total) == (7, 7)


@pytest.mark.parametrize(
    ("by_epoch", "expected"), slow_after(2, [(None, EPOCH_STEPS), (False, None), (True, EPOCH_STEPS)])
)
def test_a_method_that_updates_once_an_epoch_is_told_its_length(
    tmp_path: Path, by_epoch: bool | None, expected: int | None
) -> None:
    callback = PruningCallback(pm.SFP(sparsity=0.5), by_epoch=by_epoch)
    trainer = make_huggingface_trainer(Classifier(), tmp_path, [callback], save_strategy="no", num_train_epochs=1)
    if expected is None:
        with pytest.raises(PomonaError, match="once an epoch"):
            trainer.train()
    else:
        trainer.train()
        assert callback.pruner.steps_per_epoch == expected


def test_the_schedule_follows_steps_by_default(tmp_path: Path) -> None:
    callback = make_callback()
    make_huggingface_trainer(Classifier(), tmp_path, [callback], save_strategy="no", num_train_epochs=1).train()
    assert callback.pruner.steps_per_epoch is None


def test_the_sparsity_is_logged_beside_the_loss(tmp_path: Path) -> None:
    seen: list[float | None] = []

    class Tracker(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
            seen.append(logs.get("sparsity"))

    trainer = make_huggingface_trainer(Classifier(), tmp_path, [make_callback(), Tracker()], save_strategy="steps")
    trainer.train()
    logged = {entry["step"]: entry["sparsity"] for entry in trainer.state.log_history if "loss" in entry}
    assert len(logged) == STEPS
    assert logged[1] == 0
    assert logged[STEPS] == pytest.approx(0.8, abs=1e-3)
    assert sorted(logged.values()) == list(logged.values())
    assert seen == [entry["sparsity"] for entry in trainer.state.log_history]
    assert "sparsity" not in trainer.evaluate(Batches()), "the pruner is finished"


def test_training_that_was_broken_off_is_resumed_by_the_same_trainer(tmp_path: Path) -> None:
    class Interrupt(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 15:
                raise KeyboardInterrupt

    whole = Classifier()
    make_huggingface_trainer(whole, tmp_path / "whole", [make_callback()], save_strategy="no").train()
    model, callback, interrupt = Classifier(), make_callback(), Interrupt()
    trainer = make_huggingface_trainer(model, tmp_path, [callback, interrupt], save_strategy="steps", save_steps=10)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.remove_callback(interrupt)
    trainer.train(resume_from_checkpoint=True)
    assert callback.pruner.finished
    assert is_identical(model.state_dict(), whole.state_dict())


def test_a_second_training_prunes_again_and_says_that_the_model_was_pruned(tmp_path: Path) -> None:
    model, callback = Classifier(), make_callback()
    trainer = make_huggingface_trainer(model, tmp_path, [callback], save_strategy="no", num_train_epochs=1)
    trainer.train()
    first = callback.pruner
    with pytest.warns(UserWarning, match="zero"):
        trainer.train()
    assert callback.pruner is not first
    assert callback.pruner.finished
    assert float(callback.pruner.sparsity()) == pytest.approx(0.8, abs=1e-3)


@pytest.mark.slow
def test_pruning_can_begin_at_a_dense_checkpoint(tmp_path: Path) -> None:
    make_huggingface_trainer(Classifier(), tmp_path, [], save_strategy="steps", save_steps=10, max_steps=10).train()
    callback = make_callback()
    trainer = make_huggingface_trainer(Classifier(7), tmp_path, [callback], save_strategy="no", max_steps=STEPS)
    trainer.train(resume_from_checkpoint=True)
    assert (callback.pruner.step, callback.pruner.total) == (STEPS - 10, STEPS - 10)


@pytest.mark.slow
def test_a_longer_training_is_resumed_with_the_masks_at_rest(tmp_path: Path) -> None:
    make_huggingface_trainer(Classifier(), tmp_path, [make_callback()], save_strategy="steps", save_steps=20).train()
    callback = make_callback()
    trainer = make_huggingface_trainer(Classifier(7), tmp_path, [callback], save_strategy="no", num_train_epochs=5)
    trainer.train(resume_from_checkpoint=str(tmp_path / "huggingface" / "checkpoint-20"))
    assert (callback.pruner.step, callback.pruner.total) == (STEPS + EPOCH_STEPS, STEPS)


@pytest.mark.parametrize("pattern", slow_after(1, [pm.Balanced(block=8), "unstructured"]), ids=str)
def test_a_transformer_is_pruned_and_saved_with_exact_zeros(tmp_path: Path, pattern: Any) -> None:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, num_labels=3
    )
    model = transformers.BertForSequenceClassification(config)
    tokens = torch.randint(50, (16, 8))
    data = [{"input_ids": row, "labels": row[0] % 3} for row in tokens]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, max_steps=12, per_device_train_batch_size=4, report_to=[],
        disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    callback = PruningCallback(pm.DPF(sparsity=0.75, every=2, pattern=pattern))
    trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[callback])
    trainer.train()
    trainer.save_model()
    loaded = transformers.BertForSequenceClassification.from_pretrained(tmp_path)
    masks = callback.pruner.masks()
    assert len(masks) >= 12
    for name, mask in masks.items():
        assert torch.equal(dict(loaded.named_parameters())[name] != 0, mask)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "bert"


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED"])
def test_sharded_training_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    trainer = make_huggingface_trainer(Classifier(), tmp_path, [make_callback()])
    monkeypatch.setitem(PartialState._shared_state, "distributed_type", DistributedType(kind))
    with pytest.raises(PomonaError, match=f"{kind} shards the weights.*use DistributedDataParallel"):
        trainer.callback_handler.on_train_begin(trainer.args, trainer.state, trainer.control)


def test_what_is_no_pruner_is_refused() -> None:
    with pytest.raises(PomonaError, match=r"takes a pruner such as pm.DPF.*got 0.9"):
        PruningCallback(0.9)  # type: ignore[arg-type]
