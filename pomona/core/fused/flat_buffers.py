"""Masks and latents in flat buffers, so that a step costs a kernel or two and not some for every layer."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...allocation import LAYERWISE_ALLOCATIONS, floor_counts, parse_allocation
from ...compressors import Soft
from ...masking import count_pruned
from .. import guards
from .random_stream import label

if TYPE_CHECKING:
    from ..engine import Slot


class Arena:
    """Slots of one device and one type. Their masks and latents become views of one buffer each.

    A view has the strides of its parameter, so that all three can be walked through side by side.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        # Targets come before their companions, so that figures over the targets are over a front part.
        self.slots = sorted(slots, key=lambda slot: slot.leader is not None)
        self.targets = [slot for slot in self.slots if slot.leader is None]
        self.names = [slot.name for slot in self.targets]
        self.sizes = [slot.mask.numel() for slot in self.targets]
        self.count = sum(self.sizes)
        self.ends = torch.tensor(self.sizes).cumsum(0).to(self.slots[0].mask.device) - 1  # of each target
        self.method = self.slots[0].method
        self.mask = self.pool("mask")
        self.latent = self.pool("latent")
        self.weight = self.pool("weight")
        self.drawn = self.pool("drawn")
        self.seen = self.pool("seen")
        self.flipped = self.pool("flipped")
        self.gauge = self.pool("gauge")
        self.past: Tensor | None = self.seen  # the masks before an update, where kernels look for them
        compressor = getattr(self.method, "compressor", None)
        self.soft = compressor if isinstance(compressor, Soft) else None  # the projection has a gauge that kernels know
        self.selection: Any = None  # of the highest scores, where kernels do it
        self.floor: Any = None  # the same of those that each layer keeps at least, where it has a floor
        self.score: Tensor | None = None  # |latent|, where they do it by that
        self.aimed: float | None = None  # the sparsity that they select for
        self.kernel = kernels() if self.mask.is_cuda and self.fuses() else None
        self.addresses = self.locate()  # of the parameters when the table was made
        self.table: tuple[Tensor, ...] = ()
        self.rows: Any = None  # the scales and thresholds of all outputs, where kernels shrink by them
        self.figures: Any = None  # what they note of an update
        self.recordings: dict[str, torch.cuda.CUDAGraph | None] = {}

    def pool(self, field: str) -> Any:
        """Move one field of the slots into a buffer, and return the buffer; None where no slot has it.

        Targets may have what their companions do not.
        """
        slots = [slot for slot in self.slots if getattr(slot, field) is not None]
        if not slots:
            return None
        tensors = [getattr(slot, field) for slot in slots]
        buffer = torch.empty(sum(t.numel() for t in tensors), dtype=tensors[0].dtype, device=tensors[0].device)
        offset = 0
        for slot, tensor in zip(slots, tensors, strict=True):
            like = slot.parameter if tensor.shape == slot.parameter.shape else tensor
            view = buffer.as_strided(tensor.shape, dense_strides(like), offset)
            setattr(slot, field, view.copy_(tensor))
            offset += tensor.numel()
        return buffer

    def fuses(self) -> bool:
        """Whether the kernels can do what the method does."""
        dense = all(slot.parameter.stride() == slot.mask.stride() for slot in self.slots)
        plain = self.method.plain or (self.soft is not None and all(map(outputs, self.slots)))
        alike = self.weight is None or len(self.targets) == len(self.slots)
        return dense and plain and self.method.weights != "free" and alike and self.mask.numel() < 2**31

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
            self.figures = self.kernel.Figures(self.sizes, self.mask.device)
            if self.soft is not None:
                self.rows = self.kernel.Rows(self.gauge, [*map(outputs, self.slots)], sizes, self.soft.rescale)
        return True

    def launch(self, move: str) -> None:
        """Run a kernel on all slots.

        Python takes longer to launch a Triton kernel than to replay a recording of it, so from the second
        time on a move is a CUDA graph of one node.
        """
        if guards.capturing(self.mask) or move not in self.recordings:
            with RECORDING:  # Triton may still be loading a kernel for another thread
                self.play(move)
            self.recordings.setdefault(move, None)
            return
        recording = self.recordings[move]
        if recording is None:
            recording = self.recordings[move] = self.record(move)
        recording.replay()

    def record(self, move: str) -> torch.cuda.CUDAGraph:
        """A CUDA graph of a move."""
        graph = torch.cuda.CUDAGraph()
        with RECORDING, torch.cuda.stream(aside(self.mask.device)):
            graph.capture_begin(capture_error_mode="thread_local")  # other threads may go on meanwhile
            self.play(move)
            graph.capture_end()
        return graph

    def play(self, move: str) -> None:
        """The kernels of a move."""
        parameter, dense = self.slots[0].parameter, self.latent if self.weight is None else self.weight

        def run(name: str, values: Tensor | None) -> None:
            self.kernel.move(name, self.table, values, self.mask, parameter, self.rows)  # type: ignore[union-attr]

        if move == "pick":
            self.select(torch.abs(self.latent[: self.count], out=self.score))
        elif move == "measure":
            self.rows.measure(self.latent, self.mask)
        elif move == "note":
            self.figures.run(self.table, dense, self.mask, self.past, parameter, self.rows)
        elif move == "follow":
            run("take", self.latent)
            self.select(self.latent)
            run("project", dense)
        else:
            run(move, dense if move == "project" else self.latent)

    def select(self, scores: Tensor) -> None:
        """mask ← the highest scores; what a floor keeps of a layer comes before all others."""
        if self.floor is not None:
            self.floor.run(scores, self.mask)
            scores = scores.masked_fill(self.mask[: self.count], torch.inf)
        self.selection.run(scores, self.mask)

    # ---- the three moves, for all slots or some of them

    def enter(self, slots: Sequence[Slot]) -> None:
        """parameter ← latent."""
        if self.latent is None or not slots:
            return
        if len(slots) == len(self.slots) and self.ready():
            self.launch("enter")
            return
        torch._foreach_copy_([s.parameter for s in slots], [s.source for s in slots])

    def take(self, slots: Sequence[Slot]) -> None:
        """latent ← parameter."""
        if self.latent is not None and slots:
            torch._foreach_copy_([s.source for s in slots], [s.parameter for s in slots])
            for slot in slots:
                slot.bound()

    def leave(self, slots: Sequence[Slot]) -> None:
        """latent ← parameter, then parameter ← project(latent)."""
        if len(slots) == len(self.slots) and self.ready():
            self.launch("leave")  # the optimizer has told autograd already that the parameters changed
            for slot in slots:
                slot.version = slot.parameter._version
            return
        self.take(slots)
        for slot in slots:
            slot.hold()

    def follow(self, slots: Sequence[Slot]) -> bool:
        """latent ← parameter, mask ← the highest of the latent, parameter ← m ⊙ weight: if kernels can do it all."""
        if self.selection is None or len(slots) < len(self.slots) or not self.ready():
            return False
        self.launch("follow")
        for slot in slots:
            slot.version = slot.parameter._version
        return True

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

    # ---- masks that follow scores, and weights that are drawn

    def put(self, masks: Mapping[str, Tensor]) -> None:
        """Put new masks in force; they come with their outputs first."""
        torch._foreach_copy_(
            [slot.mask for slot in self.targets],
            [masks[s.name].movedim(0, s.target.rows) if s.target.rows else masks[s.name] for s in self.targets],
        )

    def pick(self) -> None:
        """mask ← the largest |latent|."""
        if self.score is None:
            self.score = torch.empty_like(self.latent[: self.count])
        self.launch("pick")

    def measure(self) -> None:
        """Note what the method is to know of the masks."""
        if self.gauge is not None and self.ready():
            self.launch("measure")
            return
        for slot in self.targets:
            slot.measure(slot.mask)

    def remember(self) -> Tensor:
        """The masks that an update is about to change, or has changed since the last record."""
        if self.seen is not None:
            return self.seen
        mask = self.mask[: self.count]
        if not self.ready():
            return mask.clone()
        if self.past is None:  # a recording looks for them in one and the same place
            self.past = torch.empty_like(mask)
        return self.past.copy_(mask)

    def note(self) -> Tensor | None:
        """What an update changed in each target; None where kernels cannot tell."""
        if not self.ready():
            return None
        self.launch("note")
        return self.figures.values.clone()

    def aim(self, sparsity: float) -> bool:
        """How sparse `follow` and `pick` are to leave the model; False where kernels cannot do it."""
        if self.kernel is None or not self.method.pattern.is_elementwise or self.latent.dtype == torch.float64:
            return False
        if sparsity == self.aimed:
            return True
        self.aimed = sparsity
        name, floor = parse_allocation(self.method.allocation)
        layerwise = LAYERWISE_ALLOCATIONS.get(name)
        sizes = [self.count] if layerwise is None else self.sizes
        shapes = [slot.target.outputs_first for slot in self.targets]
        shares = [sparsity] if layerwise is None else layerwise(shapes, sparsity)
        if self.selection is None:
            self.selection = self.kernel.Selection(sizes, self.mask.device)
            self.floor = self.kernel.Selection(self.sizes, self.mask.device) if floor else None
        self.selection.aim([size - count_pruned(share, size) for size, share in zip(sizes, shares, strict=True)])
        if floor:
            self.floor.aim(floor_counts(shapes, sparsity, self.method.pattern, floor))
        return True

    def redraw(self, number: int) -> None:
        """Draw some of the weights off the mask anew."""
        stream, coin = self.method.stream, self.method.coin
        if self.ready() and all(layout(slot.parameter) for slot in self.targets):
            buffers = self.mask, self.weight, self.drawn
            self.kernel.redraw(self.table, self.draws(), *buffers, stream, number, coin)  # type: ignore[union-attr]
            return
        for slot in self.targets:
            key = slot.name, slot.target.fan_in
            stream.redraw(*key, slot.weight, slot.drawn, ~slot.mask, number, coin)  # type: ignore[arg-type]

    def draws(self) -> tuple[Tensor, ...]:
        """What kernels must know to draw the weights of each slot."""
        stream = self.method.stream
        rows = [(*stream.key, *label(slot.name), *layout(slot.parameter)) for slot in self.targets]  # type: ignore[misc]
        bounds = torch.tensor([stream.bound(slot.target.fan_in) for slot in self.targets])
        integers = torch.tensor(rows, dtype=torch.int64).t().contiguous().pin_memory()
        ready = (
            integers.to(self.mask.device, non_blocking=True),
            bounds.pin_memory().to(self.mask.device, non_blocking=True),
        )
        return (*ready[0], ready[1])


