"""Ranks that would train different networks are refused: other options, masks that drift apart, other trainers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engine_helpers import make_sgd
from ranks import RankWorld
from torch import distributed, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import pomona as pm
from pomona.core.mask_bits import hash_mask


def make_net(seed: int = 0) -> nn.Sequential:
    """Return a small network."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 3))


def refusal(action: Any, *arguments: Any, **options: Any) -> str:
    """Return the message of the PomonaError that a call raises."""
    try:
        action(*arguments, **options)
    except pm.PomonaError as error:
        return str(error)
    return "nothing was refused"


def attach_with(method: str, options: dict[str, Any], lengths: dict[str, int]) -> str:
    """Attach a method on every rank; rank 1 has other options or lengths than rank 0."""
    rank = distributed.get_rank()
    model = DistributedDataParallel(make_net())
    pruner = getattr(pm, method)(**({"sparsity": 0.5} | (options if rank == 1 else {})))
    return refusal(pruner.attach, model, make_sgd(model), **({"total_steps": 8} | (lengths if rank == 1 else {})))


def train_plain_models(sparsity: float) -> str:
    """Train models that no wrapper joins; rank 1 has another sparsity, which the first step refuses."""
    model = make_net()
    optimizer = make_sgd(model)
    pm.DPF(sparsity=sparsity if distributed.get_rank() else 0.5).attach(model, optimizer, total_steps=8)
    model(torch.ones(2, 6)).sum().backward()
    return refusal(optimizer.step)


def train_with_drift(layer: str) -> tuple[int, str]:
    """Train until the error of a drift: on rank 1 the latent of a layer is changed after the first update."""
    plain = make_net()
    model = DistributedDataParallel(plain)
    optimizer = make_sgd(model)
    pruner = pm.DPF(sparsity=0.5, every=2, schedule="constant", allocation="uniform")
    pruner.attach(model, optimizer, total_steps=8)
    for step in range(8):
        if step == 3 and distributed.get_rank() == 1:
            next(slot for slot in pruner.slots if slot.name == layer).latent.mul_(-1).add_(0.3)
        optimizer.zero_grad()
        model(torch.full((2, 6), float(step))).square().sum().backward()
        message = refusal(optimizer.step)
        if message != "nothing was refused":
            return step, message
    return 8, message


def train_in_join(batches: list[int]) -> str:
    """Train within join(), with another number of batches on each rank."""
    model = DistributedDataParallel(make_net())
    optimizer = make_sgd(model)
    pm.SET(sparsity=0.5, every=2).attach(model, optimizer, total_steps=8)
    with model.join():
        for _ in range(batches[distributed.get_rank()]):
            model(torch.ones(2, 6)).sum().backward()
            message = refusal(optimizer.step)
    return message


