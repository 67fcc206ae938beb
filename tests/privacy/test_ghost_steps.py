"""Private steps with sums of outer products (ghost clipping) against steps with gradients of examples."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from private_training import NoiselessSource, flat_parameters, make_budget
from torch import nn

from pomona.errors import PomonaError
from pomona.privacy import Clipping, Ledger, PrivateStep, Source, gradient_recorder
from pomona.privacy.clipping import NORM_ERROR, UNITS, GradientGrid
from pomona.privacy.outer_products import OuterProducts
from pomona.privacy.product_sums import ProductShape

ROWS, WIDTH, TIMES = 40, 12, 5  # ROWS are those of the budget
SHAPES = [ProductShape(TIMES, 16, WIDTH), ProductShape(1, 3, 16)]  # of the layers of `Network`


class Network(nn.Module):
    """A layer on sequences, and one on vectors."""

    def __init__(self, amount: float = 0.0) -> None:
        super().__init__()
        self.first, self.last, self.amount = nn.Linear(WIDTH, 16), nn.Linear(16, 3), amount

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return self.last(torch.relu(h + self.amount * h.sum(0) if self.amount else h).mean(1))


@pytest.fixture(autouse=True)
def always(monkeypatch):
    """Use outer products wherever that is possible."""
    monkeypatch.setattr(gradient_recorder, "are_products_cheaper", lambda *a, **b: True)


def make(seed: int = 0, device: str = "cpu", amount: float = 0.0, **options):
    """Return a network in float64 and its private step, without noise unless there is a source."""
    torch.manual_seed(seed)
    model = Network(amount).double().to(device)
    options = {"budget": make_budget(), "source": NoiselessSource(device, seed=3), "method": "dpsgd", **options}
    return model, PrivateStep(model, torch.optim.SGD(model.parameters(), 1.0), **options)


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    """Return random sequences and labels."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, TIMES, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (ROWS,), generator=generator)


def take(model: nn.Module, step: PrivateStep, rows_of_zeros: int = 0) -> torch.Tensor:
    """Take a step and return the sum of the clipped gradients, in units of C."""
    (x, y), before, rows = make_data(), flat_parameters(model), step.draw()
    x[rows[:rows_of_zeros]] = 0
    device = before.device
    step(x[rows].to(device), y[rows].to(device), rows)
    return (before - flat_parameters(model)).cpu() * step.budget.batch_size / step.clip


def bound(clip: float, rows: int) -> float:
    """Return by how much the norms of two sums may differ, over C."""
    size = 16 * WIDTH + 16 + 3 * 16 + 3
    grid = GradientGrid(clip, size)
    limits = grid.norm_limit - grid.with_products(SHAPES).norm_limit
    rounding = math.sqrt(size) + sum(shape.error(UNITS) for shape in SHAPES)
    return rows * (limits + 2 * NORM_ERROR * UNITS + rounding) / UNITS


def products_of(step: PrivateStep) -> set[str]:
    """Return the parameters whose gradients are outer products."""
    x, y = make_data()
    device = next(iter(step.parameters.values())).device
    found, _ = step.gradients.of_examples(x[:3].to(device), y[:3].to(device))
    return {name for name, part in found.items() if isinstance(part, OuterProducts)}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("clip", [0.01, 0.5, 100.0])
@pytest.mark.parametrize(
    "clipping", [None, Clipping(layers=True), Clipping(quantile=0.5)], ids=["one", "by layer", "quantile"]
)
def test_step_is_that_with_gradients_of_examples(clip, clipping, device):
    sums, norms = [], []
    for ghost in (True, False):
        model, step = make(device=device, clip=clip, clipping=clipping, ghost=ghost)
        assert products_of(step) == ({"first.weight", "last.weight"} if ghost else set())
        sums.append(take(model, step, rows_of_zeros=2))
        norms.append(step.norms.norms)
    assert float((sums[0] - sums[1]).norm()) <= bound(clip, ROWS) < 0.03
    assert float(sums[0].norm()) > 0.001
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


def test_step_in_bfloat16_learns():
    model, step = make(precision="bfloat16")
    model.float()
    x, y = make_data()
    losses = [float(step(x[rows].float(), y[rows], rows)) for rows in step]
    assert losses[-1] < losses[0]
    gradients, _ = step.gradients.of_examples(x[:3].float(), y[:3])
    assert gradients["first.weight"].inputs.dtype == torch.bfloat16


