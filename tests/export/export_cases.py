"""Small networks and examples for the tests of exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pomona as pm
from pomona.export import FORMATS, ExportReport


def prune_randomly(model: nn.Module, density: float = 0.1) -> nn.Module:
    """Set all but a share of the weights to zero; return the model in evaluation mode."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(torch.rand_like(parameter) < density)
    return model.eval()


def build_network(density: float = 0.1) -> nn.Module:
    """Return a pruned network with a convolution, a batch norm and linear layers."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 40), nn.ReLU()]
    return prune_randomly(nn.Sequential(*layers, nn.Linear(40, 10)), density)


def images(batch: int = 1) -> Tensor:
    """Return a batch of images for `build_network`."""
    return torch.randn(batch, 3, 8, 8, generator=torch.Generator().manual_seed(2))


def export_quietly(model: nn.Module, folder: Path, file_format: str, example: Any, **options: Any) -> ExportReport:
    """Export without timing longer than needed and without warnings."""
    file = folder / FORMATS[file_format].file_name
    return pm.export(model, file, file_format, example, seconds=0, note=lambda sentence: None, **options)


def require_packages(file_format: str) -> None:
    """Skip a test where the packages of a format are not installed."""
    for package in {"onnx": ("onnx", "onnxscript", "onnxruntime"), "openvino": ("openvino",)}.get(file_format, ()):
        pytest.importorskip(package)