def arenas(slots: Sequence[Slot]) -> list[Arena]:
    """One arena for each device and type."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Slot]] = {}
    for slot in slots:
        kinds.setdefault((slot.parameter.device, slot.parameter.dtype), []).append(slot)
    return [Arena(group) for group in kinds.values()]


def dense_strides(parameter: Tensor) -> tuple[int, ...]:
    """The strides of a copy: those of the parameter where it has no gaps."""
    return torch.empty_like(parameter, device="meta").stride()


def outputs(slot: Slot) -> int:
    """How many outputs a gauge tells apart; 0 where it is none, or they do not lie one after another."""
    number, mask = 0 if slot.gauge is None else slot.gauge[0].numel(), slot.mask
    return number if number == 1 or (slot.target.rows == 0 and mask.stride(0) * number == mask.numel()) else 0


def layout(parameter: Tensor) -> tuple[int, int] | None:
    """How to find a weight's row-major position from its place in memory: None where kernels do not know.

    Memory counts (outer, spatial, channels) where a position counts (outer, channels, spatial); a contiguous
    tensor has one of both.
    """
    if parameter.is_contiguous():
        return 1, 1
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if parameter.ndim in formats and parameter.is_contiguous(memory_format=formats[parameter.ndim]):
        return parameter.shape[1], parameter.shape[2:].numel()
    return None


RECORDING = threading.RLock()  # held while a CUDA graph is recorded


@cache
def aside(device: torch.device) -> torch.cuda.Stream:
    """The stream to record on. There is but one: torch gives out 32 in turn, and a thirty-third that is recorded on
    would be the one on which another thread is at work."""
    return torch.cuda.Stream(device)


@cache
def kernels() -> ModuleType | None:
    """The Triton kernels, where Triton is there."""
    try:
        from . import flat_buffers_triton as arena_triton
    except ImportError:
        return None
    return arena_triton
