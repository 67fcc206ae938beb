"""The plan of a network: its steps and their memory in the form that the native kernel runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..cpu import network as native
from ..cpu.network import StepRecord
from .convert import Network
from .steps import Activation, Convolution, MaxPool, Step

MIN_SURVIVORS = 8  # of a row in a chunk, on average
LINE_NUMBERS = 16  # of a cache line


class NetworkPlan:
    """The steps of a network for images of one shape, ready to run in any number of threads at the same time."""

    def __init__(self, network: Network, instruction_set: str | None = None) -> None:
        self.instruction_set, self.run_native = instruction_set, native.require_function("network_run", instruction_set)
        size = () if network.is_flat else (network.output.height, network.output.width)
        self.output_shape = (network.output.channels, *size)
        self.weights: list[Tensor] = []  # to which the records point
        self.places, numbers = place_activations(network)
        self.scratch_place = numbers + native.TILE_NUMBERS  # a tile may end behind the last activation
        steps = [self.make_record(step) for step in network.steps]
        load, store = StepRecord(kind=native.LOAD), StepRecord(kind=native.STORE)
        set_shape(load, network.input)
        set_shape(store, network.output)
        load.output, load.output_plane = self.locate(network.input)
        store.input, store.input_plane = self.locate(network.output)
        self.records = (StepRecord * (len(steps) + 2))(load, *steps, store)
        self.scratch = max(native.scratch_numbers(record, instruction_set) for record in steps)
        self.sums = native.TILE_NUMBERS * max(record.rows for record in steps)
        self.idle: list[Tensor] = []  # workspaces that no thread uses now

    @property
    def nbytes(self) -> int:
        """The bytes of the weights, and of the workspace for one thread."""
        numbers = self.scratch_place + self.scratch + self.sums
        return sum(tensor.nbytes for tensor in self.weights) + 4 * numbers

    def locate(self, activation: Activation) -> tuple[int, int]:
        """Return the place of an activation in the workspace, and the numbers from one channel to the next."""
        return self.places[activation], plane_numbers(activation)

    def make_record(self, step: Step) -> StepRecord:
        """Return the native form of a step."""
        record = StepRecord(kind=native.MEAN, rows=step.output.channels, residual=native.NO_RESIDUAL, chunks=1)
        set_shape(record, step.input)
        record.input, record.input_plane = self.locate(step.input)
        record.output, record.output_plane = self.locate(step.output)
        if isinstance(step, (Convolution, MaxPool)):
            for name, (vertical, horizontal) in zip(native.PAIRS, step.geometry.pairs, strict=True):
                setattr(record, f"{name}_height", vertical)
                setattr(record, f"{name}_width", horizontal)
            record.kind = native.MAX_POOL
        if isinstance(step, Convolution):
            record.kind, record.relu = native.CONVOLVE, step.relu
            if step.residual is not None:
                record.residual, record.residual_plane = self.locate(step.residual)
            self.add_weight(record, step)
        return record

    def add_weight(self, record: StepRecord, step: Convolution) -> None:
        """Give a record the survivors of its weight in the kernel's order: by chunks of channels, then by rows."""
        weight, rows, channels = step.weight, step.output.channels, step.input.channels
        at_once = native.channels_at_once(record, self.instruction_set)
        at_once = max(at_once, MIN_SURVIVORS * rows * channels // max(1, len(weight.values)))
        record.chunks = -(-channels // at_once)
        part = weight.columns // (step.geometry.taps * at_once) * rows + weight.rows
        order = part.argsort(stable=True)
        starts = torch.nn.functional.pad(torch.bincount(part, minlength=record.chunks * rows).cumsum(0), (1, 0))
        offsets = native.locate_columns(record, weight.columns[order].int(), self.instruction_set)
        tensors = starts, offsets, weight.values[order].float(), weight.shift.float()
        self.weights += tensors
        record.starts, record.offsets, record.values, record.shifts = (tensor.data_ptr() for tensor in tensors)

    def run(self, x: Tensor) -> Tensor | None:
        """Return the output for contiguous float32 images, or None where a number is not finite."""
        n, threads = x.shape[0], torch.get_num_threads()
        y = x.new_empty((n, *self.output_shape))
        sums_place = self.scratch_place + self.scratch * threads  # behind the activations, as the scratch memory
        workspace = self.take_workspace(sums_place + self.sums * threads)
        addresses = x.data_ptr(), y.data_ptr(), workspace.data_ptr()
        code = self.run_native(self.records, len(self.records), n, *addresses, self.scratch_place, sums_place, threads)
        self.idle.append(workspace)
        return y if code == native.DONE else None

    def take_workspace(self, size: int) -> Tensor:
        """Return memory for so many numbers that no other thread uses."""
        try:
            workspace = self.idle.pop()
        except IndexError:
            workspace = torch.empty(0)
        return workspace if workspace.numel() >= size else torch.zeros(size, dtype=torch.float32, device="cpu")


def set_shape(record: StepRecord, activation: Activation) -> None:
    """Set the shape of a step's input."""
    record.channels, record.height, record.width = activation.channels, activation.height, activation.width


def plane_numbers(activation: Activation) -> int:
    """Return the numbers from one channel of an activation to the next: an odd number of cache lines.

    Planes a power of two apart would compete for the same places in a cache.
    """
    return (-(-activation.pixels // LINE_NUMBERS) | 1) * LINE_NUMBERS


def place_activations(network: Network) -> tuple[dict[Activation, int], int]:
    """Return where each activation lies in the workspace, and the size of all: they share memory over time."""
    last_uses = find_last_uses(network.steps) | {network.output: len(network.steps)}
    places: dict[Activation, int] = {}
    live: list[Activation] = []
    size = 0
    for time, activation in enumerate((network.input, *(step.output for step in network.steps)), -1):
        live = sorted((other for other in live if last_uses.get(other, -1) >= time), key=places.__getitem__)
        needed, place = activation_numbers(activation), 0
        for other in live:
            if place + needed <= places[other]:
                break
            place = places[other] + activation_numbers(other)
        places[activation] = place
        live.append(activation)
        size = max(size, place + needed)
    return places, size


def activation_numbers(activation: Activation) -> int:
    """Return the numbers that an activation takes in the workspace."""
    return activation.channels * plane_numbers(activation)


def find_last_uses(steps: Sequence[Step]) -> dict[Activation, int]:
    """Return the index of the last step that reads each activation."""
    read = [(step.input, getattr(step, "residual", None)) for step in steps]
    return {a: time for time, both in enumerate(read) for a in both if a is not None}
