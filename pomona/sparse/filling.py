"""Checks and protection of a network that a file fills: tensors of one dtype each, and no change by a refused file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import PomonaError

# Containers of a module that layers change in place: modules, parameters, buffers, hooks, and the weights of an LSTM.
CONTAINERS: tuple[type[Any], ...] = (dict, list, set)


@contextmanager
def unchanged_on_failure(model: nn.Module) -> Iterator[None]:
    """Give a model the modules, tensors and modes back that it had, where the block fails.

    No tensor is copied: what is put in a model takes the place of a tensor, and does not write to it.
    """
    before = [(module, read_attributes(module)) for module in model.modules()]
    try:
        yield
    except BaseException:
        for module, attributes in before:
            write_attributes(module, attributes)
        raise


def read_attributes(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Return the attributes of a module by name, each with a shallow copy of its content where it is a container."""
    return {
        name: (value, next((kind(value) for kind in CONTAINERS if isinstance(value, kind)), None))
        for name, value in vars(module).items()
    }


def write_attributes(module: nn.Module, attributes: Mapping[str, tuple[Any, Any]]) -> None:
    """Give a module exactly these attributes, and each container the content that it had."""
    for value, content in attributes.values():
        if isinstance(value, list):
            value[:] = content
        elif isinstance(value, dict | set):
            value.clear()
            value.update(content)
    vars(module).clear()
    vars(module).update({name: value for name, (value, _) in attributes.items()})


def require_matching_dtypes(path: Any, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Raise PomonaError for a tensor that cannot run with the others of its file.

    A file may hold all tensors of one dtype of the model in another floating-point one, as of `model.half()`, but not
    some of them. The statistics and weights of batch norms may be float32 beside any. The parts of packed weights are
    not among the model's tensors: their formats check them, and their products take vectors of any dtype.
    """
    chosen: dict[torch.dtype, tuple[str, torch.dtype]] = {}  # by dtype of the model, the first tensor of the file
    for name, own in model.state_dict().items():
        if not isinstance(own, Tensor) or name not in tensors:
            continue
        stored = tensors[name].dtype
        if own.dtype.is_floating_point and stored.is_floating_point:
            if stored == torch.float32 and is_of_batch_norm(model, name):
                continue
            first, expected = chosen.setdefault(own.dtype, (name, stored))
        else:
            first, expected = name, own.dtype
        if stored != expected:
            other = f"{first} as {expected}, where the model has both as {own.dtype}"
            raise PomonaError(
                f"'{path}' has {name} as {stored} and {other}: give a model whose tensors have the dtypes of the file, "
                "pm.load(path, model)."
                if first != name
                else f"'{path}' has {name} as {stored} where the model has {own.dtype}: save the model again."
            )


def is_of_batch_norm(model: nn.Module, name: str) -> bool:
    """Return whether a tensor is of a batch norm, which computes images of 16 bits with float32 statistics."""
    return isinstance(model.get_submodule(name.rpartition(".")[0]), _BatchNorm)
