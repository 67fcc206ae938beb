"""Attack 9: augmentation whose random numbers others know, or that a missing row moves, and its replay."""

# ruff: noqa: NPY002 -- augmentation of users draws from the global generators

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from private_training import NoiselessSource, UncheckedBudget, flat_parameters
from torch import nn
from torch.utils.data import Dataset, default_collate

from pomona.errors import PomonaError
from pomona.privacy import Ledger, PrivateStep, Source, poisson_loader
from pomona.privacy.seeded_rows import SeededRows

ROWS, WIDTH, GUESSES = 60, 8, 60
MOST_CORRECT = 48  # of 60: more have a probability of 2e-6 at the 1/2 of a secret key
BUDGET = UncheckedBudget(1.0, 1e-5, ROWS, ROWS, 1, 0.0, 3.0, 0.0, ((1, 1.0),))  # all rows, one step


class Flipped(Dataset):
    """Rows that are flipped, scaled and shifted at random, by three generators."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int):
        sign = 1.0 if torch.rand(()) < 0.5 else -1.0
        return self.x[row] * sign * random.choice((1.0, 1.5)) + np.random.choice((0.0, 0.1)), self.y[row]


def make_rows():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.randint(2, (ROWS,), generator=generator)


def make_step(source, budget=BUDGET, **options):
    model = nn.Linear(WIDTH, 2)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    return model, PrivateStep(model, optimizer, budget, method="dpsgd", source=source, **options)


def seed_all() -> None:
    """Seed the global generators, as a public script does."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def release_loaded(source, present: bool, workers: int = 0) -> torch.Tensor:
    """Return the sum that a step with a loader releases, with row 0 in the sample or not."""
    model, step = make_step(source)
    whole = source.sample_rows
    source.sample_rows = lambda *given: whole(*given)[0 if present else 1 :]
    seed_all()
    for inputs, targets in poisson_loader(step, Flipped(*make_rows()), num_workers=workers):
        step(inputs, targets)
    return flat_parameters(model) * ROWS


def release_plain(source, present: bool, is_seeded: bool = True) -> torch.Tensor:
    """Return the sum that a plain loop releases, with row 0 in the sample or not."""
    (x, y), (model, step) = make_rows(), make_step(source)
    source.poisson, draw = lambda *given: draw(*given)[0 if present else 1 :], source.poisson
    seed_all()
    for rows in step:
        if is_seeded:
            with step.randomness():
                flips = torch.rand(len(rows), 1) < 0.5
        else:
            flips = torch.rand(len(rows), 1) < 0.5
        step(torch.where(flips, -1.0, 1.0) * x[rows], y[rows], rows)
    return flat_parameters(model) * ROWS


def count_correct_guesses(release) -> int:
    """Return how often whoever knows the code and all other rows tells whether row 0 is there."""
    known = [release(NoiselessSource(seed=0), present) for present in (True, False)]
    middle, direction = (known[0] + known[1]) / 2, known[0] - known[1]
    guesses = [(release(Source(seed=k), k % 2 == 1) - middle) @ direction > 0 for k in range(1, GUESSES + 1)]
    return sum(bool(guess) == (k % 2 == 1) for k, guess in enumerate(guesses, 1))


def test_attack_on_known_random_numbers_succeeds_without_the_key():
    assert count_correct_guesses(lambda source, present: release_plain(source, present, is_seeded=False)) > 55


@pytest.mark.parametrize("release", [release_loaded, release_plain])
def test_attack_on_known_random_numbers_fails(release):
    assert count_correct_guesses(release) <= MOST_CORRECT


def test_missing_row_leaves_the_random_numbers_of_others():
    sums = [release_loaded(NoiselessSource(seed=5), present) for present in (True, False)]
    assert 0.5 < float((sums[0] - sums[1]).norm()) <= 1.0
    assert torch.equal(sums[0], release_loaded(NoiselessSource(seed=5), True, workers=2))
    assert not torch.equal(sums[0], release_loaded(NoiselessSource(seed=6), True))


def states():
    """Return the states of the global generators."""
    kind, keys, *others = np.random.get_state()
    return random.getstate(), (kind, keys.tolist(), *others), torch.get_rng_state().tolist()


def test_global_generators_are_restored():
    _, step = make_step(Source(seed=1))
    seed_all()
    before = states()
    SeededRows(Flipped(*make_rows()), b"key").__getitems__([(1, 0), (1, 7)])
    assert states() == before
    rows = step.draw()
    with step.randomness():
        random.random()
        np.random.rand()
        torch.rand(3)
        assert states() != before
    assert states() == before
    with pytest.raises(RuntimeError, match="stop"), step.randomness():
        raise RuntimeError("stop")
    assert states() == before
    step(*(part[rows] for part in make_rows()))
    with pytest.raises(PomonaError, match=r"call draw\(\) before randomness"):
        step.randomness()


def draw_everywhere():
    return [*torch.rand(4).tolist(), *np.random.rand(4).tolist(), *(random.random() for _ in range(4))]


def test_blocks_draw_other_numbers_by_key_step_call_and_process():
    seen = []
    for seed in (1, 1, 2):
        source = Source(seed=seed)
        for _ in range(2):
            source.poisson(10, 0.5)
            for rank in (0, 1, 0):
                with source.seeded_generators(rank):
                    seen.append(tuple(draw_everywhere()))
    assert seen[:6] == seen[6:12]
    assert len(set(seen)) == 12
    assert len({number for draw in seen for number in draw}) == 12 * 12
    one, other = Source(seed=1), Source(seed=1)
    with one.seeded_torch(0):
        first = torch.rand(5)
    with other.seeded_torch(1):
        assert not torch.equal(torch.rand(5), first)
    assert one.calls == other.calls  # so that both draw the same noise


@pytest.mark.parametrize("workers", [0, 2])
def test_collating_draws_secret_numbers_that_are_replayed(workers):
    def collate(examples):
        inputs, targets = default_collate(examples)
        return inputs + torch.rand(len(inputs), 1), targets

    seen = []
    for seed in (1, 1, 2):
        _, step = make_step(Source(seed=seed))
        seed_all()
        loader = poisson_loader(step, Flipped(*make_rows()), collate_fn=collate, num_workers=workers)
        seen.append(next(loader)[0])
        loader.close()
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], seen[2])


@pytest.mark.parametrize("with_ledger", [False, True])
def test_resumed_run_draws_the_augmentation_again(tmp_path, with_ledger):
    budget = UncheckedBudget(1.0, 1e-5, ROWS, ROWS // 2, 4, 0.0, 3.0, 0.0, ((4, 1.0),))
    ends, state, weights = [], None, None
    for is_resumed in (False, True):
        ledger = Ledger(tmp_path, make_rows()) if with_ledger else None
        model, step = make_step(Source(), budget, ledger=ledger)
        if is_resumed:
            model.load_state_dict(weights)
            step.load_state_dict(state)
        for inputs, targets in poisson_loader(step, Flipped(*make_rows())):
            if step.drawn == 2 and not is_resumed:
                state, weights = step.state_dict(), {key: value.clone() for key, value in model.state_dict().items()}
            step(inputs, targets)
        ends.append(flat_parameters(model))
    assert torch.equal(*ends)