def attach_to_zero() -> str:
    """Attach to a ZeroRedundancyOptimizer."""
    model = DistributedDataParallel(make_net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    return refusal(pm.RigL(sparsity=0.5).attach, model, optimizer, total_steps=8)


def attach_to_fsdp1() -> str:
    """Attach to a model that FSDP1 wraps."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(make_net(), device_id=torch.device("cpu"))
    return refusal(pm.DPF(sparsity=0.5).attach, model, make_sgd(model), total_steps=8)


def resume_on_one_rank() -> str:
    """Load a checkpoint on rank 0 only."""
    plain = make_net()
    model = DistributedDataParallel(plain)
    optimizer = make_sgd(model)
    pm.DPF(sparsity=0.5, every=2).attach(model, optimizer, total_steps=8)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    state, weights = optimizer.state_dict(), plain.state_dict()
    other = make_net()
    other.load_state_dict(weights)
    again = DistributedDataParallel(other)
    optimizer = make_sgd(again)
    if distributed.get_rank() == 0:
        optimizer.load_state_dict(state)
    return refusal(pm.DPF(sparsity=0.5, every=2).attach, again, optimizer, total_steps=8)


@pytest.fixture(scope="module")
def world() -> Iterator[RankWorld]:
    """Return two ranks."""
    with RankWorld(2) as ranks:
        yield ranks


@pytest.mark.parametrize(
    ("method", "options", "named"),
    [
        ("DPF", {"sparsity": 0.6}, "rank 1 has sparsity = 0.6 and rank 0 has 0.5"),
        ("SET", {"seed": 7, "every": 2}, "rank 1 has every = 2 and rank 0 has None"),
        ("Random", {"seed": 7}, "rank 1 has seed = 7 and rank 0 has 0"),
        ("DPF", {"schedule": "constant"}, "rank 1 has schedule = constant and rank 0 has cubic("),
        ("DPF", {"pattern": "balanced(4)"}, "rank 1 has compressor = None and rank 0 has soft("),
        ("DPF", {"exclude": ["0"]}, "rank 1 has exclude = ['0'] and rank 0 has []"),
    ],
)
def test_another_option_on_a_rank_is_refused_at_attach(world: RankWorld, method: str, options: Any, named: str) -> None:
    for message in world.run(attach_with, method, options, {}):
        assert named in message, message
        assert message.endswith("on every rank, and load the same checkpoint.")


def test_another_length_of_training_on_a_rank_is_refused_at_attach(world: RankWorld) -> None:
    for message in world.run(attach_with, "DPF", {}, {"total_steps": 9}):
        assert "rank 1 has total_steps = 9 and rank 0 has 8" in message


def test_equal_options_are_accepted(world: RankWorld) -> None:
    assert world.run(attach_with, "DPF", {}, {}) == ["nothing was refused"] * 2


def test_ranks_without_a_wrapper_are_compared_at_the_first_step(world: RankWorld) -> None:
    for message in world.run(train_plain_models, 0.75):
        assert "rank 1 has sparsity = 0.75 and rank 0 has 0.5" in message


@pytest.mark.parametrize("layer", ["0.weight", "2.weight"])
def test_a_drift_stops_every_rank_at_the_next_update_and_names_rank_and_layer(world: RankWorld, layer: str) -> None:
    for step, message in world.run(train_with_drift, layer):
        assert step == 3
        assert f"after step 4 the mask of {layer} on rank 1 is not that of rank 0" in message


@pytest.mark.parametrize("batches", [[2, 2], [3, 1]])
def test_join_is_refused(world: RankWorld, batches: list[int]) -> None:
    for message in world.run(train_in_join, batches):
        assert message.startswith("join() lets a rank without data stop stepping")


def test_zero_and_fsdp1_are_refused_by_name(world: RankWorld) -> None:
    for message in world.run(attach_to_zero):
        assert "ZeroRedundancyOptimizer keeps the momentum of each parameter on one rank" in message
    for message in world.run(attach_to_fsdp1):
        assert "FullyShardedDataParallel (FSDP1)" in message


def test_a_checkpoint_that_only_one_rank_loaded_is_refused(world: RankWorld) -> None:
    for message in world.run(resume_on_one_rank):
        assert "rank 1 has step of its checkpoint = [] and rank 0 has [1]" in message


def test_the_hash_of_a_mask_sees_every_entry_and_its_place() -> None:
    mask = torch.rand(3, 5, 21, generator=torch.Generator().manual_seed(0)) < 0.5
    found = {int(hash_mask(mask))}
    for entry in range(mask.numel()):
        changed = mask.flatten().clone()
        changed[entry] ^= True
        found.add(int(hash_mask(changed.view_as(mask))))
    assert len(found) == mask.numel() + 1
    words = torch.zeros(128, dtype=torch.bool)
    ends = [words.index_fill(0, torch.tensor([i]), True) for i in (63, 127)]  # the highest bits of two words
    assert len({int(hash_mask(m)) for m in (words, *ends, ends[0] | ends[1])}) == 4


def test_the_hash_does_not_depend_on_the_memory_format() -> None:
    mask = torch.rand(4, 3, 5, 5, generator=torch.Generator().manual_seed(0)) < 0.5
    assert int(hash_mask(mask)) == int(hash_mask(mask.to(memory_format=torch.channels_last)))
