"""The test that gradients of a row depend on nothing else in its micro-batch."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from private_training import make_budget, make_data, make_step
from torch import nn

from pomona.errors import PomonaError
from pomona.privacy import Clipping, PrivateStep, Source
from pomona.privacy.clipping import GradientGrid
from pomona.privacy.recorded_gradients import compute_recorded_gradients
from pomona.privacy.row_independence import find_dependent_parameter


def compute(x, y):
    """Return gradients that are the inputs themselves."""
    return {"weight": x.clone()}


def add_mean(x, y):
    """Return gradients that depend on all rows."""
    return {"bias": x.clone(), "weight": x + x.mean()}


def add_place(x, y):
    """Return gradients of which one depends on the place, by a single bit."""
    gradients = x.clone()
    gradients[7] = gradients[7].nextafter(torch.tensor(9.0))
    return {"weight": gradients}


@pytest.mark.parametrize(("function", "expected"), [(compute, None), (add_mean, "weight"), (add_place, "weight")])
def test_dependence_is_found(function, expected):
    batch = torch.zeros(12, 3), torch.zeros(12, dtype=torch.int64)
    assert find_dependent_parameter(function, *batch) == expected


def test_one_row_is_independent():
    assert find_dependent_parameter(compute, torch.zeros(1, 3), torch.zeros(1)) is None


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_recorded_gradients_are_independent(device, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 10)
    ).to(device)
    parameters = dict(model.named_parameters())
    batch = torch.zeros(24, 2, 3, 8, 8, device=device), torch.zeros(24, dtype=torch.int64, device=device)

    def gradients(x, y):
        return compute_recorded_gradients(model, F.cross_entropy, parameters, x, y, 2, dtype=dtype)[0]

    assert find_dependent_parameter(gradients, *batch) is None


def test_step_in_bfloat16_refuses_a_model_whose_rows_depend_on_each_other(monkeypatch):
    x, y = make_data()
    step = make_step(precision="bfloat16")[1]
    monkeypatch.setattr(
        "pomona.privacy.example_gradients.choose_gradients",
        lambda *a, **named: lambda *b: (add_mean(b[3].flatten(1), None), y),
    )
    rows = step.draw()
    with pytest.raises(PomonaError, match="leave precision=.bfloat16. out"):
        step(x[rows], y[rows])


def test_step_in_bfloat16_learns_and_resumes_with_the_same_precision():
    x, y = make_data()
    model, step = make_step(noiseless=True, precision="bfloat16")
    model.float()
    losses = [float(step(x[rows].float(), y[rows])) for rows in step]
    assert losses[-1] < losses[0]
    other = make_step(noiseless=True)[1]
    with pytest.raises(PomonaError, match="precision"):
        other.load_state_dict(step.state_dict())


def test_precision_needs_recorded_gradients():
    model = nn.Sequential(nn.LSTM(3, 2))
    from pomona.privacy.per_example_gradients import choose_gradients

    parameters = dict(model.named_parameters())
    with pytest.raises(PomonaError, match='precision="bfloat16"'):
        choose_gradients(
            model,
            lambda output, target: output[0].sum(),
            parameters,
            torch.randn(2, 4, 3),
            torch.zeros(2),
            1,
            torch.bfloat16,
        )


# ---- attacks by layers that mix rows, in training mode, at random, late or a little


class Layer(nn.Module):
    """A linear layer, a layer that may mix rows, and another linear layer."""

    def __init__(self, amount: float = 1.0) -> None:
        super().__init__()
        self.first, self.last, self.amount, self.calls = nn.Linear(WIDTH, 16), nn.Linear(16, 2), amount, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        h = self.first(x)
        return self.last(torch.relu(self.mix(h) if self.training else h))

    def mix(self, h: torch.Tensor) -> torch.Tensor:
        return F.dropout(h, 0.3)


class Shuffled(Layer):
    def mix(self, h):
        return 0.7 * h + 0.3 * h[torch.randperm(len(h))]


class Summed(Layer):
    def mix(self, h):
        return h.cumsum(0)


class Centred(Layer):
    def mix(self, h):
        return h - h.mean(0) if len(h) > 2 else h


class LateCentred(Layer):
    def mix(self, h):
        return h - h.mean(0) if self.calls > 6 else h


class Leaky(Layer):
    """A layer that adds a little of the sum of all rows, in each mode."""

    def forward(self, x):
        h = self.first(x)
        return self.last(torch.relu(h + self.amount * h.sum(0)))


class FromFirst(nn.Module):
    """A layer of zeros in which all rows see the first one, in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 2)
        nn.init.zeros_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def forward(self, x):
        if self.training:
            x = x + torch.cat([torch.zeros_like(x[:1]), x[:1].expand(len(x) - 1, -1)])
        return self.layer(x)


