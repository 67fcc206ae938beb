"""Every convolutional network of the papers, pruned by filters, gives the same outputs when shrunk."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from slow_cases import slow_after
from torch import nn

import pomona as pm
from pomona.sparse import shrink

pytest.importorskip("torch_pruning")

# Name, options, image side, and by how much the parameters must shrink at 40 %. Where all channels are
# removable, (1 − 0.4)² of the weights are left; residual networks can only lose channels inside their blocks.
CASES: list[tuple[str, dict[str, Any], int, float]] = [
    ("conv2", {"image_size": 8}, 8, 2.4),
    ("conv4", {"image_size": 8}, 8, 2.4),
    ("conv6", {"image_size": 8}, 8, 2.4),
    ("digits_cnn", {}, 8, 2.4),
    ("digits_cnn", {"affine": False}, 8, 2.2),
    ("resnet20", {}, 16, 1.6),
    ("resnet20", {"shortcut": "B"}, 16, 1.6),
    ("resnet20", {"affine": False}, 16, 1.5),
    ("resnet32", {}, 8, 1.6),
    ("resnet44", {"shortcut": "B"}, 8, 1.6),
    ("resnet56", {}, 8, 1.6),
    ("resnet110", {}, 8, 1.6),
    ("resnet110", {"shortcut": "B"}, 8, 1.6),
    ("wrn16_4", {}, 8, 1.6),
    ("wrn28_2", {}, 8, 1.6),
    ("wrn28_2", {"affine": False, "dropout": 0.3}, 8, 1.5),
    ("resnet18", {"rho": 0.5}, 8, 1.6),
    ("resnet18", {"stem": "imagenet"}, 32, 1.6),
    ("resnet34", {"rho": 0.25}, 8, 1.6),
    ("resnet50", {"num_classes": 10, "rho": 0.5}, 32, 1.6),
    ("resnet101", {"num_classes": 10, "rho": 0.25, "stem": "cifar"}, 8, 1.6),
    ("wrn50_2", {"num_classes": 10, "rho": 0.25}, 32, 1.6),
    ("vgg11", {}, 32, 2.4),
    ("vgg16_d", {"hidden": (64, 64)}, 32, 2.4),
    ("densenet40", {}, 8, 2.2),
    ("densenet100", {}, 8, 2.2),
    ("densenet100", {"affine": False, "dropout": 0.2}, 8, 2.2),
    ("lenet300", {}, 28, 1.6),
]


def build_pruned(name: str, options: dict[str, Any]) -> nn.Module:
    """Return a network with random norms, statistics and biases, and 40 % of the filters of each layer pruned."""
    torch.manual_seed(0)
    model = pm.models.build(name, **options)
    for part in model.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            part.running_mean.normal_(0, 0.3)
            part.running_var.uniform_(0.5, 1.5)
            if part.affine:
                nn.init.normal_(part.weight, 1.5, 0.3)
        if isinstance(getattr(part, "bias", None), nn.Parameter):
            nn.init.normal_(part.bias, 0, 0.3)
    pruner = pm.OneShot(sparsity=0.4, pattern=pm.Filter(), allocation="uniform")
    pruner.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), total_steps=1)
    pruner.finish()
    return model.eval()


@pytest.mark.parametrize(
    ("name", "options", "side", "ratio"),
    slow_after(8, CASES),
    ids=[f"{n}-{'-'.join(map(str, o.values()))}" for n, o, _, _ in CASES],
)
def test_outputs_are_equal_in_float64(name: str, options: dict[str, Any], side: int, ratio: float) -> None:
    """In float64 rounding cannot hide a leaked constant."""
    model = build_pruned(name, options).double()
    shape = (pm.models.info(name).input_shape[0], side, side)
    shrunk = shrink(model, shape)
    x = torch.randn(2, *shape, dtype=torch.float64)
    with torch.no_grad():
        expected, actual = model(x), shrunk.model(x)
    scale = expected.abs().max()
    assert expected.std(0).max() > 1e-3 * scale, "the outputs must depend on the image"
    assert (expected - actual).abs().max() < 1e-12 * scale
    assert shrunk.params.ratio > ratio
    assert shrunk.macs.ratio > min(ratio, 1.5)


@pytest.mark.parametrize("name", ["resnet20", "wrn16_4", "densenet40"])
def test_float32_differs_by_rounding(name: str) -> None:
    model = build_pruned(name, {})
    shrunk = shrink(model, (3, 16, 16))
    x = torch.randn(8, 3, 16, 16)
    with torch.no_grad():
        expected, actual = model(x), shrunk.model(x)
    assert 0 < shrunk.difference < 1e-5 * expected.abs().max()
    assert (expected - actual).abs().max() < 1e-5 * expected.abs().max()
