"""Tensor-parallel training on two ranks, by rows of one layer and columns of another, is that of one process."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ranks import RankWorld
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from pomona.methods import make_pruner
from pomona.sharding import whole

# isort: split
from distributed_draws import make_batch, make_network

METHODS = [
    "dpf(sparsity=0.7, every=2)",
    "dpf(sparsity=0.7, every=2, printed=True)",
    "dpf(sparsity=0.5, every=2, pattern='block((2, 2))')",
    "incremental(sparsity=0.7, every=2)",
    "rigl(sparsity=0.5, every=2)",
    "acdc(sparsity=0.5, start=0.1, phase=0.25)",
    "set(sparsity=0.5, every=2)",
    "feather(sparsity=0.97, theta=0.5)",
    "iterand(sparsity=0.5, every=2, rate=0.5)",
]
STEPS = 6


@pytest.fixture(scope="module")
def world() -> Iterator[RankWorld]:
    """Return a world of two ranks."""
    with RankWorld(2) as world:
        yield world


def train(method: str, parallel: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Train on the same batches; return masks and weights."""
    warnings.simplefilter("ignore")
    model: Any = make_network("linear")
    if parallel:
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}  # the last layer stays plain, on both ranks
        model = parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    pruner = make_pruner(method).attach(model, optimizer, total_steps=STEPS, steps_per_epoch=3)
    for step in range(STEPS):
        x, y = make_batch("linear", step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    masks = {name: whole(mask) for name, mask in pruner.masks().items()}
    return masks, {name: whole(parameter.detach()) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("method", METHODS)
def test_tensor_parallel_training_is_that_of_one_process(world: RankWorld, method: str) -> None:
    masks, weights = train(method, parallel=False)
    for found_masks, found_weights in world.run(train, method, True):
        assert found_masks.keys() == masks.keys()
        for name, mask in masks.items():
            assert torch.equal(found_masks[name], mask), name
        for name, weight in weights.items():
            torch.testing.assert_close(found_weights[name], weight, rtol=1e-9, atol=1e-9)
