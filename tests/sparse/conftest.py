"""Settings of cuDNN that the tests of packed layers depend on, and a substitute for it on a CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from substitute_cudnn import Cudnn

from pomona.sparse.layers import conv2d_relu


@pytest.fixture
def nondeterministic_cudnn() -> Iterator[None]:
    """Let cuDNN choose any algorithm, whatever tests before this one have set, and restore the settings afterwards."""
    cudnn, algorithms = torch.backends.cudnn, torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    settings = cudnn.enabled, cudnn.deterministic, cudnn.benchmark
    torch.use_deterministic_algorithms(False)
    cudnn.enabled, cudnn.deterministic, cudnn.benchmark = True, False, False
    yield
    cudnn.enabled, cudnn.deterministic, cudnn.benchmark = settings
    torch.use_deterministic_algorithms(algorithms, warn_only=warn_only)


@pytest.fixture
def cudnn(nondeterministic_cudnn: None, monkeypatch: pytest.MonkeyPatch) -> Cudnn:
    """Treat the CPU as a device that has cuDNN, with a substitute for its operator."""
    substitute = Cudnn()
    monkeypatch.setattr(conv2d_relu, "CUDNN_DEVICES", {"cpu"})
    monkeypatch.setattr(torch, "cudnn_convolution_relu", substitute)
    return substitute
