"""Gradients: those that a mask update reads, and those that the optimizer sees in place of backward's."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..errors import PomonaError, require
from ..sharding import is_sharded, local_part, reshard, whole_reads
from .slot import Slot
from .targets import parameter_kind, unwrap


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
            gradients = differentiate(value, inner, [slot.parameter for slot in slots])
    finally:
        for module, mode in training.items():
            module.training = mode
    return dict(zip((slot.name for slot in slots), gradients, strict=True))


def differentiate(loss: Tensor, model: nn.Module, parameters: Sequence[nn.Parameter]) -> Sequence[Tensor | None]:
    """Return the gradients of a loss at some parameters, and leave `.grad` of all as it is.

    FSDP2 reduces gradients in hooks of a backward pass, so that a pass must be made where weights are sharded.
    """
    if not any(map(is_sharded, parameters)):
        return torch.autograd.grad(loss, list(parameters), allow_unused=True)
    before = {parameter: parameter.grad for parameter in model.parameters()}
    for parameter in before:
        parameter.grad = None
    loss.backward()
    reshard(model)
    gradients = [parameter.grad for parameter in parameters]
    for parameter, gradient in before.items():
        parameter.grad = gradient
    return gradients


def require_gradients(gradients: Mapping[str, Tensor | None], method: str) -> dict[str, Tensor]:
    """Return the gradients, or raise PomonaError where one is missing or holds NaN or inf."""
    for name, gradient in gradients.items():
        if gradient is None:
            raise PomonaError(
                f"{name} has no gradient, so the loss does not use it, and {method} cannot rank it: "
                f"use exclude=['{name}']."
            )
        if gradient.numel() and not is_finite(gradient):
            raise PomonaError(
                f"the gradient of {name} holds NaN or inf, and {method} cannot rank it: lower the "
                "learning rate, clip, or skip this step."
            )
    return dict(gradients)  # type: ignore[arg-type]


def is_finite(gradient: Tensor) -> bool:
    """Return whether a gradient holds neither NaN nor inf."""
    if is_sharded(gradient):
        with whole_reads():
            return bool(torch.isfinite(gradient).all())
    return all(bool(value.isfinite()) for value in gradient.aminmax())  # NaN is the smallest and the largest value


class GradientPolicy(Protocol):
    """Who decides whether an update needs a step's dense gradient: the pruner."""

    def wants_gradient(self) -> bool:
        """Return whether the coming step is replaced by an update that sees its unmasked gradient."""


def make_mask_hook(slot: Slot, policy: GradientPolicy) -> Callable[[Tensor], None]:
    """Return a post-accumulate-grad hook that masks, unless an update is about to read the dense gradient."""
    # Weak, because Python cannot see a cycle through a parameter's hooks and would never free it.
    slot_ref, policy_ref = weakref.ref(slot), weakref.ref(policy)

    @torch.no_grad()
    def mask(_: Tensor) -> None:
        hooked, deciding = slot_ref(), policy_ref()
        if hooked is not None and deciding is not None and not deciding.wants_gradient():
            hooked.mask_gradient()

    return torch.compiler.disable(mask)


def find_untrained_biases(slots: Sequence[Slot]) -> list[tuple[nn.Module, str]]:
    """Return the places of biases beside random weights, which are not trained."""
    modules = dict.fromkeys(slot.target.module for slot in slots if slot.weight is not None)
    return [
        (module, leaf)
        for module in modules
        for leaf, parameter in module._parameters.items()
        if parameter is not None and parameter_kind(module, leaf, parameter) == "bias"
    ]


def drop_gradients(places: Sequence[tuple[nn.Module, str]]) -> dict[nn.Parameter, Tensor]:
    """Remove the gradients of the parameters at some places, and return them."""
    found = (module._parameters.get(leaf) for module, leaf in places)
    dropped = {parameter: parameter.grad for parameter in found if parameter is not None and parameter.grad is not None}
    for parameter in dropped:
        parameter.grad = None
    return dropped


def replace_gradients(
    slots: Sequence[Slot], untrained_biases: Sequence[tuple[nn.Module, str]]
) -> dict[nn.Parameter, Tensor]:
    """Replace the gradients that the optimizer must not see, and return those that backward left.

    Scores get g ⊙ w with g taken at the sparse weights, and biases of random weights get none. Where the method
    transforms gradients, they are only saved: `FlatBuffers.transform_gradients` replaces them.
    """
    scored = [slot for slot in slots if slot.weight is not None]
    transforms = bool(slots) and slots[0].method.transforms_gradient
    transformed = [slot for slot in slots if slot.leader is None] if transforms else []
    replaced = [slot.parameter for slot in (*scored, *transformed)]
    saved = {p: p.grad for p in replaced if p.grad is not None} | drop_gradients(untrained_biases)
    if scored:
        weights: Any = [slot.weight for slot in scored]
        products = torch._foreach_mul([local_part(saved[slot.parameter]) for slot in scored], weights)
        for slot, gradient in zip(scored, products, strict=True):
            slot.parameter.grad = slot.place(gradient)
    return saved


def restore_gradients(saved: dict[nn.Parameter, Tensor]) -> None:
    """Put saved gradients back, and forget them."""
    for parameter, gradient in saved.items():
        parameter.grad = gradient
    saved.clear()
