"""Low-rank fine-tuning (LoRA) of a pruned model, which keeps its zeros exactly when the update is merged.

`add_lora` gives each pruned layer the weight w + m ⊙ s·b·a, where the mask m is true where w is not zero. The model is
trained on the weight that it will have, so that `merge_lora` changes no output.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..core.targets import DENSE, Target, prunable, unwrap
from ..errors import PomonaError, require
from ..sharding import refuse_sharded


class LowRankUpdate(nn.Module):
    """A parametrization that adds a low-rank update to a weight where the weight is not zero."""

    mask: Tensor

    def __init__(self, target: Target, rank: int, scale: float) -> None:
        super().__init__()
        weight, outputs_second = target.parameter, target.output_dim == 1
        dtype = torch.promote_types(weight.dtype, torch.float32)
        self.a = nn.Parameter(torch.empty(rank, target.fan_in, device=weight.device, dtype=dtype))
        self.b = nn.Parameter(torch.zeros(target.outputs, rank, device=weight.device, dtype=dtype))
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))
        self.scale, self.outputs_second = scale, outputs_second
        self.order = tuple(target.module._parameters)  # of the layer's parameters
        self.register_buffer("mask", weight.detach() != 0)

    def forward(self, weight: Tensor) -> Tensor:
        update = low_rank_product(self.a, self.b, self.scale, self.outputs_second)
        return add_where_kept(weight, update, self.mask)


def low_rank_product(a: Tensor, b: Tensor, scale: float, outputs_second: bool = False) -> Tensor:
    """Return scale · b a as a weight: outputs × inputs, or inputs × outputs where a layer stores them so."""
    product = scale * (b @ a)
    return product.T if outputs_second else product


def add_where_kept(weight: Tensor, update: Tensor, mask: Tensor) -> Tensor:
    """Return weight + update where the mask is true, and the weight elsewhere."""
    return torch.where(mask, weight + update.to(weight.dtype), weight)


def add_lora(
    model: nn.Module,
    rank: int = 8,
    *,
    alpha: float | None = None,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
) -> list[nn.Parameter]:
    """Freeze a pruned model, add a low-rank update to its linear layers, and return the parameters to train.

    Arguments:
        model: the model, with zeros in its weights; it is changed in place.
        rank: the rank of the updates.
        alpha: the updates are scaled by alpha / rank; None scales them by one.
        include: names of layers, or globs; the default is all linear layers that `pm.prunable(model)` lists.
        exclude: names of layers to leave as they are, or globs.
    """
    whole = isinstance(rank, int) and not isinstance(rank, bool)
    require(whole and rank >= 1, f"rank must be a whole number of 1 or more, got {rank!r}.")
    finite = alpha is None or (isinstance(alpha, float | int) and math.isfinite(alpha))
    require(finite, f"alpha must be a finite number or None, got {alpha!r}.")
    inner = unwrap(model)
    refuse_sharded(inner, "add_lora")
    require(not any(find_updates(inner)), "the model has low-rank updates already: call merge_lora(model) first.")
    found = prunable(inner, include, exclude, DENSE - {"frozen"}).targets
    targets = [t for t in found if "linear" in t.tags and t.leaf == "weight" and len(t.shape) == 2]
    if not targets:
        raise PomonaError(f"{type(inner).__name__} has no linear layer to update: name layers with include=[…].")
    for target in targets:
        require(
            not target.aliases,
            f"{target.name} is also {', '.join(target.aliases)}, which an update of one layer would not follow: leave "
            f"it out with exclude=[{target.name!r}].",
        )
    model.requires_grad_(False)
    updates = [LowRankUpdate(target, rank, 1.0 if alpha is None else alpha / rank) for target in targets]
    for target, update in zip(targets, updates, strict=True):
        parametrize.register_parametrization(target.module, "weight", update)
    return [factor for update in updates for factor in (update.a, update.b)]


@torch.no_grad()
def merge_lora(model: nn.Module) -> nn.Module:
    """Merge low-rank updates into the weights, keep all zeros, and return the plain model, all of it trainable.

    A model of `add_lora` is changed in place and gives the same outputs as before. A model of the library PEFT was
    trained with updates of pruned weights too, which are dropped here: its outputs change by them.
    """
    inner = unwrap(model)
    adapters = [module for module in inner.modules() if hasattr(module, "lora_A")]
    updated = list(find_updates(inner))
    require(
        bool(updated or adapters),
        f"{type(inner).__name__} has no low-rank updates to merge: train it with add_lora, or with PEFT's LoRA.",
    )
    for module in updated:
        merge_update(module)
    for module in adapters:
        merge_adapters(module)
    if adapters:
        inner = cast(Any, inner).unload()
    return inner.requires_grad_(True)


def find_updates(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers with a low-rank update of `add_lora`."""
    for module in model.modules():
        parts: Any = getattr(module, "parametrizations", {})
        if "weight" in parts and any(isinstance(part, LowRankUpdate) for part in parts["weight"]):
            yield module


def merge_update(layer: Any) -> None:
    """Make the weight of a layer with an update of `add_lora` a plain parameter, in its old place."""
    order = layer.parametrizations.weight[0].order
    # Removing a parametrization changes the layer's class, which the layers of copies share.
    contents = {name: value for name, value in vars(type(layer)).items() if name not in ("__dict__", "__weakref__")}
    layer.__class__ = type(type(layer).__name__, type(layer).__bases__, contents)
    parametrize.remove_parametrizations(layer, "weight", leave_parametrized=True)
    for name in order:
        layer._parameters[name] = layer._parameters.pop(name)


def merge_adapters(layer: Any) -> None:
    """Add the active adapters of a layer of PEFT to its weight, where the weight is not zero."""
    plain = hasattr(layer, "get_delta_weight") and not any(layer.lora_bias.values()) and not layer.lora_variant
    if not plain or layer.merged:
        raise PomonaError(
            f"merge_lora takes plain LoRA that is not merged yet, got a {type(layer).__name__} with a bias, a variant "
            "such as DoRA, or merged weights: unmerge it, or train it with add_lora."
        )
    weight = layer.get_base_layer().weight
    mask = weight != 0
    for adapter in layer.active_adapters:
        if adapter in layer.lora_A:
            weight.copy_(add_where_kept(weight, layer.get_delta_weight(adapter), mask))
