"""Count of the multiply-accumulate operations (MACs) that a forward pass performs, by the module that performs them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor, nn
from torch.backends import mha
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

RECURRENT = (nn.RNNBase, nn.RNNCellBase)
# Products of consecutive rows with one matrix each, as of tokens with their experts.
GROUPED = ("aten::_grouped_mm", "transformers::grouped_mm_fallback")
# Products whose first argument is a third term that is added.
WITH_ADDEND = (torch.ops.aten.addmm, torch.ops.aten.baddbmm)


class Source(IntEnum):
    """What the values of a tensor depend on; a result depends on the highest source of its arguments."""

    CONSTANT = 0  # neither parameters nor inputs: buffers, positions
    PARAMETER = 1
    INPUT = 2


@dataclass
class Macs:
    """MACs of one module."""

    all: int = 0
    left: int = 0  # whose weight is not zero
    activations: int = 0  # of products of two activations, which have no weight

    def add(self, positions: int, weight: Tensor, nonzeros: int) -> None:
        """Add a weight that is applied at so many positions."""
        self.all += positions * weight.numel()
        self.left += positions * nonzeros


class MacCounter(TorchDispatchMode):
    """Counts the MACs of matrix products and convolutions as they run, with the formulas of torch's FlopCounterMode.

    So every product counts, whichever class of layer or function calls it. Fused attention is computed by its two
    products. Recurrent layers run as one operator without a formula: their weights perform one MAC at each step. A
    packed layer counts as its dense form, which runs once more in its place.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.macs: dict[nn.Module, Macs] = {}
        self.dense_forms: dict[nn.Module, nn.Module] = {}  # of packed layers
        self.sources: dict[int, Source] = {}  # by storage
        self.owners: dict[int, list[nn.Module]] = {}  # of parameters, by storage
        self.nonzero_counts: dict[tuple[Any, ...], int] = {}
        self.running: list[nn.Module] = []  # the innermost module last
        self.paused = 0  # the number of running modules whose products are not counted one by one
        self.model = model
        for buffer in model.buffers():
            self.sources[storage_id(buffer)] = Source.CONSTANT
        for module in model.modules():
            self.register_parameters(module)

    def register_parameters(self, module: nn.Module) -> None:
        """Note the parameters that belong to a module itself."""
        for parameter in module.parameters(recurse=False):
            self.sources[storage_id(parameter)] = Source.PARAMETER
            self.owners.setdefault(storage_id(parameter), []).append(module)

    @contextmanager
    def observe(self) -> Iterator[None]:
        """Count the MACs of everything that runs, with hooks that tell which module is running."""
        with ExitStack() as stack:
            for module in self.model.modules():
                before = module.register_forward_pre_hook(self.enter_module, prepend=True)
                after = module.register_forward_hook(self.leave_module, with_kwargs=True, always_call=True)
                stack.callback(before.remove)
                stack.callback(after.remove)
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            stack.callback(mha.set_fastpath_enabled, mha.get_fastpath_enabled())
            mha.set_fastpath_enabled(False)
            stack.enter_context(self)
            yield

    def enter_module(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Note that a module begins to run."""
        self.running.append(module)
        self.paused += counts_as_a_whole(module)

    def leave_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
        """Note that a module has run, and count one whose products are not counted one by one."""
        self.paused -= counts_as_a_whole(module)
        if counts_as_a_whole(module) and outputs is not None and not self.paused:
            if is_packed(module) and module not in self.dense_forms:
                self.dense_forms[module] = module.dense()  # type: ignore[operator]
                self.register_parameters(self.dense_forms[module])
            dense = self.dense_forms.get(module, module)
            self.running[-1] = dense
            if isinstance(dense, RECURRENT):
                self.add_steps(dense, (*args, *kwargs.values())[0])
            else:
                dense.forward(*args, **kwargs)  # not a call: the hooks of the packed layer are also those of this one
        self.running.pop()

    def add_steps(self, module: Any, inputs: Any) -> None:
        """Add the MACs of a recurrent layer, which applies all its weights at each step."""
        steps = inputs.data.numel() // module.input_size  # a packed sequence has its elements in `data`
        for weight in own_weights(module):
            self.macs.setdefault(module, Macs()).add(steps, weight, self.count_nonzeros(weight))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function._schema.name in GROUPED and args[0].ndim == 2 and args[1].ndim == 3:
            with self:
                return multiply_groups(*args, **kwargs)
        formula = flop_registry.get(function._overloadpacket)
        if formula is None and function is not torch.ops.prim.device.default:
            with self:
                parts = function.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        result = function(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        source = max(map(self.source_of, tensors), default=Source.CONSTANT)
        if formula is not None and source > Source.CONSTANT and not self.paused:
            self.add_product(function, args, formula(*args, **kwargs, out_val=result) // 2)
        for output in tree_leaves(result):
            if isinstance(output, Tensor):
                self.sources[storage_id(output)] = source
        return result

    def source_of(self, tensor: Tensor) -> Source:
        """Return what a tensor depends on; those of unknown origin are inputs."""
        return self.sources.get(storage_id(tensor), Source.INPUT)

    def add_product(self, function: Any, args: Any, macs: int) -> None:
        """Add a product of two tensors to the running module, or to the module that its weight belongs to."""
        first = 1 if function._overloadpacket in WITH_ADDEND else 0
        weight = next((t for t in (args[first + 1], args[first]) if self.source_of(t) < Source.INPUT), None)
        running = self.running[-1] if self.running else self.model
        if weight is None:
            counts = self.macs.setdefault(running, Macs())
            counts.all, counts.left, counts.activations = (
                count + macs for count in (counts.all, counts.left, counts.activations)
            )
            return
        owners = self.owners.get(storage_id(weight), [])
        owner = running if running in owners or not owners else owners[0]
        self.macs.setdefault(owner, Macs()).add(macs // weight.numel(), weight, self.count_nonzeros(weight))

    def count_nonzeros(self, tensor: Tensor) -> int:
        """Return the number of non-zero entries of a tensor; all of them where a tensor has no values."""
        if tensor.is_meta:
            return tensor.numel()
        key = (storage_id(tensor), tensor.storage_offset(), tensor.shape, tensor.stride())
        if key[0] not in self.owners:  # the storage may be another tensor's later
            return int(tensor.count_nonzero())
        if key not in self.nonzero_counts:
            self.nonzero_counts[key] = int(tensor.count_nonzero())
        return self.nonzero_counts[key]


def multiply_groups(rows: Tensor, matrices: Tensor, offs: Tensor, **_: Any) -> Tensor:
    """Return the product of each group of rows, which ends at its entry of `offs`, with its matrix.

    On the meta device the groups are unknown, and all rows are multiplied by the first matrix.
    """
    if offs.is_meta:
        return rows @ matrices[0]
    result, start = rows.new_zeros(len(rows), matrices.shape[2]), 0
    for matrix, end in zip(matrices, offs.tolist(), strict=True):
        result[start:end] = rows[start:end] @ matrix
        start = end
    return result


def storage_id(tensor: Tensor) -> int:
    """Return a number that a tensor shares with its views, on the meta device too."""
    return tensor.untyped_storage()._cdata


def is_packed(module: nn.Module) -> bool:
    """Return whether a module is a packed layer of `pm.compress`."""
    return hasattr(module, "packed_weights")


def counts_as_a_whole(module: nn.Module) -> bool:
    """Return whether the products of a module are not counted one by one."""
    return is_packed(module) or isinstance(module, RECURRENT)


def own_weights(module: nn.Module) -> list[Tensor]:
    """Return the weights that belong to a module itself, without its biases."""
    return [p for name, p in module.named_parameters(recurse=False) if "weight" in name]
