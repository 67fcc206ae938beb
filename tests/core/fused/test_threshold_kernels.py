"""Kernels that threshold all layers at once against `SoftThreshold` layer by layer, and the figures of an update.

The kernels run on CUDA, or in Triton's interpreter on the CPU, where no CUDA graph is captured.
"""

from __future__ import annotations

import copy
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from triton_interpreter import DEVICE, INTERPRETED, needs_interpreter, run_in_interpreter

import pomona as pm
from pomona.core.fused.flat_buffers import FlatBuffers
from pomona.core.fused.output_layout import threshold_count

STEPS = 10

LAYOUTS = [torch.contiguous_format, torch.channels_last]
METHODS = {
    "soft": {"compressor": "soft"},
    "unscaled": {"compressor": "soft(rescale=False)", "allocation": "uniform"},
    "floor": {"compressor": "soft", "allocation": "global(floor=0.05)"},
    "plain": {},
}


def build_training(method: str, layout: torch.memory_format, dtype: torch.dtype = torch.float32, **options):
    """Return a model, its optimizer and an attached pruner.

    The rows are shorter and longer than the part that one program reads at a time; a bias is one row.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Conv2d(5, 70, 3), nn.Flatten(), nn.Linear(1120, 4))
    model = model.to(DEVICE, dtype, memory_format=layout)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-3)
    include = ["0.weight", "2.weight", "2.bias", "4.weight"]
    options = {"sparsity": 0.8, "every": 2, "settle": 0.3, "schedule": "cubic(until=0.5)", **METHODS[method], **options}
    pruner = pm.DPF(include=include, **options).attach(model, optimizer, STEPS, 2, track=True)
    return model, optimizer, pruner


def step_with_random_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """Take a step with gradients that do not depend on the weights, so that rounding errors do not grow."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter)
    optimizer.step()


class OperationCounter(TorchDispatchMode):
    """Counts the torch operations that are dispatched, without views."""

    VIEWS = ("slice", "as_strided", "detach", "select", "expand", "alias", "view", "unsqueeze", "permute")

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._overloadpacket.__name__ not in self.VIEWS
        return func(*args, **(kwargs or {}))


def enable_kernels(pruner: pm.Pruner) -> FlatBuffers:
    """Enable the kernels of a pruner, assert that they can be used, and return its buffers."""
    (buffers,) = pruner.attached_engine().buffers
    if INTERPRETED:
        from pomona.core.fused import flat_buffers_triton

        assert buffers.can_fuse()
        buffers.kernels = flat_buffers_triton
    assert buffers.kernels_ready()
    return buffers


@pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="needs a CUDA device or Triton's interpreter")
@pytest.mark.usefixtures("launch_directly")
class TestKernels:
    pytestmark = [] if INTERPRETED else [pytest.mark.gpu]

    @pytest.mark.parametrize(("method", "layout"), zip(METHODS, LAYOUTS * 2, strict=True))
    def test_training_matches_that_without_kernels(self, method, layout) -> None:
        """Masks are equal; values differ by no more than the rounding of the scales."""
        model, optimizer, pruner = build_training(method, layout)
        other, second_optimizer, unfused = build_training(method, layout)
        buffers = enable_kernels(pruner)
        unfused.attached_engine().buffers[0].kernels = None
        for at in range(STEPS):
            step_with_random_gradients(model, optimizer, at)
            step_with_random_gradients(other, second_optimizer, at)
            for slot, other_slot in zip(pruner.slots, unfused.slots, strict=True):
                assert torch.equal(slot.mask, other_slot.mask), (slot.name, at)
                assert pruner.at_rest or torch.equal(slot.latent, other_slot.latent)
                torch.testing.assert_close(slot.latent, other_slot.latent, rtol=1e-5, atol=1e-6)
                torch.testing.assert_close(slot.parameter, other_slot.parameter, rtol=1e-5, atol=1e-6)
                assert torch.equal(slot.projected(), slot.parameter), "the projection differs from the method's"
                if slot.calibration is not None:
                    torch.testing.assert_close(slot.calibration, other_slot.calibration, rtol=1e-5, atol=1e-6)
        assert pruner.at_rest
        assert buffers.magnitude is not None, "the kernels did not select the masks"
        assert pruner.settled() == unfused.settled()
        for entry, expected in zip(pruner.history, unfused.history, strict=True):
            assert entry == {**expected, "delta": pytest.approx(expected["delta"], rel=1e-5)}
        assert len(pruner.history) == 4

    @pytest.mark.parametrize("at", [3, 8])  # while masks change, and when they are fixed
    def test_resumed_and_copied_runs_are_bit_identical(self, at) -> None:
        model, optimizer, pruner = build_training("soft", torch.channels_last)
        enable_kernels(pruner)
        for seed in range(at):
            step_with_random_gradients(model, optimizer, seed)
        second, second_optimizer, resumed = build_training("soft", torch.channels_last)
        enable_kernels(resumed)
        second.load_state_dict(model.state_dict())
        second_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        third, third_optimizer, copied = copy.deepcopy((model, optimizer, pruner))
        enable_kernels(copied)
        for seed in range(at, STEPS):
            for each in ((model, optimizer), (second, second_optimizer), (third, third_optimizer)):
                step_with_random_gradients(*each, seed)
        for other in (resumed, copied):
            assert other.history == pruner.history
            for slot, other_slot in zip(pruner.slots, other.slots, strict=True):
                for field in ("mask", "latent", "calibration", "parameter"):
                    assert torch.equal(getattr(slot, field), getattr(other_slot, field)), (slot.name, field)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("rescale", [True, False])
    def test_calibrations_and_projections_of_other_dtypes(self, dtype, rescale) -> None:
        _, _, pruner = build_training("soft", torch.channels_last, dtype, compressor=f"soft(rescale={rescale})")
        buffers = enable_kernels(pruner)
        for slot in buffers.slots:
            slot.latent.copy_(torch.randn(slot.mask.shape, generator=torch.Generator().manual_seed(1)))
            slot.mask.copy_(slot.latent.abs() > 0.7)
        buffers.slots[0].mask[1] = False  # an output without kept weights
        buffers.slots[1].mask.fill_(True)  # nothing is pruned
        buffers.calibrate()
        buffers.project()
        coarse = {torch.bfloat16: 4e-2, torch.float16: 5e-3, torch.float64: 1e-6}[dtype]
        for slot in buffers.slots:
            expected = slot.method.calibrate(slot.latent, slot.mask, slot.target.output_dim)
            torch.testing.assert_close(slot.calibration[0], expected[0], rtol=coarse, atol=0)
            assert torch.equal(slot.calibration[1], expected[1])
            if not INTERPRETED or dtype != torch.bfloat16:  # the interpreter truncates where CUDA rounds
                assert torch.equal(slot.parameter, slot.projected())
        assert torch.equal(buffers.slots[1].parameter, buffers.slots[1].latent)
        assert (buffers.slots[1].calibration[0] == 1).all()

    @pytest.mark.parametrize("method", ["dpf", "incremental", "edge_popup"])
    def test_the_figures_of_an_update(self, method) -> None:
        """The methods have a latent, none, and random weights."""
        model = nn.Sequential(nn.Linear(90, 70), nn.Linear(70, 3)).to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        pruner = pm.methods.make_pruner({"name": method, "sparsity": 0.7, "include": ["*.weight"]})
        pruner.attach(model, optimizer, total_steps=40)
        buffers, generator = enable_kernels(pruner), torch.Generator().manual_seed(0)
        buffers.snapshot_masks().copy_(torch.rand(buffers.count, generator=generator) < 0.5)
        buffers.mask.copy_(torch.rand(buffers.count, generator=generator) < 0.2)
        before, at = buffers.mask_before.clone(), 0
        for slot, figures in zip(buffers.targets, buffers.measure_update().t().tolist(), strict=True):
            past, at = before[at : at + slot.mask.numel()].view_as(slot.mask), at + slot.mask.numel()
            dense = slot.dense.detach().double()
            expected = [slot.mask.sum(), (slot.mask ^ past).sum(), past.sum(), dense[~slot.mask].norm(), dense.norm()]
            assert figures == pytest.approx([float(x) for x in expected], rel=1e-5)


def test_outputs_that_are_not_contiguous_are_not_fused() -> None:
    for model in (
        nn.Sequential(nn.ConvTranspose2d(4, 6, 3), nn.Conv2d(6, 3, 1)),
        nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)),
    ):
        with torch.no_grad():
            if isinstance(model[0], nn.Linear):
                model[0].weight = nn.Parameter(torch.randn(5, 4).t())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        pruner = pm.DPF(compressor="soft", include=["*.weight"]).attach(model, optimizer, total_steps=40)
        (buffers,) = pruner.attached_engine().buffers
        assert [bool(threshold_count(slot)) for slot in buffers.slots] == [False, True]
        assert not buffers.can_fuse()


@pytest.mark.parametrize("compressor", [None, "soft"])
@pytest.mark.parametrize("allocation", ["global", "global(floor=0.05)"])
def test_an_update_takes_as_many_operations_with_more_layers(compressor, allocation, monkeypatch) -> None:
    """Apart from kernel launches, which are replaced here, an update copies the masks and the figures."""
    operations: list[str] = []
    monkeypatch.setattr(FlatBuffers, "launch", lambda _, operation: operations.append(operation))
    for depth in (1, 20):
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(depth)))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        method = pm.DPF(compressor=compressor, allocation=allocation, every=1, sparsity=0.5, include=["*.weight"])
        pruner = method.attach(model, optimizer, total_steps=100, steps_per_epoch=50)
        (buffers,) = pruner.attached_engine().buffers
        buffers.kernels, figures = MagicMock(), torch.zeros(5, depth)
        buffers.kernels.UpdateFigures.return_value.values = figures
        pruner.complete_step()
        operations.clear()
        with OperationCounter() as calls:
            pruner.complete_step()
        assert calls.count == 2
        update = ["select_by_magnitude", *(["calibrate"] if compressor else []), "measure_update", "project"]
        assert operations == update
        operations.clear()
        step_with_random_gradients(model, optimizer, 0)
        expected = ["bound_gradients", "load", "store", *update]
        assert operations == expected, "latents are not projected exactly once"


def test_other_compressors_are_not_fused() -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    pruner = pm.DPF(compressor="binary", include=["weight"]).attach(model, optimizer, total_steps=40)
    assert not pruner.attached_engine().buffers[0].can_fuse()


@needs_interpreter
def test_the_kernels_pass_in_the_interpreter() -> None:
    run_in_interpreter(__file__, "TestKernels")
