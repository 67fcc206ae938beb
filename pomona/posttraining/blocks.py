"""The blocks of a model in the order in which they run, and the calibration inputs that reach each of them.

The blocks of a transformer are the longest list of modules of one class; an encoder and a decoder have one each. The
outputs of a block are the inputs of the next one, so that each block runs once for its statistics and once, pruned, for
its outputs. Where that is not what the model does, which the first batch of each shape shows, every block is reached by
running the whole model up to it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ..core.batch_norm import iterate_batches, move_to_device, run_batch, select_inputs
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


def find_block_lists(model: nn.Module, layers: Iterable[nn.Module]) -> list[list[nn.Module]]:
    """Return the lists of modules of one class that hold layers to prune, the longest of those that overlap.

    An encoder and a decoder have a list each; they are in the order of the model.
    """
    wanted = set(layers)
    lists = [list(m) for m in model.modules() if isinstance(m, (nn.ModuleList, nn.Sequential)) and len(m) > 1]
    alike = [
        blocks
        for blocks in lists
        if len({type(block) for block in blocks}) == 1 and all(wanted & set(block.modules()) for block in blocks)
        and not any(block in wanted for block in blocks)
    ]  # fmt: skip
    chosen: list[int] = []
    parts = [{part for block in blocks for part in block.modules()} for blocks in alike]
    for index in sorted(range(len(alike)), key=lambda index: -len(alike[index])):
        if not any(parts[index] & parts[other] for other in chosen):
            chosen.append(index)
    return [alike[index] for index in sorted(chosen)]


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


class BlockChain:
    """Blocks, and whether each is called once, with the output of the one before, whenever the model runs."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self.blocks = list(blocks)
        self.is_chained = True  # in all runs that were observed
        self.called: list[nn.Module] = []
        self.first: BlockInputs | None = None
        self.expected: BlockInputs | None = None  # what the next block has, if it is chained

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Compare the calls of the blocks while the model runs on one batch."""
        hooks = [block.register_forward_pre_hook(self.compare, with_kwargs=True) for block in self.blocks]
        hooks += [block.register_forward_hook(self.expect) for block in self.blocks]
        try:
            yield
            self.is_chained = self.is_chained and self.called == self.blocks
        finally:
            self.called, self.first, self.expected = [], None, None
            for hook in hooks:
                hook.remove()

    def compare(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare the arguments of a block with those that it has in a chain."""
        inputs = BlockInputs(args, kwargs)
        self.called.append(block)
        self.first = self.first or inputs
        self.is_chained = self.is_chained and bool(args) and (self.expected is None or self.expected.equals(inputs))

    def expect(self, block: nn.Module, args: tuple[Any, ...], outputs: Any) -> None:
        """Note what the next block has in a chain."""
        assert self.first is not None
        self.expected = self.first.with_hidden_state(tree_map(copy_tensor, outputs))


class Calibration:
    """The calibration batches of a model, and their way through its blocks."""

    def __init__(self, model: nn.Module, data: Iterable[Any], max_batches: int | None) -> None:
        valid = max_batches is None or (type(max_batches) is int and max_batches >= 1)
        require(valid, f"max_batches counts batches and must be ≥ 1, got {max_batches}: None reads all.")
        self.model = model
        self.batches = list(itertools.islice(iterate_batches(data), max_batches))
        require(bool(self.batches), "data has no batches: give at least one for the calibration.")

    def run(self, index: int) -> None:
        """Run the model on a batch; raise PomonaError where it does not take it."""
        try:
            run_batch(self.model, self.batches[index])
        except (PomonaError, _BlockReached):
            raise
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise PomonaError(
                f"{type(self.model).__name__} does not run on batch {index} of the calibration data: {reason}"
            ) from error

    def shapes(self, index: int) -> tuple[torch.Size, ...]:
        """Return the shapes of the inputs in a batch."""
        inputs = select_inputs(self.batches[index])
        leaves = tree_leaves(list(inputs.values()) if isinstance(inputs, Mapping) else inputs)
        return tuple(leaf.shape for leaf in leaves if isinstance(leaf, Tensor))

    def run_whole_model(self) -> None:
        """Run the model on every batch."""
        for index in range(len(self.batches)):
            self.run(index)

    def inputs_of(self, block: nn.Module) -> list[BlockInputs]:
        """Return the arguments with which the model calls a block for each batch; the model stops there."""
        reached: list[BlockInputs] = []

        def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            reached.append(BlockInputs(*tree_map(copy_tensor, (args, kwargs))))
            raise _BlockReached

        handle = block.register_forward_pre_hook(stop, with_kwargs=True)
        try:
            for index in range(len(self.batches)):
                try:
                    self.run(index)
                except _BlockReached:
                    continue
                raise PomonaError("the model does not call all of its blocks: leave out those with exclude=[…].")
        finally:
            handle.remove()
        return reached

    def walk(
        self, chain: BlockChain, device: torch.device | None = None
    ) -> Iterator[tuple[nn.Module, list[BlockInputs]]]:
        """Yield each block with its inputs; the caller prunes it before it takes the next one.

        With a `device`, each block is there while it is in use.
        """
        inputs = self.inputs_of(chain.blocks[0])
        for block, following in itertools.zip_longest(chain.blocks, chain.blocks[1:]):
            with placed_on(block, device):
                yield block, inputs
                if chain.is_chained and following is not None:
                    inputs = [one.with_hidden_state(one.run(block)) for one in inputs]
            if not chain.is_chained and following is not None:
                inputs = self.inputs_of(following)


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
