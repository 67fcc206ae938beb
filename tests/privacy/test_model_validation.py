"""Models for private training: layers that mix examples are refused, and norms can be replaced."""

from __future__ import annotations

import warnings

import pytest
import torch
from private_training import ROWS, NoiselessSource, assert_close_on_grid, make_budget, mean_of_clipped
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


# ---- models and optimizers that a step cannot train are refused before a draw is charged


def make_private(model, optimizer=None, **options):
    """Return the private step of a model."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 1.0)
    return PrivateStep(
        model, optimizer, make_budget(), source=NoiselessSource(seed=3), **{"method": "dpsgd", **options}
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Linear(3, 2, dtype=torch.complex64), "'weight' has complex numbers"),
        (lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 2))), r"'0' has a hook of WeightNorm.*weight_norm\."),
        (lambda: nn.utils.spectral_norm(nn.Linear(3, 2)), r"'Linear' has a hook of SpectralNorm.*in eval\(\)"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_models_without_real_weights_of_their_own_are_refused(make, message):
    with pytest.raises(PomonaError, match=message):
        make_private(make())


def test_optimizers_of_another_kind_are_refused():
    model = nn.Linear(3, 2)
    for optimizer, message in (
        (torch.optim.LBFGS(model.parameters()), "LBFGS computes the gradient several times"),
        (torch.optim.SparseAdam(model.parameters()), "SparseAdam takes sparse gradients"),
    ):
        with pytest.raises(PomonaError, match=message):
            make_private(model, optimizer)
    make_private(model, torch.optim.Adam(model.parameters()))


class Scaled(nn.Module):
    """A linear layer times a parameter without dimensions, as that of the logits of CLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.logit_scale = nn.Linear(3, 2), nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.logit_scale * self.layer(x)


class Looked(nn.Module):
    """Vectors that are looked up, with gradients that autograd keeps sparse."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.vectors, self.head = kind(7, 3, sparse=True), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.vectors(x)
        return self.head(found.mean(1) if found.dim() > 2 else found)


@pytest.mark.parametrize("options", [{"micro": 256}, {"micro": 7}])
@pytest.mark.parametrize("make", [Scaled, lambda: Looked(nn.Embedding), lambda: Looked(nn.EmbeddingBag)])
def test_scalar_parameters_and_sparse_gradients_are_trained(make, options):
    torch.manual_seed(0)
    model = make().double()
    x = torch.randn(ROWS, 3).double() if isinstance(model, Scaled) else torch.randint(7, (ROWS, 5))
    y, step = torch.randint(2, (ROWS,)), make_private(model, clip=0.3, **options)
    before, rows, expected = nn.utils.parameters_to_vector(model.parameters()).detach().clone(), step.draw(), []
    for k in rows.tolist():
        nn.functional.cross_entropy(model(x[k : k + 1]), y[k : k + 1]).backward()
        grads = [p.grad.to_dense() if p.grad.is_sparse else p.grad for p in model.parameters()]
        expected.append(torch.cat([grad.flatten() for grad in grads]))
        model.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one example at a time
        step(x[rows], y[rows])
    change = before - nn.utils.parameters_to_vector(model.parameters()).detach()
    assert_close_on_grid(change, mean_of_clipped(torch.stack(expected), 0.3), 0.3)


def test_sparse_gradients_choose_indices():
    model = Looked(nn.EmbeddingBag)
    step = PrivateStep(
        model,
        torch.optim.SGD(model.parameters(), 1.0),
        make_budget(share=0.5, index=1.0),
        keep=0.5,
        micro=7,
        source=Source(seed=1),
    )
    x, y, rows = torch.randint(7, (ROWS, 5)), torch.randint(2, (ROWS,)), step.draw()
    with pytest.warns(UserWarning, match="one example at a time"):
        step(x[rows], y[rows])
    assert step.steps_taken == 1
