"""The pruner's state in the optimizer's: loaded before `attach` it is continued, or refused in a sentence."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import TOTAL, copy_state, make_hard, make_soft, soft_and_hard
from engine_helpers import (
    Net,
    attach_to_network,
    compute_loss,
    count_global_hooks,
    count_hooks,
    is_identical,
    make_sgd,
    save_and_load,
    train,
)
from slow_cases import slow_unless
from torch.optim import SGD, Adam, Optimizer

import pomona as pm

STOP = 18
Loaded = tuple[Net, Optimizer]


def save(model: Net, optimizer: Optimizer) -> dict[str, Any]:
    """Return what a training script saves that knows nothing of the pruner, as it is after loading the file."""
    return save_and_load({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


def load(file: dict[str, Any], make: Callable[[Net], Optimizer] = make_sgd) -> Loaded:
    """Return a new network and its optimizer with a saved state; no pruner is attached."""
    model = Net(seed=7).double()
    optimizer = make(model)
    model.load_state_dict(file["model"])
    optimizer.load_state_dict(file["optimizer"])
    return model, optimizer


def train_and_load(pruner: pm.Pruner, stop: int = STOP) -> Loaded:
    """Return a network and an optimizer with the saved state of a run that was stopped."""
    model, optimizer, _ = attach_to_network(pruner)
    train(model, optimizer, range(stop))
    return load(save(model, optimizer))


# ---- continued


@soft_and_hard
@pytest.mark.parametrize("pattern", ["unstructured", "filter(norm=1)"])
@pytest.mark.parametrize("schedule", ["constant", "cubic"])
def test_a_state_loaded_before_attach_is_continued(kind: Callable[..., pm.Pruner], pattern: str, schedule: str) -> None:
    options = {"pattern": pattern, "schedule": schedule, "sparsity": 0.5, "allocation": "uniform"}
    model, optimizer, pruner = attach_to_network(kind(**options))
    train(model, optimizer, range(STOP))
    other, other_optimizer = load(save(model, optimizer))
    resumed = kind(**options).attach(other, other_optimizer, total_steps=TOTAL)
    assert resumed.step == STOP
    assert is_identical(copy_state(resumed), copy_state(pruner))
    assert "pomona" not in other_optimizer.param_groups[0]
    train(model, optimizer, range(STOP, TOTAL))
    train(other, other_optimizer, range(STOP, TOTAL))
    assert is_identical(copy_state(resumed), copy_state(pruner))
    assert is_identical(other_optimizer.state_dict(), optimizer.state_dict())


def test_a_loaded_state_survives_a_script_that_loads_and_saves_again() -> None:
    model, optimizer, pruner = attach_to_network(make_soft())
    train(model, optimizer, range(STOP))
    other, other_optimizer = load(save(*load(save(model, optimizer))))
    resumed = make_soft().attach(other, other_optimizer, total_steps=TOTAL)
    assert is_identical(copy_state(resumed), copy_state(pruner))


def test_the_state_takes_its_space_in_a_file_once(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 2))
    optimizer = SGD(model.parameters(), lr=0.1)
    make_soft().attach(model, optimizer, total_steps=TOTAL)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    latent = 4 * 300 * 300
    assert latent < (tmp_path / "optimizer.pt").stat().st_size < 1.5 * latent


def test_several_optimizers_are_continued_whichever_carries_the_state() -> None:
    def make(model: Net) -> list[Optimizer]:
        hidden = [*model.hidden.parameters(), *model.head.parameters()]
        rest = [*model.conv1.parameters(), *model.norm.parameters(), *model.conv2.parameters()]
        return [SGD(hidden, lr=0.05, momentum=0.9), Adam(rest, lr=0.01)]

    def step(model: Net, optimizers: list[Optimizer], steps: range) -> None:
        for number in steps:
            model.zero_grad()
            compute_loss(model, number).backward()
            for optimizer in optimizers:
                optimizer.step()

    model = Net().double()
    optimizers = make(model)
    pruner = make_soft(schedule="cubic").attach(model, optimizers, total_steps=TOTAL)
    step(model, optimizers, range(STOP))
    file = save_and_load([model.state_dict(), *(optimizer.state_dict() for optimizer in optimizers)])
    step(model, optimizers, range(STOP, TOTAL))

    other = Net(seed=7).double()
    other_optimizers = make(other)
    for one, state in zip((other, *other_optimizers), file, strict=True):
        one.load_state_dict(state)
    resumed = make_soft(schedule="cubic").attach(other, other_optimizers, total_steps=TOTAL)
    step(other, other_optimizers, range(STOP, TOTAL))
    assert is_identical(copy_state(resumed), copy_state(pruner))

    other_optimizers = make(other)  # the order in which they step has changed
    for optimizer, state in zip(other_optimizers, file[1:], strict=True):
        optimizer.load_state_dict(state)
    other.load_state_dict(file[0])
    assert make_soft(schedule="cubic").attach(other, other_optimizers[::-1], total_steps=TOTAL).step == STOP


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_pruners_of_one_optimizer_are_continued_in_any_order(order: tuple[int, int]) -> None:
    def make_pruners() -> tuple[pm.Pruner, pm.Pruner]:
        return make_soft(include="conv*"), make_hard(include="hidden", sparsity=0.5)

    model = Net().double()
    optimizer = make_sgd(model)
    pruners = [pruner.attach(model, optimizer, total_steps=TOTAL) for pruner in make_pruners()]
    train(model, optimizer, range(STOP))
    other, other_optimizer = load(save(model, optimizer))
    resumed = make_pruners()
    for index in order:
        resumed[index].attach(other, other_optimizer, total_steps=TOTAL)
    train(model, optimizer, range(STOP, TOTAL))
    train(other, other_optimizer, range(STOP, TOTAL))
    for one, two in zip(pruners, resumed, strict=True):
        assert is_identical(copy_state(one), copy_state(two))
    assert is_identical(other_optimizer.state_dict(), optimizer.state_dict())


def test_a_continued_run_calls_no_loss_at_attach() -> None:
    model = Net().double()
    optimizer = make_sgd(model)
    pruner = pm.SNIP(sparsity=0.5).attach(model, optimizer, loss=lambda: compute_loss(model, 0))
    train(model, optimizer, range(3))
    other, other_optimizer = load(save(model, optimizer))
    resumed = pm.SNIP(sparsity=0.5).attach(other, other_optimizer, loss=lambda: pytest.fail("the loss was computed"))
    train(model, optimizer, range(3, 6))
    train(other, other_optimizer, range(3, 6))
    assert is_identical(copy_state(resumed), copy_state(pruner))


def test_loading_after_attach_leaves_nothing_in_the_parameter_groups() -> None:
    model, optimizer, pruner = attach_to_network(make_soft())
    train(model, optimizer, range(STOP))
    file = save(model, optimizer)
    optimizer.load_state_dict(file["optimizer"])
    assert "pomona" not in optimizer.param_groups[0]
    del file["optimizer"]["pomona"]  # some tools keep only the keys they know
    train(model, optimizer, range(STOP, 20))
    optimizer.load_state_dict(file["optimizer"])
    assert pruner.step == STOP


# ---- the first step


def test_a_state_that_no_pruner_takes_gives_a_warning_at_the_first_step() -> None:
    model, optimizer = train_and_load(make_soft(include="conv*"))
    make_soft(include="hidden").attach(model, optimizer, total_steps=TOTAL)
    with pytest.warns(UserWarning, match=r"of a pruner of conv1\.weight, conv2\.weight, and no pruner has taken it"):
        train(model, optimizer, [0])


@soft_and_hard
def test_pruned_weights_without_a_state_give_one_warning(kind: Callable[..., pm.Pruner]) -> None:
    model, _ = train_and_load(kind())
    optimizer = make_sgd(model)
    kind().attach(model, optimizer, total_steps=TOTAL)
    with pytest.warns(UserWarning, match=r"80% of the weights were zero at attach.*begins at step 0") as caught:
        train(model, optimizer, range(3))
    assert len(caught) == 1


def test_weights_that_may_be_zero_give_no_warning() -> None:
    model, _ = train_and_load(make_soft())
    for pruner in (make_soft(), pm.Finetune()):
        other = copy.deepcopy(model)
        optimizer = make_sgd(other)
        pruner.attach(other, optimizer, total_steps=TOTAL, resume=False)
        train(other, optimizer, [0])  # a warning would fail the test
    zeros = Net().double()
    torch.nn.init.zeros_(zeros.conv2.weight)  # as in a residual branch that starts at zero
    attach = make_soft(allocation="uniform").attach(zeros, make_sgd(zeros), total_steps=TOTAL)
    train(zeros, attach.optimizers[0], [0])


# ---- refused


def truncate(model: Net, optimizer: Optimizer) -> None:
    """Remove the masks from the state that waits in an optimizer."""
    del optimizer.param_groups[0]["pomona"]["masks"]


def move_weights(model: Net, optimizer: Optimizer) -> None:
    """Train without a pruner, as a script does that forgot it."""
    train(model, optimizer, [STOP])


REFUSED: dict[str, tuple[Any, dict[str, Any], Any, str]] = {
    "method": (make_hard, {}, None, "name = dpf, this pruner has incremental"),
    "option": (lambda: make_soft(sparsity=0.7), {}, None, "sparsity = 0.8, this pruner has 0.7"),
    "length": (make_soft, {"total_steps": 50}, None, "total_steps=40, attach has 50"),
    "epochs": (make_soft, {"steps_per_epoch": 10}, None, "steps_per_epoch=None, attach has 10"),
    "weights": (make_soft, {}, lambda model, _: model.load_state_dict(Net().double().state_dict()), "load its weights"),
    "moved": (make_soft, {}, move_weights, r"conv1\.weight is not the one that the state was saved with"),
    "damaged": (make_soft, {}, truncate, "has no 'masks'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_state_that_does_not_fit_is_refused_with_the_way_out(case: str) -> None:
    make, options, edit, message = REFUSED[case]
    model, optimizer = train_and_load(make_soft())
    if edit is not None:
        edit(model, optimizer)
    hooks = count_hooks(model, optimizer), count_global_hooks()
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    pruner = make()
    with pytest.raises(pm.PomonaError, match=rf"{message}.*attach\(…, resume=False\)"):
        pruner.attach(model, optimizer, **{"total_steps": TOTAL, **options})
    assert is_identical((model.state_dict(), optimizer.state_dict()), before)
    assert (count_hooks(model, optimizer), count_global_hooks()) == hooks

    pruner.attach(model, optimizer, resume=False, **{"total_steps": TOTAL, **options})
    assert pruner.step == 0
    assert "pomona" not in optimizer.param_groups[0]
    train(model, optimizer, [0])  # a warning would fail the test


def test_hard_weights_that_are_not_the_saved_ones_are_refused() -> None:
    model, optimizer = train_and_load(make_hard())
    model.load_state_dict(Net().double().state_dict())
    with pytest.raises(pm.PomonaError, match="load its weights too"):
        make_hard().attach(model, optimizer, total_steps=TOTAL)


def test_one_pruner_for_the_layers_of_two_is_refused() -> None:
    model = Net().double()
    optimizer = make_sgd(model)
    for name in ("conv*", "hidden"):
        make_soft(include=name).attach(model, optimizer, total_steps=TOTAL)
    other, other_optimizer = load(save(model, optimizer))
    with pytest.raises(pm.PomonaError, match="states of 2 pruners"):
        make_soft().attach(other, other_optimizer, total_steps=TOTAL)


def test_a_state_at_its_last_step_is_continued_with_a_warning_and_finished() -> None:
    model, optimizer, pruner = attach_to_network(make_soft())
    train(model, optimizer, range(TOTAL))
    other, other_optimizer = load(save(model, optimizer))
    with pytest.warns(UserWarning, match=r"step 40 of 40, for which only finish\(\) is left") as caught:
        resumed = make_soft().attach(other, other_optimizer, total_steps=TOTAL)
    assert caught[0].filename == __file__
    pruner.finish()
    resumed.finish()
    assert is_identical(other.state_dict(), model.state_dict())


def test_a_new_phase_follows_a_finished_pruner() -> None:
    model, optimizer, pruner = attach_to_network(make_soft(), total=8)
    train(model, optimizer, range(8))
    pruner.finish()
    file = save(model, optimizer)
    assert "pomona" not in file["optimizer"]["param_groups"][0]
    for one, one_optimizer in ((model, optimizer), load(file)):
        held = pm.Finetune(include="*.weight").attach(one, one_optimizer, total_steps=8)
        train(one, one_optimizer, range(8))
        assert held.step == 8


# ---- processes


SCRIPT = """
import os, signal, sys
sys.path[:0] = {folders}
import torch
from engine_helpers import Net, make_sgd, train
from test_invariants import TOTAL, frequent_pruner, make_model

