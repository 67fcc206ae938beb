"""https://github.com/neuralmagic/sparseml/issues/429: DDP processes with different seeds may have different masks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_helpers import make_sgd
from torch import Tensor, distributed, multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

import pomona as pm

STEPS = 8
METHODS: dict[str, Callable[[], pm.Pruner]] = {
    "oneshot": lambda: pm.OneShot(sparsity=0.5, include=["0.weight"]),
    "dpf": lambda: pm.DPF(sparsity=0.5, every=2, include=["0.weight"]),
    "set": lambda: pm.SET(sparsity=0.5, every=2, include=["0.weight"]),
    "random": lambda: pm.Random(sparsity=0.5, include=["0.weight"]),
}


def make_tied_model() -> nn.Module:
    """Return a network in which more weights are zero than will be pruned, so that ties decide the mask."""
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.1)
    nn.init.zeros_(model[0].weight[:, 4:])
    return model


def train_tied_model(method: str, seed: int, wrap: Callable[[nn.Module], nn.Module] = lambda model: model) -> Tensor:
    """Train on the same batches under a seed of this process, and return the mask at the end."""
    torch.manual_seed(seed)
    model = wrap(make_tied_model())
    optimizer = make_sgd(model)
    pruner = METHODS[method]().attach(model, optimizer, total_steps=STEPS, resume=False)
    for step in range(STEPS):
        torch.rand(seed + 1)  # every process draws other numbers
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return pruner.masks()["0.weight"].clone()


@pytest.mark.parametrize("method", METHODS)
def test_ties_are_broken_by_position_whatever_the_seed(method: str) -> None:
    """With too many zeros the entries to prune were shuffled, by a generator that each process had seeded itself."""
    assert torch.equal(train_tied_model(method, seed=1), train_tied_model(method, seed=2))


def run_rank(rank: int, folder: str) -> None:
    """Train every method as a rank with a seed of its own, and save the masks."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    masks = {method: train_tied_model(method, seed=rank, wrap=DistributedDataParallel) for method in METHODS}
    torch.save(masks, f"{folder}/{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()
    os._exit(0)  # a normal exit is sometimes aborted by torch's threads


@pytest.mark.slow
def test_two_ranks_with_different_seeds_have_the_same_masks(tmp_path: Path) -> None:
    """Users expect exactly the same masks on every process of data-parallel training."""
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=run_rank, args=(rank, str(tmp_path))) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
        process.kill()
    assert [process.exitcode for process in ranks] == [0, 0]
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for method, mask in first.items():
        assert torch.equal(mask, second[method])
        assert int((~mask).sum()) == 128
