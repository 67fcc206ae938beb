"""Projected gradient steps towards an input at which two networks predict different classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .regions import InputSet, normalize_samples, sample_norms

FIRST_STEP, LAST_STEP_RATIO = 1.0, 0.02  # step sizes in radii of the region, which fall geometrically

# What the attack raises, from the margins of the class at the centre in the dense and in the pruned network. Above zero
# the first two have one network inside the class and the other outside, and the last two have one outside.
OBJECTIVES: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda dense, pruned: torch.minimum(dense, -pruned),
    lambda dense, pruned: torch.minimum(pruned, -dense),
    lambda dense, pruned: -pruned,
    lambda dense, pruned: -dense,
)


@dataclass(frozen=True)
class AttackResult:
    """What an attack found in the region of each example.

    `changed`: an input for which the two networks predict different classes. `left_class`: an input for which one of
    them predicts another class than the dense network at the centre.
    """

    changed: Tensor
    left_class: Tensor


@torch.enable_grad()
def attack_predictions(
    dense: nn.Module,
    pruned: nn.Module,
    inputs: InputSet,
    classes: Tensor,
    *,
    steps: int = 40,
    starts: int = 2,
    seed: int = 0,
) -> AttackResult:
    """Look for inputs in the region of each example that change its class, from the centre and random points."""
    count, shape = len(inputs), inputs.centre.shape[2:]
    low, high, centre = (part.flatten(0, 1) for part in (inputs.low, inputs.high, inputs.centre))
    repeats = len(OBJECTIVES) * max(starts, 1)
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand((repeats, count, *shape), generator=generator, dtype=torch.float64).to(centre.device)
    points = low + noise * (high - low)
    points[: len(OBJECTIVES)] = centre
    result = AttackResult(*(torch.zeros(count, dtype=torch.bool, device=centre.device) for _ in range(2)))
    for step in range(steps + 1 if bool((high > low).any()) else 1):
        points = project(points, inputs).requires_grad_()
        outputs = [network(points.flatten(0, 1)).view(repeats, count, -1) for network in (dense, pruned)]
        predicted = [output.argmax(2) for output in outputs]
        changed, left = predicted[0] != predicted[1], (predicted[0] != classes) | (predicted[1] != classes)
        result = AttackResult(result.changed | changed.any(0), result.left_class | left.any(0))
        if step == steps:
            break
        margins = [class_margins(output, classes) for output in outputs]
        objectives = [OBJECTIVES[i % len(OBJECTIVES)](margins[0][i], margins[1][i]) for i in range(repeats)]
        (gradient,) = torch.autograd.grad(torch.stack(objectives).sum(), points)
        size = FIRST_STEP * LAST_STEP_RATIO ** (step / max(1, steps - 1))
        points = points.detach() + size * ascent_direction(gradient, inputs)
    return result


@torch.enable_grad()
def worst_inputs(model: nn.Module, inputs: InputSet, classes: Tensor, steps: int = 5) -> Tensor:
    """Return for each example an input of its region where gradient steps have lowered the margin of its class."""
    points = project(inputs.centre.transpose(0, 1), inputs)
    if not bool((inputs.high > inputs.low).any()):
        return points[0]
    for step in range(steps):
        points = points.requires_grad_()
        margins = class_margins(model(points[0].to(parameter_type(model))).flatten(1), classes)
        (gradient,) = torch.autograd.grad(-margins.sum(), points)
        size = FIRST_STEP * LAST_STEP_RATIO ** (step / max(1, steps - 1))
        points = project(points.detach() + size * ascent_direction(gradient, inputs), inputs)
    return points[0]


def parameter_type(model: nn.Module) -> torch.dtype:
    """Return the dtype of a model's first parameter."""
    return next(model.parameters()).dtype


def class_margins(outputs: Tensor, classes: Tensor) -> Tensor:
    """Return the output of each example's class minus the largest other one."""
    own = classes[..., None] == torch.arange(outputs.shape[-1], device=outputs.device)
    return outputs.masked_fill(~own, -torch.inf).amax(-1) - outputs.masked_fill(own, -torch.inf).amax(-1)


def ascent_direction(gradient: Tensor, inputs: InputSet) -> Tensor:
    """Return a step along the gradient, as long as the region: to a corner of a box, to the border of a ball."""
    corner = (inputs.high - inputs.low).flatten(0, 1) / 2 * gradient.sign()
    radius = per_example(inputs.radius, gradient[0])
    border = radius * normalize_samples(gradient.flatten(0, 1)).view_as(gradient)
    return torch.where(radius.isinf(), corner, border.nan_to_num(0.0))


def project(points: Tensor, inputs: InputSet) -> Tensor:
    """Return the points moved into the region of their example."""
    low, high, centre = (part.flatten(0, 1) for part in (inputs.low, inputs.high, inputs.centre))
    moved = points.detach().clamp(low, high) - centre
    norms = sample_norms(moved.flatten(0, 1)).view(*moved.shape[:2], *[1] * (moved.ndim - 2))
    shrunk = (per_example(inputs.radius, points[0]) / norms.clamp(min=torch.finfo(norms.dtype).tiny)).clamp(max=1)
    return centre + moved * shrunk


def per_example(values: Tensor, like: Tensor) -> Tensor:
    """Return one number for each example, shaped to multiply a batch of them."""
    return values.view(-1, *[1] * (like.ndim - 1))
