"""Checks of what surrounds private steps: parameters, processes, δ, copies, the ledger's limits, and augmentation."""

from __future__ import annotations

import copy
import random
import tempfile
from pathlib import Path

import pytest
import torch
from private_training import ROWS, make_budget, make_data, make_step

from pomona.errors import PomonaError
from pomona.privacy import Budget, Ledger, PrivateStep, Source
from pomona.privacy import budget as budget_module
from pomona.privacy.seeded_rows import SeededRows


def check_parameters() -> None:
    """A parameter group that is added after the step was made is refused."""
    model, step = make_step()
    model.register_parameter("extra", torch.nn.Parameter(torch.zeros(3)))
    step.optimizer.add_param_group({"params": [model.extra]})
    with pytest.raises(PomonaError):
        take_step(step)


def take_step(step: PrivateStep) -> None:
    """Take one step on the data of the tests."""
    x, y = make_data()
    rows = step.draw()
    step(x[rows], y[rows], rows)


def check_processes() -> None:
    """Processes whose weights or sums differ are refused."""
    for differs in ("weights", "sums"):
        _, step = make_step()
        step.processes.count, seen = 2, []

        def gather(found, digest, seen=seen, differs=differs):
            seen.append(digest)
            found[:] = [digest, "other" if differs == ("weights", "sums")[len(seen) - 1] else digest]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.distributed, "all_gather_object", gather)
            patch.setattr(torch.distributed, "all_reduce", lambda values: None)
            with pytest.raises(PomonaError, match=f"the {differs} of process 1 are not those of process 0"):
                take_step(step)
        assert len(set(seen)) == len(seen) == ("weights", "sums").index(differs) + 1
        assert all(seen)


def check_delta() -> None:
    """A δ that rounding errors of the accountant could exceed is refused."""
    for cache in (budget_module._solve_budget, budget_module.costs_at):
        cache.cache_clear()
    for delta in (5e-11, 1e-13):
        with pytest.raises(PomonaError, match="δ must be 1e-10 or more"):
            Budget.solve(epsilon=8.0, delta=delta, rows=ROWS, batch_size=20, steps=2)


def check_copies() -> None:
    """A copy, or an earlier state, never uses the noise of a step for another gradient."""
    model, step = make_step(source=Source())
    for one, name in ((step, "private step"), (step.source, "random source")):
        with pytest.raises(PomonaError, match=f"a {name} cannot be copied"):
            copy.deepcopy(one)
    state = step.state_dict()
    take_step(step)
    step.load_state_dict(state)
    with torch.no_grad():
        model[0].weight.add_(1)
    with pytest.raises(PomonaError):
        take_step(step)


def check_limits() -> None:
    """A run that has ended takes no step, a limit is not below what runs may reach, and a lost journal is noticed."""
    with tempfile.TemporaryDirectory() as name:
        ledger = Ledger(Path(name), "ab" * 16)
        ledger.admit("cd" * 16, make_budget(), secure=True)
        ledger.record("cd" * 16, 1, "weights", "sum")
        spent, planned = ledger.total(1e-5), ledger.total(1e-5, planned=True)
        with pytest.raises(PomonaError):
            ledger.set_limit((spent + planned) / 2, 1e-5)
        ledger.end("cd" * 16)
        with pytest.raises(PomonaError):
            ledger.record("cd" * 16, 2, "weights", "sum")
        with pytest.raises(PomonaError):
            ledger.record_skipped("cd" * 16, 2)
        ledger.path.unlink()
        with pytest.raises(PomonaError):
            Ledger(Path(name), "ab" * 16)


def check_augmentation() -> None:
    """The numbers of a row depend on the key, the step and the row, and on nothing else."""

    class Numbers(torch.utils.data.Dataset):
        def __getitem__(self, row: int) -> float:
            return float(torch.rand(())) + random.random()

    def draw(key: bytes, step: int, *rows: int) -> list[float]:
        torch.manual_seed(0)
        return SeededRows(Numbers(), key).__getitems__([(step, row) for row in rows])[1]

    keys = Source(seed=1).row_key(), Source(seed=2).row_key()
    assert draw(keys[0], 1, 4, 7, 9)[1:] == draw(keys[0], 1, 7, 9)
    assert len({*draw(keys[0], 1, 4, 7), *draw(keys[0], 2, 4, 7), *draw(keys[1], 1, 4, 7)}) == 6


GUARD_CHECKS = (
    check_parameters,
    check_processes,
    check_delta,
    check_copies,
    check_limits,
    check_augmentation,
)
