"""What the outputs of a model depend on besides its input, and whether that has changed since."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from operator import attrgetter

import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks

from ..layers.base import PackedLayer
from .native_snapshot import Values, list_values, make_native_snapshot

SMALL_NUMBERS = 1 << 13  # of the largest vector whose values are compared
INTERNALS = frozenset(vars(nn.Module()))  # the attributes that every module has
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
read_version, read_shape = attrgetter("_version"), attrgetter("shape")


class ModelSnapshot:
    """The modules, attributes and tensors of a model at one time.

    `is_current` compares them with the model as it is, at every call: the objects and their names, the versions,
    addresses and strides of tensors, and the values of vectors, such as those of norms and biases. It does not see
    values that are written to larger tensors through `.data`, or to inference tensors, and nothing that is no attribute
    of a module: other objects, globals, closures.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = list(model.modules())
        hooked = [(m._forward_pre_hooks, m._forward_hooks) for m in self.modules[1:]]
        self.hooks = [*chain(*hooked), global_hooks._global_forward_pre_hooks, global_hooks._global_forward_hooks]
        parts = list(chain.from_iterable(map(find_parts, self.modules)))
        attributes = list(chain.from_iterable(map(find_attributes, self.modules)))
        # A tensor is equal to no other, whatever its values: where there may be any, the objects are compared.
        exact = [*parts, *(one for one in attributes if any(isinstance(value, Tensor) for value in list_values(one)))]
        known = set(map(id, exact))
        others = [one for one in attributes if id(one) not in known]
        self.exact, self.others = list(map(list_values, exact)), list(map(list_values, others))
        self.objects, self.values = list(chain.from_iterable(self.exact)), list(chain.from_iterable(self.others))
        self.ids = list(map(id, self.objects))
        self.dicts = [one for one in (*exact, *others) if isinstance(one, dict)]
        self.keys = list(chain.from_iterable(self.dicts))
        tensors = {id(t): t for t in self.objects if isinstance(t, Tensor) and t.layout == torch.strided}
        self.tensors = list(tensors.values())
        self.addresses = list(map(Tensor.data_ptr, self.tensors))
        self.shapes, self.strides = list(map(read_shape, self.tensors)), list(map(Tensor.stride, self.tensors))
        self.versioned = [t for t in self.tensors if not t.is_inference()]
        self.versions = sum(map(read_version, self.versioned))
        self.vectors = [t.detach() for t in self.tensors if is_small_vector(t)]
        self.numbers = self.read_numbers()
        self.native = make_native_snapshot(self.hooks, [*exact, *others], self.tensors, self.vectors)

    def is_current(self) -> bool:
        """Return whether the model is as it was: in nearly no time where all objects are the same ones."""
        if self.native is None:
            return self.is_equal()
        return self.native.matches() or (self.has_same_structure() and self.native.has_same_tensors())

    def is_equal(self) -> bool:
        """Return whether the model is as it was, without the native call."""
        return (
            not any(self.hooks)
            and self.has_same_structure()
            and sum(map(read_version, self.versioned)) == self.versions
            and list(map(Tensor.data_ptr, self.tensors)) == self.addresses
            and list(map(read_shape, self.tensors)) == self.shapes
            and list(map(Tensor.stride, self.tensors)) == self.strides
            and self.read_numbers() == self.numbers
        )

    def has_same_structure(self) -> bool:
        """Return whether modules have the same children and tensors, and the same attributes or equal ones."""
        try:
            same = list(map(id, chain.from_iterable(self.exact))) == self.ids
            same = same and list(chain.from_iterable(self.dicts)) == self.keys
            return same and list(chain.from_iterable(self.others)) == self.values
        except Exception:  # objects that cannot be compared, such as arrays
            return False

    def read_numbers(self) -> bytes:
        """Return the bytes of all small vectors; as numbers, a NaN would be equal to nothing."""
        return torch.cat(self.vectors).view(torch.uint8).numpy().tobytes() if self.vectors else b""


def is_observed_inside(model: nn.Module) -> bool:
    """Return whether hooks see the calls of a model's modules, or modules are in training mode."""
    modules = list(model.modules())
    seen = any(module._forward_pre_hooks or module._forward_hooks for module in modules[1:])
    seen = seen or bool(global_hooks._global_forward_pre_hooks or global_hooks._global_forward_hooks)
    return seen or any(module.training and not isinstance(module, PackedLayer) for module in modules)


def find_parts(module: nn.Module) -> Iterator[Values]:
    """Yield the dictionaries of the children, parameters and buffers of a module, of each kind that it has.

    Something of a new kind is either read by nothing or in the place of an attribute, except in a container.
    """
    for part in (module._modules, module._parameters, module._buffers):
        if part or (part is module._modules and isinstance(module, CONTAINERS)):
            yield part


def is_small_vector(tensor: Tensor) -> bool:
    """Return whether the values of a tensor are compared."""
    is_vector = tensor.ndim == 1 and tensor.is_floating_point() and tensor.device.type == "cpu"
    return is_vector and tensor.numel() <= SMALL_NUMBERS


def find_attributes(module: nn.Module) -> Iterator[Values]:
    """Yield the dictionary of a module's attributes, and the lists, dictionaries and sets among them.

    Those of packed layers are not what outputs depend on.
    """
    if isinstance(module, PackedLayer):
        return
    yield vars(module)
    own = [value for name, value in vars(module).items() if name not in INTERNALS]
    known: set[int] = set()
    while own:
        value = own.pop()
        if isinstance(value, (list, tuple, dict, set)) and id(value) not in known:
            known.add(id(value))
            own.extend(list_values(value))
            if not isinstance(value, tuple):
                yield value
