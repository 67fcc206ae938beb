"""Masks and latents in flat buffers, so that a step costs a kernel or two and not some for every layer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import guards

if TYPE_CHECKING:
    from .engine import Slot


class Arena:
    """Slots of one device and one type. Their masks and latents become views of one buffer each.

    A view has the strides of its parameter, so that all three can be walked through side by side.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        # Targets come before their companions, so that figures over the targets are over a front part.
        self.slots = sorted(slots, key=lambda slot: slot.leader is not None)
        self.targets = [slot for slot in self.slots if slot.leader is None]
        self.sizes = [slot.mask.numel() for slot in self.targets]
        self.count = sum(self.sizes)
        self.ends = torch.tensor(self.sizes).cumsum(0).to(self.slots[0].mask.device) - 1  # of each target
        self.method = self.slots[0].method
        self.mask = self.pool("mask")
        self.latent = self.pool("latent") if self.slots[0].latent is not None else None
        tracked = bool(self.targets) and self.targets[0].flipped is not None
        self.flipped = self.pool("flipped", self.targets) if tracked else None
        self.kernel = kernels() if self.fuses() else None
        self.addresses = self.locate()  # of the parameters when the table was made
        self.table: tuple[Tensor, ...] = ()
        self.recordings: dict[str, torch.cuda.CUDAGraph | None] = {}

    def pool(self, field: str, slots: Sequence[Slot] | None = None) -> Tensor:
        """Move one field of the slots into a buffer, and return the buffer."""
        slots = self.slots if slots is None else slots
        tensors = [getattr(slot, field) for slot in slots]
        buffer = torch.empty(sum(t.numel() for t in tensors), dtype=tensors[0].dtype, device=tensors[0].device)
        offset = 0
        for slot, tensor in zip(slots, tensors, strict=True):
            view = buffer.as_strided(tensor.shape, dense_strides(slot.parameter), offset)
            setattr(slot, field, view.copy_(tensor))
            offset += tensor.numel()
        return buffer

    def fuses(self) -> bool:
        """Whether the kernels can do what the method does."""
        first = self.slots[0].parameter
        dense = all(slot.parameter.stride() == slot.mask.stride() for slot in self.slots)
        plain = self.method.plain and self.method.weights != "free"
        return first.is_cuda and dense and plain and self.mask.numel() < 2**31

    def locate(self) -> tuple[int, ...]:
        """Where the parameters lie."""
        return tuple([slot.parameter.data_ptr() for slot in self.slots])

    def moved(self) -> bool:
        """Whether a parameter lies elsewhere than before; the kernels' table is then made anew."""
        addresses = self.locate()
        if addresses == self.addresses:
            return False
        self.addresses, self.table, self.recordings = addresses, (), {}
        return True

    def ready(self) -> bool:
        """Whether to use the kernels."""
        if self.kernel is None:
            return False
        if not self.table:
            sizes = [slot.mask.numel() for slot in self.slots]
            self.table = self.kernel.table(self.addresses, sizes, self.mask.device)
        return True

    def launch(self, move: str) -> None:
        """Run a kernel on all slots.

        Python takes longer to launch a Triton kernel than to replay a recording of it, so from the second
        time on a move is a CUDA graph of one node.
        """
        if guards.capturing(self.mask) or move not in self.recordings:
            self.kernel.move(move, self.table, self.latent, self.mask, self.slots[0].parameter)  # type: ignore[union-attr]
            self.recordings.setdefault(move, None)
            return
        recording = self.recordings[move]
        if recording is None:
            recording = self.recordings[move] = self.record(move)
        recording.replay()

    def record(self, move: str) -> torch.cuda.CUDAGraph:
        """A CUDA graph of a move."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.Stream(self.mask.device)):
            graph.capture_begin(capture_error_mode="thread_local")  # other threads may go on meanwhile
            self.kernel.move(move, self.table, self.latent, self.mask, self.slots[0].parameter)  # type: ignore[union-attr]
            graph.capture_end()
        return graph

    # ---- the three moves, for all slots or some of them

    def enter(self, slots: Sequence[Slot]) -> None:
        """parameter ← latent."""
        if self.latent is None or not slots:
            return
        if len(slots) == len(self.slots) and self.ready():
            self.launch("enter")
            return
        torch._foreach_copy_([s.parameter for s in slots], [s.source for s in slots])

    def leave(self, slots: Sequence[Slot]) -> None:
        """latent ← parameter, then parameter ← project(latent)."""
        if len(slots) == len(self.slots) and self.ready():
            self.launch("leave")  # the optimizer has told autograd already that the parameters changed
            for slot in slots:
                slot.version = slot.parameter._version
            return
        if self.latent is not None and slots:
            torch._foreach_copy_([s.source for s in slots], [s.parameter for s in slots])
            for slot in slots:
                slot.bound()
        for slot in slots:
            slot.hold()

    def project(self) -> None:
        """parameter ← project(latent)."""
        if self.ready():
            self.launch("project")
            torch.autograd.graph.increment_version([slot.parameter for slot in self.slots])
            for slot in self.slots:
                slot.version = slot.parameter._version
            return
        for slot in self.slots:
            slot.project()


def arenas(slots: Sequence[Slot]) -> list[Arena]:
    """One arena for each device and type."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Slot]] = {}
    for slot in slots:
        kinds.setdefault((slot.parameter.device, slot.parameter.dtype), []).append(slot)
    return [Arena(group) for group in kinds.values()]


def dense_strides(parameter: Tensor) -> tuple[int, ...]:
    """The strides of a copy: those of the parameter where it has no gaps."""
    return torch.empty_like(parameter, device="meta").stride()


@cache
def kernels() -> ModuleType | None:
    """The Triton kernels, where Triton is there."""
    try:
        from . import arena_triton
    except ImportError:
        return None
    return arena_triton