@pytest.mark.parametrize("micro", [1, 7])
def test_sum_does_not_depend_on_micro_batches(micro):
    sums = []
    for rows in (256, micro):
        model, step = make(clip=0.5, micro=rows)
        sums.append(take(model, step))
    assert float((sums[0] - sums[1]).abs().max()) <= 2 / UNITS  # a rounding error of float64 may move a factor


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_row_that_is_not_finite_counts_as_zero(bad):
    sums = []
    for ghost in (True, False):
        model, step = make(clip=0.5, ghost=ghost)
        (x, y), before, rows = make_data(), flat_parameters(model), step.draw()
        x[rows[1], 2, 3] = bad
        step.is_tested = True  # skip the validation of the model, which is not meant for such inputs
        step(x[rows], y[rows], rows)
        sums.append((before - flat_parameters(model)) * 20 / 0.5)
    assert float((sums[0] - sums[1]).norm()) <= bound(0.5, ROWS)


@pytest.mark.parametrize(("method", "share"), [("random", 0.0), ("gip", 0.5), ("datalens", 0.0)])
def test_other_methods_have_gradients_of_examples(method, share):
    budget = make_budget(share=share, index=10.0 if share else 0.0)
    model, step = make(method=method, budget=budget, keep=0.5, schedule="constant", group=20)
    assert not products_of(step)
    assert bool(take(model, step).any())


def test_resumed_steps_are_replayed_bit_for_bit(tmp_path):
    (x, y), ends = make_data(), []
    state = weights = None
    for _ in range(2):
        model, step = make(source=Source(), ledger=Ledger(tmp_path, (x, y)), micro=6)
        if state is not None:
            model.load_state_dict(weights)
            step.load_state_dict(state)
        for rows in step:
            step(x[rows], y[rows], rows)
            if state is None and step.steps_taken == 3:
                state, weights = step.state_dict(), {k: v.clone() for k, v in model.state_dict().items()}
        ends.append(flat_parameters(model))
    assert torch.equal(*ends)


def test_run_continues_as_it_began():
    """With another way to compute its gradients, a step that is repeated would release another sum."""
    state = make()[1].state_dict()
    with pytest.raises(PomonaError, match="ghost: False, not True"):
        make(ghost=False)[1].load_state_dict(state)
    with pytest.raises(PomonaError, match="ghost: True, not False"):
        make()[1].load_state_dict(make(ghost=False)[1].state_dict())
    del state["options"]["ghost"]
    step = make()[1]
    assert products_of(step)
    step.load_state_dict(state)
    assert not products_of(step)
    make()[1].load_state_dict(make()[1].state_dict())


@pytest.mark.parametrize("amount", [1e-4, 1e-5])
def test_rows_that_mix_are_refused(amount):
    model, step = make(amount=amount)
    with pytest.raises(PomonaError, match="'first.weight' of an example depends on its place"):
        take(model, step)


@pytest.mark.parametrize("factor", [0.0, 1.0, 1e4, 1e-30, 1e16])
@pytest.mark.parametrize("clip", [0.01, 100.0])
def test_added_row_changes_the_sum_by_at_most_the_norm(factor, clip):
    """At any place, with micro-batches that it moves other rows between."""
    x, y = make_data()
    x[7] *= factor
    for place in (0, 3, 19):
        rows = torch.cat([torch.arange(10, 29), torch.tensor([7])]).roll(place)
        sums = []
        for sample in (rows, rows[rows != 7]):
            model, step = make(clip=clip, micro=6)
            step.source.poisson = lambda *given, sample=sample: sample
            before, drawn = flat_parameters(model), step.draw()
            step(x[drawn], y[drawn], drawn)
            sums.append((before - flat_parameters(model)) * 20 / clip)
        assert float((sums[0] - sums[1]).norm()) <= 1 - 2**-10


def test_rounding_errors_of_other_rows_are_allowed():
    model, step = make(amount=1e-13)
    assert bool(take(model, step).any())


def test_large_data_sets_have_gradients_of_examples():
    budget = dataclasses.replace(make_budget(), rows=(1 << 21) + 1)
    assert not make(budget=budget)[1].gradients.products
    assert make()[1].gradients.products
