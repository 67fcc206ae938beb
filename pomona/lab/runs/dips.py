"""Dips of the accuracy while the masks of a run still change, and the note that explains one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pomona.core.method import Method, TrainingProgress
from pomona.methods._mask_holder import MaskHolder

from .run_evaluation import changed_recently

if TYPE_CHECKING:
    from .run import Run

SMALLEST_DIP = 10.0  # percentage points below the best accuracy of the stage so far


class DipWatcher:
    """Watches the accuracy of one stage and explains its first dip that a mask change has caused."""

    def __init__(self) -> None:
        self.best = 0.0
        self.is_explained = False

    def explain(self, run: Run, row: Mapping[str, Any]) -> str | None:
        """Return a note about the accuracy in an epoch's row, or None where there is nothing to explain."""
        accuracy = row.get("accuracy")
        if accuracy is None:
            return None
        fall, self.best = self.best - accuracy, max(self.best, accuracy)
        has_fixed_masks = not row["sparsity"] or isinstance(run.pruner, MaskHolder) or not changed_recently(run)
        if self.is_explained or fall < SMALLEST_DIP or has_fixed_masks:
            return None
        reestimated = row.get("accuracy_reestimated")
        if reestimated is not None and reestimated - accuracy < fall / 2:
            return None  # new batch-norm statistics do not help: the cause is another one
        self.is_explained = True
        return f"{describe_cause(accuracy, reestimated)} {describe_end(run)}"


def describe_cause(accuracy: float, reestimated: float | None) -> str:
    """Return the sentence about why the accuracy fell; `reestimated` is that with new batch-norm statistics, if any."""
    if reestimated is None:
        return f"accuracy fell to {accuracy:.2f} %: the masks changed a few steps before it was measured."
    return (
        f"accuracy fell to {accuracy:.2f} %: the masks still change, and the batch-norm statistics are those of "
        f"earlier masks. With new statistics it is {reestimated:.2f} %."
    )


def describe_end(run: Run) -> str:
    """Return the sentence about when the masks of this stage change for the last time."""
    assert run.pruner is not None
    last = last_update(run.pruner.method, run.stage_steps, run.steps_per_epoch)
    if last is None or last >= run.stage_steps:
        return "The masks change until the end of this stage."
    epoch = -(-(run.stage_start + last) // run.steps_per_epoch)
    return f"The masks are fixed from epoch {epoch} on."


def last_update(method: Method, steps: int, steps_per_epoch: int) -> int | None:
    """Return the step of a method's last mask update in a training of so many steps; None if it has one at each."""
    if method.weights == "score":
        return None
    due = (step for step in range(steps, 0, -1) if method.is_update_due(TrainingProgress(step, steps, steps_per_epoch)))
    return next(due, 0)
