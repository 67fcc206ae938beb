"""Deliberate mutants of private steps, each a mistake that was made somewhere, and the check that catches each one.

A check raises where a step is wrong. All checks pass on the code as it is; a mutant must fail its check.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from private_training import (
    ROWS,
    NoiselessSource,
    assert_close_on_grid,
    flat_parameters,
    gradients_one_by_one,
    make_budget,
    make_data,
    make_network,
    make_step,
    mean_of_clipped,
)

from pomona.errors import PomonaError
from pomona.privacy import Budget, IndexMechanism, Ledger, PrivateStep, Source, example_gradients
from pomona.privacy.clipping import UNITS, GradientGrid
from pomona.privacy.ledger import find_ledgers
from pomona.privacy.optimizer_guard import OptimizerGuard
from pomona.privacy.step_journal import StepJournal

CLIP = 0.5

# ---- checks


def check_sum() -> None:
    """A step without noise is the mean of gradients that are masked, clipped and rounded one by one."""
    for micro in (256, 7):
        model, step = make_step(noiseless=True, clip=CLIP, micro=micro)
        (x, y), before = make_data(), flat_parameters(model)
        rows = step.draw()
        x[rows[1]] = math.nan
        step.steps_taken = 1  # skip the validation of the model, which is not meant for NaN inputs
        gradients = gradients_one_by_one(model, x[rows], y[rows])
        gradients[1] = 0
        assert float(gradients.norm(dim=1).max()) > 1.5 * CLIP
        step(x[rows], y[rows])
        norms = gradients.norm(dim=1, keepdim=True).clamp(min=1e-30)
        expected = mean_of_clipped(gradients + 0 * norms, CLIP)
        assert_close_on_grid(before - flat_parameters(model), torch.nan_to_num(expected), CLIP)


def check_sensitivity() -> None:
    """One row changes the integer sum by a norm of at most 2²¹, also where every coordinate is rounded up."""
    size = 10_000
    grid = GradientGrid(CLIP, size)
    for length, spread in ((1.0, 0.0), (50.0, 0.0), (1.0, 1.0), (0.9 * CLIP, 1.0)):
        row = torch.full((1, size), 1.0) + spread * torch.randn(1, size, generator=torch.Generator().manual_seed(1))
        parts = list((length * row / row.norm()).split([4000, 6000], dim=1))
        total = torch.zeros(size, dtype=torch.int64)
        grid.add_clipped(parts, total)
        assert 0 < sum(int(value) ** 2 for value in total.tolist()) <= UNITS**2


def check_noise() -> None:
    """The released sum has noise of σ C in every coordinate, once a step, new in each, and of other coordinates too."""
    budget = make_budget(steps=12, sigma=3.0)
    for micro in (256, 6):
        noises = []
        for source in (Source(), NoiselessSource(seed=3)):
            _, step = make_step(budget=budget, clip=2.0, micro=micro, lr=0.0)
            step.source = step.journal.source = source
            step.source.key = Source(seed=3).key
            totals = []
            step.grid.__class__.to_gradient, original = record_totals(totals), step.grid.__class__.to_gradient
            try:
                x, y = make_data()
                for rows in step:
                    step(x[rows], y[rows])
            finally:
                step.grid.__class__.to_gradient = original
            noises.append(torch.stack(totals).double())
        noise = (noises[0] - noises[1]) / UNITS
        assert float(noise.std()) == pytest.approx(3.0, rel=0.05)
        assert float(noise.mean(1).abs().max()) < 5 * 3.0 / math.sqrt(noise.shape[1])
        assert float((torch.corrcoef(noise) - torch.eye(12)).abs().max()) < 0.3
        assert float(noise[:, 1:].sub(noise[:, :-1]).std()) == pytest.approx(3.0 * math.sqrt(2), rel=0.1)


def record_totals(totals: list) -> Callable:
    """Return a method that keeps the noisy sums and releases nothing."""

    def to_gradient(self, total, divisor):
        totals.append(total.clone())
        return total.double() * 0

    return to_gradient


def check_sampling() -> None:
    """Each row is drawn independently with probability q, anew in each step."""
    rows, rate, steps = 200, 0.2, 400
    source = Source(seed=5)
    drawn = torch.zeros(steps, rows)
    for step in range(steps):
        drawn[step, source.poisson(rows, rate)] = 1
    sizes = drawn.sum(1)
    assert float(sizes.mean()) == pytest.approx(rows * rate, rel=0.05)
    assert float(sizes.var()) == pytest.approx(rows * rate * (1 - rate), rel=0.35)
    assert float((drawn.mean(0) - rate).abs().max()) < 5 * math.sqrt(rate * (1 - rate) / steps)
    together = torch.corrcoef(drawn.T) - torch.eye(rows)
    assert float(together.abs().max()) < 0.35
    assert not torch.equal(drawn[0], drawn[1])


def check_charges() -> None:
    """Every draw is charged, whatever is done with it, and no row is used that was not drawn."""
    x, y = make_data()
    _, step = make_step(budget=make_budget(steps=5, batch=1), data=(x, y))
    drawn = 0
    for rows in step:
        drawn += 1
        assert step.spent >= step.budget.spent(drawn)
        assert drawn <= 5
        if drawn == 2:
            step(x[rows], y[rows])
            with pytest.raises(PomonaError):
                step(x[rows], y[rows])
        if drawn == 3:
            other = torch.tensor([k for k in range(ROWS) if k not in rows.tolist()][: len(rows) or 1])
            with pytest.raises(PomonaError):
                step(x[other], y[other])
    assert drawn == 5 == step.source.step
    with pytest.raises(PomonaError):
        step.draw()


def check_ledger() -> None:
    """A step is on the disk before its release, and a resumed run replays it under the same name."""
    with tempfile.TemporaryDirectory() as name:
        folder, (x, y) = Path(name), make_data()

        def make():
            model = make_network()
            ledger = Ledger(folder, (x, y))
            optimizer = torch.optim.SGD(model.parameters(), 1.0)
            return model, PrivateStep(model, optimizer, make_budget(), method="dpsgd", ledger=ledger)

        model, step = make()
        seen = []
        step.optimizer.register_step_pre_hook(lambda *_: seen.append(count_steps(folder)))
        state = None
        for rows in step:
            state = state or step.state_dict()
            step(x[rows], y[rows])
        assert seen == [[k] for k in range(1, 9)]
        other, resumed = make()
        resumed.load_state_dict(state)
        for rows in resumed:
            resumed(x[rows], y[rows])
        assert count_steps(folder) == [8]
        assert torch.equal(flat_parameters(model), flat_parameters(other))


def count_steps(folder: Path) -> list[int]:
    """Return the steps of each run in a folder's ledger."""
    return [account.steps for ledger in find_ledgers(folder) for account in ledger.accounts.values()]


