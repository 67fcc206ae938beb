"""The bound on gradients of AC/DC and sparse momentum, which grow weights from zero in outputs that have none."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import pomona as pm
from pomona.core.gradient_bound import growth_factors
from pomona.core.method import GradientBound
from pomona.lab.recipes.recipe import Recipe
from pomona.methods import METHODS
from pomona.models.resnet_cifar import ResNetCifar

BOUNDED = ("acdc", "sparse_momentum")
FILTERS, CARRYING = 20, 2  # of the layer under test, and those of them that have weights


def factors(weights: list[float], gradients: list[float], feedback: float = 1.0) -> list[float]:
    """Return the factors of a layer's gradients, given norms."""
    bound = GradientBound(feedback, 0.1)
    return growth_factors(torch.tensor([weights]), torch.tensor([gradients]), bound)[0].tolist()


def test_weak_outputs_are_compared_with_those_that_carry_the_layer_by_hand():
    # Σw²/Σw is 2.0196/2.4 = 0.84 with a tenth of 0.084; a tenth of the mean, 0.048, would call no output of 0.05 weak.
    weights = [1.0, 1.0, 0.1, 0.1, 0.05, 0.05, 0.05, 0.05, *[0.0] * 2]
    assert factors(weights, [1.0, 4.0, 2.0, 3.0, 8.0, 1.0, 100.0, 2.0, 5.0, 0.0]) == pytest.approx(
        [1.0, 1.0, 1.0, 1.0, 0.25, 1.0, 0.02, 1.0, 0.4, 1.0]  # the lower median of the first four is 2
    )
    assert factors(weights[:4], [1.0, 1.0, 1.0, 40.0]) == pytest.approx([1.0, 1.0, 1.0, 0.25])  # ten medians at most


def test_a_weak_output_with_nothing_to_compare_is_shortened_by_hand():
    assert factors([1.0, 0.0, 0.0], [0.0, 300.0, 2.0]) == pytest.approx([1.0, 0.01, 0.01])
    assert factors([1.0, 0.0, 0.0], [0.0, 300.0, 2.0], feedback=0.5) == pytest.approx([1.0, 0.005, 0.005])
    assert factors([1.0, 0.0], [0.0, 300.0], feedback=1e6) == [1.0, 1.0]  # never lengthened


def test_a_layer_without_weights_or_gradients_is_left_alone():
    assert factors([0.0, 0.0, 0.0], [1.0, 2.0, 5.0]) == [1.0, 1.0, 1.0]
    assert factors([1.0, 1.0], [0.0, 0.0]) == [1.0, 1.0]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.floats(0, 3), st.floats(-3, 3), st.integers(0, 2**31))
def test_the_factors_do_not_depend_on_the_scale_of_the_loss(outputs: int, feedback: float, power: float, seed: int):
    generator = torch.Generator().manual_seed(seed)
    weights, norm = (10 ** torch.randn(2, outputs, generator=generator, dtype=torch.float64) for _ in range(2))
    weights = weights * (torch.rand(2, outputs, generator=generator) < 0.6)
    found = growth_factors(weights, norm, GradientBound(feedback, 0.1))
    assert ((found >= 0) & (found <= 1)).all()
    torch.testing.assert_close(growth_factors(weights, norm * 10**power, GradientBound(feedback, 0.1)), found)


