"""Whether a pruned network still passes its input on: layers that keep too little, and layers that nothing passes.

A layer is blocked where some of its inputs depend on the network's, but all weights that it keeps read others, which
were removed. `reconnect` exchanges these weights for ones that read what is left.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.instancenorm import _InstanceNorm

from ..allocation import LAYERWISE_ALLOCATIONS, parse_allocation
from ..patterns import Pattern
from ..patterns.sharded_selection import select_masks
from ..sharding import is_sharded, place_like, whole, whole_reads
from .coupled import ZERO_FUNCTIONS, ZERO_PRESERVING
from .method import Masks, Targets
from .slot import Slot, outputs_first
from .targets import output_dim, unwrap
from .tracing import cached_trace, called_name

LAYERS = (_ConvNd, nn.Linear)
# Group and layer norms are not among these: they mix channels.
CHANNELWISE_MODULES = (*ZERO_PRESERVING, _BatchNorm, _InstanceNorm, nn.Sigmoid, nn.Softplus, nn.Hardsigmoid)
CHANNELWISE_FUNCTIONS = ZERO_FUNCTIONS | {"add", "iadd", "sub", "mul", "imul", "sigmoid", "hardswish"}
CHANNELWISE_FUNCTIONS |= {"max_pool2d", "avg_pool2d", "adaptive_max_pool2d", "adaptive_avg_pool2d"}
CHANNELWISE_FUNCTIONS |= {"contiguous", "flatten"}

LEAST_SCORE = 1e-6  # of a weight that a blocked layer may choose: its square must not round to zero
LOW_DENSITY = 0.02  # a layer is reported below this density
LOW_SHARE = 0.1  # and below this share of the density that it would have if its allocation alone decided
# Of a layer that loses whole outputs little passes long before 2 %, for which few are wide enough: there only the
# share counts.


def warn_about_layers(model: nn.Module | None, slots: Sequence[Slot], reported: set[str], stacklevel: int) -> None:
    """Warn once for each layer that keeps far less than the others, or that nothing of the input passes.

    Names of layers are added to `reported`. The host reads the masks, so this is not for a captured step.
    """
    slots = [slot for slot in slots if slot.mask.ndim > 1]
    with whole_reads(any(slot.is_sharded for slot in slots)):
        kept = [int(slot.place(slot.mask).count_nonzero()) for slot in slots]
    if model is None or sum(kept) == sum(slot.parameter.numel() for slot in slots):
        return
    messages = describe_low_densities(slots, kept)
    masks: dict[Tensor, Tensor] = {
        slot.parameter: outputs_first(slot.place(slot.mask), slot.target.output_dim) for slot in slots
    }
    for name in find_blocked_layers(unwrap(model), masks):
        messages[name] = f"nothing of the input passes {name}: all weights it keeps read outputs that were removed."
    empty = [slot.name for slot, count in zip(slots, kept, strict=True) if not count]
    messages |= {name: f"nothing passes {name}, which has no weight left." for name in empty}
    for name, message in messages.items():
        if name not in reported:
            reported.add(name)
            warnings.warn(
                f"{message} Lower the sparsity, use allocation='uniform', or leave the layer out with "
                f"exclude=['{name}'].",
                stacklevel=stacklevel + 1,
            )


def describe_low_densities(slots: Sequence[Slot], kept: Sequence[int]) -> dict[str, str]:
    """Return name → what to report for layers of a low density that their allocation does not explain."""
    overall = sum(kept) / sum(slot.parameter.numel() for slot in slots)
    shapes = [slot.target.outputs_first for slot in slots]
    layerwise = LAYERWISE_ALLOCATIONS.get(parse_allocation(slots[0].method.allocation)[0])
    expected = [1 - s for s in layerwise(shapes, 1 - overall)] if layerwise else [overall] * len(slots)
    limit = 1.0 if slots[0].method.pattern.removes_outputs else LOW_DENSITY
    messages = {}
    for slot, count, usual in zip(slots, kept, expected, strict=True):
        size = slot.parameter.numel()
        density = count / size
        if density < min(limit, LOW_SHARE * usual):
            messages[slot.name] = (
                f"{slot.name} keeps {count:,} of {size:,} weights ({density:.2%}), where all layers "
                f"together keep {overall:.2%}."
            )
    return messages


def find_blocked_layers(model: nn.Module, masks: Mapping[Tensor, Tensor]) -> list[str]:
    """Return the weights of the layers that are blocked under masks, by parameter and with outputs first."""
    blocked: dict[str, None] = {}
    follow_masks(model, masks, lambda name, *_: blocked.setdefault(name))
    return list(blocked)


def reconnect(model: nn.Module, pattern: Pattern, targets: Targets, masks: Masks, only_prunes: bool) -> Masks:
    """Return masks in which blocked layers keep as many weights as before, the largest of those that read live inputs.

    Where these are too few, the layer also keeps the largest of its own. With `only_prunes`, it can only choose among
    the weights that it has.
    """
    names = {parameter: name for name, parameter in model.named_parameters() if name in masks}
    connected = dict(masks)

    def exchange(name: str, layer: nn.Module, reads: Tensor) -> Tensor | None:
        """Return the new mask of a blocked layer; `reads` is (outputs, inputs), true where an input is live."""
        if name not in masks:
            return None
        mask, latent = masks[name], targets.latent[name]
        candidates = reads.to(mask.device).reshape(*reads.shape, *[1] * (mask.ndim - 2)).expand(mask.shape)
        candidates = place_like(candidates, mask)
        candidates = candidates & targets.masks[name] if only_prunes else candidates
        if not candidates.any():
            return None
        scores = latent.abs() + LEAST_SCORE
        first = scores.max() * mask.numel() ** 0.5  # ranks any unit with a candidate above all units without one
        scores = torch.where(candidates, scores + first, torch.where(mask, scores, 0))
        connected[name] = select_masks(pattern, [scores], 1 - int(mask.count_nonzero()) / mask.numel())[0]
        return connected[name]

    follow_masks(model, {parameter: masks[name] for parameter, name in names.items()}, exchange)
    return connected


# Called for a blocked layer with its weight's name, the layer and (outputs, inputs) of what it could read; may return a
# new mask.
OnBlocked = Callable[[str, nn.Module, Tensor], Any]


def follow_masks(model: nn.Module, masks: Mapping[Tensor, Tensor], on_blocked: OnBlocked) -> None:
    """Follow masks, by parameter and with outputs first, through a symbolic forward, and report blocked layers.

    Where an operation is not known, all its outputs depend on all its inputs, so that no layer is named without a
    reason. Nothing is reported where the forward cannot be traced.
    """
    graph = cached_trace(model)
    depends: dict[Any, Tensor] = {}  # for each channel of a node, or for all in one, whether it depends on the input
    for node in () if graph is None else graph.nodes:
        sources = [depends[source] for source in node.all_input_nodes]
        if node.op in ("placeholder", "get_attr"):
            depends[node] = torch.tensor([node.op == "placeholder"])
            continue
        call = model.get_submodule(str(node.target)) if node.op == "call_module" else node.target
        if not isinstance(call, LAYERS) or len(sources) != 1:
            depends[node] = follow_call(call, called_name(node), node.args, sources)
            continue
        mask = masks.get(call.weight)
        depends[node] = follow_layer(call, sources[0], mask)
        if sources[0].any() and not depends[node].any():
            new = on_blocked(f"{node.target}.weight", call, readable_inputs(call, sources[0]))
            depends[node] = depends[node] if new is None else follow_layer(call, sources[0], new)


def follow_call(call: Any, name: str, arguments: Sequence[Any], sources: Sequence[Tensor]) -> Tensor:
    """Return which channels of the output of a call, by its name, depend on the input, given those of its arguments."""
    if name in ("size", "dim") or (call is getattr and arguments[1] == "shape"):
        return torch.tensor([False])  # a shape does not depend on values
    # Other forms of these do not keep the order of channels.
    flattens = name in ("view", "reshape") and len(arguments) == 3 and arguments[2] == -1
    averages_images = name == "mean" and len(arguments) > 1 and tuple(to_list(arguments[1])) in ((2, 3), (-2, -1))
    if isinstance(call, CHANNELWISE_MODULES) or name in CHANNELWISE_FUNCTIONS or flattens or averages_images:
        return combine(sources)
    return combine(sources).any().reshape(1)


def to_list(value: Any) -> list[Any]:
    """Return a value or a sequence of values as a list."""
    return list(value) if isinstance(value, (tuple, list)) else [value]


def combine(sources: Sequence[Tensor]) -> Tensor:
    """Return which channels of any of the sources depend on the input; of sources of different lengths, all in one."""
    lengths = {len(source) for source in sources} - {1}
    if len(lengths) > 1:
        sources = [source.any().reshape(1) for source in sources]
    return functools.reduce(torch.logical_or, sources, torch.tensor([False]))


def follow_layer(layer: nn.Module, source: Tensor, mask: Tensor | None) -> Tensor:
    """Return which outputs of a layer have a kept weight that reads an input channel which depends on the input.

    The mask has its outputs in front; without one all weights are kept.
    """
    if getattr(layer, "groups", 1) > 1 and isinstance(layer, _ConvTransposeNd):
        return source.any().reshape(1)
    reads = readable_inputs(layer, source)
    if mask is not None:
        mask = mask if mask.ndim == 2 else mask.flatten(2).any(2)
        reads = whole((place_like(reads, mask) & mask).any(1)) if is_sharded(mask) else (reads & mask.cpu()).any(1)
        return reads.cpu()
    return reads.any(1)


def readable_inputs(layer: nn.Module, source: Tensor) -> Tensor:
    """Return (outputs, inputs of an output), true where an input channel depends on the input of the network."""
    groups = getattr(layer, "groups", 1)
    weight = outputs_first(layer.weight, output_dim(layer))  # type: ignore[arg-type]
    outputs, inputs = len(weight), weight.shape[1] * groups
    if inputs % len(source) == 0:
        source = source.repeat_interleave(inputs // len(source))  # a flattened image has its pixels side by side
    else:
        source = source.any().expand(inputs)
    return source.view(groups, -1).repeat_interleave(outputs // groups, 0)
