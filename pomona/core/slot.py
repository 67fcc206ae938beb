"""The engine's state of one pruned parameter: its mask, its latent values and how it is projected."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..masking import apply_mask
from ..native import step
from ..sharding import (
    is_sharded,
    local_part,
    place_like,
    place_reduced,
    positions_of,
    whole,
    whole_reads,
    wrap_part,
    wrap_reduced,
)
from .channels import Channels
from .method import Method
from .score_method import ScoreMethod
from .targets import Target


@dataclass(eq=False)
class Slot:
    """One pruned parameter with its mask; soft methods add a latent, score methods scores and random weights."""

    target: Target
    parameter: nn.Parameter
    method: Method
    mask: Tensor
    latent: Tensor | None  # None: the optimizer moves the parameter itself
    last_flip: Tensor | None = None  # the step at which each mask entry last changed, where that is tracked
    initial_value: Tensor | None = None  # the value before the first pruning, kept until the first step
    leader: OutputLeaders | None = None  # for a coupled parameter, the slots whose removed outputs it follows
    unscaled_norms: list[tuple[nn.Module, OutputLeaders]] = dataclasses.field(
        default_factory=list
    )  # see `clear_running_means`
    weight: Tensor | None = None  # the random weights that scores select from
    draw_number: Tensor | None = None  # the number of each weight's last re-draw, where weights are re-drawn
    observed_mask: Tensor | None = None  # the mask of the last history entry, where the mask moves at every step
    calibration: Tensor | None = None  # what the projection measured when the mask was installed, where it does
    calibration_shape: Sequence[int] = ()  # of all ranks together, where the parameter is sharded
    version: int = -1  # the parameter's version right after the last projection
    output_norms: Tensor | None = None  # estimates of the norm of each output at that version, where they are needed

    @classmethod
    def create(cls, target: Target, method: Method, track: bool = False, leader: OutputLeaders | None = None) -> Slot:
        """Create a slot whose mask keeps everything."""
        if isinstance(method, ScoreMethod):
            return cls._create_scored(target, method, track, leader)
        weight = local_part(target.parameter.detach())
        slot = cls(
            target,
            target.parameter,
            method,
            mask=torch.ones_like(weight, dtype=torch.bool),
            latent=weight.clone() if method.weights == "soft" else None,
            last_flip=torch.zeros_like(weight, dtype=torch.int32) if track else None,
            leader=leader,
        )
        slot.calibration = slot.measure_calibration(weight, slot.mask) if leader is None else None
        return slot

    @classmethod
    def _create_scored(cls, target: Target, method: ScoreMethod, track: bool, leader: OutputLeaders | None) -> Slot:
        """Create a slot of random weights with random scores; a coupled parameter has neither."""
        like = local_part(target.parameter.detach())
        slot = cls(target, target.parameter, method, torch.ones_like(like, dtype=torch.bool), None, leader=leader)
        if leader is None:
            key, at = (target.name, target.fan_in, like), slot.positions()
            slot.latent, slot.weight = method.stream.scores(*key, at=at), method.stream.weights(*key, at=at)
            slot.observed_mask = slot.mask.clone()
            slot.draw_number = torch.zeros_like(like, dtype=torch.int32) if method.redraw_limit else None
            slot.last_flip = torch.zeros_like(like, dtype=torch.int32) if track else None
        return slot

    @property
    def name(self) -> str:
        """The parameter's name in the model."""
        return self.target.name

    @property
    def is_hard(self) -> bool:
        """Whether entries off the mask stay zero."""
        return self.method.weights == "hard"

    @property
    def masks_gradient(self) -> bool:
        """Whether gradient and momentum off the mask are zeroed too."""
        return self.is_hard and not self.method.keeps_pruned_momentum

    @property
    def values(self) -> Tensor:
        """The parameter, or the part of it on this rank where it is sharded; all tensors of a slot have its shape."""
        return local_part(self.parameter)

    @property
    def is_sharded(self) -> bool:
        """Whether the parameter is a DTensor, of which this rank may hold a part only."""
        return is_sharded(self.parameter)

    @property
    def moved(self) -> Tensor:
        """The tensor that the optimizer moves: the latent, or the parameter where there is none."""
        return self.values if self.latent is None else self.latent

    def place(self, part: Tensor) -> Tensor:
        """Return a tensor of this slot as one that is sharded like the parameter; as it is where that is not."""
        return wrap_part(part, self.parameter)

    def own_part(self, values: Tensor) -> Tensor:
        """Return this rank's part of a tensor in the parameter's shape, however it is placed."""
        return local_part(place_like(values, self.parameter)) if self.is_sharded else whole(values)

    def own_calibration(self, values: Tensor) -> Tensor:
        """Return this rank's part of a calibration of all ranks together."""
        return local_part(place_reduced(values, self.parameter)) if self.is_sharded else whole(values)

    def positions(self) -> Tensor | None:
        """Return the row-major positions of this rank's entries in a sharded parameter; None where it has all."""
        return positions_of(self.parameter) if self.is_sharded else None

    @property
    def dense(self) -> Tensor:
        """The dense values that the mask is applied to."""
        return self.moved if self.weight is None else self.weight

    # ---- outputs, and what is coupled to them

    def kept_outputs(self) -> Tensor:
        """Return a boolean vector that is true for outputs with at least one kept weight."""
        if self.target.output_groups == 1:
            return whole(self.place(self.mask).movedim(self.target.output_dim, 0).flatten(1).any(1))
        groups = whole(self.place(self.mask)).unflatten(
            0, (self.target.output_groups, -1)
        )  # group, input, output of the group, …
        return groups.movedim(2, 1).flatten(2).any(2).flatten()

    def copy_output_mask(self) -> None:
        """Mask a coupled parameter by the outputs that its leaders keep."""
        if self.leader is not None:
            self.mask.copy_(local_part(place_like(self.leader.kept_outputs(), self.parameter)))

    def clear_running_means(self) -> None:
        """Zero the running means of removed outputs in norms that have no gain and shift to mask."""
        for norm, leaders in self.unscaled_norms:
            running_mean = norm._buffers.get("running_mean")
            if running_mean is not None:
                running_mean.masked_fill_(~leaders.kept_outputs(), 0)

    # ---- the tensor that the model holds

    def is_stale(self) -> bool:
        """Return whether the model holds another tensor under this name, or one with another layout."""
        now = local_part(self.target.parameter)
        same_layout = (
            now.device == self.mask.device
            and now.dtype == self.moved.dtype
            and dense_strides(now) == self.mask.stride()
        )
        return self.target.parameter is not self.parameter or not same_layout

    def rebind(self) -> None:
        """Take over the tensor that the model holds now, moving the slot's own tensors to its device."""
        self.parameter = self.target.parameter
        self.mask = self.mask.to(self.values.device)
        for field in ("latent", "weight", "calibration"):
            if getattr(self, field) is not None:
                setattr(self, field, getattr(self, field).to(self.values))
        for field in ("last_flip", "draw_number", "observed_mask"):
            if getattr(self, field) is not None:
                setattr(self, field, getattr(self, field).to(self.values.device))
        self.version = -1

    def save_initial_value(self) -> None:
        """Save the parameter until the first step, where no latent holds its value."""
        if self.latent is None:
            self.initial_value = self.values.detach().clone()

    def restore_initial_value(self) -> None:
        """Undo the pruning at `attach`, unless the user has written the parameter since."""
        if self.parameter._version != self.version:
            self.initial_value = None
        if self.initial_value is not None:
            self.values.copy_(self.initial_value)

    def was_edited(self) -> bool:
        """Return whether the user changed the parameter since the last projection (loaded a checkpoint, say)."""
        if self.parameter._version == self.version or self.method.weights == "free":
            return False
        if not self.is_sharded:
            return not torch.equal(self.projected(), self.values)
        with whole_reads():
            return bool((self.place(self.projected()) != self.place(self.values.detach())).any())

    def holds_projection(self) -> bool:
        """Return whether the parameter holds the sparse value, up to the rounding errors of another device.

        Free weights may hold anything.
        """
        if self.method.weights == "free" or not self.parameter.numel():
            return True
        with whole_reads(self.is_sharded):
            held = self.place(self.values.detach())
            distance = (self.place(self.projected()) - held).abs().max()
            return bool(distance <= 1e-4 * held.abs().max())

    def adopt_edit(self) -> bool:
        """Copy a parameter that the user edited into the latent; return whether it was edited.

        Random weights are never taken from the user.
        """
        edited = self.was_edited()
        if edited and self.latent is not None and self.weight is None:
            self.latent.copy_(self.values)
            self.clip_latent()
            self.reset_calibration()
        return edited

    # ---- projection

    def project(self) -> None:
        """Write the sparse value into the parameter."""
        if not self._project_with_norms():
            self.write_projection(self.dense, self.values)
            self.output_norms = None
        self.version = self.parameter._version

    def _project_with_norms(self) -> bool:
        """Project in one pass that also estimates the norm of each output; return False if impossible or not needed."""
        projection = self.method.fused_projection
        if self.method.fused_gradient_bound is None or projection is None or self.leader is not None:
            return False
        if self.mask.device.type != "cpu" or self.is_sharded:
            return False
        if self.target.output_dim or self.mask.ndim < 2 or not step.has_rows(self.mask, self.mask.shape[:1]):
            return False
        if self.output_norms is None:
            self.output_norms = torch.empty(len(self.mask), dtype=torch.float32)
        calibration = self.calibration if projection.soft_threshold else None
        return step.project_rows(self.dense, self.mask, self.parameter, calibration, self.output_norms)

    def known_output_norms(self) -> Tensor | None:
        """Return estimates of the norms of the outputs that the parameter holds now, where there are any."""
        return self.output_norms if self.version == self.parameter._version else None

    def enforce_mask(self) -> None:
        """Project, except for free weights, which may grow between two updates."""
        if self.method.weights != "free":
            self.project()

    def projected(self) -> Tensor:
        """Return the sparse value in a new tensor."""
        value = torch.empty_like(self.values, requires_grad=False)
        self.write_projection(self.dense, value)
        return value

    def write_projection(self, values: Tensor, out: Tensor) -> None:
        """Write the sparse value of `values` into `out`; a coupled parameter is only masked."""
        mask = self.mask.to(out.device)
        if self.leader is not None:
            apply_mask(values, mask, out)
        elif self.is_sharded and self.method.fused_projection is None:  # it may read the whole tensor
            with whole_reads():
                placed = self.place(values), self.place(mask), self.place(out)
                self.method.project(*placed, self.place_calibration())
        else:
            self.method.project(values, mask, out, self.calibration)

    def calibrate(self, mask: Tensor) -> None:
        """Measure what the projection must know of a mask, in place: a captured graph reads it there."""
        if self.calibration is not None:
            self.calibration.copy_(self.measure_calibration(self.moved, mask))  # type: ignore[arg-type]

    def measure_calibration(self, weights: Tensor, mask: Tensor) -> Tensor | None:
        """Return what the projection must know of weights and their mask, or this rank's part of it."""
        if not self.is_sharded:
            return self.method.calibrate(weights, mask, self.target.output_dim)
        with whole_reads():
            measured = self.method.calibrate(self.place(weights.detach()), self.place(mask), self.target.output_dim)
        if measured is None:
            return None
        self.calibration_shape = measured.shape
        return local_part(place_reduced(measured, self.parameter)).clone()

    def place_calibration(self) -> Tensor | None:
        """Return the calibration of all ranks together, as the projection of a sharded parameter reads it."""
        if self.calibration is None or not self.is_sharded:
            return self.calibration
        return wrap_reduced(self.calibration, self.calibration_shape, self.parameter)

    def reset_calibration(self) -> None:
        """Make the projection a plain mask until the next mask is installed."""
        self.calibrate(torch.ones_like(self.mask))

    def freeze_projection(self) -> None:
        """Make the projected value the latent after the last mask update, and the projection a plain mask."""
        if self.calibration is not None:
            self.moved.copy_(torch.where(self.mask, self.projected(), self.moved))
            self.reset_calibration()

    def clip_latent(self) -> None:
        """Let the method clip the latent in place."""
        if self.latent is not None and self.leader is None:
            self.method.clip_latent(self.latent)

    def mask_gradient(self) -> None:
        """Zero the gradient off the mask."""
        gradient = local_part(self.parameter.grad)
        if gradient is not None:
            apply_mask(gradient, self.mask, gradient)


@dataclass(eq=False)
class OutputLeaders:
    """The slots whose removed outputs the channels of a bias or a norm follow."""

    channels: Channels
    slots: dict[str, Slot]  # by the names of their weights

    def kept_outputs(self) -> Tensor:
        """Return a boolean vector that is true for channels that are kept."""
        return self.channels.kept(lambda name: self.slots[name].kept_outputs())


def dense_strides(parameter: Tensor) -> tuple[int, ...]:
    """Return the strides of a copy: those of the parameter where it has no gaps."""
    return torch.empty_like(parameter, device="meta").stride()


def outputs_first(tensor: Tensor, output_dim: int) -> Tensor:
    """Return the tensor without gradient and with its output dimension in front.

    A view costs some microseconds, so none is made without need.
    """
    tensor = tensor.detach() if tensor.requires_grad else tensor
    return tensor.movedim(output_dim, 0) if output_dim else tensor