def check_guards() -> None:
    """Foreign steps of the optimizer and budgets without noise are refused."""
    _, step = make_step()
    with pytest.raises(PomonaError):
        step.optimizer.step()
    model = make_network()
    budget = Budget(2.0, 1e-5, ROWS, 20, 8, 0.0, 1e-9, 0.0, ((8, 2.0),))
    with pytest.raises(PomonaError):
        PrivateStep(model, torch.optim.SGD(model.parameters(), 1.0), budget, method="dpsgd")


def check_secrets() -> None:
    """Keys are new and not torch's, and what is published holds none."""
    keys = []
    for _ in range(2):
        torch.manual_seed(0)
        keys.append(Source().key)
    assert keys[0] != keys[1]
    assert len(set(keys[0])) > 8
    _, step = make_step()
    assert step.source.key.hex() not in repr(step.facts()) + repr(step.source)


def check_indices() -> None:
    """The index draws cost what the budget says."""
    _, step = make_step(budget=make_budget(share=0.5, index=3.0), method="gip", keep=0.3, group=50)
    assert step.mechanism(7).cost(step.size) <= 3.0 * (1 + 1e-9)


CHECKS = (
    check_sum,
    check_sensitivity,
    check_noise,
    check_sampling,
    check_charges,
    check_ledger,
    check_guards,
    check_secrets,
    check_indices,
)