class NormedFilters(nn.Module):
    """A convolution and a batch norm, where most filters have no weights."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, FILTERS, 3), nn.BatchNorm2d(FILTERS), nn.Linear(FILTERS * 16, 4)
        self.conv.weight.data[CARRYING:] = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x)).flatten(1))


def grow_filters(feedback: float | None) -> Tensor:
    """Return the norms of all filters after a compressed phase of AC/DC, which keeps two, and a dense one."""
    torch.manual_seed(0)
    model, images, classes = NormedFilters(), torch.randn(16, 3, 6, 6), torch.randint(4, (16,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = pm.ACDC(sparsity=0.9, include="conv.weight", start=0.0, phase=0.5, until=1.0, feedback=feedback)
    pruner.attach(model, optimizer, total_steps=20, resume=False)
    for _ in range(19):
        optimizer.zero_grad()
        F.cross_entropy(model(images), classes).backward()
        optimizer.step()
    assert pruner.sparsity() == 0
    return model.conv.weight.detach().flatten(1).norm(dim=1)


def test_filters_that_grow_from_zero_do_not_outgrow_those_with_weights():
    unbounded, bounded = grow_filters(None), grow_filters(1.0)
    assert unbounded[CARRYING:].max() > 3 * unbounded[:CARRYING].max()  # so that this test can fail
    assert 0 < bounded[CARRYING:].max() < bounded[:CARRYING].max()


@pytest.mark.parametrize("name", BOUNDED)
def test_hard_methods_that_regrow_by_gradients_have_the_bound_by_default(name: str):
    spec = METHODS[name]
    assert spec().feedback == 1
    assert spec(feedback=math.inf) == spec(feedback=None)
    assert not spec(feedback=None).transforms_gradient
    gradient, weights = torch.tensor([[3.0, 4.0], [300.0, 0.0]]), torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    bounded = spec().transform_gradient(gradient, weights, weights != 0, 0)
    torch.testing.assert_close(bounded, torch.tensor([[3.0, 4.0], [5.0, 0.0]]))
    bias = torch.tensor([1.0, 100.0])
    assert torch.equal(spec().transform_gradient(bias, torch.tensor([1.0, 0.0]), bias > 0, 0), bias)
    with pytest.raises(pm.PomonaError, match="0 or more, or None for no bound, got -1"):
        spec(feedback=-1)


@pytest.mark.parametrize("name", BOUNDED)
def test_a_recipe_without_the_bound_has_the_fingerprint_of_earlier_runs(name: str):
    base = {"data": "digits", "model": "mlp"}
    default, unbounded = (Recipe.load({**base, "method": text}) for text in (name, f"{name}(feedback=inf)"))
    assert "method.feedback" not in unbounded.settings()
    assert default.settings()["method.feedback"] == 1
    stored = unbounded.to_dict()
    del stored["method"]["feedback"]  # a run of before there was the option
    assert Recipe.load_stored(stored).fingerprint() == unbounded.fingerprint() != default.fingerprint()


def train_resnet(pruner: pm.Pruner) -> tuple[float, float]:
    """Train a ResNet-8 on digits for eight epochs; return its accuracy in %, and the largest weight."""
    digits = pm.data.load("digits")
    (x, y), (x_test, y_test) = (((part.x.float() / 255 - 0.3) / 0.38, part.y) for part in (digits.train, digits.test))
    torch.manual_seed(0)
    model, steps = ResNetCifar(8, in_channels=1), len(y) // 32
    model.head = nn.Sequential(nn.Flatten(), nn.Linear(64 * 2 * 2, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    pruner.attach(model, optimizer, total_steps=8 * steps, steps_per_epoch=steps)
    for _ in range(8):
        for rows in torch.randperm(len(y))[: 32 * steps].view(steps, 32):
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    pruner.finish()
    with torch.no_grad():
        accuracy = 100 * (model.eval()(x_test).argmax(1) == y_test).float().mean().item()
    return accuracy, max(float(slot.parameter.detach().abs().max()) for slot in pruner.slots)


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["unstructured", "kernel"])
@pytest.mark.parametrize("name", BOUNDED)
def test_a_residual_network_at_98_percent_is_not_destroyed(name: str, pattern: str):
    accuracy, _ = train_resnet(pm.Pruner(METHODS[name](sparsity=0.98, pattern=pattern)))
    assert accuracy > 80
    _, largest = train_resnet(pm.Pruner(METHODS[name](sparsity=0.98, pattern=pattern, feedback=None)))
    assert largest > 100  # so that this test can fail
