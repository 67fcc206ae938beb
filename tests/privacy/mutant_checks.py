"""Checks that private steps pass and deliberate mutants of them fail: each raises where a step is wrong."""

from __future__ import annotations

import dataclasses
import math
import tempfile
import warnings
from collections import Counter
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
from torch import nn

from pomona.errors import PomonaError
from pomona.privacy import (
    Budget,
    Clipping,
    Ledger,
    Pair,
    PrivateStep,
    Ramp,
    Source,
)
from pomona.privacy import budget as budget_module
from pomona.privacy.accounting import compose_steps
from pomona.privacy.clipping import UNITS, GradientGrid
from pomona.privacy.ledger import find_ledgers

CLIP = 0.5


def check_sum() -> None:
    """A step without noise is the mean of gradients that are masked, clipped and rounded one by one."""
    for micro in (256, 7):
        model, step = make_step(noiseless=True, clip=CLIP, micro=micro)
        (x, y), before = make_data(), flat_parameters(model)
        rows = step.draw()
        x[rows[1]] = math.nan
        step.is_tested = True  # skip the validation of the model, which is not meant for NaN inputs
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
            source.key, source.secure = Source(seed=3).key, False  # two sums with the same noise, on purpose
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
            step(x[rows], y[rows], rows)
        assert seen == [[k] for k in range(1, 9)]
        other, resumed = make()
        resumed.load_state_dict(state)
        for rows in resumed:
            resumed(x[rows], y[rows], rows)
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


def check_layers() -> None:
    """An example whose gradient is large in every layer adds integers of a joint norm of at most 2²¹."""
    for clipping in (Clipping(layers=True), Clipping(layers={"0": 1.0, "1": 3.0, "4": 0.5})):
        _, step = make_step(clip=CLIP, clipping=clipping)
        parts = [torch.full((1, size), 9.0) for size in step.sizes]
        total = torch.zeros(step.size, dtype=torch.int64)
        step.norms.grid(0).add_clipped(parts, total)
        assert 0.98 * UNITS**2 < sum(int(value) ** 2 for value in total.tolist()) <= UNITS**2


def check_counts() -> None:
    """Counts change by at most 2²¹ with a row, have their noise in every step, and gradient and counts cost σ."""
    ends = []
    for source in (NoiselessSource(seed=3), *(Source(seed=seed) for seed in range(60))):
        _, step = make_step(clipping=Clipping(quantile=0.5, rate=1.0, count_noise=2.0), source=source)
        source.key = Source(seed=3).key if isinstance(source, NoiselessSource) else source.key
        x, y = make_data()
        step.source.poisson = lambda rows, rate: torch.arange(20)
        seen = []
        draw = source.discrete_gaussian

        def watch(count, variance, draw=draw, seen=seen):
            seen.append((count, math.sqrt(variance) / UNITS))
            return draw(count, variance)

        source.discrete_gaussian = watch
        rows = step.draw()
        step(x[rows], y[rows])
        ends.append(math.log(step.norms.norms[0]))
        assert sum(count for count, _ in seen) == step.size + 1
        noise = dict(seen)
        assert noise[step.size] ** -2 + noise[1] ** -2 <= step.budget.sigma**-2 * (1 + 1e-9)
        one = torch.zeros(step.size + 1, dtype=torch.int64)
        step.norms.grid(0).add_clipped([torch.full((1, size), 1e-9) for size in step.sizes], one)
        assert UNITS / 2 < int(one[-1]) <= UNITS
    # The noise of 2 examples moves the share of 20 by a tenth, and the norm by as much.
    assert float(torch.tensor(ends[1:]).std()) == pytest.approx(0.1, rel=0.3)


