"""Attack 5: a private run that is killed at any moment and resumed takes the same steps, and pays for each once."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from pomona.errors import PomonaError
from pomona.lab import train
from pomona.lab.recipes.private_recipe import PrivateRecipe
from pomona.lab.runs import checkpoint, durable_files
from pomona.lab.runs.private import PrivateStrategy
from pomona.privacy import EPSILON_RAMP, Budget, PrivateStep, Ramp, journal, random_source, step_journal
from pomona.privacy.ledger import find_ledgers

STEPS = 12
BUDGET = Budget(8.0, 1e-5, 1347, 400, STEPS, 0.0, 1.0, 0.0, ((STEPS, 8.0),))
SETTINGS = {
    "name": "killed",
    "data": "digits",
    "model": "mlp(hidden=[8])",
    "rate": "constant",
    "optimizer": {"lr": 1.0, "momentum": 0.9, "weight_decay": 0.0},
    "train": {"epochs": 3, "batch_size": 400, "device": "cpu", "checkpoint_steps": 3},
    "private": {"method": "dpsgd", "epsilon": 8.0, "average": 0.9, "budget": BUDGET.to_dict()},
}
RECIPE = PrivateRecipe.load(SETTINGS)

# Norms that adapt, for each layer, noise that changes, and index draws: all of it is replayed.
RAMPS = {"noise_ramp": Ramp(1.2, 0.9, 4), "index_ramp": EPSILON_RAMP}
RAMPED_BUDGET = dataclasses.replace(BUDGET, share=0.01, sigma=1.1, index=0.02, **RAMPS)
CHANGING = {
    "method": "gip",
    "keep": 0.5,
    "share": 0.01,
    "clipping": {"layers": True, "quantile": 0.5},
    **{key: ramp.to_dict() for key, ramp in RAMPS.items()},
    "budget": RAMPED_BUDGET.to_dict(),
}
CHANGING_RECIPE = PrivateRecipe.load(SETTINGS | {"private": SETTINGS["private"] | CHANGING})

# Where a run is killed: the object, and the name of the function before or after which it happens.
MOMENTS = (
    (PrivateStep, "draw", "after"),  # between draw and journal
    (PrivateStep, "sum_clipped_gradients", "after"),
    (journal, "format_line", "after"),  # before the line is written
    (journal.os, "fsync", "before"),  # after it is written, before it is safe; also within checkpoints
    (step_journal.StepJournal, "enter_release", "after"),  # journalled, before the optimizer's step
    (torch.optim.SGD, "step", "after"),
    (durable_files, "write_file", "after"),
    (checkpoint, "_make_current", "before"),
    (checkpoint, "_make_current", "after"),
    (checkpoint, "_remove", "before"),
)


def kill_at(place: object, name: str, when: str, count: int) -> None:
    """Let this process kill itself at the count-th call of a function."""
    original, calls = getattr(place, name), Counter()

    def call(*arguments, **options):
        calls[name] += 1
        if when == "before" and calls[name] == count:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*arguments, **options)
        if when == "after" and calls[name] == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(place, name, call)


def run_in_fork(recipe, folder, moment, count) -> bool:
    """Train or resume in a forked process that is killed at a moment; return whether it was."""
    child = os.fork()
    if not child:
        code = 1
        try:
            if moment is not None:
                kill_at(*moment, count)
            resume = (folder / "run" / "recipe.toml").exists()
            train(PrivateStrategy(recipe, ledger=folder / "ledger"), folder / "run", resume=resume)
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), status
    return status != 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(
    ("recipe", "kills"), [(RECIPE, 10), pytest.param(CHANGING_RECIPE, 100, marks=pytest.mark.slow)]
)
def test_killed_runs_take_the_same_steps_and_pay_once(tmp_path, monkeypatch, recipe, kills):
    monkeypatch.setattr(random_source, "os", SimpleNamespace(urandom=lambda count: bytes(range(count))))
    whole = train(PrivateStrategy(recipe, ledger=tmp_path / "ledger"), tmp_path / "run")
    expected = load_file(tmp_path / "run" / "model.safetensors")
    generator, killed, runs = random.Random(kills), Counter(), 0
    while killed.total() < kills:
        folder, runs = tmp_path / str(runs), runs + 1
        folder.mkdir()
        alive = True
        while alive and killed.total() < kills + runs:
            moment = generator.choice(MOMENTS)
            if run_in_fork(recipe, folder, moment, generator.randint(1, 9)):
                killed[moment[1:]] += 1
            else:
                alive = False
        if alive:
            assert not run_in_fork(recipe, folder, None, 0)
        found = load_file(folder / "run" / "model.safetensors")
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        (ledger,) = find_ledgers(folder / "ledger")
        (account,) = ledger.accounts.values()
        assert sorted(account.released) == list(range(1, STEPS + 1))
        assert not account.skipped
        lines = (folder / "ledger" / f"{ledger.digest}.jsonl").read_bytes().splitlines()
        assert len(lines) == 2 + STEPS  # the data set, the run, and each step once
    assert whole["epsilon"] == 8.0
    assert len(killed) > (3 if kills < 50 else 8)


def test_copy_with_fresh_noise_after_a_kill_is_noticed(tmp_path):
    """A broken copy that draws a new key when it resumes spends twice, and the ledger says so."""
    strategy = PrivateStrategy(RECIPE, ledger=tmp_path / "ledger")
    train(strategy, tmp_path / "run")
    train(PrivateStrategy(RECIPE, ledger=tmp_path / "ledger"), tmp_path / "again")
    (ledger,) = find_ledgers(tmp_path / "ledger")
    assert [account.steps for account in ledger.accounts.values()] == [STEPS, STEPS]
    ledger.set_limit(1.01 * ledger.total(1e-5), 1e-5)
    with pytest.raises(PomonaError, match="digits. would cost"):
        train(PrivateStrategy(RECIPE, ledger=tmp_path / "ledger"), tmp_path / "more")