torch.set_num_threads(1)
name, stop, file, out = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
model = make_model(name, seed=7 if os.path.exists(file) else 0)
optimizer, start = make_sgd(model), 0
if os.path.exists(file):
    saved = torch.load(file, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    start = saved["step"]
pruner = frequent_pruner(name, schedule="cubic").attach(model, optimizer, total_steps=TOTAL)
assert pruner.step == start
for step in range(start, TOTAL):
    train(model, optimizer, [step])
    if step + 1 == stop:
        torch.save({{"step": stop, "model": model.state_dict(), "optimizer": optimizer.state_dict()}}, file)
    if step == stop + 1:
        os.kill(os.getpid(), signal.SIGKILL)
pruner.finish()
torch.save({{"model": model.state_dict(), "masks": pruner.masks(), "optimizer": optimizer.state_dict()}}, out)
"""


@pytest.mark.parametrize("name", slow_unless(["dpf"], ["dpf", "iterand", "rigl", "sfp"]))
def test_a_killed_process_is_continued_by_another(name: str, tmp_path: Path) -> None:
    here = Path(__file__).parent
    script = SCRIPT.format(folders=[str(here), str(here.parent)])
    environment = {**os.environ, "PYTHONPATH": str(Path(pm.__file__).parents[1]), "OMP_NUM_THREADS": "1"}

    def run(stop: int, file: str, out: str) -> int:
        arguments = [name, str(stop), str(tmp_path / file), str(tmp_path / out)]
        return subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script, *arguments], env=environment, timeout=300, check=False
        ).returncode

    assert run(-9, "none", "whole.pt") == 0
    assert run(STOP, "saved.pt", "never.pt") == -signal.SIGKILL
    assert run(-9, "saved.pt", "resumed.pt") == 0
    whole, resumed = (torch.load(tmp_path / file, weights_only=True) for file in ("whole.pt", "resumed.pt"))
    assert is_identical(resumed, whole)
