"""https://github.com/neuralmagic/sparseml/issues/2164: execution speed and size of a ResNet-50 after sparsifying."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from complaint_models import count_bytes, prune_at_once

import pomona as pm


def test_a_file_of_a_sparse_network_is_smaller(tmp_path: Path) -> None:
    """The user's ResNet had 89.895 MB dense, at 70 % and at 90 % sparsity."""
    torch.manual_seed(0)
    model = pm.models.build("resnet20").eval()
    x = torch.randn(1, 3, 32, 32)
    dense = pm.save(model, tmp_path / "dense.safetensors", "resnet20").stat().st_size
    prune_at_once(model, pm.OneShot(sparsity=0.875, pattern=pm.Balanced(block=16), include=["blocks.*.conv*"]))
    packed = pm.compress(model, x, policy="all", patience=0.0)
    file = pm.save(packed, tmp_path / "packed.safetensors", "resnet20")
    assert file.stat().st_size < 0.35 * dense
    assert count_bytes(packed) < 0.35 * count_bytes(model)
    with torch.no_grad():
        assert torch.allclose(pm.load(file).eval()(x), model(x), atol=1e-4)


def test_scattered_zeros_make_a_smaller_file_too(tmp_path: Path) -> None:
    """The user's zeros had no pattern: such weights are stored without their zeros, and run as dense ones."""
    exporting = pytest.importorskip("pomona.export")
    torch.manual_seed(0)
    model = pm.models.build("resnet20").eval()
    prune_at_once(model, pm.OneShot(sparsity=0.9))
    file = tmp_path / "csr.safetensors"
    report = exporting.export(model, file, format="csr", architecture="resnet20", note=lambda _: None)
    assert report.bytes < 0.3 * report.state_bytes
    loaded = pm.load(file).state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in model.state_dict().items())