def check_ramps() -> None:
    """The noise of each step is that which the accountant composed, and a budget that left a step out is refused."""
    target = {"epsilon": 4.0, "delta": 1e-5, "rows": ROWS, "batch_size": 20, "steps": 8}
    for cache in (budget_module._solve_budget, budget_module.costs_at):
        cache.cache_clear()
    budget = Budget.solve(**target, noise_ramp=Ramp(2.0, 0.5, 4))
    _, step = make_step(budget=budget)
    seen, draw = [], step.source.discrete_gaussian
    step.source.discrete_gaussian = lambda count, variance: seen.append(variance) or draw(count, variance)
    x, y = make_data()
    for rows in step:
        step(x[rows], y[rows])
    sigmas = [math.sqrt(variance) / UNITS for variance in seen]
    cost = next(compose_steps(Counter(Pair(0.5, round(sigma, 9)) for sigma in sigmas)))
    assert cost.get_epsilon_for_delta(1e-5) == pytest.approx(4.0, rel=2e-3)
    with pytest.raises(PomonaError):
        dataclasses.replace(Budget.solve(**target), noise_ramp=Ramp(0.5, 0.5)).verify()


def check_replay() -> None:
    """A resumed run has the norms that the first one had at the same step."""
    (x, y), norms = make_data(), []
    clipping = Clipping(layers=True, quantile=0.5)
    model, step = make_step(clipping=clipping)
    for rows in step:
        step(x[rows], y[rows])
        norms.append(list(step.norms.norms))
        if step.steps_taken == 3:
            state, weights = step.state_dict(), {k: v.clone() for k, v in model.state_dict().items()}
    assert len({tuple(each) for each in norms}) == 8
    other, resumed = make_step(clipping=clipping)
    other.load_state_dict(weights)
    resumed.load_state_dict(state)
    assert resumed.norms.norms == norms[2]
    for rows in resumed:
        resumed(x[rows], y[rows])
    assert resumed.norms.norms == norms[-1]
    assert torch.equal(flat_parameters(model), flat_parameters(other))


def check_model_randomness() -> None:
    """The numbers that a model draws are not those of a seed."""
    source, copy = Source(seed=2), Source(seed=2)
    with source.seeded_torch():
        drawn = torch.rand(20)
    tried = torch.Generator().manual_seed(copy.integer(64) >> 1)
    assert not torch.equal(drawn, torch.rand(20, generator=tried))


class Writing(nn.Linear):
    """A layer that writes a row into a parameter or a buffer."""

    def __init__(self, name: str) -> None:
        super().__init__(72, 72)
        self.register_buffer("kept", torch.zeros(72))
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        getattr(self, self.name).data.copy_(x.detach().flatten(1).mean(0))
        return super().forward(x.flatten(1))


class Mixing(nn.Linear):
    """A layer whose rows see a part of the sum of all rows, in training mode, after some passes."""

    def __init__(self, part: float, start: int = 0) -> None:
        super().__init__(72, 5)
        self.part, self.start, self.calls = part, start, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = x.flatten(1)
        is_mixed = self.training and len(x) > 2 and self.calls > self.start
        return super().forward(x + self.part * x.sum(0) if is_mixed else x)


def train(model: nn.Module, sample: int, dtype: torch.dtype = torch.float32) -> None:
    """Take private steps whose samples are the first rows."""
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    step = PrivateStep(model, optimizer, make_budget(), method="dpsgd", source=Source(seed=3))
    step.source.poisson = lambda rows, rate: torch.arange(sample)
    x, y = make_data()
    for rows in step:
        step(x[rows].to(dtype), y[rows])


def check_forward() -> None:
    """What a forward pass writes into a parameter or a buffer is restored and refused, also for a single row."""
    for name in ("bias", "kept"):
        model = Writing(name)
        before = {key: value.clone() for key, value in model.state_dict().items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one example at a time
            with pytest.raises(PomonaError):
                train(model, 1)
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def check_rows() -> None:
    """Rows that mix a little, in training mode, later than in the first steps or by a bit of 16 are refused."""
    torch.manual_seed(0)
    for part, start, dtype in (
        (1.0, 0, torch.float32),
        (1e-5, 0, torch.float32),
        (1.0, 5, torch.float32),
        (1e-9, 0, torch.bfloat16),
    ):
        with pytest.raises(PomonaError):
            train(Mixing(part, start).to(dtype), 20, dtype)


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
    check_layers,
    check_counts,
    check_ramps,
    check_replay,
    check_model_randomness,
    check_forward,
    check_rows,
)
