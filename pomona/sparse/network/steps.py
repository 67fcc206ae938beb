"""The steps of a network: convolutions with sparse weights, pools and means, each from one activation to another."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..conv_geometry import ConvGeometry
from ..cpu.network import MAX_KERNEL

MAX_NUMBERS = 1 << 30  # of an activation and its copies for a kernel, which the native code addresses in 32 bits


@dataclass(eq=False, frozen=True)
class Activation:
    """The shape of what a step reads or writes, for one image."""

    channels: int
    height: int
    width: int

    @property
    def pixels(self) -> int:
        """The number of pixels of a channel."""
        return self.height * self.width


@dataclass(eq=False)
class SparseWeight:
    """The survivors of a weight, rows × (channels · taps), sorted by row and column, with a shift for each row."""

    rows: Tensor
    columns: Tensor
    values: Tensor  # float64, so that batch norms are folded in without loss
    shift: Tensor  # float64

    @classmethod
    def from_dense(cls, weight: Tensor, bias: Tensor | None) -> SparseWeight:
        """Return the survivors of a dense weight, whose first dimension is that of the rows."""
        matrix = weight.detach().flatten(1)
        rows, columns = matrix.nonzero().unbind(1)
        shift = torch.zeros(len(matrix)) if bias is None else bias.detach()
        return cls(rows, columns, matrix[rows, columns].double(), shift.double())

    @classmethod
    def identity(cls, channels: int) -> SparseWeight:
        """Return the weight that copies every channel."""
        every = torch.arange(channels)
        return cls(every, every, torch.ones(channels).double(), torch.zeros(channels).double())

    def scale_rows(self, scale: Tensor, shift: Tensor) -> None:
        """Let the weight compute scale · y + shift for every output y."""
        self.values, self.shift = self.values * scale[self.rows], self.shift * scale + shift

    def pad_rows(self, before: int, after: int) -> None:
        """Add rows of zeros."""
        self.rows = self.rows + before
        self.shift = torch.nn.functional.pad(self.shift, (before, after))


@dataclass(eq=False)
class Convolution:
    """A convolution with a sparse weight, after which a residual is added and a ReLU is applied where asked for."""

    input: Activation
    geometry: ConvGeometry
    weight: SparseWeight
    output: Activation = field(init=False)
    residual: Activation | None = None
    relu: bool = False

    def __post_init__(self) -> None:
        self.update_output()

    def update_output(self) -> None:
        """Set the output's shape anew, after the rows of the weight changed."""
        self.output = output_activation(self.input, self.geometry, len(self.weight.shift))


@dataclass(eq=False)
class MaxPool:
    """The maximum over each window."""

    input: Activation
    geometry: ConvGeometry
    output: Activation = field(init=False)

    def __post_init__(self) -> None:
        self.output = output_activation(self.input, self.geometry, self.input.channels)


@dataclass(eq=False)
class Mean:
    """The mean of each channel."""

    input: Activation
    output: Activation = field(init=False)

    def __post_init__(self) -> None:
        self.output = Activation(self.input.channels, 1, 1)


Step = Convolution | MaxPool | Mean


class UnsupportedError(Exception):
    """A node that is no step: the steps end before it."""


def output_activation(x: Activation, geometry: ConvGeometry, channels: int) -> Activation:
    """Return the output of a convolution or pool; raise UnsupportedError where the image is too small."""
    height, width = geometry.output_size((x.height, x.width))
    largest = max(x.channels * geometry.taps, channels) * (max(x.pixels, height * width) + MAX_KERNEL)
    if min(height, width) < 1 or max(geometry.kernel) > MAX_KERNEL or largest > MAX_NUMBERS:
        raise UnsupportedError("an image smaller than the kernel, or one that is too large")
    return Activation(channels, height, width)
