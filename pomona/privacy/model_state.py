"""The parameters and buffers of a model, which a forward pass must leave as they are, and copies to test it with.

What a forward pass writes into the model is released with it, without clipping and noise. The values are compared, and
not the versions that autograd counts: writing to `parameter.data` does not change those.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from torch._C import _functorch
from torch.utils import _pytree as pytree

from ..errors import require

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by their bytes


class ModelState:
    """The parameters and buffers of a model at one time: which there are, also without a value, and their values."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules = [(m, dict(m._parameters), dict(m._buffers), dict(m._modules)) for m in model.modules()]
        self.tensors = named_tensors(model)
        self.values = {id(tensor): tensor.detach().clone() for tensor in self.tensors.values()}

    def changed(self) -> list[str]:
        """Return the names of parameters and buffers that are new, missing, replaced or have another value."""
        now, found, names, flags = named_tensors(self.model), [], [], []
        for name in {**self.tensors, **now}:
            tensor, value = now.get(name), self.values.get(id(self.tensors.get(name)))
            if tensor is None or value is None or tensor is not self.tensors[name] or not is_alike(tensor, value):
                found.append(name)
            else:
                names.append(name)
                flags.append((bits(tensor) == bits(value)).all())
        for device in {flag.device for flag in flags}:  # one transfer for all tensors of a GPU
            own = [k for k, flag in enumerate(flags) if flag.device == device]
            equal = torch.stack([flags[k] for k in own]).tolist()
            found += [names[k] for k, is_equal in zip(own, equal, strict=True) if not is_equal]
        return sorted(found)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the parameters and buffers and their values."""
        for module, parameters, buffers, modules in self.modules:
            module._parameters.clear()
            module._parameters.update(parameters)
            module._buffers.clear()
            module._buffers.update(buffers)
            module._modules.clear()
            module._modules.update(modules)
        for tensor in self.tensors.values():
            value = self.values[id(tensor)]
            if is_alike(tensor, value):
                tensor.detach().copy_(value)
            else:
                tensor.data = value


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a model by name, those that are shared under each of their names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def is_alike(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same shape, dtype and device."""
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device


def bits(tensor: Tensor) -> Tensor:
    """Return a tensor as integers of the same bits, so that a NaN equals itself and 0 does not equal −0."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.view(INTEGERS[tensor.element_size()]) if tensor.is_floating_point() else tensor


@contextmanager
def unchanged_state(model: nn.Module) -> Iterator[None]:
    """Restore parameters and buffers of a model, and raise PomonaError if the block has changed one, without noise.

    They are restored after an error too. Gradients that the block has left are cleared: an optimizer would apply those
    of frozen parameters.
    """
    before = ModelState(model)
    without_gradient = [parameter for parameter in model.parameters() if parameter.grad is None]
    changed: list[str] = []
    try:
        yield
    finally:
        changed = before.changed()
        if changed:
            before.restore()
        for parameter in without_gradient:
            parameter.grad = None
    refuse_changes(before, changed)


def refuse_changes(before: ModelState, changed: list[str]) -> None:
    """Raise PomonaError if there are names of parameters or buffers that a forward pass has changed."""
    name = changed[0] if changed else ""
    is_parameter = isinstance(before.tensors.get(name), nn.Parameter)
    remedy = "initialize it before the private step, without the data" if is_parameter else "remove that layer"
    require(
        not changed,
        f"the {'parameter' if is_parameter else 'buffer'} '{name}' was updated from the examples in a forward pass, "
        f"without noise: {remedy}, or freeze it with eval().",
    )


def copy_model(model: nn.Module) -> nn.Module:
    """Return a copy of a model, also of one that keeps results of its last forward pass as attributes."""
    memo: dict[int, object] = {}
    for module in model.modules():
        for value in pytree.tree_leaves(vars(module)):
            if not isinstance(value, Tensor):
                continue
            plain = value
            while _functorch.is_functorch_wrapped_tensor(plain):  # left by a pass that was batched over examples
                plain = _functorch.get_unwrapped(plain)
            if plain is not value or not value.is_leaf:
                memo[id(value)] = plain.detach().clone()
    return copy.deepcopy(model, memo)


@contextmanager
def repeatable_random_numbers(device: torch.device) -> Iterator[Callable[[], None]]:
    """Yield a function after which models draw the same random numbers as at the beginning, and call it at the end."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def repeat() -> None:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])  # noqa: NPY002
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, device)

    try:
        yield repeat
    finally:
        repeat()
