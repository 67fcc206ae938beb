"""The geometry of a two-dimensional convolution, as the packed layers, the operators and the kernels share it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ConvGeometry:
    """The size of a convolution's kernel and how it moves over an image, each as (vertical, horizontal)."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Kernel, stride, padding and dilation, in the order in which the operator takes them."""
        return self.kernel, self.stride, self.padding, self.dilation

    @property
    def taps(self) -> int:
        """The number of positions in the kernel."""
        return self.kernel[0] * self.kernel[1]

    @classmethod
    def from_pairs(cls, *pairs: Sequence[int]) -> ConvGeometry:
        """Return the geometry of kernel, stride, padding and dilation, each a pair."""
        return cls(*((vertical, horizontal) for vertical, horizontal in pairs))

    def output_size(self, image: tuple[int, int]) -> tuple[int, int]:
        """Return the height and width of the output for an image of this height and width."""
        height, width = (
            (side + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
            for side, kernel, stride, padding, dilation in zip(image, *self.pairs, strict=True)
        )
        return height, width
