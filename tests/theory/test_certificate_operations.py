"""Certificates of networks with single operations: extrema, sums with a factor, squares, results without axes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pruned_copies import without_small_weights
from torch import Tensor, nn

from pomona.errors import PomonaError
from pomona.theory.certificate import Cube, certify, certify_predictions
from pomona.theory.certificate.domains import bound_by_intervals, bound_by_linear_forms
from pomona.theory.certificate.fused_steps import ROOT_MEAN_SQUARE_NORM
from pomona.theory.certificate.paired_graph import pair_networks
from pomona.theory.certificate.prediction_attack import attack_predictions
from pomona.theory.certificate.regions import neighbourhoods


class Two(nn.Module):
    """A function of the results of two linear layers."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(4, 6), nn.Linear(4, 6)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.one(x), self.two(x))


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "add with a factor": lambda a, b: torch.add(a, b, alpha=-2),
    "sub with a factor": lambda a, b: torch.sub(a, b, alpha=0.3),
    "number minus a product": lambda a, b: torch.rsub(a, 1, alpha=2) + b,
    "square": lambda a, b: a * a - b,
    "amin": lambda a, b: a.amin(-1, keepdim=True) + b,
    "sum": lambda a, b: (a.relu() + b).sum(),
    "mean of products": lambda a, b: (a * b.tanh()).mean(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_certificate_of_one_operation_holds_and_is_close(name: str) -> None:
    dense = Two(FUNCTIONS[name])
    pruned = without_small_weights(dense, 0.3)
    found = certify(dense, pruned, (4,), region=Cube(0.4, 0.6), steps=30)
    assert 0 < found.found <= found.error <= 2 * found.found


def test_a_square_is_not_a_product_of_independent_factors() -> None:
    class Square(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(scale))

        def forward(self, x: Tensor) -> Tensor:
            y = self.scale * x
            return y * y

    graph = pair_networks(Square(1.0), Square(0.5), torch.zeros(1, 2))
    assert [step.op for step in graph.steps[-1:]] == ["pow"]
    # 0 ≤ y² ≤ 1 on the cube of ±1, where a product has −1 too.
    bounds = bound_by_intervals(graph, Cube(-1, 1))
    assert bounds.error == pytest.approx(2**0.5 * 1.0, rel=1e-6)
    assert bound_by_linear_forms(graph, Cube(-1, 1)) is not None


def test_a_norm_by_root_mean_square_with_a_product_is_known() -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            return y * torch.rsqrt((y * y).mean(-1, keepdim=True) + 1e-6)

    graph = pair_networks(Norm(), Norm(), torch.zeros(1, 4))
    assert [step.function for step in graph.steps[-1:]] == [ROOT_MEAN_SQUARE_NORM]


@pytest.mark.parametrize("function", [lambda a, b: a.sum(), lambda a, b: a[:, :1] + b[:, :1]], ids=["none", "one"])
def test_a_prediction_needs_two_outputs(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    model = Two(function)
    with pytest.raises(PomonaError, match="of which there are at least two, .* of shape"):
        certify_predictions(model, model, torch.zeros(2, 4))


def test_a_table_read_at_values_is_refused() -> None:
    class Read(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(8))

        def forward(self, x: Tensor) -> Tensor:
            return self.table[x]

    with pytest.raises(PomonaError, match="'index'"):
        bound_by_intervals(pair_networks(Read(), Read(), torch.zeros(1, 4, dtype=torch.long)), Cube(0, 7))


def test_truth_values_are_factors() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(4, 4)
            self.register_buffer("keep", torch.tensor([True, False, True, True]))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.keep

    dense = Masked()
    found = certify(dense, without_small_weights(dense, 0.3), (4,), region=Cube(0.4, 0.6), steps=20)
    assert found.found <= found.error <= 1.01 * found.found


def test_extrema_in_a_classifier_are_proven_and_attacked() -> None:
    dense = Two(torch.maximum)
    pruned = without_small_weights(dense, 0.05)
    x = torch.rand(40, 4, generator=torch.Generator().manual_seed(0))
    found = certify_predictions(dense, pruned, x, radius=0.02)
    assert 0.3 < found.share <= found.largest_share
    inputs = neighbourhoods(x, 0.02)
    sides = [network.double() for network in (dense, pruned)]
    attack = attack_predictions(*sides, inputs, found.classes, steps=60, starts=6, seed=1)
    assert not bool((found.unchanged & attack.changed).any())
