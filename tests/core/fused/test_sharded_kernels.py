"""Kernels on the weights that this rank has of a sharded model, against the plain model without kernels.

They run on CUDA, or in Triton's interpreter on the CPU, in a group of one process.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from test_threshold_kernels import enable_kernels
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from triton_interpreter import DEVICE, INTERPRETED, needs_interpreter, run_in_interpreter

import pomona as pm
from pomona.sharding import place_like, whole

STEPS = 8
METHODS = {
    "default": {},
    "as printed": {"printed": True},
    "uniform": {"allocation": "uniform"},
    "one threshold": {"allocation": "global(floor=0)"},
}


@pytest.fixture
def _process_group(tmp_path: Path) -> Iterator[None]:
    """Make a group of this process alone."""
    backend = "nccl" if DEVICE == "cuda" else "gloo"
    distributed.init_process_group(backend, init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def train(options: dict, sharded: bool) -> tuple[dict[str, Tensor], dict[str, Tensor], list[dict]]:
    """Train with random gradients; return masks, weights and history."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Conv2d(5, 30, 3), nn.Flatten(), nn.Linear(480, 4))
    model = model.to(DEVICE)
    if sharded:
        model = fully_shard(model, mesh=init_device_mesh(DEVICE, (1,)))
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-3)
    pruner = pm.DPF(0.8, every=2, **options).attach(model, optimizer, STEPS)
    if sharded:
        buffers = enable_kernels(pruner)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            gradient = torch.randn(parameter.shape, generator=generator).to(DEVICE)
            parameter.grad = place_like(gradient, parameter)
        optimizer.step()
    if sharded:
        assert type(buffers.top_k).__name__ == "RankedTopK", "the kernels did not select the masks"
    masks = {name: whole(mask).cpu() for name, mask in pruner.masks().items()}
    return masks, {name: whole(p.detach()).cpu() for name, p in model.named_parameters()}, pruner.history


@pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="needs a CUDA device or Triton's interpreter")
@pytest.mark.usefixtures("launch_directly", "_process_group")
class TestKernels:
    pytestmark = [] if INTERPRETED else [pytest.mark.gpu]

    @pytest.mark.parametrize("options", METHODS.values(), ids=METHODS.keys())
    def test_sharded_weights_are_pruned_like_plain_ones(self, options: dict) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plain, sharded = train(options, False), train(options, True)
        for name, mask in plain[0].items():
            assert torch.equal(sharded[0][name], mask), name
        for name, weight in plain[1].items():
            assert not isinstance(weight, DTensor)
            torch.testing.assert_close(sharded[1][name], weight)
        for one, other in zip(plain[2], sharded[2], strict=True):
            assert other.pop("layers") == one.pop("layers")
            assert other == pytest.approx(one, rel=1e-5)


@needs_interpreter
def test_kernels_in_the_interpreter() -> None:
    run_in_interpreter(__file__, "TestKernels")
