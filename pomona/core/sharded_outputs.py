"""Outputs of layers that are divided among ranks, each whole on a rank, as the rows of FSDP2 are.

What all ranks must know of the outputs, such as their norms, is exchanged for all layers at once: an operation on a
DTensor costs some fifty microseconds, and there would be dozens of them for each layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed

from ..patterns.counting_selection import Ranks
from ..patterns.sharded_selection import RowShards
from ..sharding import dtensor_module, local_part, place_like, place_reduced, sharding_mesh
from .gradient_bound import output_factors

if TYPE_CHECKING:
    from .method import GradientBound
    from .slot import Slot


class ShardedOutputs:
    """The outputs of some layers, of which this rank has a part. Figures of all are ordered by layer and output."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = sorted(slots, key=count_outputs)  # so that layers of one width are the rows of one matrix
        self.counts = [count_outputs(slot) for slot in self.slots]
        self.matrices = [(len(list(group)), count) for count, group in groupby(self.counts)]
        first = [0, *accumulate(self.counts)]
        own = [number_outputs(slot) + at for slot, at in zip(self.slots, first, strict=False)]
        self.own_counts = [len(numbers) for numbers in own]
        self.own_numbers = torch.cat(own)  # of this rank's outputs among all
        mesh = sharding_mesh(slot.parameter for slot in slots)
        self.groups = [mesh.get_group(dim) for dim in divided_dims(self.slots[0].parameter)]

    @classmethod
    def of(cls, slots: Sequence[Slot]) -> ShardedOutputs | None:
        """Return the outputs of sharded layers; None where a rank has a part of an output, or layers are placed apart.

        Vectors have no outputs that are measured one by one.
        """
        module = dtensor_module()
        if not slots or not all(slot.is_sharded and slot.mask.ndim > 1 and count_outputs(slot) > 1 for slot in slots):
            return None
        places = {(s.parameter.device_mesh, tuple(divided_dims(s.parameter))) for s in slots}  # type: ignore[attr-defined]
        whole = all(
            placement.is_replicate() or (type(placement) is module.Shard and placement.dim == slot.target.output_dim)
            for slot in slots
            for placement in slot.parameter.placements  # type: ignore[attr-defined]
        )
        return cls(slots) if whole and len(places) == 1 else None

    @cached_property
    def row_ranks(self) -> Ranks | None:
        """How counts of weights are added over the ranks; None where kernels cannot select among the weights.

        The answer is the same on all ranks: each has rows of every layer, in the order of the ranks.
        """
        shapes = [slot.parameter.shape for slot in self.slots]
        ranks = self.groups[0].size() if len(self.groups) == 1 else 0
        fits = all(-(-shape[0] // ranks) * (ranks - 1) < shape[0] for shape in shapes) if ranks else False
        row_major = all(slot.target.output_dim == 0 and slot.mask.is_contiguous() for slot in self.slots)
        if not (fits and row_major and sum(map(math.prod, shapes)) < 2**31):
            return None
        return RowShards.of([slot.parameter for slot in self.slots]).counts

    # ---- the bound on gradients

    def bound_gradients(self, bound: GradientBound) -> None:
        """Replace the gradients of all layers by bounded ones, as `BoundedFeedback` defines them."""
        gradients = [local_part(place_like(slot.parameter.grad, slot.parameter)) for slot in self.slots]  # type: ignore[arg-type]
        weights = [slot.values.detach() for slot in self.slots]
        weight_norm, norm = self.gather(torch.stack([self.own_norms(weights), self.own_norms(gradients)]))
        pairs = zip(self.as_matrices(weight_norm), self.as_matrices(norm), strict=True)
        factors = torch.cat([output_factors(*pair, bound).flatten() for pair in pairs])
        if factors.device.type == "cpu" and bool((factors == 1).all()):
            return
        own = factors[self.own_numbers].split(self.own_counts)
        for slot, gradient, factor in zip(self.slots, gradients, own, strict=True):
            shape = [-1 if dim == slot.target.output_dim else 1 for dim in range(gradient.ndim)]
            slot.parameter.grad = slot.place(gradient * factor.view(shape).to(gradient.dtype))

    def own_norms(self, tensors: Iterable[Tensor]) -> Tensor:
        """Return the norms of this rank's outputs of all layers."""
        pairs = zip(self.slots, tensors, strict=True)
        return torch.cat([output_norms(tensor, slot.target.output_dim).flatten() for slot, tensor in pairs])

    def gather(self, own: Tensor) -> Tensor:
        """Return rows of figures of all outputs, given those of this rank's outputs."""
        every = own.new_zeros(len(own), sum(self.counts))
        every[:, self.own_numbers] = own
        for group in self.groups:
            distributed.all_reduce(every, group=group)
        return every

    def as_matrices(self, figures: Tensor) -> list[Tensor]:
        """Return figures of all outputs as matrices with a row for each layer of one width."""
        parts = figures.split([layers * width for layers, width in self.matrices])
        return [part.view(shape) for part, shape in zip(parts, self.matrices, strict=True)]

    # ---- calibrations with a scale for each output, and one threshold

    def calibrate(self) -> None:
        """Measure this rank's part of the calibrations; `share_thresholds` completes them."""
        for slot in self.slots:
            if slot.mask.numel():
                measured = slot.method.calibrate(slot.moved.detach(), slot.mask, slot.target.output_dim)
                slot.calibration.copy_(measured)  # type: ignore[union-attr, arg-type]

    def share_thresholds(self, calibrations: Tensor) -> None:
        """Give each layer the largest of the thresholds that the ranks have measured, in the buffer of all of them."""
        places, layers = self.threshold_places
        own = calibrations[places]
        largest = own.new_zeros(len(self.slots)).scatter_reduce_(0, layers, own, "amax")
        for group in self.groups:
            distributed.all_reduce(largest, distributed.ReduceOp.MAX, group=group)
        calibrations[places] = largest[layers]

    @cached_property
    def threshold_places(self) -> tuple[Tensor, Tensor]:
        """Where the thresholds of this rank's outputs lie in the buffer of calibrations, and the layer of each."""
        found: list[Any] = [slot.calibration[1] for slot in self.slots]  # type: ignore[index]
        places = [torch.arange(part.numel()) + part.storage_offset() for part in found]
        layers = torch.arange(len(found)).repeat_interleave(torch.tensor([part.numel() for part in found]))
        return torch.cat(places).to(found[0].device), layers.to(found[0].device)


def output_norms(tensor: Tensor, output_dim: int) -> Tensor:
    """Return the norm of each output of a tensor, with its other dimensions of size 1."""
    inner = [dim for dim in range(tensor.ndim) if dim != output_dim]
    return torch.linalg.vector_norm(tensor.float(), dim=inner, keepdim=True)


def count_outputs(slot: Slot) -> int:
    """Return the number of outputs of a layer on all ranks together."""
    return slot.parameter.shape[slot.target.output_dim]


def number_outputs(slot: Slot) -> Tensor:
    """Return the numbers of the outputs of a layer that this rank has."""
    shape = [-1 if dim == slot.target.output_dim else 1 for dim in range(slot.parameter.ndim)]
    every = torch.arange(count_outputs(slot), device=slot.mask.device).view(1, *shape)
    return local_part(place_reduced(every, slot.parameter)).flatten()


def divided_dims(tensor: Any) -> list[int]:
    """Return the dimensions of the mesh along which a tensor is divided."""
    return [dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]
