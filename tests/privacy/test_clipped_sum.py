"""The sum of a sample over micro-batches and processes, with and without outer products."""

from __future__ import annotations

import pytest
import torch
from product_checks import copy_rows, make_products

from pomona.errors import PomonaError
from pomona.privacy.clipped_sum import ClippedSum, allows_products
from pomona.privacy.clipping import UNITS, GradientGrid
from pomona.privacy.clipping_norms import LayerGrids


class TwoProcesses:
    """Processes of which the other one has had its sum before."""

    count = 2

    def __init__(self, other: torch.Tensor | None = None) -> None:
        self.other = other

    def add(self, values: torch.Tensor) -> torch.Tensor:
        if self.other is not None:
            values += self.other
        self.seen = values.clone()
        return values


def make_parts() -> list:
    """Return the gradients of 12 rows for three parameters, of which two have outer products."""
    dense = torch.randn(12, 9, generator=torch.Generator().manual_seed(4))
    return [make_products("normal", 12, (1, 6, 7)), dense, make_products("normal", 12, (3, 4, 5), (2.0, 2.0))]


def begin(grid: GradientGrid | LayerGrids | None = None) -> ClippedSum:
    """Return a sum for `make_parts`, with room for a count of each layer."""
    counts = len(grid.grids) if isinstance(grid, LayerGrids) else 0
    return ClippedSum(grid or GradientGrid(1.0, 71), torch.zeros(71 + counts, dtype=torch.int64))


def make_grids() -> LayerGrids:
    """Return grids of two layers: the first two parameters, and the last one."""
    return LayerGrids((GradientGrid(1.0, 51, UNITS * 3 // 5), GradientGrid(1.0, 20, UNITS * 4 // 5)), (2, 1), True)


@pytest.mark.parametrize("grid", [None, make_grids()], ids=["together", "by layer"])
@pytest.mark.parametrize("cut", [0, 3, 12])
def test_processes_add_what_one_process_adds(grid, cut):
    """Also if one of them has no rows, and so does not know which gradients are outer products."""
    parts, alone = make_parts(), begin(grid)
    alone.add([copy_rows(part, slice(None)) for part in parts])
    other = TwoProcesses()
    for rows in (slice(0, cut), slice(cut, None)):
        found = begin(grid)
        if len(parts[1][rows]):
            found.add([copy_rows(part, rows) for part in parts])
        result = found.finish(other, has_products=True)
        other = TwoProcesses(other.seen)
    assert torch.equal(result, alone.finish_own())


def test_layers_are_clipped_on_their_own():
    parts, found = make_parts(), begin(make_grids())
    found.add([copy_rows(part, slice(0, 1)) for part in parts])
    sums = found.finish_own().double() / UNITS
    assert float(sums[:51].norm()) == pytest.approx(0.6, rel=2e-3)
    assert float(sums[51:71].norm()) == pytest.approx(0.8, rel=2e-3)
    assert [float(count) for count in sums[71:]] == pytest.approx([-1, -1], rel=2e-3)


def test_empty_sums_are_zero():
    for has_products in (True, False):
        assert not begin().finish(TwoProcesses(), has_products=has_products).any()
    found = begin()
    found.add([copy_rows(part, slice(0, 0)) for part in make_parts()])
    assert not found.finish_own().any()


def test_micro_batches_of_other_shapes_are_refused():
    parts, found = make_parts(), begin()
    found.add(parts)
    with pytest.raises(PomonaError, match="other shapes in two micro-batches of a step.*set ghost=False"):
        found.add([parts[0].gradients().flatten(1), *parts[1:]])


def test_samples_that_63_bits_cannot_hold_have_no_products():
    assert allows_products(1 << 21)
    assert not allows_products((1 << 21) + 1)
