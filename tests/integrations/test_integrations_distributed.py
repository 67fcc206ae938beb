"""The callbacks under DistributedDataParallel, in two gloo processes."""

from __future__ import annotations

import os
import socket
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import is_identical, make_sgd
from torch import Tensor, distributed
from training_stacks import EPOCH_STEPS, EPOCHS, Classifier, make_huggingface_trainer, make_loader

import pomona as pm

pytestmark = pytest.mark.slow


def make_pruner() -> pm.Pruner:
    """Return the pruner of both ranks."""
    return pm.DPF(sparsity=0.8, every=2)


def find_port() -> int:
    """Return a port that is free."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def train_rank(rank: int, port: int, folder: Path, resume: bool) -> None:
    """Train as one of two ranks with Hugging Face's Trainer, and save the weights."""
    from pomona.integrations.huggingface import PruningCallback

    world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in world.items()} | {
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    model, callback = Classifier(rank + 7 * resume), PruningCallback(make_pruner())
    trainer = make_huggingface_trainer(
        model, folder, [callback], save_strategy="epoch", gradient_accumulation_steps=1,
    )  # fmt: skip
    last = folder / "huggingface" / f"checkpoint-{2 * EPOCH_STEPS}"
    trainer.train(resume_from_checkpoint=str(last) if resume else None)
    assert distributed.get_world_size() == 2
    assert isinstance(trainer.model_wrapped, torch.nn.parallel.DistributedDataParallel)
    weights = dict(model.named_parameters())
    masks = callback.pruner.masks()
    assert all(torch.equal(weights[name] != 0, mask) for name, mask in masks.items())
    torch.save({"weights": {name: p.detach() for name, p in weights.items()}, "masks": masks}, folder / f"{rank}.pt")
    distributed.destroy_process_group()


def train_two_ranks(folder: Path, resume: bool = False) -> list[Any]:
    """Train in two processes and return what each has saved."""
    port, processes = find_port(), []
    for rank in range(2):
        process = os.fork()
        if process == 0:
            try:
                train_rank(rank, port, folder, resume)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        processes.append(process)
    assert [os.waitpid(process, 0)[1] for process in processes] == [0, 0]
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


def test_two_ranks_of_hugging_face_agree_and_resume(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    first, second = train_two_ranks(tmp_path)
    assert is_identical(first, second)
    for resumed in train_two_ranks(tmp_path, resume=True):
        assert is_identical(resumed, first)


@pytest.mark.filterwarnings("ignore::Warning:lightning")
def test_two_ranks_of_lightning_leave_exact_zeros(tmp_path: Path) -> None:
    package = pytest.importorskip("lightning.pytorch")
    from pomona.integrations.lightning import PruningCallback

    class Module(Classifier, package.LightningModule):  # type: ignore[misc, name-defined]
        def training_step(self, batch: Any, index: int) -> Tensor:
            return self(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return make_sgd(self)

    module, callback = Module(), PruningCallback(make_pruner())
    trainer = package.Trainer(
        accelerator="cpu", devices=2, strategy="ddp_fork", max_epochs=EPOCHS, callbacks=[callback],
        logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(module, make_loader())
    pruned = [module.net.conv1.weight, module.net.conv2.weight, module.net.hidden.weight]
    assert sum(int((weight == 0).sum()) for weight in pruned) == round(0.8 * sum(w.numel() for w in pruned))
