"""What a run could give away beside its weights: buffers, torch's own random numbers, and files of the ledger."""

from __future__ import annotations

import math

import pytest
import torch
from private_training import make_budget, make_data, make_step
from torch import nn

from pomona.errors import PomonaError
from pomona.privacy import Ledger, PrivateStep, Source
from pomona.privacy.model_state import unchanged_state


class Counting(nn.Module):
    """A layer that adds up the examples it sees, from some call on."""

    def __init__(self, start: int = 0) -> None:
        super().__init__()
        self.linear, self.start, self.calls = nn.Linear(72, 5), start, 0
        self.register_buffer("seen", torch.zeros(72))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > self.start:
            self.seen = self.seen + x.detach().flatten(1).sum(0)
        return self.linear(x.flatten(1))


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(72, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(1)
        return self.linear(flat - flat.mean(0))


def step_of(model: nn.Module, *sizes: int) -> PrivateStep:
    """Return the private steps of a model, with samples of the first rows, of so many each."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = PrivateStep(model, optimizer, make_budget(), method="dpsgd", source=Source(seed=0))
    counts = iter(sizes)
    step.source.poisson = lambda rows, rate: torch.arange(next(counts))  # type: ignore[method-assign]
    return step


@pytest.mark.filterwarnings("ignore:.*one example at a time")
@pytest.mark.parametrize("start", [0, 4])
def test_buffer_that_examples_change_is_refused_in_any_step(start):
    """Also where the first sample is too small to test the model, or where the buffer changes later."""
    model, (x, y) = Counting(start), make_data()
    step = step_of(model, 1, 1, *[9] * 6)

    def train():
        for rows in step:
            step(x[rows].float(), y[rows])

    with pytest.raises(PomonaError, match="the buffer 'seen' (was|is) updated from the examples"):
        train()
    assert not bool(model.seen.any())  # and the examples are not left in it


def test_buffers_that_stay_as_they_are_pass():
    model = nn.BatchNorm1d(3).eval()
    model.running_mean.fill_(math.nan)
    with unchanged_state(model):
        model(torch.zeros(2, 3))
    with pytest.raises(PomonaError, match="'running_var' was updated"), unchanged_state(model):
        model.running_var.mul_(2)
    assert bool((model.running_var == 1).all())


def test_model_that_mixes_examples_is_refused_at_the_first_sample_of_two():
    x, y = make_data()
    step = step_of(Mixing(), 0, 1, 5, 5)
    for rows in step:
        if len(rows) < 2:
            step(x[rows].float(), y[rows])
            continue
        with pytest.raises(PomonaError, match="the output for one example depends on the others"):
            step(x[rows].float(), y[rows])
        break
    assert step.steps_taken == 2


class Crowded(nn.Linear):
    """A layer that mixes rows where there are many, as routers of experts with a capacity do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(1)
        return super().forward(flat - flat.mean(0) if len(flat) > 4 else flat)


def test_model_that_mixes_rows_of_a_whole_micro_batch_only_is_refused():
    (x, y), step = make_data(), step_of(Crowded(72, 5), 3)
    rows = step.draw()
    with pytest.raises(PomonaError, match="'weight' of an example depends on its place in the batch or on the other"):
        step(x[rows].float(), y[rows])


# ---- random numbers of the model


def test_random_numbers_of_the_model_are_not_those_of_a_seed_of_32_bits():
    """Attack 4 on dropout: a seed of a CPU's generator has 32 bits, so all masks that it can draw can be tried."""
    source, other = Source(seed=1), Source(seed=1)
    source.poisson(10, 0.5)
    other.poisson(10, 0.5)
    with source.seeded_torch():
        drawn = torch.rand(1000)
    seed = other.integer(64) >> 1  # what the attacker would find by trying
    assert torch.equal(  # as torch.manual_seed(seed) would have drawn them
        torch.rand(9, generator=torch.Generator().manual_seed(seed)),
        torch.rand(9, generator=torch.Generator().manual_seed(seed & 0xFFFFFFFF)),
    )
    assert not torch.equal(drawn[:9], torch.rand(9, generator=torch.Generator().manual_seed(seed)))


def test_random_numbers_of_the_model_are_replayed_and_uniform():
    draws = []
    for _ in range(2):
        source, before = Source(seed=4), torch.get_rng_state()
        source.poisson(10, 0.5)
        with source.seeded_torch():
            draws.append(torch.rand(20_000))
            normal = torch.randn(20_000)
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(*draws)
    assert float(draws[0].mean()) == pytest.approx(0.5, abs=0.01)
    assert float(draws[0].std()) == pytest.approx(math.sqrt(1 / 12), rel=0.02)
    assert float(normal.std()) == pytest.approx(1.0, rel=0.03)
    assert len(set(Source(seed=4).twister_state()[24:-40].tolist())) == 256


# ---- files


def test_ledger_is_for_its_owner_only(tmp_path):
    """Its digest of the data set tells who knows all other rows whether a row is there."""
    x, y = make_data()
    _, step = make_step(ledger=Ledger(tmp_path / "ledger", (x, y)), source=Source())
    rows = step.draw()
    step(x[rows], y[rows], rows)
    files = [path for path in (tmp_path / "ledger").iterdir() if path.is_file()]
    assert {path.suffix for path in files} == {".jsonl", ".head"}
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
