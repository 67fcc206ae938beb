"""The Triton kernel: on a device, or in Triton's interpreter."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from packing import balanced_weight, is_close
from triton_interpreter import DEVICE, HAS_TRITON, INTERPRETED, needs_interpreter, run_in_interpreter

from pomona.sparse import BalancedTensor
from pomona.sparse.format import DTYPES

needs_triton = [
    *([] if INTERPRETED else [pytest.mark.gpu]),
    pytest.mark.skipif(
        not HAS_TRITON or (DEVICE == "cpu" and not INTERPRETED),
        reason="needs Triton, and a CUDA device or its interpreter",
    ),
]


class TestTriton:
    pytestmark = needs_triton

    # The interpreter treats the bits of a bfloat16 as an integer when it multiplies matrices.
    @pytest.mark.parametrize("dtype", DTYPES[:2] if INTERPRETED else DTYPES)
    @pytest.mark.parametrize(
        ("rows", "columns", "block", "kept", "n"),
        [(40, 70, 32, 3, 5), (64, 64, 32, 1, 17), (33, 100, 25, 4, 1), (70, 130, 64, 9, 20), (40, 150, 100, 7, 3)],
    )
    def test_more_vectors(self, dtype: torch.dtype, rows: int, columns: int, block: int, kept: int, n: int) -> None:
        from pomona.sparse.cuda import triton_dense

        weight = balanced_weight(rows, columns, block=block, kept=kept, dtype=dtype)
        packed = BalancedTensor.from_dense(weight, block).to(DEVICE)
        x, bias = torch.randn(n, columns).to(dtype), torch.randn(rows)
        y = torch.empty(rows, n, dtype=dtype, device=DEVICE)
        strides = (x, x.T.contiguous().T), (y.T, y.view(n, rows))
        for inputs, out in product(*strides):
            out.fill_(torch.nan)
            given = inputs.to(DEVICE), packed.values, packed.indices, bias.to(DEVICE)
            assert triton_dense.multiply(*given, out, columns, block, True)
            assert is_close(out.cpu(), (x.double() @ weight.double().T + bias).relu())

    @pytest.mark.filterwarnings("ignore:invalid value")  # numpy, in the interpreter
    def test_infinities_and_nans_are_those_of_the_dense_product(self) -> None:
        from pomona.sparse.cuda import triton_dense

        weight = balanced_weight(40, 64, block=32, kept=3)
        weight[3, int(weight[3].nonzero()[0])] = torch.inf
        packed = BalancedTensor.from_dense(weight, 32).to(DEVICE)
        x = torch.randn(3, 64)
        x[1, 5] = torch.nan
        y = torch.empty(3, 40, device=DEVICE)
        assert triton_dense.multiply(x.to(DEVICE), packed.values, packed.indices, None, y, 64, 32, False)
        assert is_close(y.cpu(), x.double() @ weight.double().T)


@needs_interpreter
def test_triton_in_its_interpreter() -> None:
    run_in_interpreter(__file__, "TestTriton")