WIDTH, MANY = 8, 64


def train(model, rows=MANY, steps=9, dtype=torch.float32, scale=1.0, **options):
    """Take steps on samples of all rows."""
    budget = dataclasses.replace(make_budget(steps=20), rows=rows, batch_size=rows)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    step = PrivateStep(model, optimizer, budget, method="dpsgd", source=Source(seed=3), **options)
    x, y = scale * torch.randn(rows, WIDTH, dtype=dtype), torch.randint(2, (rows,))
    for _ in range(steps):
        drawn = step.draw()
        step(x[drawn], y[drawn])
    return step


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", [Shuffled, Summed, Centred, LateCentred, FromFirst])
def test_attack_by_rows_that_mix_in_training_mode_fails(kind, seed):
    torch.manual_seed(seed)
    with pytest.raises(PomonaError, match="on the other examples, which the|depends on the others of its batch"):
        train(kind())


@pytest.mark.parametrize("clip", [0.05, 1000.0])
@pytest.mark.parametrize("amount", [1e-4, 3e-5, 1e-5])
def test_attack_by_rows_that_mix_a_little_fails(amount, clip):
    """A row of norm 10⁴ moved the sum of the others by 2 C at 1e-5, where the proof allows 2⁻¹⁰ C."""
    torch.manual_seed(1)
    with pytest.raises(PomonaError, match="'first.weight' of an example depends on its place"):
        train(Leaky(amount), 200, 1, scale=0.1, clip=clip)


@pytest.mark.parametrize("options", [{}, {"clipping": Clipping(layers=True, quantile=0.5)}, {"micro": 16}])
def test_dropout_is_no_mixing(options):
    torch.manual_seed(0)
    assert train(Layer(), **options).steps_taken == 9


@pytest.mark.parametrize(("dtype", "amount"), [(torch.bfloat16, 0.0), (torch.bfloat16, 1e-3), (torch.float16, 1e-3)])
def test_models_in_16_bits_are_tested_bit_for_bit(dtype, amount, monkeypatch):
    """Also without precision="bfloat16": a rounding error of 16 bits is larger than the margin."""
    torch.manual_seed(0)
    model = Leaky(amount).to(dtype)
    if not amount:
        assert train(model, 16, 1, dtype).steps_taken == 1
        return
    monkeypatch.setattr("pomona.privacy.row_independence.is_within_margin", lambda *given: True)
    with pytest.raises(PomonaError, match=r"remove the layer that mixes them, or use model.float\(\)"):
        train(model, 16, 1, dtype)


def test_autocast_and_frozen_parameters_and_inputs_count_as_16_bits():
    step = make_step()[1].gradients
    step.model.float()
    assert not step.is_exact(torch.zeros(1))
    assert step.is_exact(torch.zeros(1, dtype=torch.bfloat16))
    with torch.autocast("cpu"):
        assert step.is_exact(torch.zeros(1))
    step.model.register_buffer("narrow", torch.zeros(2, dtype=torch.float16))
    assert step.is_exact(torch.zeros(1))


@pytest.mark.parametrize("size", [1e-6, 1e-2])
def test_margin_is_that_of_the_sum(size):
    """Errors that are small for each row are allowed, unless they all have one direction."""
    grid = GradientGrid(1.0, WIDTH)

    def add_clipped(parts):
        total = torch.zeros(WIDTH, dtype=torch.int64)
        grid.add_clipped(parts, total)
        return total

    def compute(x, y):
        return {"weight": x + size / MANY * x.mean(0).sign()}

    batch = torch.zeros(MANY, WIDTH), torch.zeros(MANY, dtype=torch.int64)
    assert find_dependent_parameter(compute, *batch, moves=False) == "weight"
    assert find_dependent_parameter(compute, *batch, add_clipped, moves=False) == (None if size < 1e-3 else "weight")
