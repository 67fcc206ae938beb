"""Kernels that bound the gradients of weak outputs in all layers at once, against `BoundedFeedback` layer by layer.

The kernels run on CUDA, or in Triton's interpreter on the CPU, where no CUDA graph is captured.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from triton_interpreter import DEVICE, INTERPRETED, needs_interpreter, run_in_interpreter

import pomona as pm

LAYOUTS = [torch.contiguous_format, torch.channels_last]


def build_model(layout: torch.memory_format) -> nn.Module:
    """Return a model whose layers have few and many outputs, with rows shorter and longer than a program's part."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Conv2d(5, 70, 3), nn.Flatten(), nn.Linear(1120, 1), nn.Linear(1, 4))
    return model.to(DEVICE, memory_format=layout)


def set_gradients(model: nn.Module, seed: int) -> None:
    """Set random gradients, a third of them hundreds of times too long."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, generator=generator)
        long = torch.rand(parameter.shape[0], generator=generator) < 0.3
        gradient[long] *= 300
        parameter.grad = gradient.to(parameter).to(memory_format=torch.preserve_format)


@pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="needs a CUDA device or Triton's interpreter")
@pytest.mark.usefixtures("launch_directly")
class TestKernels:
    pytestmark = [] if INTERPRETED else [pytest.mark.gpu]

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("feedback", [0.0, 0.5, 1.0])
    def test_training_matches_that_without_kernels(self, layout, feedback) -> None:
        options = {
            "sparsity": 0.9,
            "allocation": "uniform",
            "every": 1,
            "feedback": feedback,
            "schedule": "constant",
            "settle": 0.5,
        }
        ends, bounded = [], []
        for fused in (False, True):
            model = build_model(layout)
            with torch.no_grad():
                model[1].weight[::3] *= 1e-3  # outputs that are all but empty
            optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
            pruner = pm.DPF(include=["*.weight", "1.bias"], **options).attach(model, optimizer, 6)
            (buffers,) = pruner.attached_engine().buffers
            buffers.kernels = None
            if fused:
                from pomona.core.fused import flat_buffers_triton

                buffers.kernels = flat_buffers_triton
                assert buffers.can_fuse()
            for seed in range(6):
                set_gradients(model, seed)
                before = [parameter.grad.clone() for parameter in model.parameters()]
                optimizer.step()
                assert all(map(torch.equal, before, [parameter.grad for parameter in model.parameters()]))
            assert (buffers.bounded_gradients is not None) == fused
            if fused:
                bounded.append((buffers.bounded_gradients.factors < 1).sum())
            ends.append(copy.deepcopy(model.state_dict()))
        torch.testing.assert_close(ends[0], ends[1])
        assert bounded[0] > 5


@needs_interpreter
def test_the_kernels_in_the_interpreter() -> None:
    run_in_interpreter(__file__, "TestKernels")