@pytest.mark.parametrize("check", CHECKS)
def test_checks_pass_on_the_code_as_it_is(check):
    check()


# ---- mutants


def of_result(change: Callable) -> Callable:
    """Return a maker of a mutant that changes what a function returns."""
    return lambda original: lambda *given, **named: change(original(*given, **named))


def divide_by_the_sample_size(original):
    def to_gradient(self, total, divisor):
        return original(self, total, divisor * 1.07)

    return to_gradient


def clip_the_sum(original):
    def add_clipped(self, gradients, total):
        summed = [torch.nan_to_num(part).sum(0, keepdim=True) for part in gradients]
        original(self, summed, total)

    return add_clipped


def clip_each_part_alone(original):
    def add_clipped(self, gradients, total):
        start = 0
        for part in gradients:
            original(self, [part], total[start : start + part.shape[1]])
            start += part.shape[1]

    return add_clipped


def scale_without_norm(original):
    return lambda self, squares: torch.where(squares.isfinite(), UNITS / self.clip, 0.0).float()


def keep_lost_rows(original):
    return lambda self, squares: original(self, torch.nan_to_num(squares, nan=1.0))


def add_noise_to_each_part(original):
    def add_clipped(self, gradients, total):
        original(self, gradients, total)
        total += Source().discrete_gaussian(len(total), self.noise_variance(3.0))

    return add_clipped


def one_number_for_all(original):
    return lambda self, count, variance: original(self, 1, variance).expand(count).clone()


def same_noise_each_step(original):
    def draw(self, count, variance):
        self.step, step = 1, self.step
        self.calls.clear()
        try:
            return original(self, count, variance)
        finally:
            self.step = step

    return draw


def shuffle_in_place_of_poisson(original):
    def poisson(self, rows, rate):
        self.step += 1
        return torch.randperm(rows)[: int(rate * rows)].sort().values

    return poisson


def draw_the_same_rows(original):
    def poisson(self, rows, rate):
        self.step = 0
        return original(self, rows, rate)

    return poisson


