"""Masks and latents of all layers in flat buffers, so that a step launches one or two kernels for all layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...sharding import local_part, place_like, whole_reads
from ..sharded_outputs import ShardedOutputs
from ..slot import dense_strides
from .bounded_rows import BoundedRows
from .captured_graphs import CapturedGraphs
from .latent_memory import LatentMemory
from .output_layout import output_count, threshold_count
from .redraw_inputs import has_known_layouts, redraw_inputs
from .unit_selection import UnitSelection

if TYPE_CHECKING:
    from ..slot import Slot


class FlatBuffers:
    """Slots of one device and dtype, whose masks and latents are views of one buffer each.

    A view has the strides of its parameter, so that parameter, mask and latent can be read in the same order.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        # Targets come before coupled parameters, so that the targets' entries are the front of each buffer.
        self.slots = sorted(slots, key=lambda slot: slot.leader is not None)
        self.targets = [slot for slot in self.slots if slot.leader is None]
        self.names = [slot.name for slot in self.targets]
        self.sizes = [slot.mask.numel() for slot in self.targets]
        self.is_sharded = any(slot.is_sharded for slot in self.slots)  # whether this rank has parts of them only
        self.sharded_outputs = ShardedOutputs.of(self.targets) if self.is_sharded else None
        self.count = sum(self.sizes)
        self.last_entries = torch.tensor(self.sizes).cumsum(0).to(self.slots[0].mask.device) - 1  # of each target
        self.method = self.slots[0].method
        self.mask = self._flatten_field("mask")
        self.latent = self._flatten_field("latent")
        self.weight = self._flatten_field("weight")
        self.draw_number = self._flatten_field("draw_number")
        self.observed_mask = self._flatten_field("observed_mask")
        self.last_flip = self._flatten_field("last_flip")
        self.calibration = self._flatten_field("calibration")
        self.mask_before: Tensor | None = self.observed_mask  # the masks before an update, where kernels read them
        self.projection = self.method.fused_projection
        self.units: UnitSelection | None = None  # what the kernels select among
        self.top_k: Any = None  # the kernels' selection of the highest scores
        self.floor_top_k: Any = None  # their selection of what each layer keeps at least, where there is a floor
        self.magnitude: Tensor | None = None  # |latent|, where the kernels select by it
        self.selected_sparsity: float | None = None  # the sparsity that they select for
        self.kernels = triton_kernels() if self.mask.is_cuda and self.can_fuse() else None
        self.addresses = self.parameter_addresses()  # when the block table was made
        self.block_table: tuple[Tensor, ...] = ()
        self.output_thresholds: Any = None  # scales and thresholds of all outputs, where kernels shrink by them
        self.update_figures: Any = None  # what kernels measure of an update
        self.bounded_gradients: Any = None  # gradients that kernels bound, where they can
        self.bounded_views: dict[Slot, Tensor] = {}  # the part of each slot in their buffer
        self.graphs = CapturedGraphs(self.mask.device)
        self.bounded_rows = BoundedRows()  # on a CPU
        self.latent_memory = LatentMemory()

    def _flatten_field(self, field: str) -> Any:
        """Move one field of the slots into a new buffer and return it; None where no slot has the field.

        Targets may have fields that coupled parameters do not have.
        """
        slots = [slot for slot in self.slots if getattr(slot, field) is not None]
        if not slots:
            return None
        first, count = getattr(slots[0], field), sum(getattr(slot, field).numel() for slot in slots)
        buffer = torch.empty(count, dtype=first.dtype, device=first.device)
        del first  # so that each tensor is freed once it is copied
        offset = 0
        for slot in slots:
            tensor = getattr(slot, field)
            like = slot.values if tensor.shape == slot.values.shape else tensor
            view = buffer.as_strided(tensor.shape, dense_strides(like), offset)
            setattr(slot, field, view.copy_(tensor))
            offset += tensor.numel()
        return buffer

    @property
    def target_mask(self) -> Tensor:
        """The part of the mask buffer that belongs to targets."""
        return self.mask[: self.count]

    @property
    def projection_is_mask(self) -> bool:
        """Whether the projection is m ⊙ w and nothing else."""
        return self.projection is not None and not self.projection.soft_threshold

    # ---- kernels

    def can_fuse(self) -> bool:
        """Return whether the fused kernels compute what the method does on these slots."""
        if self.projection is None or self.method.weights == "free" or not 0 < self.mask.numel() < 2**31:
            return False
        return (
            all(slot.values.stride() == slot.mask.stride() for slot in self.slots)
            and (self.projection_is_mask or all(map(threshold_count, self.slots)))
            and (self.weight is None or len(self.targets) == len(self.slots))
        )

    def parameter_addresses(self) -> tuple[int, ...]:
        """Return the memory address of every parameter."""
        return tuple([slot.values.data_ptr() for slot in self.slots])

    def forget_moved_parameters(self) -> bool:
        """Return whether a parameter has a new address; the kernels' block table is then made again."""
        addresses = self.parameter_addresses()
        if addresses == self.addresses:
            return False
        self.addresses, self.block_table = addresses, ()
        self.graphs.clear()
        return True

    def kernels_ready(self) -> bool:
        """Return whether to use the kernels, after making their tables where needed."""
        if self.kernels is None:
            return False
        if not self.block_table:
            sizes = [slot.mask.numel() for slot in self.slots]
            self.block_table = self.kernels.make_block_table(self.addresses, sizes, self.mask.device)
            self.update_figures = self.kernels.UpdateFigures(self.sizes, self.mask.device)
            if self.projection.soft_threshold:  # type: ignore[union-attr]
                counts, rescale = [*map(threshold_count, self.slots)], self.projection.rescale  # type: ignore[union-attr]
                self.output_thresholds = self.kernels.OutputThresholds(self.calibration, counts, sizes, rescale)
        return True

    def launch(self, operation: str) -> None:
        """Run the kernels of an operation on all slots."""
        self.graphs.launch(operation, self._run_kernels)

    def _run_kernels(self, operation: str) -> None:
        """Launch the kernels of an operation."""
        parameter, dense = self.slots[0].values, self.latent if self.weight is None else self.weight

        def copy(name: str, values: Tensor | None) -> None:
            self.kernels.run_copy(name, self.block_table, values, self.mask, parameter, self.output_thresholds)  # type: ignore[union-attr]

        if operation == "select_by_magnitude":
            self._select(torch.abs(self.latent[: self.count], out=self.magnitude))
        elif operation == "bound_gradients":
            self.bounded_gradients.bound(self.block_table[0], *self.method.fused_gradient_bound)  # type: ignore[misc]
        elif operation == "calibrate":
            self.output_thresholds.calibrate(self.latent, self.mask)
        elif operation == "measure_update":
            self.update_figures.measure(
                self.block_table, dense, self.mask, self.mask_before, parameter, self.output_thresholds
            )
        elif operation == "store_select_project":
            copy("store", self.latent)
            scores = self.latent[: self.count]
            # A norm of units needs scores of one sign: see `EdgePopup.update`.
            self._select(scores - scores.amin() if self.method.pattern.ranks_units else scores)
            copy("project", dense)
        else:
            copy(operation, dense if operation == "project" else self.latent)

    def _select(self, scores: Tensor) -> None:
        """Write the masks of the targets' weights with the highest scores, or of the units with the highest norms."""
        if self.method.pattern.is_elementwise:
            self._select_largest(scores, self.mask)
            return
        assert self.units is not None
        parts = zip(scores.split(self.sizes), (slot.mask for slot in self.targets), strict=True)
        views = [part.as_strided(mask.shape, mask.stride(), part.storage_offset()) for part, mask in parts]
        self._select_largest(self.units.norms(views), self.units.mask)
        self.units.write_masks()

    def _select_largest(self, scores: Tensor, mask: Tensor) -> None:
        """Write the mask of the highest scores; what a floor keeps of a layer ranks above all others."""
        if self.floor_top_k is not None:
            self.floor_top_k.select(scores, mask)
            scores = scores.masked_fill(mask[: len(scores)], torch.inf)
        self.top_k.select(scores, mask)

    # ---- the gradients that the optimizer sees

    def transform_gradients(self, slots: Sequence[Slot]) -> None:
        """Replace the gradients of targets where the method transforms them; parameters hold their sparse values."""
        targets = [slot for slot in slots if slot.leader is None] if self.method.transforms_gradient else []
        if len(targets) == len(self.targets) and self._bounds_gradients():
            views = self.bounded_views
            torch._foreach_copy_([*views.values()], [slot.parameter.grad for slot in views])  # type: ignore[misc]
            self.launch("bound_gradients")
            for slot, view in views.items():
                slot.parameter.grad = view
            return
        bound = self.method.fused_gradient_bound
        if bound is not None and self.sharded_outputs is not None and len(targets) == len(self.targets):
            self.sharded_outputs.bound_gradients(bound)
            return
        for slot in targets:
            if bound is not None and self.bounded_rows.bound(slot, bound):
                continue
            with whole_reads(slot.is_sharded):
                gradient: Any = slot.parameter.grad
                tensors = gradient, slot.parameter.detach(), slot.place(slot.mask)
                slot.parameter.grad = self.method.transform_gradient(*tensors, slot.target.output_dim)

    def _bounds_gradients(self) -> bool:
        """Return whether kernels bound the gradients, after making their buffer where needed."""
        if self.method.fused_gradient_bound is None or self.is_sharded or not self.kernels_ready():
            return False
        slots = [slot for slot in self.targets if slot.mask.ndim > 1]
        counts, sizes = [*map(output_count, slots)], [slot.mask.numel() for slot in slots]
        if self.bounded_gradients is None and self.kernels.can_bound(counts):  # type: ignore[union-attr]
            gradient = self.latent.new_empty(sum(sizes))
            places = [self.slots.index(slot) for slot in slots]
            self.bounded_gradients = self.kernels.BoundedGradients(gradient, places, counts, sizes)  # type: ignore[union-attr]
            for slot, part in zip(slots, gradient.split(sizes), strict=True):
                self.bounded_views[slot] = part.as_strided(slot.mask.shape, slot.mask.stride(), part.storage_offset())
        return self.bounded_gradients is not None

    # ---- the copies of a step, for all slots or some of them

    def load_latents(self, slots: Sequence[Slot], point: bool) -> None:
        """Copy latents into parameters, or `point` the parameters to the memory of the latents where they can."""
        if self.latent is None or not slots:
            return
        if point and self.kernels is None and self.latent_memory.point(slots):
            return
        if len(slots) == len(self.slots) and self.kernels_ready():
            self.launch("load")
            return
        torch._foreach_copy_([s.values for s in slots], [s.moved for s in slots])

    def store_latents(self, slots: Sequence[Slot]) -> None:
        """Copy parameters into latents, which the method may clip."""
        if self.latent is None or not slots:
            return
        if self.latent_memory.is_used:
            self.latent_memory.restore()
            for slot in slots:
                slot.clip_latent()
            return
        if len(slots) == len(self.slots) and self.kernels_ready():
            self.launch("store")
            return
        torch._foreach_copy_([s.moved for s in slots], [s.values for s in slots])
        for slot in slots:
            slot.clip_latent()

    def store_and_project(self, slots: Sequence[Slot]) -> None:
        """Copy parameters into latents, then write the sparse values into the parameters."""
        if len(slots) == len(self.slots) and self.kernels_ready():
            self.launch("store_and_project")  # the optimizer's step has increased the parameters' versions already
            for slot in slots:
                slot.version = slot.parameter._version
            return
        self.store_latents(slots)
        for slot in slots:
            slot.enforce_mask()

    def store_select_project(self, slots: Sequence[Slot]) -> bool:
        """Store the scores, select the mask of the highest and project; return False where kernels cannot do it all."""
        if self.top_k is None or self.is_sharded or len(slots) < len(self.slots) or not self.kernels_ready():
            return False
        self.launch("store_select_project")
        for slot in slots:
            slot.version = slot.parameter._version
        return True

    def project(self) -> None:
        """Write the sparse values into the parameters."""
        if self.kernels_ready():
            self.launch("project")
            torch.autograd.graph.increment_version([slot.parameter for slot in self.slots])
            for slot in self.slots:
                slot.version = slot.parameter._version
            return
        for slot in self.slots:
            slot.project()

    # ---- mask updates

    def install_masks(self, masks: Mapping[str, Tensor]) -> None:
        """Copy new masks, which come with their output dimension in front, into the buffer."""
        if not self.targets:
            return
        torch._foreach_copy_(
            [slot.mask for slot in self.targets],
            [
                local_part(place_like(masks[s.name].movedim(0, s.target.output_dim), s.parameter))
                if s.target.output_dim or self.is_sharded
                else masks[s.name]
                for s in self.targets
            ],
        )

    def select_by_magnitude(self) -> None:
        """Install the masks of the largest latents in magnitude; `set_sparsity` says how many."""
        if self.magnitude is None:
            self.magnitude = torch.empty_like(self.latent[: self.count])
        launch = self._run_kernels if self.is_sharded else self.launch  # no graph can replay what ranks exchange
        launch("select_by_magnitude")

    def calibrate(self) -> None:
        """Measure what the projection must know of the installed masks."""
        if self.calibration is None:
            return
        shared = self.sharded_outputs if self.method.calibrates_outputs else None
        if self.kernels_ready() and (shared is not None or not self.is_sharded):
            self.launch("calibrate")
        elif shared is not None:
            shared.calibrate()
        else:
            for slot in self.targets:
                slot.calibrate(slot.mask)
        if shared is not None:
            shared.share_thresholds(self.calibration)

    def snapshot_masks(self) -> Tensor:
        """Return the targets' masks before an update, or those of the last history entry for score methods."""
        if self.observed_mask is not None:
            return self.observed_mask
        if not self.kernels_ready():
            return self.target_mask.clone()
        if self.mask_before is None:  # a captured graph reads them at one fixed address
            self.mask_before = torch.empty_like(self.target_mask)
        return self.mask_before.copy_(self.target_mask)

    def track_flips(self, before: Tensor, step: int) -> None:
        """Remember when each mask entry last changed, and the masks that the next history entry compares with."""
        if self.last_flip is not None:
            self.last_flip.masked_fill_(before ^ self.target_mask, step)
        if self.observed_mask is not None:
            self.observed_mask.copy_(self.target_mask)

    def measure_update(self) -> Tensor | None:
        """Return the figures of an update for each target, or this rank's part; None where kernels cannot measure."""
        if not self.kernels_ready():
            return None
        self.launch("measure_update")
        return self.update_figures.values.clone()

    def set_sparsity(self, sparsity: float) -> bool:
        """Set the sparsity that the kernels select for; return False where kernels cannot select."""
        pattern = self.method.pattern
        ranks = None if self.sharded_outputs is None else self.sharded_outputs.row_ranks
        if self.kernels is None or self.latent.dtype == torch.float64 or (self.is_sharded and ranks is None):
            return False
        if not UnitSelection.can_select(pattern, self.targets):
            return False
        if sparsity == self.selected_sparsity:
            return True
        self.selected_sparsity = sparsity
        if self.units is None:
            self.units = UnitSelection(pattern, self.targets, self.mask)
        kept, floors = self.units.kept_counts(self.method.allocation, sparsity)  # type: ignore[arg-type]
        if self.top_k is None:
            self.top_k = self.units.make_top_k(self.kernels, len(kept) == 1, ranks)
            self.floor_top_k = self.units.make_top_k(self.kernels, False, ranks) if floors else None
        self.top_k.set_counts(kept)
        if floors:
            self.floor_top_k.set_counts(floors)
        return True

    # ---- random weights

    def redraw_weights(self, number: int) -> None:
        """Draw a share of the weights off the mask again; `number` counts the re-draws."""
        stream, limit = self.method.stream, self.method.redraw_limit  # type: ignore[attr-defined]
        if not self.is_sharded and self.kernels_ready() and has_known_layouts(self.targets):
            buffers = self.mask, self.weight, self.draw_number
            self.kernels.redraw(self.block_table, redraw_inputs(self.targets, stream), *buffers, stream, number, limit)  # type: ignore[union-attr]
            return
        for slot in self.targets:
            drawn = slot.weight, slot.draw_number, ~slot.mask
            stream.redraw(slot.name, slot.target.fan_in, *drawn, number, limit, slot.positions())


def group_slots(slots: Sequence[Slot]) -> list[FlatBuffers]:
    """Return one set of buffers for each device and dtype."""
    groups: dict[tuple[torch.device, torch.dtype], list[Slot]] = {}
    for slot in slots:
        groups.setdefault((slot.values.device, slot.values.dtype), []).append(slot)
    return [FlatBuffers(group) for group in groups.values()]


@cache
def triton_kernels() -> ModuleType | None:
    """Return the module of Triton kernels, or None where Triton is not installed."""
    try:
        from . import flat_buffers_triton
    except ImportError:
        return None
    return flat_buffers_triton
