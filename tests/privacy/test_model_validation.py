"""Models for private training: layers that mix examples are refused, and norms can be replaced."""

from __future__ import annotations

import pytest
import torch
from private_training import ROWS, make_budget
from torch import nn

import pomona.models as models
from pomona.errors import PomonaError
from pomona.privacy import PrivateStep, Source, fix, problems, validate
from pomona.privacy.model_validation import refuse_mixed_examples


def test_batch_norm_is_refused_by_name_and_can_be_replaced():
    torch.manual_seed(0)
    model = models.build("wrn16_4")
    assert len(problems(model)) == 13
    with pytest.raises(PomonaError, match=r"'blocks.0.norm1' is a BatchNorm2d.* group norm.*\(12 more"):
        validate(model)
    with pytest.raises(PomonaError, match="BatchNorm2d"):
        PrivateStep(model, torch.optim.SGD(model.parameters(), 0.1), make_budget(), method="dpsgd")
    fixed = fix(model)
    assert fixed is model
    assert problems(model) == []
    norms = [m for m in model.modules() if isinstance(m, nn.GroupNorm)]
    assert {norm.num_groups for norm in norms} == {16}
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 10)


def test_replaced_norms_keep_their_weights_and_lose_their_statistics():
    model = nn.Sequential(
        nn.BatchNorm1d(6), nn.InstanceNorm2d(4, track_running_stats=True), nn.BatchNorm2d(24, affine=False)
    )
    with torch.no_grad():
        model[0].weight.fill_(3.0)
    fix(model.eval())
    assert model[0].num_groups == 1
    assert model[0].weight.tolist() == [3.0] * 6
    assert model[2].num_groups == 8
    assert model[2].weight is None
    assert not list(model.buffers())
    assert not model[2].training
    model[1](torch.randn(2, 4, 3, 3))


class RunningMean(nn.Module):
    """A layer with a buffer that accumulates the mean of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.linear = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.add_(x.mean(0))
        return self.linear(x)


class BatchCentering(nn.Module):
    """A layer that subtracts the mean over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x - x.mean(0))


def test_buffers_and_outputs_that_mix_examples_are_refused():
    x = torch.randn(ROWS, 3)
    with pytest.raises(PomonaError, match="the buffer 'mean' was updated from the examples"):
        refuse_mixed_examples(RunningMean(), x)
    with pytest.raises(PomonaError, match="the output for one example depends on the others"):
        refuse_mixed_examples(BatchCentering(), x)
    refuse_mixed_examples(nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.LayerNorm(4)), x)
    model = BatchCentering()
    step = PrivateStep(
        model, torch.optim.SGD(model.parameters(), 0.1), make_budget(), method="dpsgd", source=Source(seed=0)
    )
    rows = step.draw()
    with pytest.raises(PomonaError, match="the output for one example depends on the others"):
        step(x[rows], torch.zeros(len(rows), dtype=torch.int64))
    assert step.steps_taken == 0


def test_private_cnn_is_small_and_valid():
    model = models.build("private_cnn")
    assert sum(p.numel() for p in model.parameters()) == 66_410
    validate(model)
    refuse_mixed_examples(model, torch.randn(3, 3, 32, 32))
    assert models.build("private_cnn", in_channels=1, rho=0.5)(torch.randn(2, 1, 28, 28)).shape == (2, 10)


def test_model_without_parameters_is_refused():
    with pytest.raises(PomonaError, match="no parameter to train"):
        validate(nn.ReLU())
