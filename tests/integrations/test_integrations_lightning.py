"""The callback for Lightning: optimizers, manual optimization, best checkpoints, lottery tickets, logs."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_helpers import count_hooks, is_identical, make_sgd
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from training_stacks import EPOCH_BATCHES, Batches, Classifier, make_loader, train_plain

import pomona as pm
from pomona.errors import PomonaError

lightning = pytest.importorskip("lightning.pytorch")

from pomona.integrations.lightning import PruningCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::Warning:lightning", "ignore::Warning:pytorch_lightning")


class Module(Classifier, lightning.LightningModule):  # type: ignore[misc, name-defined]
    """The classifier with automatic optimization; `val_loss` is chosen, by epoch."""

    val_losses = (0.5, 0.4, 0.3, 0.2)

    def training_step(self, batch: Any, index: int) -> Tensor:
        return self(**batch)["loss"]

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", self.val_losses[self.current_epoch], batch_size=1)

    def configure_optimizers(self) -> Any:
        return make_sgd(self)


def make_callback(**options: Any) -> PruningCallback:
    """Return a callback whose masks change every two steps, at 80 % from three quarters of training on."""
    return PruningCallback(pm.DPF(sparsity=0.8, every=2, settle=0.0), **options)


def make_trainer(folder: Path, callbacks: list[Any], package: Any = lightning, **options: Any) -> Any:
    """Return a trainer that prints nothing."""
    return package.Trainer(**{
        "accelerator": "cpu", "max_epochs": 4, "callbacks": callbacks, "logger": False, "enable_progress_bar": False,
        "enable_model_summary": False, "enable_checkpointing": False, "default_root_dir": folder, **options,
    })  # fmt: skip


def test_a_trained_module_is_plain_and_holds_exact_zeros(tmp_path: Path) -> None:
    module, callback = Module(), make_callback()
    trainer = make_trainer(tmp_path, [callback])
    before = count_hooks(module, make_sgd(module))
    trainer.fit(module, make_loader())
    assert callback.pruner.finished
    assert callback.pruner.step == callback.pruner.total == 4 * EPOCH_BATCHES
    weights = dict(module.named_parameters())
    assert all(torch.equal(weights[name] != 0, mask) for name, mask in callback.pruner.masks().items())
    assert count_hooks(module, trainer.optimizers[0]) == before
    Module().load_state_dict(module.state_dict())


def test_the_sparsity_is_logged(tmp_path: Path) -> None:
    logged: list[float] = []

    class Tracker(lightning.Callback):  # type: ignore[misc, name-defined]
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            logged.append(float(trainer.callback_metrics["sparsity"]))

    make_trainer(tmp_path, [make_callback(), Tracker()], log_every_n_steps=5).fit(Module(), make_loader())
    assert logged == sorted(logged)
    assert logged[0] < 0.6
    assert logged[-1] == pytest.approx(0.8, abs=1e-3)


def test_the_best_checkpoint_has_the_final_sparsity(tmp_path: Path) -> None:
    class Rising(Module):
        val_losses = (0.1, 0.2, 0.3, 0.4)  # the dense model of the first epoch is the best of all

    best = lightning.callbacks.ModelCheckpoint(tmp_path / "best", monitor="val_loss", filename="{epoch}")
    stopping = lightning.callbacks.EarlyStopping("val_loss", patience=3)
    callback = make_callback()
    trainer = make_trainer(tmp_path, [best, stopping, callback], enable_checkpointing=True)
    trainer.fit(Rising(), make_loader(), make_loader())
    # The final sparsity is reached with the last step of the third epoch.
    assert best.best_model_path.endswith("epoch=2.ckpt")
    assert float(best.best_model_score) == pytest.approx(0.3)
    saved = torch.load(best.best_model_path, weights_only=False)
    kept = {name: (saved["state_dict"][name] != 0).double().mean() for name in callback.pruner.masks()}
    assert saved["optimizer_states"][0]["pomona"]["reached"] == 0.8
    assert all(share < 1 for share in kept.values())
    assert stopping.wait_count == 1


class ResumableLoader(DataLoader[Any]):
    """A loader that goes on where it was saved, as torchdata's StatefulDataLoader does."""

    start = taken = 0

    def __iter__(self) -> Iterator[Any]:
        start, self.start = self.start, 0
        for self.taken, batch in enumerate(itertools.islice(super().__iter__(), start, None), start + 1):
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["taken"]


@pytest.mark.slow
def test_a_checkpoint_within_an_epoch_is_resumed_by_a_loader_with_state(tmp_path: Path) -> None:
    def make_resumable() -> Any:
        return ResumableLoader(Batches(), batch_size=None)

    every = lightning.callbacks.ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=15, save_top_k=-1)
    whole, resumed = Module(), Module(7)
    make_trainer(tmp_path, [make_callback(), every], enable_checkpointing=True).fit(whole, make_resumable())
    trainer = make_trainer(tmp_path, [make_callback()])
    trainer.fit(resumed, make_resumable(), ckpt_path=tmp_path / "step=15.ckpt")
    assert is_identical(resumed.state_dict(), whole.state_dict())


