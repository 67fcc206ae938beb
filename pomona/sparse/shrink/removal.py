"""`shrink`: find the channels, heads and neurons that contribute nothing, remove them, and verify the outputs."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._pytree import tree_leaves

from ...core.targets import unwrap
from ...errors import PomonaError, require
from ...models.example_inputs import Example, ModelInputs, is_shape, without_cache
from ...models.mac_counter import is_packed
from ...models.summary import summary
from ...sharding import refuse_sharded
from . import latency as latencies
from .channel_group import ChannelGroup
from .constant_inputs import measure_constant_inputs
from .dependency_graph import find_groups
from .padding_shortcut import make_shortcuts_traceable, restore_padding_shortcuts
from .report import (
    Change,
    Counts,
    Shrunk,
    count_channels,
    count_units,
    explain_no_unit_removed,
    explain_nothing_removed,
)
from .transformer_layouts import find_unit_groups
from .unit_group import UnitGroup

UNTRACEABLE = "Torch-Pruning cannot trace its forward pass ({reason})."
COUNTS_CHANNELS = (
    "its forward pass depends on the number of channels ({reason}): prune it without the layers that it divides, such "
    "as those of attention, exclude=['*attention*']."
)
OUTPUT_TOLERANCE = 1e4  # times the type's epsilon: what sums in another order may differ by, through many layers


@torch.no_grad()
def shrink(model: nn.Module, example: Example, *, latency: bool = False) -> Shrunk:
    """Return a smaller copy of a pruned model, without what contributes nothing to its outputs, and its report.

    A transformer of Hugging Face loses attention heads and feed-forward neurons, any other model loses channels. The
    model itself is not changed. In evaluation mode the copy gives the model's outputs up to rounding, which is
    verified on the example. PomonaError is raised if nothing can be removed, if the model's output does not depend
    on its input, if Torch-Pruning cannot trace the model, or if its forward pass depends on the number of channels.

    Args:
        model: a model with filters whose weights are all zero, as `pattern=Filter()` leaves them, or a transformer with
            zero columns, as `pattern=Block((None, 1))` leaves them in the layers that read neurons.
        example: a batch, the shape of one sample, such as (3, 32, 32), or a tuple or dictionary of the model's
            arguments.
        latency: whether to measure the latency of both models on the example.
    """
    model = unwrap(model)
    refuse_sharded(model, "pm.shrink")
    refuse_packed(model)
    given = ModelInputs.from_example(model, example)
    inputs = randomize(given) if is_shape(example) else given
    small = copy.deepcopy(model).eval().requires_grad_(True)
    with without_cache(model), without_cache(small):
        before = summary(model, inputs)  # also refuses an example that does not fit
        expected = inputs.call(small)
        groups = find_unit_groups(small)
        if groups:
            removed, kept = remove_units(groups, small, inputs)
        else:
            removed, kept = remove_channels(model, small, inputs, expected, before.sparsity)
        with convert_failures(model, COUNTS_CHANNELS):
            difference = compare_outputs(expected, inputs.call(small))
        after = summary(small, inputs)
    copy_modes(model, small)
    milliseconds = None
    if latency:
        milliseconds = Change(*(1000 * t for t in latencies.measure_median_seconds([model, small], inputs)))
    params, macs = Change(before.params, after.params), Change(before.macs, after.macs)
    return Shrunk(small, params, macs, removed, kept, difference, milliseconds)


def remove_units(groups: Sequence[UnitGroup], small: nn.Module, inputs: ModelInputs) -> Counts:
    """Remove heads and neurons of a transformer in place, and return what was removed and what stays."""
    refuse_computed(small, groups)
    constants = measure_constant_inputs(small, inputs)
    for group in groups:
        group.classify(constants)
    removed, kept = count_units(groups, small)
    require(bool(removed), explain_no_unit_removed(small, groups))
    for group in groups:
        group.remove_units()
    return removed, kept


def refuse_packed(model: nn.Module) -> None:
    """Raise PomonaError for a model with packed layers, which have no channels to remove."""
    packed = next((name for name, module in model.named_modules() if is_packed(module)), None)
    require(packed is None, f"{packed} is packed: shrink the model before pm.compress, or pm.decompress(model).")


def refuse_computed(model: nn.Module, groups: Sequence[UnitGroup]) -> None:
    """Raise PomonaError for a layer whose weight is computed from others, as with a low-rank update."""
    names = {module: name for name, module in model.named_modules()}
    computed = next((layer for group in groups for layer in group.layers() if is_parametrized(layer)), None)
    require(
        computed is None,
        f"{names.get(computed)} computes its weight at each call: make it plain first, by merge_lora or by "
        "remove_parametrizations of torch.nn.utils.parametrize.",
    )


def remove_channels(model: nn.Module, small: nn.Module, inputs: ModelInputs, expected: Any, sparsity: float) -> Counts:
    """Remove the channels of a model in place, by Torch-Pruning, and return what was removed and what stays."""
    refuse_constant_output(small, inputs, expected)
    with convert_failures(model, UNTRACEABLE):
        make_shortcuts_traceable(small)
        groups = find_groups(small, inputs)
        choose_channels(groups, small, randomize(inputs))
        removed, kept = count_channels(groups, model, small)
        require(bool(removed), explain_nothing_removed(model, sparsity, kept))
        for group in groups:
            group.remove_channels()
        restore_padding_shortcuts(small)
    return removed, kept


def refuse_constant_output(model: nn.Module, example: ModelInputs, output: Any) -> None:
    """Raise PomonaError if a model gives the same output for the example and for random inputs, whatever they are."""
    if not all(tensor.is_floating_point() and tensor.ndim for tensor in example.tensors):
        return
    # Large inputs too, because a unit whose bias keeps it at zero for small ones is not dead.
    scales = (1, 1, 100, 10_000)
    inputs = example.map_tensors(
        lambda tensor: torch.cat([scale * randomize_tensor(tensor, seed) for seed, scale in enumerate(scales)])
    )
    for one, other in zip(tree_leaves(output), tree_leaves(inputs.call(model)), strict=True):
        if not isinstance(one, Tensor) or one.ndim == 0 or one.shape[1:] != other.shape[1:]:
            return  # not one output for each sample
        same = torch.cat([one, other])
        if not torch.allclose(same, same[:1].expand_as(same), rtol=1e-6, atol=0):
            return
    names = {module: name for name, module in model.named_modules()}
    constants = measure_constant_inputs(model, inputs)
    reads_constants = [names[layer] for layer, values in constants.items() if values.isfinite().all()]
    empty = [names[layer] for layer in constants if not layer.get_parameter("weight").any()]
    where = (
        f"{empty[0]} has no weight left" if empty else f"{[*reads_constants, 'the last layer'][0]} reads constants only"
    )
    raise PomonaError(
        f"{type(model).__name__} gives the same output for every input, because {where}: a network that is cut in two "
        "cannot be shrunk, so prune it again at a lower sparsity or with allocation='uniform'."
    )


def choose_channels(groups: Sequence[ChannelGroup], model: nn.Module, example: ModelInputs) -> None:
    """Decide which channels of each group are removed, and merge the constants of the model in place."""
    inputs = measure_constant_inputs(model, example)
    for group in groups:
        group.classify(inputs)
        group.set_representative_constant()
    new_inputs = measure_constant_inputs(model, example)
    for group in groups:
        group.merge_constants(inputs, new_inputs)


@contextmanager
def convert_failures(model: nn.Module, message: str) -> Iterator[None]:
    """Raise PomonaError with a message in place of any other exception of the forward pass or of Torch-Pruning."""
    try:
        yield
    except PomonaError:
        raise
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise PomonaError(f"{type(model).__name__} cannot be shrunk: {message.format(reason=reason)}") from error


def randomize(example: ModelInputs) -> ModelInputs:
    """Return an example with normal random numbers in place of its floating-point values; ids stay."""
    return example.map_tensors(randomize_tensor)


def randomize_tensor(tensor: Tensor, seed: int = 0) -> Tensor:
    """Return normal random numbers in the shape of a tensor, from a fixed seed, or the tensor itself if it has ids."""
    if not tensor.is_floating_point():
        return tensor
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed)).to(tensor)


def compare_outputs(expected: Any, actual: Any) -> float:
    """Return the largest difference between two outputs; raise ValueError if rounding cannot explain it."""
    largest = 0.0
    for one, other in zip(tree_leaves(expected), tree_leaves(actual), strict=True):
        difference, scale = float((one - other).abs().max()), float(one.abs().max())
        allowed = OUTPUT_TOLERANCE * torch.finfo(one.dtype).eps * scale
        if not difference <= allowed:
            raise ValueError(f"outputs differ by {difference:.2g}, more than the {allowed:.2g} of rounding")
        largest = max(largest, difference)
    return largest


def copy_modes(model: nn.Module, small: nn.Module) -> None:
    """Copy the training mode of every module and `requires_grad` of every parameter to the shrunk model."""
    modes = {name: module.training for name, module in model.named_modules()}
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    for name, module in small.named_modules():
        module.training = modes[name]
    for name, parameter in small.named_parameters():
        parameter.requires_grad_(trained[name])
