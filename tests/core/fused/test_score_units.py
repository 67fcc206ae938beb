"""Kernels that select units by their scores against the method's own selection, on CUDA or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from test_score_kernels import attach_iterand, train_step
from test_threshold_kernels import enable_kernels
from triton_interpreter import DEVICE, INTERPRETED, needs_interpreter, run_in_interpreter

import pomona as pm


@pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="needs a CUDA device or Triton's interpreter")
@pytest.mark.usefixtures("launch_directly")
class TestKernels:
    pytestmark = [] if INTERPRETED else [pytest.mark.gpu]

    @pytest.mark.parametrize("allocation", ["uniform", "global", "erk"])
    def test_the_filters_are_those_that_the_method_selects(
        self, allocation: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
        options = {"sparsity": 0.6, "allocation": allocation, "schedule": pm.Linear(until=0.2), "every": 5}
        options |= {"pattern": "filter(of='filters')", "rate": 0.5}
        model, optimizer, fused = attach_iterand(False, DEVICE, **options)
        other, second_optimizer, plain = attach_iterand(False, DEVICE, **options)
        engine = fused.attached_engine()
        enable_kernels(fused)
        engine.set_next_sparsity(engine.next_sparsity)
        for buffers in plain.attached_engine().buffers:
            buffers.kernels = buffers.top_k = None
        for step in range(6):
            train_step(model, optimizer, step)
            train_step(other, second_optimizer, step)
            for slot, expected in zip(fused.slots, plain.slots, strict=True):
                assert torch.equal(slot.mask, expected.mask)
        assert engine.buffers[0].top_k is not None
        assert 0 < fused.sparsity() < 0.6


@needs_interpreter
def test_kernels_in_the_interpreter() -> None:
    run_in_interpreter(__file__, "TestKernels")
