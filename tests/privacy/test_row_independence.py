"""The test that gradients of a row depend on nothing else in its micro-batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from private_training import make_data, make_step
from torch import nn

from pomona.errors import PomonaError
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
    model, step = make_step(precision="bfloat16")
    monkeypatch.setattr(
        "pomona.privacy.example_gradients.choose_gradients", lambda *a: lambda *b: (add_mean(b[3].flatten(1), None), y)
    )
    rows = step.draw()
    with pytest.raises(PomonaError, match="leave the precision out"):
        step(x[rows], y[rows])


def test_step_in_bfloat16_learns_and_resumes_with_the_same_precision():
    x, y = make_data()
    model, step = make_step(noiseless=True, precision="bfloat16")
    model.float()
    losses = []
    for rows in step:
        losses.append(float(step(x[rows].float(), y[rows])))
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
