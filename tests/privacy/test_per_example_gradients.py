"""Per-example gradients against one backward pass for each row, and against Opacus."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from private_training import gradients_one_by_one, make_data, make_network
from torch import nn

import pomona.models as models
from pomona.privacy.per_example_gradients import compute_per_example_gradients, compute_summed_gradients


def test_gradients_are_those_of_each_row():
    model, (x, y) = make_network(), make_data()
    gradients, losses = compute_per_example_gradients(model, F.cross_entropy, dict(model.named_parameters()), x, y)
    ours = torch.cat([g.flatten(1) for g in gradients.values()], 1)
    assert torch.allclose(ours, gradients_one_by_one(model, x, y), atol=1e-12)
    assert torch.allclose(losses, F.cross_entropy(model(x), y, reduction="none"))
    total = compute_summed_gradients(model, F.cross_entropy, dict(model.named_parameters()), x, y)
    assert all(torch.allclose(total[name], gradients[name].sum(0)) for name in total)


def test_gradients_of_views_are_averaged():
    model, (x, y) = make_network(), make_data()
    views = torch.stack([x, x.flip(-1), 2 * x], 1)
    parameters = dict(model.named_parameters())
    gradients, _ = compute_per_example_gradients(model, F.cross_entropy, parameters, views, y, views=3)
    each = [compute_per_example_gradients(model, F.cross_entropy, parameters, view, y)[0] for view in views.unbind(1)]
    total = compute_summed_gradients(model, F.cross_entropy, parameters, views, y, views=3)
    for name, ours in gradients.items():
        assert torch.allclose(ours, torch.stack([one[name] for one in each]).mean(0))
        assert torch.allclose(total[name], ours.sum(0))


def test_gradients_equal_those_of_opacus():
    GradSampleModule = pytest.importorskip("opacus").GradSampleModule

    torch.manual_seed(0)
    model = models.build("private_cnn")
    x, y = torch.randn(12, 3, 32, 32), torch.randint(10, (12,))
    ours, _ = compute_per_example_gradients(model, F.cross_entropy, dict(model.named_parameters()), x, y)
    wrapped = GradSampleModule(model, loss_reduction="sum")
    F.cross_entropy(wrapped(x.requires_grad_()), y, reduction="sum").backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(ours[name], parameter.grad_sample, rtol=1e-4, atol=1e-6)


def test_gradients_of_an_lstm_are_those_of_each_row():
    torch.manual_seed(0)
    model = models.build("bilstm", vocabulary=11, embedding=4, hidden=3, dropout=0.0).double()
    x, y = torch.randint(0, 11, (6, 7)), torch.randint(2, (6,))
    ours, _ = compute_per_example_gradients(model, F.cross_entropy, dict(model.named_parameters()), x, y)
    expected = gradients_one_by_one(model, x, y)
    assert torch.allclose(torch.cat([g.flatten(1) for g in ours.values()], 1), expected)


def test_dropout_masks_differ_between_examples():
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(50, 2)).double()
    x = torch.ones(30, 50, dtype=torch.float64)
    gradients, _ = compute_per_example_gradients(
        model, F.cross_entropy, dict(model.named_parameters()), x, torch.zeros(30, dtype=torch.int64)
    )
    assert len({tuple((row != 0).any(0).tolist()) for row in gradients["1.weight"]}) > 20
