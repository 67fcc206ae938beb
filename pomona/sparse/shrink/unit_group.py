"""Units of a transformer block that are removed whole: attention heads, and neurons of feed-forward layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...core.targets import output_dim as find_output_dim
from .constant_inputs import ConstantInputs

# Attributes of attention modules that count heads, or the channels of all heads.
HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads")
KEY_HEAD_COUNTS = ("num_key_value_heads",)
HEAD_CHANNELS = ("all_head_size", "split_size")


@dataclass(frozen=True)
class RowSlice:
    """Consecutive outputs of a layer."""

    layer: nn.Module
    start: int
    rows: int

    def matrices(self, units: int) -> Tensor:
        """Return the weights of each unit: units × outputs of a unit × inputs."""
        return weight_matrix(self.layer)[self.start : self.start + self.rows].reshape(units, self.rows // units, -1)

    def positions(self, units: int, chosen: Tensor) -> Tensor:
        """Return the outputs of the layer that belong to the chosen units."""
        all_rows = torch.arange(self.start, self.start + self.rows).view(units, -1)
        return all_rows[chosen].flatten()


@dataclass
class UnitGroup:
    """The heads or the neurons of one module.

    A unit contributes nothing where no weight reads it. Where the weights that give it its value are all zero, its
    value is a constant, which is added to the reader's bias.
    """

    kind: str  # "head" or "neuron"
    units: int
    producers: tuple[RowSlice, ...]
    values: tuple[RowSlice, ...]  # those of the producers of which one alone, if it is zero, makes a unit constant
    reader: nn.Module
    holder: nn.Module  # the module with attributes that count the units
    removed: Tensor = field(init=False)
    constant: Tensor = field(init=False)  # has a constant that is not zero, and that no bias can take

    def fits(self) -> bool:
        """Return whether the layers have as many outputs and inputs as the units need."""
        return (
            self.units > 0
            and all(part.rows % self.units == 0 for part in self.producers)
            and count_columns(self.reader) % self.units == 0
            and (self.kind == "head" or all(part.rows == self.units for part in self.producers))
        )

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of all layers of the group."""
        for layer in self.layers():
            yield from layer.parameters(recurse=False)

    def layers(self) -> list[nn.Module]:
        """Return the layers of the group, each once, the reader last."""
        return list(dict.fromkeys([*(part.layer for part in self.producers), self.reader]))

    def classify(self, inputs: ConstantInputs) -> None:
        """Find the units that contribute nothing, and add constants to the reader's bias, in place."""
        reading = weight_matrix(self.reader).reshape(-1, self.units, count_columns(self.reader) // self.units)
        is_read = reading.flatten(2).any(2).any(0).cpu()
        fixed = torch.zeros(self.units, dtype=torch.bool)
        for part in self.values:
            fixed |= ~part.matrices(self.units).flatten(1).any(1).cpu()
        value = inputs[self.reader].view(self.units, -1)
        fixed &= value.isfinite().all(1)
        is_zero = (value.nan_to_num() == 0).all(1)
        bias = self.reader._parameters.get("bias")
        self.constant = fixed & is_read & ~is_zero
        if bias is not None and self.constant.any():
            chosen = self.constant.to(reading.device)
            added = torch.einsum("ouc,uc->o", reading[:, chosen].double(), value.to(reading.device)[chosen].double())
            bias.data.add_(added.to(bias.dtype))
            self.constant = torch.zeros_like(self.constant)
        self.removed = (~is_read | fixed) & ~self.constant
        if self.removed.all():
            self.removed[0] = False  # a layer needs one unit

    def count_outputs(self) -> dict[nn.Module, tuple[int, int]]:
        """Return the number of outputs of each producer, before and after the removal."""
        left = int((~self.removed).sum())
        sizes: dict[nn.Module, tuple[int, int]] = {}
        for part in self.producers:
            before, after = sizes.get(part.layer, (0, 0))
            sizes[part.layer] = before + part.rows, after + part.rows // self.units * left
        return sizes

    def count_zero_outputs(self) -> dict[nn.Module, int]:
        """Return how many outputs of each producer are zero but belong to a unit that stays."""
        zeros: Counter[nn.Module] = Counter()
        for part in self.producers:
            zeros[part.layer] += int((~part.matrices(self.units).any(2).cpu())[~self.removed & ~self.constant].sum())
        return {layer: count for layer, count in zeros.items() if count}

    def remove_units(self) -> None:
        """Remove the units marked as removed from all layers, and from the attributes that count them."""
        if not self.removed.any():
            return
        kept = ~self.removed
        columns = torch.arange(count_columns(self.reader)).view(self.units, -1)[kept].flatten()
        keep_inputs(self.reader, columns)
        for layer in self.layers()[:-1]:
            parts = [part for part in self.producers if part.layer is layer]
            keep_outputs(layer, torch.cat([part.positions(self.units, kept) for part in parts]))
        if self.kind == "head":
            self.update_counts(int(kept.sum()))

    def update_counts(self, left: int) -> None:
        """Correct the attributes of the attention module that count heads or their channels."""
        for names in (HEAD_COUNTS, KEY_HEAD_COUNTS, HEAD_CHANNELS):
            for name in names:
                count = getattr(self.holder, name, None)
                if isinstance(count, int):
                    setattr(self.holder, name, count // self.units * left)


def weight_matrix(layer: Any) -> Tensor:
    """Return a view of a layer's weight, outputs × inputs."""
    return layer.weight.detach().movedim(find_output_dim(layer), 0)


def count_rows(layer: Any) -> int:
    """Return the number of outputs of a layer."""
    return int(layer.weight.shape[find_output_dim(layer)])


def count_columns(layer: Any) -> int:
    """Return the number of inputs of a layer."""
    return int(layer.weight.shape[1 - find_output_dim(layer)])


def keep_outputs(layer: Any, rows: Tensor) -> None:
    """Remove all other outputs of a linear layer, in place."""
    layer.weight = select(layer.weight, find_output_dim(layer), rows)
    if layer.bias is not None:
        layer.bias = select(layer.bias, 0, rows)
    set_size(layer, ("out_features", "nf"), len(rows))


def keep_inputs(layer: Any, columns: Tensor) -> None:
    """Remove all other inputs of a linear layer, in place."""
    layer.weight = select(layer.weight, 1 - find_output_dim(layer), columns)
    set_size(layer, ("in_features", "nx"), len(columns))


def select(parameter: nn.Parameter, dim: int, positions: Tensor) -> nn.Parameter:
    """Return a parameter with some of its entries along a dimension."""
    values = parameter.detach().index_select(dim, positions.to(parameter.device))
    return nn.Parameter(values, requires_grad=parameter.requires_grad)


def set_size(layer: nn.Module, names: tuple[str, ...], size: int) -> None:
    """Set the attribute of a layer, Linear or Conv1D, that holds its number of inputs or outputs."""
    for name in names:
        if hasattr(layer, name):
            setattr(layer, name, size)
