"""Data parallel training in two gloo processes equals training in one process with the same global batch."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import Net, is_identical, make_batch, make_sgd, obeys_masks
from torch import distributed, multiprocessing, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import pomona as pm

STEPS = 24

METHODS: dict[str, Callable[[], pm.Pruner]] = {
    "dpf": lambda: pm.DPF(sparsity=0.8, every=4),
    "dpf filters": lambda: pm.DPF(sparsity=0.5, every=4, pattern=pm.Filter()),
    "dpf at once": lambda: pm.DPF(sparsity=0.8, every=4, schedule="constant"),
    "oneshot": lambda: pm.OneShot(sparsity=0.8),
    "incremental": lambda: pm.Incremental(sparsity=0.8, every=4),
    "iterand": lambda: pm.IteRand(sparsity=0.6, every=4, distribution="ku"),
}
# Soft and score methods may be attached before or after DistributedDataParallel, the others after it.
ATTACHABLE_FIRST = [name for name in METHODS if name.startswith(("dpf", "iterand"))]


class NetWithoutNorm(nn.Module):
    """The network without batch norm, whose statistics differ between ranks."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        net = Net(seed)
        self.conv1, self.conv2, self.hidden, self.head = net.conv1, net.conv2, net.hidden, net.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x)))).mean((2, 3))
        return self.head(F.relu(self.hidden(x)))


def join_process_group(rank: int, folder: str) -> None:
    """Join the gloo process group as a rank."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)


def train_on_rank(method: str, seed: int, rank: int | None, attach_first: bool = False) -> dict[str, Any]:
    """Train on the whole batch, or on the half of a rank, and return masks, weights and history."""
    model = plain = NetWithoutNorm(seed).double().to(memory_format=torch.channels_last)
    pruner = METHODS[method]()
    optimizer = make_sgd(plain)
    if attach_first:
        pruner.attach(plain, optimizer, total_steps=STEPS)
    if rank is not None:
        model = DistributedDataParallel(plain)
    if not attach_first:
        pruner.attach(model, optimizer, total_steps=STEPS)
    for step in range(STEPS):
        x, y = make_batch(step, size=8)
        if rank is not None:
            x, y = x[rank::2], y[rank::2]
        if step or not attach_first:  # ranks that attach first are synchronized at the first step
            assert obeys_masks(plain, pruner)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    masks = {name: mask.clone() for name, mask in pruner.masks().items()}
    pruner.finish()
    return {"masks": masks, "weights": plain.state_dict(), "history": [entry["step"] for entry in pruner.history]}


def run_worker(rank: int, folder: str) -> None:
    """Train all methods as a rank, save the results, and save the error for different models."""
    join_process_group(rank, folder)
    results = {}
    for method in METHODS:
        results[method] = train_on_rank(method, seed=rank, rank=rank)  # rank 0 is broadcast
        if method in ATTACHABLE_FIRST:
            results[f"{method}, attached first"] = train_on_rank(method, seed=rank, rank=rank, attach_first=True)
    torch.save(results, f"{folder}/{rank}.pt")

    model = nn.Sequential(nn.Linear(4, 4 + 4 * rank), nn.Linear(4 + 4 * rank, 2))  # a different one on each rank
    optimizer = make_sgd(model)
    pm.DPF(sparsity=0.5).attach(model, optimizer, total_steps=STEPS)
    model(torch.ones(2, 4)).sum().backward()
    try:
        optimizer.step()
    except pm.PomonaError as error:
        Path(folder, f"{rank}.txt").write_text(str(error))
    distributed.barrier()  # no rank leaves before all have raised the error
    distributed.destroy_process_group()
    os._exit(0)  # a normal exit is sometimes aborted by torch's threads


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the results of two processes."""
    folder = tmp_path_factory.mktemp("ranks")
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=run_worker, args=(rank, str(folder))) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(180)
        process.kill()  # it waits forever where the other rank has failed
    assert [process.exitcode for process in ranks] == [0, 0]
    return folder


@pytest.mark.parametrize("method", [*METHODS, *(f"{method}, attached first" for method in ATTACHABLE_FIRST)])
def test_two_processes_train_like_one(folder: Path, method: str) -> None:
    one = train_on_rank(method.split(",")[0], seed=0, rank=None)
    ranks = [torch.load(folder / f"{rank}.pt")[method] for rank in range(2)]
    assert is_identical(ranks[0], ranks[1])
    for rank in ranks:
        assert rank["history"] == one["history"]
        assert is_identical(rank["masks"], one["masks"])
        for name, weight in one["weights"].items():
            assert torch.allclose(rank["weights"][name], weight, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rank", [0, 1])
def test_different_models_on_the_ranks_are_refused(folder: Path, rank: int) -> None:
    assert "the ranks prune different layers" in (folder / f"{rank}.txt").read_text()
