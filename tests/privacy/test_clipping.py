"""Gradients on the grid: the norm bound in integers, exact sums, and rows that are not finite."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pomona.errors import PomonaError
from pomona.native import private as native
from pomona.native.library import supported_instruction_sets
from pomona.privacy import clipping
from pomona.privacy.clipping import UNITS, GradientGrid, add_rounded_rows, sum_squares

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@pytest.fixture(params=["native", "torch"], autouse=True)
def implementation(request, monkeypatch):
    """Use the C kernels, or PyTorch in place of them."""
    if request.param == "torch":
        monkeypatch.setattr(clipping.native, "add_squared_norms", lambda *a: False)
        monkeypatch.setattr(clipping.native, "add_rounded_rows", lambda *a: False)
    elif native.load_kernel("add_rounded_rows") is None:
        pytest.skip("needs a C compiler")


def integers_of(gradients: torch.Tensor, clip: float, parts: int = 1) -> torch.Tensor:
    """Return the integer vector of each row, each clipped alone, as int64 of shape (rows, d)."""
    grid = GradientGrid(clip, gradients.shape[1])
    found = torch.zeros(gradients.shape, dtype=torch.int64)
    for row, total in zip(gradients, found, strict=True):
        grid.add_clipped([part.clone() for part in row[None].tensor_split(parts, 1)], total)
    return found


def make_rows(kind: str, rows: int, size: int, exponent: float, seed: int) -> torch.Tensor:
    """Return float64 gradients of a kind that may be hard to clip, times 2^exponent."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "normal":
        values = torch.randn(rows, size, generator=generator, dtype=torch.float64)
    elif kind == "equal":
        values = torch.ones(rows, size, dtype=torch.float64)
    elif kind == "sparse":
        values = torch.zeros(rows, size, dtype=torch.float64)
        values[:, :3] = torch.randn(rows, 3, generator=generator, dtype=torch.float64)[:, :size]
    else:  # of very different sizes
        values = torch.exp(20 * torch.randn(rows, size, generator=generator, dtype=torch.float64))
    return values * 2.0**exponent


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(["normal", "equal", "sparse", "uneven"]),
    size=st.integers(3, 5000),
    exponent=st.floats(-40, 40),
    clip=st.sampled_from([2.0**-20, 0.01, 1.0, 3.7, 2.0**20]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
def test_norm_of_every_example_is_within_the_sensitivity(kind, size, exponent, clip, dtype, seed):
    found = integers_of(make_rows(kind, 2, size, exponent, seed).to(dtype), clip, parts=3)
    for row in found.tolist():
        assert sum(value * value for value in row) <= (UNITS * (1 - clipping.OTHER_ROWS)) ** 2


def test_rounding_up_every_coordinate_is_within_the_sensitivity():
    """The worst case: all coordinates are a little above a half and are rounded up, so the norm grows by √d / 2."""
    size = 1_000_000
    grid = GradientGrid(1.0, size)
    whole = math.floor(grid.norm_limit / math.sqrt(size))  # so that s g is just above `whole` − ½
    gradient = torch.full((1, size), (whole - 0.4999) / UNITS)
    total = torch.zeros(size, dtype=torch.int64)
    grid.add_clipped([gradient], total)
    assert set(total.tolist()) == {whole}
    assert size * whole**2 <= (UNITS * (1 - clipping.OTHER_ROWS)) ** 2


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 40), size=st.integers(1, 3000), seed=st.integers(0, 99), cut=st.integers(0, 40))
def test_sum_is_exact_whatever_the_order_and_the_chunks(rows, size, seed, cut):
    gradients = make_rows("normal", rows, size, -3, seed).float()
    grid, sums = GradientGrid(1.0, size), []
    for chunks in ([gradients], [gradients.flip(0)], [gradients[:cut], gradients[cut:]]):
        total = torch.zeros(size, dtype=torch.int64)
        for chunk in chunks:
            grid.add_clipped([part.contiguous() for part in chunk.clone().tensor_split(2, 1)], total)
        sums.append(total)
    assert torch.equal(sums[0], sums[1])
    assert torch.equal(sums[0], sums[2])
    assert torch.equal(sums[0], integers_of(gradients, 1.0, parts=2).sum(0))


def test_more_rows_than_32_bits_can_add_are_added_in_parts():
    gradients = torch.full((1500, 1), 1.0)
    total = torch.zeros(1, dtype=torch.int64)
    GradientGrid(1.0, 1).add_clipped([gradients], total)
    assert int(total) == 1500 * int(integers_of(torch.ones(1, 1), 1.0))
    assert int(total) > 1 << 31


def test_short_gradients_are_rounded_and_long_ones_scaled():
    short = torch.tensor([[0.3, -0.4, 0.00000012]])
    assert integers_of(short, 1.0).tolist() == [[round(0.3 * UNITS), -round(0.4 * UNITS), 0]]
    long = integers_of(torch.tensor([[30.0, -40.0]]), 2.0)[0].double()
    assert float(long.norm() / UNITS) == pytest.approx(1, abs=1.2e-3)
    assert float(long[0] / long[1]) == pytest.approx(-0.75, abs=1e-6)
    gradient = GradientGrid(2.0, 2).to_gradient(long.long(), 4)
    assert float(gradient.norm()) == pytest.approx(2 / 4, abs=1e-3)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
def test_rows_without_a_finite_norm_count_as_zero(bad):
    gradients = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    gradients[2, 7] = bad
    assert not integers_of(gradients, 1.0)[2].any()
    assert torch.equal(integers_of(gradients, 1.0)[[0, 1, 3]], integers_of(gradients[[0, 1, 3]], 1.0))
    total = torch.zeros(50, dtype=torch.int64)
    GradientGrid(1.0, 50).add_clipped([gradients.clone()], total)
    assert torch.equal(total, integers_of(gradients, 1.0).sum(0))


@settings(max_examples=20, deadline=None)
@given(size=st.integers(1, 5000), seed=st.integers(0, 99))
def test_error_of_the_norms_is_within_its_bound(size, seed):
    gradients = make_rows("uneven", 3, size, -10, seed).clamp(max=2.0**60).float()
    found = sum_squares([part.contiguous() for part in gradients.tensor_split(2, 1)])
    exact = gradients.double().square().sum(1)
    assert bool(((found - exact).abs() <= 2**-13 * exact + size * 2.0**-126).all())


@pytest.mark.parametrize("instruction_set", supported_instruction_sets())
def test_kernels_and_torch_round_the_same(monkeypatch, instruction_set):
    if native.load_kernel("add_rounded_rows") is None:
        pytest.skip("needs a C compiler")
    values = torch.randn(200, 3001, generator=torch.Generator().manual_seed(0))
    values[:, :40] = (torch.arange(40) + 0.5) / 1024  # ties
    scales = torch.full((200,), 1024.0)
    scales[::3], scales[5] = 1e5, 0.0
    one, other = torch.zeros(2, 3001, dtype=torch.int64)
    assert KERNEL(values, scales, one, instruction_set)
    monkeypatch.setattr(clipping.native, "add_rounded_rows", lambda *a: False)
    add_rounded_rows([values[:, :1000].contiguous(), values[:, 1000:].contiguous()], scales, other)
    assert torch.equal(one, other)


KERNEL = native.add_rounded_rows  # the kernel, whatever the fixture puts in its place


def test_clip_out_of_range_is_refused():
    for clip in (1e-9, 1e9):
        with pytest.raises(PomonaError, match="for exact sums"):
            GradientGrid(clip, 10)