def draw_pairs(original):
    def poisson(self, rows, rate):
        pairs = original(self, rows // 2, rate)
        return torch.cat([2 * pairs, 2 * pairs + 1]).sort().values

    return poisson


def accept_any_rows(original):
    return lambda self, inputs, targets, rows: (inputs, targets)


def charge_after_the_release(original):
    def call(self, *given, **named):
        entered = []
        self.journal.enter_release = lambda *arguments: entered.append(arguments)
        result = original(self, *given, **named)
        del self.journal.enter_release
        self.journal.enter_release(*entered[0])
        return result

    return call


def charge_taken_steps_only(original):
    def draw(self):
        self.drawn = self.steps_taken
        return original(self)

    return draw


def skip_empty_samples(original):
    def draw(self):
        rows = original(self)
        while not len(rows):
            self.drawn -= 1
            rows = original(self)
        return rows

    return draw


def allow_the_same_rows_twice(original):
    def call(self, *given, **named):
        pending = self.pending
        result = original(self, *given, **named)
        self.pending = pending
        return result

    return call


def resume_with_a_new_key(original):
    def load(self, state):
        original(self, state)
        self.key = Source().key

    return load


def draw_keys_from_torch(original):
    def init(self, device="cpu", *, seed=None):
        original(self, device, seed=seed)
        if seed is None:
            self.key = bytes(torch.randint(256, (32,)).tolist())

    return init


def publish_the_key(original):
    return lambda self: original(self) | {"source": self.source.state_dict()}


MUTANTS = [
    # object, name, mutant, the check that catches it
    (GradientGrid, "to_gradient", divide_by_the_sample_size, check_sum),
    (GradientGrid, "to_gradient", of_result(lambda gradient: gradient * 2), check_sum),
    (GradientGrid, "add_clipped", clip_the_sum, check_sum),
    (GradientGrid, "add_clipped", clip_each_part_alone, check_sensitivity),
    (GradientGrid, "scale_rows", scale_without_norm, check_sensitivity),
    (GradientGrid, "scale_rows", of_result(lambda scales: scales * 2), check_sensitivity),
    (GradientGrid, "scale_rows", keep_lost_rows, check_sum),
    (GradientGrid, "norm_limit", lambda original: property(lambda self: UNITS), check_sensitivity),
    (GradientGrid, "norm_limit", lambda original: property(lambda self: 2.0 * UNITS), check_sensitivity),
    (
        GradientGrid,
        "noise_variance",
        lambda original: lambda self, sigma: original(self, sigma / self.clip),
        check_noise,
    ),
    (GradientGrid, "noise_variance", lambda original: lambda self, sigma: int(sigma * UNITS**2), check_noise),
    (GradientGrid, "noise_variance", lambda original: lambda self, sigma: original(self, sigma / 20), check_noise),
    (GradientGrid, "add_clipped", add_noise_to_each_part, check_noise),
    (Source, "discrete_gaussian", of_result(lambda noise: noise * 0), check_noise),
    (Source, "discrete_gaussian", of_result(lambda noise: noise.abs()), check_noise),
    (Source, "discrete_gaussian", one_number_for_all, check_noise),
    (Source, "discrete_gaussian", same_noise_each_step, check_noise),
    (Source, "poisson", shuffle_in_place_of_poisson, check_sampling),
    (Source, "poisson", draw_the_same_rows, check_sampling),
    (Source, "poisson", draw_pairs, check_sampling),
    (Source, "poisson", lambda original: lambda self, rows, rate: original(self, rows, 2 * rate), check_sampling),
    (example_gradients, "pad_rows", lambda original: lambda batch, count: batch_of_two(batch), check_sum),
    (PrivateStep, "check_examples", accept_any_rows, check_charges),
    (PrivateStep, "__call__", allow_the_same_rows_twice, check_charges),
    (PrivateStep, "draw", charge_taken_steps_only, check_charges),
    (PrivateStep, "draw", skip_empty_samples, check_charges),
    (PrivateStep, "__call__", charge_after_the_release, check_ledger),
    (StepJournal, "enter_release", lambda original: lambda *given: None, check_ledger),
    (Source, "load_state_dict", resume_with_a_new_key, check_ledger),
    (OptimizerGuard, "refuse_foreign_step", lambda original: lambda *given: None, check_guards),
    (Budget, "verify", lambda original: lambda self: None, check_guards),
    (Source, "__init__", draw_keys_from_torch, check_secrets),
    (PrivateStep, "facts", publish_the_key, check_secrets),
    (
        PrivateStep,
        "mechanism",
        lambda original: lambda self, step=None: IndexMechanism(0.3, theta=math.inf, group=50),
        check_indices,
    ),
    (PrivateStep, "mechanism", lambda original: lambda self, step=None: doubled(original(self, step)), check_indices),
]


def batch_of_two(batch):
    """Return a batch whose rows are all the first one."""
    return tuple(part[:1].expand_as(part) for part in batch)


def doubled(mechanism: IndexMechanism) -> IndexMechanism:
    """Return a mechanism with twice the ε."""
    return IndexMechanism(mechanism.keep, epsilon=2 * mechanism.epsilon, group=mechanism.group)


@pytest.mark.parametrize(
    ("place", "name", "mutate", "check"),
    MUTANTS,
    ids=[f"{k}-{mutant[0].__name__.split('.')[-1]}.{mutant[1]}" for k, mutant in enumerate(MUTANTS)],
)
def test_mutants_are_caught(place, name, mutate, check, monkeypatch):
    pytest.importorskip("dp_accounting")
    monkeypatch.setattr(place, name, mutate(getattr(place, name)))
    with pytest.raises((AssertionError, PomonaError, pytest.fail.Exception)):
        check()
