"""Recorded gradients against one backward pass for each row, over layers, shapes and views."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from private_training import gradients_one_by_one, make_data, make_network
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from pomona import models
from pomona.models.weight_standardization import StandardizedWeight
from pomona.privacy.per_example_gradients import (
    choose_gradients,
    compute_gradients_one_by_one,
    compute_per_example_gradients,
)
from pomona.privacy.recorded_gradients import UnrecordedUse, compute_recorded_gradients

ROWS = 3


def assert_recorded(model: nn.Module, x: torch.Tensor, views: int = 1, rtol: float = 1e-9) -> None:
    """Assert that recorded gradients and losses of random targets are those of a backward pass for each row."""
    generator = torch.Generator().manual_seed(1)
    y = torch.randint(2, (len(x),), generator=generator)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found, losses = compute_recorded_gradients(model, F.cross_entropy, parameters, x, y, views)
    expected, expected_losses = compute_gradients_one_by_one(model, F.cross_entropy, parameters, x, y, views)
    torch.testing.assert_close(losses, expected_losses, rtol=rtol, atol=rtol)
    assert list(found) == list(parameters)
    for name, gradient in found.items():
        assert not gradient.requires_grad
        torch.testing.assert_close(gradient, expected[name], rtol=rtol, atol=rtol)


def images(views: int, channels: int, height: int, width: int) -> torch.Tensor:
    """Return random images, (ROWS, views, …) for several views."""
    shape = (ROWS, channels, height, width) if views == 1 else (ROWS, views, channels, height, width)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def classify(*layers: nn.Module) -> nn.Module:
    """Return the layers followed by two outputs for any shape, all in float64."""
    torch.manual_seed(0)
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(2)).double()


def warm(model: nn.Module, x: torch.Tensor, views: int) -> nn.Module:
    """Return a model whose lazy layers have their shapes."""
    model(x.flatten(0, 1) if views > 1 else x)
    return model


@settings(max_examples=40, deadline=None)
@given(
    channels=st.sampled_from([(1, 2, 1), (3, 4, 1), (4, 6, 2), (2, 4, 2)]),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.integers(1, 2),
    padding=st.integers(0, 2),
    dilation=st.integers(1, 2),
    bias=st.booleans(),
    views=st.integers(1, 3),
    size=st.tuples(st.integers(5, 8), st.integers(5, 8)),
)
def test_convolutions(channels, kernel, stride, padding, dilation, bias, views, size):
    inputs, outputs, groups = channels
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, dilation, groups, bias)
    second = nn.Conv2d(outputs, 3, 1, bias=bias)
    x = images(views, inputs, *size)
    assert_recorded(warm(classify(conv, nn.Tanh(), second), x, views), x, views)


@settings(max_examples=20, deadline=None)
@given(
    groups=st.sampled_from([(4, 1), (4, 2), (6, 3), (5, 5)]),
    affine=st.booleans(),
    views=st.integers(1, 2),
    size=st.integers(1, 5),
)
def test_group_norms(groups, affine, views, size):
    channels, count = groups
    x = images(views, 2, size, size + 1)
    model = classify(nn.Conv2d(2, channels, 1), nn.GroupNorm(count, channels, affine=affine), nn.ReLU())
    assert_recorded(warm(model, x, views), x, views)


@settings(max_examples=20, deadline=None)
@given(
    places=st.integers(1, 4),
    size=st.integers(1, 5),
    padding=st.sampled_from([None, 0]),
    affine=st.booleans(),
    views=st.integers(1, 2),
)
def test_embeddings_and_layer_norms(places, size, padding, affine, views):
    model = classify(
        nn.Embedding(6, size, padding_idx=padding), nn.LayerNorm(size, elementwise_affine=affine), nn.Linear(size, 3)
    )
    shape = (ROWS, places) if views == 1 else (ROWS, views, places)
    x = torch.randint(6, shape, generator=torch.Generator().manual_seed(0))
    assert_recorded(warm(model, x, views), x, views)


@pytest.mark.parametrize("views", [1, 2])
@pytest.mark.parametrize(
    "change",
    [
        lambda conv: parametrize.register_parametrization(conv, "weight", StandardizedWeight()),
        parametrizations.weight_norm,
    ],
    ids=["standardized", "weight_norm"],
)
def test_weights_that_are_computed_from_parameters(change, views):
    conv = nn.Conv2d(2, 4, 3)
    change(conv)
    x = images(views, 2, 5, 5)
    assert_recorded(warm(classify(conv, nn.ReLU()), x, views), x, views)


def test_networks_equal_vmap():
    torch.manual_seed(0)
    for options in ({}, {"weight_standardization": True}):
        model = models.build("wrn16_1", norm="group", **options).double()
        x, y = torch.randn(2, 3, 3, 16, 16, dtype=torch.float64), torch.tensor([3, 5])
        arguments = model, F.cross_entropy, dict(model.named_parameters()), x, y, 3
        found, expected = compute_recorded_gradients(*arguments)[0], compute_per_example_gradients(*arguments)[0]
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-9)


class Twice(nn.Module):
    """A layer that is used twice, and an in-place activation between."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.layer(x).relu_()))


