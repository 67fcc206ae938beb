"""The sum of the clipped gradients of a sample, added up from micro-batches and processes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..errors import require
from .clipping import GradientGrid
from .clipping_norms import LayerGrids
from .outer_products import OuterProducts, RowGradients
from .processes import Processes
from .product_sums import FINE_BITS, MAX_SAMPLE, ProductShape, ProductSum, round_to_units


class ClippedSum:
    """A sum in units of a grid, with the counts behind it. Which parameters have outer products is fixed at first."""

    def __init__(self, grid: GradientGrid | LayerGrids, total: Tensor) -> None:
        """Begin a sum.

        Args:
            grid: of the step.
            total: int64 zeros, one for each coordinate and count.
        """
        self.grid, self.total = grid, total
        self.shapes: list[ProductShape | None] | None = None
        self.sums: list[ProductSum] = []
        self.places: list[Tensor] = []  # of the sums in the total

    def add(self, gradients: Sequence[RowGradients]) -> None:
        """Add the clipped gradients of rows, from parts of shape (rows, n), which may be overwritten."""
        shapes = [ProductShape.of(part) if isinstance(part, OuterProducts) else None for part in gradients]
        if self.shapes is None:
            self.prepare(shapes, [part.shape[1] for part in gradients])
        require(
            shapes == self.shapes,
            "the layers of the model got inputs of other shapes in two micro-batches of a step, which the exact sum "
            "does not allow: set ghost=False.",
        )
        self.grid.add_clipped(gradients, self.total, self.sums)

    def prepare(self, shapes: list[ProductShape | None], sizes: list[int]) -> None:
        """Make the sums of outer products for parameters of these shapes."""
        self.shapes, self.grid = shapes, self.grid.with_products(shapes)
        places = self.total[: sum(sizes)].split(sizes)
        for shape, units, place in zip(shapes, self.grid.units_of_parameters(len(shapes)), places, strict=True):
            if shape is not None:
                self.sums.append(ProductSum(shape, units))
                self.places.append(place)

    def finish_own(self) -> Tensor:
        """Return the sum of this process in units."""
        for own, place in zip(self.sums, self.places, strict=True):
            own.add_into(place, is_rounded=True)
        return self.total

    def finish(self, processes: Processes, *, has_products: bool) -> Tensor:
        """Return the sum over all processes in units.

        With `has_products`, other processes may have outer products even if this one had no rows. Sums are then
        exchanged in steps of 2⁻²⁰ units, and rounded to units at the end.
        """
        if processes.count == 1 or not has_products:
            return processes.add(self.finish_own())
        self.total <<= FINE_BITS
        for own, place in zip(self.sums, self.places, strict=True):
            own.add_into(place, is_rounded=False)
        return round_to_units(processes.add(self.total))


def allows_products(rows: int) -> bool:
    """Return whether sums of outer products hold samples of so many rows."""
    return rows <= MAX_SAMPLE
