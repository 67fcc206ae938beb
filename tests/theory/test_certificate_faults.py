"""Networks whose certificates were once false: refused now, or at least as large as what an attack finds.

The numbers in the comments are those of the old certificate and of the attack that broke it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pomona.errors import PomonaError
from pomona.theory.certificate import Ball, certification, certify
from pomona.theory.certificate.gradient_attack import climb
from pomona.theory.certificate.norm_bounds import norm_bounds
from pomona.theory.certificate.paired_graph import pair_networks


def draw_linear(inputs: int = 6, outputs: int = 6) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs)


def without_smallest(model: nn.Module) -> nn.Module:
    """Return a copy without the smaller half of the first layer's weights."""
    pruned = copy.deepcopy(model)
    weight = next(p for p in pruned.parameters() if p.ndim == 2)
    weight.data[weight.abs() < weight.abs().median()] = 0
    return pruned


class Wrapped(nn.Module):
    """A linear layer, and a function of its result."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = draw_linear()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x))


def scale_view_in_place(h: Tensor) -> Tensor:
    view = h.view(-1)
    view.mul_(10)
    return h


def test_another_activation_is_refused() -> None:
    """Certified 0.0, found 0.60: module types were not compared."""
    dense = nn.Sequential(draw_linear(), nn.ReLU())
    pruned = nn.Sequential(copy.deepcopy(dense[0]), nn.Tanh())
    with pytest.raises(PomonaError, match=r"'relu' is relu\(\) .* in one, and tanh\(\)"):
        certify(dense, pruned, (6,))


def test_another_setting_of_an_activation_is_refused() -> None:
    dense = nn.Sequential(draw_linear(), nn.LeakyReLU(0.1))
    pruned = nn.Sequential(copy.deepcopy(dense[0]), nn.LeakyReLU(0.5))
    with pytest.raises(PomonaError, match="0.1.* in one, and .*0.5"):
        certify(dense, pruned, (6,))


def test_random_dropout_is_refused() -> None:
    """Certified 0.45, found 5.2: F.dropout drops in evaluation mode too, unless it is told not to."""
    dense = Wrapped(lambda h: F.dropout(h, 0.9))
    with pytest.raises(PomonaError, match="'native_dropout' is random"):
        certify(dense, without_smallest(dense), (6,))


@pytest.mark.parametrize(
    ("function", "factor"),
    [
        (lambda h: h[:, (0, 0, 0, 0, 0, 0, 0, 0, 1)], 8**0.5),  # 0.86 / 2.44: repeated by a nested tuple
        (scale_view_in_place, 10.0),  # 0.52 / 0.87: the product changed the value under its view
        (lambda h: torch.cat(h.chunk(2, 1), 1), 1.0),  # crashed
        (lambda h: h[..., [0, 0, 0]], 3**0.5),
        (lambda h: h.clone().index_select(1, torch.tensor([0, 0])), 2**0.5),
        (lambda h: h.unsqueeze(1).expand(-1, 3, 6).flatten(1), 3**0.5),
        (lambda h: torch.cat((h, h[:, :1].mul_(-2)), 1), 8**0.5),
    ],
    ids=["nested tuple", "view in place", "cat of chunks", "list", "index_select", "expand", "slice in place"],
)
def test_aliases_and_repeats_are_followed(function: Callable[[Tensor], Tensor], factor: float) -> None:
    """Only the first output of the layer is not zero; each function multiplies its distance by a factor."""
    dense = Wrapped(function)
    dense.layer.weight.data[1:] = 0
    pruned = without_smallest(dense)
    pruned.layer.weight.data[0, :3] = 0
    removed = (dense.layer.weight - pruned.layer.weight).detach().norm()
    found = certify(dense, pruned, (6,))
    assert found.found <= found.error
    assert found.error == pytest.approx(factor * float(removed), rel=1e-6)
    assert found.found == pytest.approx(found.error, rel=1e-2)


def test_jump_of_softplus_is_in_the_certificate() -> None:
    """Certified 0.63, found 0.67: softplus jumps at its threshold, by log 2 here."""
    dense = nn.Sequential(draw_linear(), nn.Softplus(threshold=0))
    found = certify(dense, without_smallest(dense), (6,), steps=200, starts=64)
    assert found.found <= found.error
    # The two layers can be on both sides of the threshold: one output alone jumps by log 2.
    single = nn.Sequential(nn.Linear(1, 1), nn.Softplus(threshold=0))
    single[0].weight.data.fill_(1.0)
    single[0].bias.data.fill_(1e-9)
    other = copy.deepcopy(single)
    other[0].bias.data.fill_(-1e-9)
    found = certify(single, other, (1,), region=Ball(1e-10), steps=3)
    assert found.found == pytest.approx(0.6931471805, rel=1e-6)
    assert found.found <= found.error < 0.6932


def test_attack_above_a_certificate_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """A certificate that an attack breaks is never returned."""
    monkeypatch.setattr(certification, "attack_graph", lambda *_, **__: 1e3)
    dense = nn.Sequential(draw_linear(), nn.ReLU())
    with pytest.raises(PomonaError, match="but 1000 was found: this is a fault of certify, please report it"):
        certify(dense, without_smallest(dense), (6,))


def test_limits_of_a_clamp_that_differ_are_not_a_slope() -> None:
    """The networks clamp at other limits, so they differ where their inputs do not."""

    class Clamp(nn.Module):
        def __init__(self, limit: float) -> None:
            super().__init__()
            self.limit = nn.Parameter(torch.full((3,), limit))

        def forward(self, x: Tensor) -> Tensor:
            return torch.clamp(x, max=self.limit)

    graph = pair_networks(Clamp(0.1), Clamp(0.5), torch.zeros(1, 3))
    with pytest.raises(PomonaError, match="cannot bound clamp at 'clamp'"):
        norm_bounds(graph, Ball())


def test_operations_without_a_derivative_are_attacked_at_random() -> None:
    class Rounded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            raise RuntimeError("no derivative")

    def difference(x: Tensor) -> Tensor:
        return Rounded.apply(x)

    points = Ball(1.0).sample(4, (3,), torch.Generator().manual_seed(0)) / 2
    assert climb(difference, points, Ball(1.0), 30) == pytest.approx(2)
