"""https://github.com/microsoft/onnxruntime/issues/11200: how to compress the sparse matrices of an ONNX model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from complaint_models import prune_at_once
from torch import nn

import pomona as pm


def test_an_onnx_file_of_a_sparse_model_is_smaller_and_runs(tmp_path: Path) -> None:
    """The parameters of the user's ONNX model were sparse matrices, stored with all their zeros."""
    exporting = pytest.importorskip("pomona.export")
    onnxruntime = pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 8)).eval()
    x = torch.randn(1, 256)
    prune_at_once(model, pm.OneShot(sparsity=0.9, pattern=pm.Balanced(block=32)))
    report = exporting.export(
        model, tmp_path / "model.onnx", format="onnx", example=x, seconds=0.0, note=lambda _: None
    )
    assert report.bytes < 0.5 * report.state_bytes
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    output = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
    with torch.no_grad():
        assert torch.allclose(torch.from_numpy(output), model(x), atol=1e-4)
