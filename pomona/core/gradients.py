"""The gradients that a mask update reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from ..errors import PomonaError, require
from .slot import Slot
from .targets import unwrap


def compute_gradients(model: nn.Module, slots: Sequence[Slot], loss: Callable[[], Tensor]) -> dict[str, Tensor | None]:
    """Return the gradient of a loss at every slot, with batch norm and dropout in evaluation mode."""
    inner = unwrap(model)
    training = {module: module.training for module in inner.modules()}
    inner.eval()
    try:
        with torch.enable_grad():
            value = loss()
            require(
                isinstance(value, Tensor) and value.numel() == 1 and value.requires_grad,
                f"loss() must return the loss of a batch, a tensor of one number with a gradient, got {value!r}.",
            )
            gradients = torch.autograd.grad(value, [slot.parameter for slot in slots], allow_unused=True)
    finally:
        for module, mode in training.items():
            module.training = mode
    return dict(zip((slot.name for slot in slots), gradients, strict=True))


def require_gradients(gradients: Mapping[str, Tensor | None], method: str) -> dict[str, Tensor]:
    """Return the gradients, or raise PomonaError where one is missing or holds NaN or inf."""
    for name, gradient in gradients.items():
        if gradient is None:
            raise PomonaError(
                f"{name} has no gradient, so the loss does not use it, and {method} cannot rank it: "
                f"use exclude=['{name}']."
            )
        if not bool(torch.isfinite(gradient).all()):
            raise PomonaError(
                f"the gradient of {name} holds NaN or inf, and {method} cannot rank it: lower the "
                "learning rate, clip, or skip this step."
            )
    return dict(gradients)  # type: ignore[arg-type]
