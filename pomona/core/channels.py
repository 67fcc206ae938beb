"""Channels of a value in a traced forward: which of them are zero once layers have removed outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from .targets import Target

KeptOutputs = Callable[[str], Tensor]  # the name of a weight → a boolean vector that is true for its kept outputs


@dataclass(frozen=True)
class Channels:
    """Channels that no layer can remove."""

    size: int

    @property
    def leaders(self) -> tuple[Target, ...]:
        """The weights whose removed outputs these channels follow."""
        return ()

    def kept(self, outputs: KeptOutputs) -> Tensor:
        """Return a boolean vector that is true for channels that are kept."""
        return torch.ones(self.size, dtype=torch.bool)


@dataclass(frozen=True)
class LayerOutputs(Channels):
    """The outputs of a layer whose filters are pruned."""

    leader: Target

    @property
    def leaders(self) -> tuple[Target, ...]:
        return (self.leader,)

    def kept(self, outputs: KeptOutputs) -> Tensor:
        return outputs(self.leader.name)


@dataclass(frozen=True)
class CombinedChannels(Channels):
    """Channels of several values, combined by an operation on which of them are kept."""

    parts: tuple[Channels, ...]
    operation: Callable[[Tensor, Tensor], Tensor]

    @property
    def leaders(self) -> tuple[Target, ...]:
        return tuple(dict.fromkeys(leader for part in self.parts for leader in part.leaders))

    def kept(self, outputs: KeptOutputs) -> Tensor:
        found = [part.kept(outputs) for part in self.parts]
        device = next(kept.device for part, kept in zip(self.parts, found, strict=True) if part.leaders)
        return reduce(self.operation, [kept.to(device) for kept in found])


def add_channels(terms: Sequence[Channels | None]) -> Channels | None:
    """Return the channels of a sum, which are kept as long as one term has them; None where one is not known."""
    known = [term for term in terms if term is not None]
    if not known or len(known) < len(terms) or len({term.size for term in known}) > 1:
        return None
    if not all(term.leaders for term in known):
        return Channels(known[0].size)
    return known[0] if len(known) == 1 else CombinedChannels(known[0].size, tuple(known), torch.logical_or)


def multiply_channels(factors: Sequence[Channels | None]) -> Channels | None:
    """Return the channels of a product, which are kept as long as every factor has them; None where none is known."""
    known = [factor for factor in factors if factor is not None]
    removable = [factor for factor in known if factor.leaders]
    if not removable or len({factor.size for factor in known}) > 1:
        return known[0] if len(known) == 1 else None
    return removable[0] if len(removable) == 1 else CombinedChannels(known[0].size, tuple(removable), torch.logical_and)


def concatenate_channels(parts: Sequence[Channels | None]) -> Channels | None:
    """Return the channels of one part after another; None where one is not known."""
    known = [part for part in parts if part is not None]
    if not known or len(known) < len(parts):
        return None
    size = sum(part.size for part in known)
    if not any(part.leaders for part in known):
        return Channels(size)
    return CombinedChannels(size, tuple(known), append)


def append(one: Tensor, other: Tensor) -> Tensor:
    """Return two vectors as one."""
    return torch.cat((one, other))