class Scaled(nn.Module):
    """A parameter that is used outside of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.head = nn.Parameter(torch.ones(4)), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x * self.factor)


class TimeFirst(nn.Module):
    """A layer whose first dimension is time."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(x.transpose(0, 1).contiguous()).tanh().mean(0))


class Generated(nn.Module):
    """A weight that depends on the examples."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.head(x), self.inner(x).mean(0).view(2, 2))


def rows_of(*shape: int) -> torch.Tensor:
    """Return ROWS random rows."""
    return torch.randn(ROWS, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_layer_that_is_used_twice():
    assert_recorded(Twice().double(), rows_of(4))


def test_frozen_and_unused_parameters():
    model = Twice().double()
    model.layer.bias.requires_grad_(False)
    model.unused = nn.Linear(2, 2).double()
    assert_recorded(model, rows_of(4))


def test_trained_parameters_may_be_a_part():
    model, x, y = Twice().double(), rows_of(4), torch.tensor([0, 1, 1])
    everything = compute_recorded_gradients(model, F.cross_entropy, dict(model.named_parameters()), x, y)[0]
    some = {"head.weight": model.head.weight}
    assert torch.equal(
        compute_recorded_gradients(model, F.cross_entropy, some, x, y)[0]["head.weight"], everything["head.weight"]
    )


def test_parameter_outside_of_a_layer_is_noticed():
    model = Scaled().double()
    with pytest.raises(UnrecordedUse, match="'factor'"):
        compute_recorded_gradients(
            model, F.cross_entropy, dict(model.named_parameters()), rows_of(4), torch.zeros(ROWS).long()
        )


@pytest.mark.parametrize(
    ("model", "shape"),
    [(Scaled(), (4,)), (TimeFirst(), (3, 3)), (TimeFirst(), (2, 3)), (TimeFirst(), (4, 3)), (Generated(), (4,))],
    ids=["scaled", "time first", "two times", "four times", "generated"],
)
def test_models_that_cannot_be_recorded_are_computed_in_another_way(model, shape):
    model, x, y = model.double(), rows_of(*shape), torch.tensor([0, 1, 1])
    arguments = model, F.cross_entropy, dict(model.named_parameters()), x, y, 1
    compute = choose_gradients(*arguments)
    found, expected = compute(*arguments)[0], compute_gradients_one_by_one(*arguments)[0]
    for name in found:
        torch.testing.assert_close(found[name], expected[name])


def test_recorded_gradients_are_chosen_and_draw_no_random_numbers():
    model, (x, y) = nn.Sequential(make_network(), nn.Dropout(0.5)), make_data()
    state = torch.get_rng_state()
    compute = choose_gradients(model, F.cross_entropy, dict(model.named_parameters()), x, y, 1)
    assert compute.func is compute_recorded_gradients
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training


def test_dropout_masks_differ_between_examples():
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(50, 2)).double()
    x = torch.ones(30, 50, dtype=torch.float64)
    parameters = dict(model.named_parameters())
    gradients, _ = compute_recorded_gradients(model, F.cross_entropy, parameters, x, torch.zeros(30, dtype=torch.int64))
    assert len({tuple((row != 0).any(0).tolist()) for row in gradients["1.weight"]}) > 20


def test_errors_in_bfloat16_are_those_of_autocast():
    """Signs of inputs of ReLU that rounding changes cause most of them: a smooth activation has far smaller ones."""
    errors = {}
    for activation in (nn.ReLU, nn.Softplus):
        torch.manual_seed(0)
        model = models.build("wrn16_1", norm="group", weight_standardization=True)
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.ReLU):
                    setattr(module, name, activation())
        x, y = torch.randn(1, 3, 16, 16), torch.tensor([3])
        parameters = dict(model.named_parameters())
        exact, ours = (
            compute_recorded_gradients(model, F.cross_entropy, parameters, x, y, dtype=dtype)[0].values()
            for dtype in (None, torch.bfloat16)
        )
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        theirs = torch.autograd.grad(loss, list(parameters.values()))
        exact, ours, theirs = (torch.cat([part.float().flatten() for part in each]) for each in (exact, ours, theirs))
        errors[activation] = [float((each - exact).norm() / exact.norm()) for each in (ours, theirs)]
    assert errors[nn.ReLU][0] < 1.5 * errors[nn.ReLU][1]
    assert errors[nn.Softplus][0] < 0.2 * errors[nn.ReLU][0]


def test_gradients_of_a_float32_model_in_bfloat16():
    model, (x, y) = make_network().float(), make_data()
    arguments = model, F.cross_entropy, dict(model.named_parameters()), x.float(), y, 1
    gradients, losses = compute_recorded_gradients(*arguments, dtype=torch.bfloat16)
    found = torch.cat([gradient.float().flatten(1) for gradient in gradients.values()], 1)
    expected = gradients_one_by_one(model, x.float(), y)
    assert gradients["0.weight"].dtype == torch.bfloat16
    assert losses.dtype == torch.float32
    assert float((found - expected).norm() / expected.norm()) < 0.05
