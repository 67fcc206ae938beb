"""Small networks for the tests of `shrink`, and the helpers that prune and compare them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pomona.sparse import Shrunk


def randomize_norms(model: nn.Module, seed: int = 0) -> nn.Module:
    """Set norms, statistics and biases to random values and convert to float64, so that any leaked constant shows."""
    torch.manual_seed(seed)
    for part in model.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            part.running_mean.normal_(0, 0.5)
            part.running_var.uniform_(0.5, 1.5)
        for parameter in part.parameters(recurse=False):
            if parameter.ndim == 1:
                nn.init.normal_(parameter, 0.3, 0.5)
    return model.double().eval()


def zero_filters(layer: Any, channels: list[int], norm: Any = None) -> None:
    """Set filters, their biases and the norm behind them to zero, as filter pruning does."""
    with torch.no_grad():
        for tensor in (layer.weight, layer.bias, *((norm.weight, norm.bias) if norm else ())):
            if tensor is not None:
                tensor[channels] = 0


def assert_equal_outputs(model: nn.Module, shrunk: Shrunk, shape: tuple[int, ...]) -> None:
    """Assert that both models give equal float64 outputs on images that `shrink` was not given."""
    x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    with torch.no_grad():
        expected, actual = model.eval()(x), shrunk.model.eval()(x)
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def two_convolutions(norm: bool = True, padding: int = 1, **options: Any) -> nn.Sequential:
    """Return two convolutions with eight channels between them, and a batch norm unless `norm` is false."""
    middle = [nn.BatchNorm2d(8, **options)] if norm else []
    last = [nn.ReLU(), nn.Conv2d(8, 3, 3, padding=padding)]
    return randomize_norms(nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), *middle, *last))  # type: ignore[return-value]


class Residual(nn.Module):
    """A residual block behind a stem, and a linear layer that reads the flattened sum."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(2, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.inner, self.inner_norm = nn.Conv2d(6, 5, 3, padding=1), nn.BatchNorm2d(5)
        self.outer, self.outer_norm = nn.Conv2d(5, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.head = nn.Linear(6 * 9, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        path = self.outer_norm(self.outer(F.relu(self.inner_norm(self.inner(x)))))
        return self.head(F.max_pool2d(F.relu(x + path), 2).flatten(1))
