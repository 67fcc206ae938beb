"""Outer products that are recorded in place of gradients: in which layers, and that they stand for the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from pomona import models
from pomona.privacy import gradient_recorder
from pomona.privacy.outer_products import OuterProducts, as_tensor
from pomona.privacy.recorded_gradients import compute_recorded_gradients, compute_recorded_products
from pomona.privacy.row_independence import find_dependent_parameter

ROWS = 4


@pytest.fixture
def always(monkeypatch):
    """Record outer products wherever that is possible."""
    monkeypatch.setattr(gradient_recorder, "are_products_cheaper", lambda *a, **b: True)


def record(model: nn.Module, x: torch.Tensor, views: int = 1) -> set[str]:
    """Assert that outer products stand for the gradients, and return the names of those that are recorded."""
    y = torch.arange(len(x)) % 2
    arguments = model, F.cross_entropy, dict(model.named_parameters()), x, y, views
    found, losses = compute_recorded_products(*arguments)
    expected, expected_losses = compute_recorded_gradients(*arguments)
    assert torch.equal(losses, expected_losses)
    assert list(found) == list(expected)
    for name, part in found.items():
        torch.testing.assert_close(as_tensor(part).view_as(expected[name]), expected[name])
    return {name for name, part in found.items() if isinstance(part, OuterProducts)}


class Sequences(nn.Module):
    """A layer on sequences, a norm, and a head on their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.head = nn.Linear(3, 8), nn.LayerNorm(8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.inner(x)).tanh().mean(1))


class Twice(nn.Module):
    """A layer that is used twice, and one whose weight is used as it is and transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.tied, self.head = nn.Linear(4, 4), nn.Embedding(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(self.layer(x).relu()) + self.tied((x[:, 0] > 0).long())
        return self.head(F.linear(x, self.tied.weight))


def rows_of(*shape: int) -> torch.Tensor:
    """Return random rows."""
    return torch.randn(ROWS, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_linear_layers_on_vectors_and_sequences(always):
    mlp = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2, bias=False)).double()
    assert record(mlp, rows_of(4)) == {"0.weight", "2.weight"}
    assert record(Sequences().double(), rows_of(5, 3)) == {"inner.weight", "head.weight"}
    assert record(Sequences().double(), rows_of(2, 5, 3), views=2) == {"inner.weight", "head.weight"}


@pytest.mark.parametrize("views", [1, 3])
@pytest.mark.parametrize(
    "options", [{}, {"stride": 2}, {"padding": (2, 1)}, {"dilation": 2, "padding": 2}, {"kernel_size": (1, 3)}]
)
def test_convolutions(always, options, views):
    convolution = nn.Conv2d(3, 5, **{"kernel_size": 3, **options})
    model = nn.Sequential(convolution, nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 2)).double()
    shape = (views, 3, 7, 8) if views > 1 else (3, 7, 8)
    assert record(model, rows_of(*shape), views) == {"0.weight", "4.weight"}


def test_weights_without_outer_products(always):
    """Groups, weights that are used twice and weights that are computed have gradients of examples."""
    grouped = nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.Flatten(), nn.Linear(16, 2)).double()
    assert record(grouped, rows_of(4, 4, 4)) == {"2.weight"}
    assert record(Twice().double(), rows_of(4)) == {"head.weight"}
    computed = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 3)), nn.ReLU(), nn.Linear(3, 2)).double()
    assert record(computed, rows_of(4)) == {"2.weight"}


def test_some_parameters_may_be_frozen(always):
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)).double()
    model[0].requires_grad_(False)
    own = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found, _ = compute_recorded_products(model, F.cross_entropy, own, rows_of(4), torch.zeros(ROWS).long())
    assert list(found) == ["2.weight", "2.bias"]


def test_products_in_16_bits(always):
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    arguments = model, F.cross_entropy, dict(model.named_parameters()), rows_of(4).float(), torch.zeros(ROWS).long(), 1
    found, _ = compute_recorded_products(*arguments, dtype=torch.bfloat16)
    expected, _ = compute_recorded_gradients(*arguments, dtype=torch.bfloat16)
    assert isinstance(found["0.weight"], OuterProducts)
    assert found["0.weight"].outputs.dtype == torch.bfloat16
    torch.testing.assert_close(found["0.weight"].gradients(), expected["0.weight"])


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_recorded_products_are_independent(always, device, dtype):
    torch.manual_seed(0)
    convolution = nn.Conv2d(3, 16, 3, padding=1)
    model = nn.Sequential(convolution, nn.GroupNorm(4, 16), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 10)).to(device)
    batch = torch.zeros(24, 2, 3, 8, 8, device=device), torch.zeros(24, dtype=torch.int64, device=device)

    def products(x, y):
        arguments = model, F.cross_entropy, dict(model.named_parameters()), x, y, 2
        return compute_recorded_products(*arguments, dtype=dtype)[0]

    assert find_dependent_parameter(products, *batch) is None


def test_products_are_recorded_where_they_cost_less():
    torch.manual_seed(0)
    x, y = torch.randn(32, 3, 32, 32), torch.zeros(32, dtype=torch.int64)
    chosen = {}
    for name, options in (("mlp", {"in_features": 3072}), ("private_cnn", {})):
        model = models.build(name, **options)
        found, _ = compute_recorded_products(model, F.cross_entropy, dict(model.named_parameters()), x, y)
        chosen[name] = {key: part.shape[1] for key, part in found.items() if isinstance(part, OuterProducts)}
    assert max(chosen["mlp"].values()) > 1_000_000
    assert not chosen["private_cnn"]
