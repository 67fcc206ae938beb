"""Weight standardization of convolutions."""

from __future__ import annotations

import copy

import torch
from torch import nn

from pomona import models
from pomona.models.weight_standardization import (
    MIN_SQUARES,
    Standardize,
    add_weight_standardization,
    pull_back,
    standardize,
)


def test_filters_have_mean_0_and_norm_1():
    weight = torch.tensor([[[[1.0, 2.0, 3.0]]], [[[4.0, 4.0, 4.0]]]])
    found, norms = standardize(weight)
    torch.testing.assert_close(found[0].flatten(), torch.tensor([-(0.5**0.5), 0, 0.5**0.5]))
    assert not found[1].any()
    torch.testing.assert_close(norms, torch.tensor([2**0.5, MIN_SQUARES**0.5]))


def test_derivative_is_that_of_the_formula():
    torch.manual_seed(0)
    weight = torch.randn(4, 3, 3, 2, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        weight[1] = 0.3 + 1e-4 * torch.randn(3, 3, 2)  # below the least norm
    assert torch.autograd.gradcheck(lambda w: Standardize.apply(w)[0], (weight,))
    gradients = torch.randn(5, *weight.shape, dtype=torch.float64)
    found = pull_back(gradients, *standardize(weight.detach()))
    for gradient, ours in zip(gradients, found, strict=True):
        (expected,) = torch.autograd.grad(Standardize.apply(weight)[0], weight, gradient)
        torch.testing.assert_close(ours, expected)


def test_option_of_wide_residual_networks():
    torch.manual_seed(0)
    model = models.build("wrn16_1", norm="group", weight_standardization=True)
    plain = models.build("wrn16_1", norm="group")
    convs = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert all(abs(float(conv.weight.detach().flatten(1).norm(dim=1).mean()) - 1) < 1e-5 for conv in convs)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in plain.parameters())
    x = torch.randn(2, 3, 32, 32)
    again = copy.deepcopy(model)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(x), model(x))


def test_scale_of_a_weight_has_no_effect():
    torch.manual_seed(0)
    model = add_weight_standardization(nn.Sequential(nn.Conv2d(3, 4, 3)))
    x = torch.randn(2, 3, 5, 5)
    before = model(x)
    with torch.no_grad():
        model[0].parametrizations.weight.original.mul_(3.0)
    torch.testing.assert_close(model(x), before)
