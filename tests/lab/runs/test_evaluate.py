"""Accuracy by hand, and batch-norm statistics against a direct computation."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from pomona.core.batch_norm import batchnorm_layers
from pomona.lab.runs.evaluate import accuracy, evaluation_mode, measure, reestimate_batchnorm


class Fixed(nn.Module):
    """Gives back its input as logits."""

    def forward(self, x):
        return x


def test_accuracy_and_loss_by_hand():
    logits = torch.tensor([[2.0, 0.0], [0.0, 2.0], [3.0, 0.0]])
    targets = torch.tensor([0, 1, 1])
    batches = [(logits[:2], targets[:2]), (logits[2:], targets[2:])]  # of unequal size
    assert accuracy(Fixed(), batches) == pytest.approx(200 / 3)
    loss = (2 * math.log(1 + math.exp(-2)) + math.log(1 + math.exp(3))) / 3
    got = measure(Fixed(), batches)
    assert got["loss"] == pytest.approx(loss)
    assert got["perplexity"] == pytest.approx(math.exp(loss))


def test_tokens_are_counted_one_by_one():
    logits = torch.zeros(2, 3, 5)
    logits[..., 4] = 1.0
    targets = torch.tensor([[4, 4, 0], [4, 1, 2]])
    got = measure(Fixed(), [(logits, targets)])
    assert got["accuracy"] == pytest.approx(50)
    right = -math.log(math.e / (math.e + 4))
    assert got["loss"] == pytest.approx((3 * right + 3 * (right + 1)) / 6)


def test_nothing_to_measure_is_an_error():
    with pytest.raises(ValueError, match="nothing to measure"):
        measure(Fixed(), [])


def test_the_mode_of_each_module_is_restored():
    model = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2))
    model[1].eval()  # frozen by its user
    with evaluation_mode(model):
        assert not any(m.training for m in model.modules())
    assert model.training
    assert model[0].training
    assert not model[1].training


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(12, 2)
    )


def test_reestimated_statistics_are_the_mean_over_batches():
    model = network()
    batches = [(torch.randn(5, 2, 2, 2) * (k + 1) + k, torch.zeros(5, dtype=torch.long)) for k in range(4)]
    fresh = reestimate_batchnorm(model, batches, count=3)
    with torch.no_grad():
        seen = [model[0](x).transpose(0, 1).flatten(1) for x, _ in batches[:3]]
    mean = torch.stack([s.mean(1) for s in seen]).mean(0)
    var = torch.stack([s.var(1, unbiased=True) for s in seen]).mean(0)
    torch.testing.assert_close(fresh[1].running_mean, mean)
    torch.testing.assert_close(fresh[1].running_var, var)
    assert fresh[1].momentum == model[1].momentum
    assert fresh[1].num_batches_tracked == 3


def test_reestimation_leaves_model_modes_and_random_state():
    model = network()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    batches = [(torch.randn(4, 2, 2, 2), torch.zeros(4, dtype=torch.long))] * 2
    random = torch.get_rng_state()
    fresh = reestimate_batchnorm(model, batches, count=2)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(m.training for m in [*model.modules(), *fresh.modules()])
    assert fresh[1].running_mean.data_ptr() != model[1].running_mean.data_ptr()
    assert torch.equal(fresh[0].weight, model[0].weight)


def test_layers_without_running_statistics_are_left_alone():
    model = nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False), nn.GroupNorm(1, 2))
    assert batchnorm_layers(model) == []
    reestimate_batchnorm(model, [(torch.randn(3, 2), torch.zeros(3))], 1)
