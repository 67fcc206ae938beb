"""The blocks of a model in the order in which they run, and the calibration inputs that reach each of them.

The blocks of a transformer are the longest list of modules of one class. The outputs of a block are the inputs of the
next one, so that each block runs once for its statistics and once, pruned, for its outputs. Where that is not what the
model does, which the first batch shows, every block is reached by running the whole model up to it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ..core.batch_norm import iterate_batches, move_to_device, run_batch
from ..errors import PomonaError, require


class _BlockReached(Exception):
    """Ends the forward pass of a model at a block whose inputs were wanted."""


@dataclass(frozen=True)
class BlockInputs:
    """The arguments of one call of a block."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self, block: nn.Module) -> Any:
        """Return the outputs of a block for these arguments, on its device.

        The block has copies of the positional arguments, to which it may add its outputs in place.
        """
        device = next((p.device for p in block.parameters()), torch.device("cpu"))
        args, kwargs = move_to_device((self.args, self.kwargs), device)
        return block(*tree_map(copy_tensor, args), **kwargs)

    def with_hidden_state(self, outputs: Any) -> BlockInputs:
        """Return these arguments with the first one replaced by the first output of the block before."""
        first = outputs[0] if isinstance(outputs, (tuple, list)) else outputs
        return replace(self, args=(first, *self.args[1:]))

    def equals(self, other: BlockInputs) -> bool:
        """Return whether two calls have the same arguments, up to rounding."""
        mine, theirs = (tree_leaves((inputs.args, inputs.kwargs)) for inputs in (self, other))
        return len(mine) == len(theirs) and all(map(same_value, mine, theirs))


def same_value(one: Any, other: Any) -> bool:
    """Return whether two arguments are equal, tensors up to rounding; of other objects only the class is compared."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.allclose(one.float(), other.float(), rtol=1e-3, atol=1e-5)
    if isinstance(one, (bool, int, float, str, type(None))):
        return one == other
    return type(one) is type(other)


def find_blocks(model: nn.Module, layers: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the longest list of modules of one class that hold layers to prune; none where no list has two."""
    wanted = set(layers)
    lists = [list(m) for m in model.modules() if isinstance(m, (nn.ModuleList, nn.Sequential)) and len(m) > 1]
    alike = [
        blocks
        for blocks in lists
        if len({type(block) for block in blocks}) == 1 and all(wanted & set(block.modules()) for block in blocks)
        and not any(block in wanted for block in blocks)
    ]  # fmt: skip
    return max(alike, key=len, default=[])


@contextmanager
def observed_inputs(layers: Sequence[tuple[nn.Module, Callable[[Tensor], None]]]) -> Iterator[None]:
    """Call a function with every input of each layer while the block runs."""

    def hook(observe: Callable[[Tensor], None]) -> Callable[..., None]:
        return lambda module, args, kwargs: observe(args[0] if args else kwargs["input"])

    handles = [layer.register_forward_pre_hook(hook(observe), with_kwargs=True) for layer, observe in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Calibration:
    """The calibration batches of a model, and their way through its blocks."""

    def __init__(self, model: nn.Module, data: Iterable[Any], max_batches: int | None) -> None:
        self.model = model
        self.batches = list(itertools.islice(iterate_batches(data), max_batches))
        require(bool(self.batches), "data has no batches: give at least one for the calibration.")

    def run_whole_model(self) -> None:
        """Run the model on every batch."""
        for batch in self.batches:
            run_batch(self.model, batch)

    def inputs_of(self, block: nn.Module, batches: Sequence[Any] | None = None) -> list[BlockInputs]:
        """Return the arguments with which the model calls a block for each batch; the model stops there."""
        reached: list[BlockInputs] = []

        def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            reached.append(BlockInputs(*tree_map(copy_tensor, (args, kwargs))))
            raise _BlockReached

        handle = block.register_forward_pre_hook(stop, with_kwargs=True)
        try:
            for batch in self.batches if batches is None else batches:
                try:
                    run_batch(self.model, batch)
                except _BlockReached:
                    continue
                raise PomonaError("the model does not call all of its blocks: leave out those with exclude=[…].")
        finally:
            handle.remove()
        return reached

    def walk(
        self, blocks: Sequence[nn.Module], device: torch.device | None = None
    ) -> Iterator[tuple[nn.Module, list[BlockInputs]]]:
        """Yield each block with its inputs; the caller prunes it before it takes the next one.

        With a `device`, each block is there while it is in use.
        """
        chained = self.blocks_are_chained(blocks)
        inputs = self.inputs_of(blocks[0])
        for index, block in enumerate(blocks):
            with placed_on(block, device):
                yield block, inputs
                if chained and index + 1 < len(blocks):
                    inputs = [one.with_hidden_state(one.run(block)) for one in inputs]
            if not chained and index + 1 < len(blocks):
                inputs = self.inputs_of(blocks[index + 1])

    def blocks_are_chained(self, blocks: Sequence[nn.Module]) -> bool:
        """Return whether each block is called once, with the output of the one before, judged by the first batch."""
        called: list[nn.Module] = []
        first: BlockInputs | None = None
        expected: BlockInputs | None = None  # what the next block has, if it is chained
        chained = True

        def compare(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            nonlocal first, chained
            called.append(block)
            inputs = BlockInputs(args, kwargs)
            first = first or inputs
            chained = chained and bool(args) and (expected is None or expected.equals(inputs))

        def expect(block: nn.Module, args: tuple[Any, ...], outputs: Any) -> None:
            nonlocal expected
            expected = first.with_hidden_state(tree_map(copy_tensor, outputs)) if first is not None else None

        hooks = [block.register_forward_pre_hook(compare, with_kwargs=True) for block in blocks]
        hooks += [block.register_forward_hook(expect) for block in blocks]
        try:
            run_batch(self.model, self.batches[0])
        finally:
            for hook in hooks:
                hook.remove()
        return chained and called == list(blocks)


@contextmanager
def placed_on(block: nn.Module, device: torch.device | None) -> Iterator[None]:
    """Move a block to a device, and back at the end."""
    home = next((p.device for p in block.parameters()), None)
    if device is None or home is None or home == device:
        yield
        return
    block.to(device)
    try:
        yield
    finally:
        block.to(home)


def copy_tensor(value: Any) -> Any:
    """Return a copy of a tensor without its graph, and any other value as it is."""
    return value.detach().clone() if isinstance(value, Tensor) else value
