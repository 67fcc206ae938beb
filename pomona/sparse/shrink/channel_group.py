"""Groups of coupled channels: which of them can be removed, and how constants are kept when they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...core.targets import output_dim as find_output_dim
from .constant_inputs import ConstantInputs


@dataclass(frozen=True)
class LayerChannels:
    """The channels of one layer that belong to a channel group.

    Channel `channels[i]` of the layer belongs to channel `group_channels[i]` of the group.
    """

    module: nn.Module
    channels: Tensor
    group_channels: Tensor

    def select(self, group_channel: int) -> Tensor:
        """Return the sorted channels of the layer that belong to one channel of the group.

        A linear layer that reads a flattened image has several, one for each pixel.
        """
        return self.channels[self.group_channels == group_channel].sort().values

    def weight_rows(self, outputs: bool = False) -> Tensor:
        """Return a view of the layer's weight with one row for each input channel, or for each output channel."""
        output_dim = find_output_dim(self.module)
        return self.module.weight.detach().movedim(output_dim if outputs else 1 - output_dim, 0)  # type: ignore

    def has_zero_weights(self, outputs: bool = False) -> Tensor:
        """Return for each of `channels` whether all its weights are zero, as an input or as an output channel."""
        return ~self.weight_rows(outputs).flatten(1).any(1).cpu()[self.channels]

    @property
    def has_all_outputs(self) -> bool:
        """Return whether all output channels of the layer belong to the group."""
        return len(self.channels) == len(self.weight_rows(outputs=True))


@dataclass
class ChannelGroup:
    """Channels that can only be removed together, with the layers that produce, normalise and read them.

    The group is processed in four steps: `classify`, `set_representative_constant`, `merge_constants` and
    `remove_channels`. The tensors have one flag for each channel of the group.
    """

    size: int
    producers: list[LayerChannels]
    norms: list[LayerChannels]
    readers: list[LayerChannels]
    obstacle: str | None  # why no channel of the group can be removed
    prune: Callable[[list[int]], None]  # removes channels of the group from all its layers
    input_independent: Tensor = field(init=False)  # the weights of all producers are zero
    removed: Tensor = field(init=False)  # to be removed
    constant: Tensor = field(init=False)  # input-independent, with a constant that is not zero at some reader
    only_channel: Tensor = field(init=False)  # stays because a layer needs at least one channel
    representative: int | None = None  # the constant channel that stays in place of all constant ones
    overwritten: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)  # (tensor, positions, old values)

    def passes_everywhere(self, members: Sequence[LayerChannels], test: Callable[[LayerChannels], Tensor]) -> Tensor:
        """Return the channels that pass a test in every one of the layers."""
        passed = torch.ones(self.size, dtype=torch.bool)
        for member in members:
            passed[member.group_channels[~test(member)]] = False
        return passed

    def classify(self, inputs: ConstantInputs) -> None:
        """Find the channels that contribute nothing and those that contribute a constant.

        `inputs` are the values that the readers see before anything is changed.
        """
        self.input_independent = self.passes_everywhere(
            self.producers, lambda producer: producer.has_zero_weights(outputs=True)
        )
        self.only_channel = torch.zeros_like(self.input_independent)
        if self.obstacle is not None:
            self.removed = self.constant = torch.zeros_like(self.input_independent)
            return

        def contributes_nothing(reader: LayerChannels) -> Tensor:
            values = inputs[reader.module][reader.channels]
            # A running mean that decays towards zero stops among the subnormal numbers.
            is_zero = values.abs() < torch.finfo(values.dtype).tiny
            return (self.input_independent[reader.group_channels] & is_zero) | reader.has_zero_weights()

        self.removed = self.passes_everywhere(self.readers, contributes_nothing)
        has_one_value = self.passes_everywhere(
            self.readers, lambda reader: inputs[reader.module][reader.channels].isfinite()
        )
        self.constant = self.input_independent & has_one_value & ~self.removed
        if self.constant.sum() > 1:
            self.representative = self.choose_representative(inputs)
        self.retain_one_channel_per_layer()

    def choose_representative(self, inputs: ConstantInputs) -> int:
        """Return the constant channel whose smallest magnitude over all readers is the largest."""
        magnitude = torch.full((self.size,), torch.inf, dtype=torch.float64)
        for reader in self.readers:
            values = inputs[reader.module][reader.channels].abs().double()
            magnitude.scatter_reduce_(0, reader.group_channels, values, "amin")
        return int(magnitude.where(self.constant, -1.0).argmax())

    def retain_one_channel_per_layer(self) -> None:
        """Exempt one channel of each layer that would lose all its channels."""
        leaving = self.removed.clone()
        if self.representative is not None:
            leaving |= self.constant
            leaving[self.representative] = False
        for producer in self.producers:
            if producer.has_all_outputs and leaving[producer.group_channels].all():
                first = producer.group_channels[0]
                leaving[first] = self.removed[first] = self.constant[first] = False
                self.only_channel[first] = True

    def set_representative_constant(self) -> None:
        """Make the norms give the representative the constant 1, so that it is not zero at any reader."""
        for norm in self.norms if self.representative is not None else ():
            channels, module = norm.select(self.representative), norm.module  # type: ignore
            new_values: list[tuple[Any, Any]] = []
            if module.affine:
                new_values = [(module.weight, 0.0), (module.bias, 1.0)]
            elif module.running_mean is not None:
                deviation = (module.running_var[channels] + module.eps).sqrt()  # type: ignore
                new_values = [(module.running_mean, -deviation)]
            for tensor, value in new_values:
                self.overwritten.append((tensor, channels, tensor[channels].clone()))
                tensor[channels] = value

    def merge_constants(self, inputs: ConstantInputs, new_inputs: ConstantInputs) -> None:
        """Add the contributions of all constant channels to the representative's weights and mark them as removed.

        `inputs` are the values that the readers saw before `set_representative_constant`, `new_inputs` those after
        it. If some reader cannot see the representative, the norms are restored and all constant channels stay.
        """
        if self.representative is None:
            return
        others = [channel for channel in self.constant.nonzero().flatten().tolist() if channel != self.representative]
        new_weights = []
        for reader in self.readers:
            rows = reader.weight_rows().cpu().double()
            channels = [reader.select(channel) for channel in (self.representative, *others)]
            parts = [rows[chosen] * match_rows(rows, inputs[reader.module][chosen]) for chosen in channels]
            total, value = torch.stack(parts).sum(0), new_inputs[reader.module][channels[0]]
            if total[(value == 0) | value.isnan()].any():
                self.restore_norms()
                return
            divisor = match_rows(rows, value.where(value != 0, 1.0))
            new_weights.append((reader.weight_rows(), channels[0], total / divisor))
        for weight, chosen, total in new_weights:
            weight[chosen] = total.to(weight)
        self.removed[others] = True

    def restore_norms(self) -> None:
        """Undo `set_representative_constant` and give up the representative."""
        for tensor, channels, value in self.overwritten:
            tensor[channels] = value
        self.representative = None

    def remove_channels(self) -> None:
        """Remove the channels marked as removed from every layer of the group."""
        if self.removed.any():
            self.prune(self.removed.nonzero().flatten().tolist())


def match_rows(rows: Tensor, values: Tensor) -> Tensor:
    """Return one value per row as float64, in a shape that broadcasts against `rows`."""
    return values.double().view(-1, *[1] * (rows.ndim - 1))
