"""Fixtures of the tests of kernels on flat buffers."""

from __future__ import annotations

import pytest
import torch
from triton_interpreter import INTERPRETED

from pomona.core.fused.flat_buffers import FlatBuffers


@pytest.fixture
def launch_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch kernels without CUDA graphs in Triton's interpreter, which has none."""
    if INTERPRETED:
        monkeypatch.setattr(FlatBuffers, "launch", FlatBuffers._run_kernels)
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