def test_manual_optimization_equals_automatic(tmp_path: Path) -> None:
    class Manual(Module):
        automatic_optimization = False

        def training_step(self, batch: Any, index: int) -> None:  # type: ignore[override]
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self(**batch)["loss"])
            optimizer.step()

    manual, automatic = Manual(), Module()
    for module in (manual, automatic):
        make_trainer(tmp_path, [make_callback()]).fit(module, make_loader())
    assert is_identical(manual.state_dict(), automatic.state_dict())


class TwoOptimizers(Module):
    """The classifier with one optimizer for its convolutions and another for its linear layers."""

    automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:  # type: ignore[override]
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(self(**batch)["loss"])
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self) -> Any:
        parts = nn.ModuleList([self.net.conv1, self.net.norm, self.net.conv2])
        return [make_sgd(parts), make_sgd(nn.ModuleList([self.net.hidden, self.net.head]))]


def test_the_optimizer_that_moves_what_is_pruned_is_chosen(tmp_path: Path) -> None:
    callback = PruningCallback(pm.DPF(sparsity=0.5, every=2, include=["net.hidden"]), total_steps=4 * EPOCH_BATCHES)
    trainer = make_trainer(tmp_path, [callback])
    trainer.fit(TwoOptimizers(), make_loader())
    assert callback.pruner.optimizers == [trainer.optimizers[1]]
    assert callback.pruner.step == 4 * EPOCH_BATCHES


def test_several_optimizers_of_what_is_pruned_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PomonaError, match=r"2 optimizers of the module move parameters to prune"):
        make_trainer(tmp_path, [make_callback()]).fit(TwoOptimizers(), make_loader())


def test_sharded_training_is_refused() -> None:
    trainer = SimpleNamespace(strategy=object.__new__(lightning.strategies.FSDPStrategy))
    with pytest.raises(PomonaError, match="FSDPStrategy shards the weights.*use DistributedDataParallel"):
        make_callback().on_train_start(trainer, Module())


class Endless(IterableDataset[Any]):
    """The batches without an end."""

    def __iter__(self) -> Iterator[Any]:
        return (Batches()[index % EPOCH_BATCHES] for index in itertools.count())


def test_training_without_an_end_is_refused_and_max_steps_is_one(tmp_path: Path) -> None:
    loader = DataLoader(Endless(), batch_size=None)
    with pytest.raises(PomonaError, match="needs total_steps"):
        make_trainer(tmp_path, [make_callback()], max_epochs=-1).fit(Module(), loader)
    callback = make_callback()
    make_trainer(tmp_path, [callback], max_epochs=-1, max_steps=9).fit(Module(), loader)
    assert (callback.pruner.step, callback.pruner.total) == (9, 9)


@pytest.mark.slow
def test_a_module_without_a_usable_forward_keeps_its_statistics(tmp_path: Path) -> None:
    class Other(Module):
        def forward(self, pixels: Tensor) -> Tensor:  # type: ignore[override]
            return self.net(pixels)

        def training_step(self, batch: Any, index: int) -> Tensor:
            return nn.functional.cross_entropy(self(batch["x"]), batch["labels"])

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        callback = make_callback()
        make_trainer(tmp_path, [callback]).fit(Other(), make_loader())
    assert callback.pruner.finished
    assert any("does not run on a training batch" in str(one.message) for one in caught)


def test_a_lottery_ticket_is_reset_to_its_first_weights(tmp_path: Path) -> None:
    begun: list[dict[str, Tensor]] = []

    class Note(lightning.Callback):  # type: ignore[misc, name-defined]
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            begun.append({name: tensor.clone() for name, tensor in pl_module.state_dict().items()})

    def train(model: nn.Module, pruner: pm.Pruner, index: int) -> None:
        trainer = make_trainer(tmp_path, [PruningCallback(pruner), Note()], max_epochs=1)
        trainer.fit(model, make_loader())

    module = Module()
    first = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    pm.Lottery(sparsity=0.5, retrainings=1).rounds(module, train)
    assert len(begun) == 2
    assert is_identical(begun[0], first)
    kept = {name: weight != 0 for name, weight in begun[1].items()}
    assert all(torch.equal(begun[1][name][mask], first[name][mask]) for name, mask in kept.items())
    assert sum(int((~kept[f"net.{name}.weight"]).sum()) for name in ("conv1", "conv2", "hidden")) == round(
        0.5 * (288 + 864 + 192)
    )


@pytest.mark.slow
def test_the_package_pytorch_lightning_works_too(tmp_path: Path) -> None:
    package = pytest.importorskip("pytorch_lightning")

    class Older(Classifier, package.LightningModule):  # type: ignore[misc, name-defined]
        training_step, configure_optimizers = Module.training_step, Module.configure_optimizers

    module, callback = Older(), PruningCallback(pm.DPF(sparsity=0.8, every=4))
    trainer = make_trainer(tmp_path, [callback], package, accumulate_grad_batches=2)
    trainer.fit(module, make_loader())
    expected = train_plain(lambda: pm.DPF(sparsity=0.8, every=4), tmp_path)
    assert is_identical(module.state_dict(), expected["weights"])
