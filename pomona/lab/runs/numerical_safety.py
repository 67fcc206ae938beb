"""Numbers that are not finite: where they are, and what a run does about them.

A run stops at a loss that is NaN or infinite, and writes no checkpoint of such weights, so that the checkpoints in its
folder are always good. With `train.nonfinite = "skip"`, a step whose gradient is not finite is left out instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor, nn

from pomona.core.pruner import Pruner
from pomona.errors import PomonaError

if TYPE_CHECKING:
    from .run import Run


def refuse_loss(run: Run, loss: float, step: int) -> NoReturn:
    """Raise PomonaError for the loss of a step, with the layer that is not finite and the last good checkpoint."""
    raise PomonaError(
        f"the loss is {loss} at step {step} of {run.total_steps}: {describe_remedy(run)}; "
        f"{describe_place(run)}, and {describe_checkpoint(run)}."
    )


def refuse_weights(run: Run) -> None:
    """Raise PomonaError where the weights of a run are not finite, before they are saved."""
    if first_nonfinite(saved_tensors(run.model, run.pruner)) is not None:
        raise PomonaError(
            f"the weights are NaN or infinite after step {run.step} of {run.total_steps}: {describe_remedy(run)}; "
            f"{describe_place(run)}, and {describe_checkpoint(run)}."
        )


def describe_remedy(run: Run) -> str:
    """Return what can be done about numbers that are not finite."""
    return (
        f"lower optimizer.lr ({run.recipe.optimizer.lr:g}), or add rate.warmup or train.clip, and start again, "
        'or leave out such steps with train.nonfinite="skip"'
    )


def describe_place(run: Run) -> str:
    """Return which layer is not finite, in words."""
    found = first_nonfinite(saved_tensors(run.model, run.pruner)) or first_nonfinite(gradients(run.model))
    return "all weights and gradients are finite" if found is None else f"{found} is the first that is not finite"


def describe_checkpoint(run: Run) -> str:
    """Return where the last good checkpoint is, in words."""
    if run.saved_step is None:
        return "there is no checkpoint yet"
    return f"the last good checkpoint, of step {run.saved_step}, is in '{run.folder}'"


def first_nonfinite(tensors: Iterator[tuple[str, Tensor]]) -> str | None:
    """Return the name of the first tensor that holds NaN or infinity."""
    return next((n for n, t in tensors if t.is_floating_point() and not bool(torch.isfinite(t).all())), None)


def saved_tensors(model: nn.Module, pruner: Pruner | None) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights and buffers of a model and the latents of its pruner, by name."""
    yield from model.named_parameters()
    yield from model.named_buffers()
    for slot in [] if pruner is None else pruner.slots:
        if slot.latent is not None:
            yield f"the dense copy of {slot.name}", slot.latent


def gradients(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the gradients of a model, by name."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            yield f"the gradient of {name}", parameter.grad


def step_or_skip(run: Run) -> None:
    """Take the optimizer's step, or leave it out where that is asked for and a gradient is not finite.

    The gradients are those of all processes together, so that all of them leave out the same steps. A step that is left
    out is counted, so that the schedules of the learning rate and of the sparsity stay together.
    """
    found = first_nonfinite(gradients(run.model)) if run.options.nonfinite == "skip" else None
    if found is None:
        run.optimizer.step()
        return
    run.note(f"step {run.step + 1} of {run.total_steps} was left out: {found} is not finite.")
    run.optimizer.zero_grad()
    if run.pruner is not None:
        run.pruner.complete_step()
