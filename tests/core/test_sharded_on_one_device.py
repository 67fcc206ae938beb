"""A model that FSDP2 shards over one process trains like the plain one, on a CPU with gloo and on a GPU with NCCL.

On several ranks, see test_sharded_training.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from pomona.methods import make_pruner
from pomona.sharding import whole

METHODS = [
    "dpf(sparsity=0.8, every=2)",
    "dpf(sparsity=0.8, every=2, printed=True)",
    "dpf(sparsity=0.5, every=2, pattern='filter', exclude=['7.weight'])",
    "dpf(sparsity=0.5, every=2, compressor='quantize(bits=4)')",
    "st3(sparsity=0.8)",
    "feather(sparsity=0.97, theta=0.5)",
    "incremental(sparsity=0.8, every=2)",
    "rigl(sparsity=0.8, every=2)",
    "set(sparsity=0.8, every=2)",
    "acdc(sparsity=0.8, start=0.1, phase=0.25)",
    "sparse_momentum(sparsity=0.8, every=2)",
    "iterand(sparsity=0.5, every=2, rate=0.5)",
]
STEPS = 8


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def mesh(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    """Return the mesh of this process alone."""
    rendezvous: Path = tmp_path_factory.mktemp("rendezvous") / "file"
    backend = "gloo" if request.param == "cpu" else "nccl"
    distributed.init_process_group(backend, init_method=f"file://{rendezvous}", rank=0, world_size=1)
    try:
        yield init_device_mesh(request.param, (1,))
    finally:
        distributed.destroy_process_group()


def make_network(device: str, dtype: torch.dtype) -> nn.Sequential:
    """Return a network in which one output of the second layer has almost died, so that its gradient is bounded."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16, affine=False), nn.ReLU()]
    layers += [nn.Conv2d(16, 16, 3, bias=False), nn.BatchNorm2d(16, affine=False), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 5))
    with torch.no_grad():
        model[3].weight[2].mul_(1e-3)
    return model.to(device, dtype)


def train(
    method: str, mesh: DeviceMesh, dtype: torch.dtype, sharded: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[dict]]:
    """Train a network; return its masks, its weights and the history of the mask updates, on the CPU."""
    model = make_network(mesh.device_type, dtype)
    if sharded:
        model = fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    pruner = make_pruner(method).attach(model, optimizer, total_steps=STEPS, steps_per_epoch=4)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(16, 3, 6, 6, generator=generator).to(mesh.device_type, dtype)
        y = torch.randint(5, (16,), generator=generator).to(mesh.device_type)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    masks = {name: whole(mask).cpu() for name, mask in pruner.masks().items()}
    weights = {name: whole(p.detach()).cpu() for name, p in model.named_parameters()}
    return masks, weights, pruner.history


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_a_sharded_model_trains_like_the_plain_one(
    method: str, dtype: torch.dtype, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain, sharded = train(method, mesh, dtype, False), train(method, mesh, dtype, True)
    assert plain[0].keys() == sharded[0].keys()
    for name, mask in plain[0].items():
        assert torch.equal(mask, sharded[0][name]), name
    for name, weight in plain[1].items():
        torch.testing.assert_close(sharded[1][name], weight)
    for one, other in zip(plain[2], sharded[2], strict=True):
        assert other.pop("layers") == one.pop("layers")
        assert other == pytest.approx(one, rel=1e-5)
