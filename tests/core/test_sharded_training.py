"""Training with FSDP2 and DDP on several ranks gives the masks and weights of one process, also after a resume.

The draws are those of benchmarks/measure/distributed_draws.py, of which there are many more.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ranks import RankWorld
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import pomona as pm

# isort: split
from distributed_draws import Draw, Worlds, compare, make_draw, make_network, train_alone

QUICK = [
    Draw(0, "dpf(every=2, sparsity=0.7)", "sgd", "linear", "fsdp", 2, 3, 1, False),
    Draw(1, "set(every=2, sparsity=0.5, pattern='block((2, 2))')", "adam", "linear", "fsdp", 2, 4, 2, False),
    Draw(2, "iterand(every=2, rate=0.5)", "sgd", "convolution", "fsdp", 2, 2, 2, False),
    Draw(4, "feather(sparsity=0.97, theta=0.5)", "sgd", "convolution", "fsdp", 2, 3, 2, False),
    Draw(5, "acdc(start=0.1, phase=0.25, sparsity=0.8)", "sgd", "convolution", "fsdp", 2, 3, 2, False),
    Draw(6, "sparse_momentum(every=2, sparsity=0.5)", "sgd", "convolution", "fsdp", 2, 3, 1, False),
    Draw(3, "rigl(every=2, sparsity=0.5)", "adamw", "convolution", "ddp", 2, 3, 1, False),
]


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    """Return worlds of ranks, which are made when they are needed."""
    made = Worlds()
    yield made
    for size in list(made.open):
        made.drop(size)


def require_like_one_process(worlds: Worlds, draw: Draw) -> None:
    """Compare the results of all ranks with those of one process."""
    distance, problem = compare(draw, train_alone(draw), worlds.run(draw))
    assert not problem, (draw, distance, problem)


@pytest.mark.parametrize("draw", QUICK, ids=lambda draw: f"{draw.wrapper} {draw.method.partition('(')[0]}")
def test_ranks_train_like_one_process(worlds: Worlds, draw: Draw) -> None:
    require_like_one_process(worlds, draw)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(1000, 1016))
def test_random_draws_train_like_one_process(worlds: Worlds, number: int) -> None:
    require_like_one_process(worlds, make_draw(number, seed=1))


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", ["dpf(every=2, sparsity=0.7, include=['2.weight'])", "iterand(include=['2.weight'])"]
)
def test_ranks_without_a_row_train_and_resume(worlds: Worlds, method: str) -> None:
    """Six rows on four ranks leave the last without any."""
    require_like_one_process(worlds, Draw(0, method, "sgd", "convolution", "fsdp", 2, 3, 4, False))


def shard(model: nn.Module, size: int | None = None) -> nn.Module:
    """Return a model sharded by FSDP2, on a mesh of `size` groups of copies where one is given."""
    world = distributed.get_world_size()
    shape, names = ((world,), ("rows",)) if size is None else ((size, world // size), ("copies", "rows"))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return fully_shard(model, mesh=mesh)


def refuse_other_options() -> str:
    """Attach with another sparsity on the second rank."""
    model = shard(make_network("linear"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        pm.RigL(sparsity=0.5 + 0.1 * distributed.get_rank()).attach(model, optimizer, total_steps=8)
    except pm.PomonaError as error:
        return str(error)
    return "nothing was refused"


def look_at_sharded_pruner() -> dict[str, Any]:
    """Return what a user sees of a pruner whose weights are sharded, after a forward that left them gathered."""
    warnings.simplefilter("ignore")
    model = shard(make_network("linear"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    pruner = pm.DPF(sparsity=0.5, every=2)
    pruner.attach(model, optimizer, total_steps=4, steps_per_epoch=2, track=True)
    x = torch.ones(2, 8, dtype=torch.float64)
    stale = []
    for step in range(4):
        optimizer.zero_grad()
        (model(x).sum() * (step + 1)).backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            model(x)  # a forward without backward
            model.train()
        for module in model.modules():
            if hasattr(module, "reshard"):
                module.reshard()
        weights = dict(model.named_parameters())
        for name, mask in pruner.masks().items():
            stale.append(bool((weights[name].full_tensor()[~mask.full_tensor()] != 0).any()))
    pruner.finish()
    return {
        "stale": any(stale),
        "sparsity": float(pruner.sparsity()),
        "zeros": pruner.sparsity().zeros,
        "settled": len(pruner.settled()),
        "text": str(pruner),
        "parts": {name: mask.to_local().shape[0] for name, mask in pruner.masks().items()},
    }


def drift_in_copies() -> str:
    """Train on a mesh of two copies of two shards, where one copy's latents are changed; return the error."""
    warnings.simplefilter("ignore")
    model = shard(make_network("linear"), size=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = pm.DPF(sparsity=0.5, every=2, schedule="constant", allocation="uniform")
    pruner.attach(model, optimizer, total_steps=8)
    for step in range(4):
        if step == 2 and distributed.get_rank() == 3:
            pruner.slots[1].latent.mul_(-1).add_(0.3)
        optimizer.zero_grad()
        model(torch.ones(2, 8, dtype=torch.float64)).sum().backward()
        try:
            optimizer.step()
        except pm.PomonaError as error:
            return str(error)
    return "nothing was refused"


def test_other_options_are_refused_for_sharded_models(worlds: Worlds) -> None:
    for message in worlds[2].run(refuse_other_options):
        assert "rank 1 has sparsity = 0.6 and rank 0 has 0.5" in message


def test_a_user_sees_whole_figures_and_no_stale_weights(worlds: Worlds) -> None:
    for seen in worlds[2].run(look_at_sharded_pruner):
        assert seen["parts"] == {"0.weight": 6, "2.weight": 4}
        assert not seen["stale"]
        assert seen["sparsity"] == seen["zeros"] == 0.5
        assert seen["settled"] >= 1
        assert "finished" in seen["text"]


@pytest.mark.slow
def test_a_drift_between_copies_of_shards_is_found() -> None:
    with RankWorld(4) as world:
        for message in world.run(drift_in_copies):
            # The changed scores of rank 3 move the threshold of its copy, so that rank 2 differs first.
            assert "after step 4 the mask of 2.weight on rank 2 is not that of rank 0" in message
