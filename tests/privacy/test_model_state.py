"""Attacks by what a forward pass writes into the model: it is restored and refused, and tells nothing about a row."""

from __future__ import annotations

import random
import warnings

import numpy as np
import pytest
import torch
from private_training import ROWS, make_budget
from torch import nn
from torch.func import vmap

from pomona.errors import PomonaError
from pomona.privacy import PrivateStep, Source
from pomona.privacy.model_state import ModelState, copy_model, repeatable_random_numbers, unchanged_state

WIDTH = 8


class ActNorm(nn.Module):
    """A layer whose bias is set from the first batch, past autograd's version counters (Glow)."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.is_set = nn.Parameter(torch.zeros(WIDTH)), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and not self.is_set:
            self.bias.data.copy_(-x.detach().mean(0))
            self.is_set = True
        return x + self.bias


class LateBuffer(nn.Module):
    """A layer with a buffer that the first batch sets or creates."""

    def __init__(self, is_declared: bool) -> None:
        super().__init__()
        if is_declared:
            self.register_buffer("stat", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if getattr(self, "stat", None) is None:
            self.register_buffer("stat", x.detach().mean(0))
        return x - self.stat


class LateLayer(nn.Module):
    """A layer that makes another one from the first batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "inner"):
            self.inner = ActNorm()
            self.inner.bias.requires_grad_(False)
        return self.inner(x)


class LateAttribute(nn.Module):
    """A layer that keeps the mean of the first batch where no state dictionary shows it."""

    mean = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mean is None:
            self.mean = x.detach().mean(0)
        return x - self.mean


class LastBatch(LateAttribute):
    """A layer that subtracts the mean of the batch before."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean, mean = x.detach().mean(0), self.mean
        return x if mean is None else x - mean


class SharesGradient(nn.Module):
    """A layer that leaves the batch as the gradient of a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch._C._functorch.is_functorch_wrapped_tensor(x):
            self.frozen.grad = x.detach().mean(0)
        return x


def make_rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Return random rows and labels."""
    return torch.randn(ROWS, WIDTH), torch.randint(2, (ROWS,))


def step_of(layer: nn.Module, sample: int) -> tuple[nn.Module, PrivateStep]:
    """Return a model with a layer and its private step, whose samples are the first rows."""
    model = nn.Sequential(layer, nn.Linear(WIDTH, 2))
    step = PrivateStep(
        model, torch.optim.SGD(model.parameters(), 1.0), make_budget(), method="dpsgd", source=Source(seed=3)
    )
    step.source.poisson = lambda rows, rate: torch.arange(sample)  # type: ignore[method-assign]
    return model, step


def take_step(step: PrivateStep, x: torch.Tensor, y: torch.Tensor) -> None:
    """Take a step, without the warning that a model is slow."""
    rows = step.draw()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step(x[rows], y[rows])


@pytest.mark.parametrize("sample", [1, 20])
def test_attack_by_a_parameter_that_the_first_batch_sets_fails(sample):
    """The bias was the mean of the batch, and told 60 times of 60 whether a row was there."""
    guesses = 0
    for trial in range(60):
        x, y = make_rows()
        is_present = bool(trial % 2)
        model, step = step_of(ActNorm(), sample)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(PomonaError, match=r"the parameter '0.bias' was updated from the examples"):
            take_step(step, *((x, y) if is_present else (x[1:], y[1:])))
        released = model.state_dict()
        assert all(torch.equal(released[name], value) for name, value in before.items())
        bias = released["0.bias"]
        guesses += (float((bias + x[0]).norm()) < float((bias + x[1]).norm())) == is_present
    assert 15 <= guesses <= 45  # that of a coin, within four standard deviations


@pytest.mark.parametrize("sample", [1, 20])
@pytest.mark.parametrize("layer", [lambda: LateBuffer(False), lambda: LateBuffer(True), LateLayer])
def test_buffers_and_layers_that_the_first_batch_makes_are_removed_and_refused(layer, sample):
    made = layer()
    buffers = dict(made._buffers)
    model, step = step_of(made, sample)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(PomonaError, match=r"'0.(stat|inner.bias)' was updated from the examples|on the other examples"):
        take_step(step, *make_rows())
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert made._buffers == buffers
    assert step.steps_taken == 0


@pytest.mark.parametrize("layer", [LateAttribute, LastBatch])
def test_what_an_earlier_batch_leaves_outside_of_the_state_is_refused(layer):
    _, step = step_of(layer(), 20)
    with pytest.raises(
        PomonaError, match="the output for one example depends on the others of its batch or on earlier"
    ):
        take_step(step, *make_rows())


def test_buffer_is_restored_after_an_error():
    model, x = nn.Sequential(LateBuffer(False), ActNorm()), torch.ones(3, WIDTH)
    with pytest.raises(RuntimeError, match="out of memory"), unchanged_state(model):  # noqa: PT012
        model(x)
        raise RuntimeError("out of memory")
    assert set(model.state_dict()) == {"1.bias"}
    assert not bool(model[1].bias.any())


def test_gradient_that_a_forward_pass_leaves_is_not_applied():
    model, step = step_of(SharesGradient(), 1)
    take_step(step, *make_rows())
    assert step.steps_taken == 1
    assert not bool(model[0].frozen.any())


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model[0].weight.data.add_(1e-7),
        lambda model: setattr(model[0].weight, "data", torch.zeros(1)),
        lambda model: setattr(model[0], "weight", nn.Parameter(torch.zeros(2, 3))),
        lambda model: setattr(model[0], "bias", None),
        lambda model: model[1].running_mean.neg_(),  # from 0 to −0
        lambda model: model[1].num_batches_tracked.add_(1),
        lambda model: setattr(model[1], "running_var", None),
        lambda model: model.register_buffer("phases", torch.ones(2, dtype=torch.complex128)),
        lambda model: model.halves.mul_(2),
        lambda model: model.append(nn.Linear(2, 2)),
    ],
)
def test_every_change_is_found_and_restored(change):
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    model.register_buffer("halves", torch.ones(3, dtype=torch.complex64))
    model[1].running_var.fill_(float("nan"))
    state = ModelState(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parameters = list(model.parameters())
    assert state.changed() == []
    change(model)
    assert state.changed()
    state.restore()
    assert state.changed() == []
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == list(before)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0, equal_nan=True)


def test_models_that_keep_results_are_copied():
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    model.kept = {"scores": [model(x)]}
    vmap(lambda row: setattr(model, "row", row) or model(row))(x)
    twin = copy_model(model)
    assert torch.equal(twin.kept["scores"][0], model.kept["scores"][0])
    assert torch.equal(twin(x), model(x))
    assert twin.weight is not model.weight


def test_random_numbers_repeat_and_are_not_used_up():
    def draw() -> list[float]:
        return [float(torch.rand(())), random.random(), float(np.random.random())]  # noqa: NPY002

    before = torch.get_rng_state()
    with repeatable_random_numbers(torch.device("cpu")) as repeat:
        one = draw()
        repeat()
        assert draw() == one
    assert torch.equal(torch.get_rng_state(), before)
    assert draw() == one


class Watched(nn.Linear):
    """A layer that keeps its last results."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scores = super().forward(x)
        return self.scores


class Scale(nn.Module):
    """A layer whose gradients are not recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


@pytest.mark.parametrize("layer", [nn.Identity, Scale])
def test_model_that_keeps_results_is_trained(layer):
    _, step = step_of(nn.Sequential(layer(), Watched(WIDTH, WIDTH)), 20)
    for _ in range(4):
        take_step(step, *make_rows())
    assert step.steps_taken == 4
