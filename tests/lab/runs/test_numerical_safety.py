"""Numbers that are not finite: a run stops and says where, keeps good checkpoints, and leaves out steps if asked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from run_helpers import DPF, digits_recipe
from torch import Tensor

from pomona.errors import PomonaError
from pomona.lab import Recipe
from pomona.lab.recipes.private_recipe import PrivateRecipe
from pomona.lab.runs import checkpoint
from pomona.lab.runs.distributed import DistributedContext
from pomona.lab.runs.run import Run
from pomona.lab.runs.strategy import TrainingStrategy

# The engine warns at a mask update; the run that stops says more.
pytestmark = pytest.mark.filterwarnings("ignore:.*holds NaN or inf at step:UserWarning")
RECIPES = Path(__file__).parents[3] / "recipes"


def open_run(folder: Path, bad_step: int, value: float = float("nan"), nonfinite: str = "stop") -> Run:
    """Return a run of 18 steps, 6 an epoch, whose gradient of the first layer is not finite at one step."""
    made = Recipe.load(digits_recipe(DPF).to_dict(), [f"train.nonfinite={nonfinite}"])
    run = Run(TrainingStrategy(made), folder, DistributedContext(), torch.device("cpu"), note=lambda text: None)
    run.open(resume=False)
    weight = next(run.model.parameters())

    def spoil(gradient: Tensor) -> Tensor:
        return gradient * value if run.step + 1 == bad_step else gradient

    weight.register_hook(spoil)
    return run


def train_and_close(run: Run) -> None:
    """Train a run to its end and close its files."""
    try:
        run.train(stop=lambda: False)
    finally:
        run.close()


def assert_saved_weights_are_finite(folder: Path, step: int) -> None:
    """Check the checkpoint of a folder."""
    state = checkpoint.load(folder)
    assert state["step"] == step
    assert all(torch.isfinite(t).all() for t in state["model"].values())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_gradient_stops_with_step_layer_and_last_good_checkpoint(tmp_path: Path, value: float) -> None:
    run = open_run(tmp_path / "run", bad_step=8, value=value)
    name = next(name for name, _ in run.model.named_parameters())
    with pytest.raises(PomonaError, match=r"the loss is nan at step 9 of 18: lower optimizer.lr") as stopped:
        train_and_close(run)
    assert f"{name} is the first that is not finite" in str(stopped.value)
    assert "the last good checkpoint, of step 6, is in" in str(stopped.value)
    assert_saved_weights_are_finite(tmp_path / "run", 6)


def test_no_checkpoint_is_written_of_weights_that_are_not_finite(tmp_path: Path) -> None:
    run = open_run(tmp_path / "run", bad_step=12)  # its own loss is finite, and a checkpoint is due after it
    with pytest.raises(PomonaError, match=r"the weights are NaN or infinite after step 12 of 18"):
        train_and_close(run)
    assert_saved_weights_are_finite(tmp_path / "run", 6)


def test_before_the_first_checkpoint_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(PomonaError, match="there is no checkpoint yet"):
        train_and_close(open_run(tmp_path / "run", bad_step=2))


def test_bad_steps_are_left_out_if_asked_for(tmp_path: Path) -> None:
    run, notes = open_run(tmp_path / "run", bad_step=7, nonfinite="skip"), []
    run.note = notes.append
    name, weight = next(run.model.named_parameters())
    before: dict[int, Tensor] = {}  # the weights that the steps begin with
    run.model.register_forward_pre_hook(lambda *_: before.update({run.step + 1: weight.detach().clone()}))
    train_and_close(run)
    assert f"step 7 of 18 was left out: the gradient of {name} is not finite." in notes
    assert torch.equal(before[7], before[8])
    assert not torch.equal(before[8], before[9])
    assert run.step == 18
    assert all(bool(torch.isfinite(p).all()) for p in run.model.parameters())
    assert run.pruner is not None
    assert run.pruner.step == 18  # the schedules of rate and sparsity stay together
    assert run.pruner.sparsity() == pytest.approx(run.pruner.method.final_sparsity, abs=1e-3)


def test_the_option_changes_a_fingerprint_only_where_it_is_used() -> None:
    made = digits_recipe(DPF)
    skipping = Recipe.load(made.to_dict(), ["train.nonfinite=skip"])
    assert "train.nonfinite" not in made.settings()
    assert skipping.fingerprint() != made.fingerprint()
    with pytest.raises(PomonaError, match="nonfinite"):
        Recipe.load(made.to_dict(), ["train.nonfinite=ignore"])


def test_private_training_leaves_out_no_steps() -> None:
    with pytest.raises(PomonaError, match="would tell about its examples"):
        PrivateRecipe.load(RECIPES / "private-digits.toml", ["train.nonfinite=skip"])
