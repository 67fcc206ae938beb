"""What is kept of a layer's inputs, beside float64."""

from __future__ import annotations

import pytest
import torch

from pomona.posttraining.input_statistics import ColumnSquares, InputStatistics, SecondMoments

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def accumulate(statistics: InputStatistics, batches: list[torch.Tensor]) -> None:
    for rows in batches:
        statistics.add(rows)
    assert statistics.count == sum(len(rows) for rows in batches)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_products_are_those_of_the_inputs_in_float32(device: str, dtype: torch.dtype) -> None:
    """Inputs of 16 bits are not rounded again, and their sums are not rounded to 16 bits."""
    torch.manual_seed(0)
    batches = [torch.randn(rows, 48, device=device).to(dtype) * 3 for rows in (1000, 1, 300)]
    exact = torch.cat(batches).double()
    moments = SecondMoments(48, torch.device(device), torch.float32)
    accumulate(moments, batches)
    assert moments.products.dtype == torch.float32
    torch.testing.assert_close(moments.products.double(), exact.T @ exact, rtol=1e-5, atol=1e-2)
    squares = ColumnSquares(48, torch.device(device), torch.float32)
    accumulate(squares, batches)
    torch.testing.assert_close(squares.squares.double(), exact.square().sum(0), rtol=1e-5, atol=0)


def test_sums_in_float64() -> None:
    rows = torch.tensor([[1.0, 2.0], [3.0, -1.0]], dtype=torch.float64)
    moments = SecondMoments(2, rows.device, torch.float64)
    moments.add(rows)
    assert moments.products.tolist() == [[10, -1], [-1, 5]]
