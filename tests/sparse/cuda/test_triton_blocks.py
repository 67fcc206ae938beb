"""The Triton kernel for dense blocks: on a device, or in Triton's interpreter."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from packing import block_weight, is_close
from triton_interpreter import DEVICE, HAS_TRITON, INTERPRETED, needs_interpreter, run_in_interpreter

import pomona as pm
from pomona.sparse import BlockTensor
from pomona.sparse.cuda import backend
from pomona.sparse.format import DTYPES

needs_triton = [
    *([] if INTERPRETED else [pytest.mark.gpu]),
    pytest.mark.skipif(
        not HAS_TRITON or (DEVICE == "cpu" and not INTERPRETED),
        reason="needs Triton, and a CUDA device or its interpreter",
    ),
]


class TestTritonBlocks:
    pytestmark = needs_triton

    # The interpreter treats the bits of a bfloat16 as an integer when it multiplies matrices.
    @pytest.mark.parametrize("dtype", DTYPES[:2] if INTERPRETED else DTYPES)
    @pytest.mark.parametrize(
        ("rows", "columns", "height", "width", "n"),
        [(40, 70, 4, 4, 5), (64, 64, 8, 8, 17), (33, 100, 1, 16, 1), (70, 130, 16, 16, 20), (150, 300, 72, 100, 3)],
    )
    def test_any_blocks(self, dtype: torch.dtype, rows: int, columns: int, height: int, width: int, n: int) -> None:
        from pomona.sparse.cuda import triton_blocks

        weight = block_weight(rows, columns, height, width, 0.6).to(dtype)
        packed = BlockTensor.from_dense(weight, height, width).to(DEVICE)
        x, bias = torch.randn(n, columns).to(dtype), torch.randn(rows)
        y = torch.empty(rows, n, dtype=dtype, device=DEVICE)
        strides = (x, x.T.contiguous().T), (y.T, y.view(n, rows))
        for inputs, out in product(*strides):
            out.fill_(torch.nan)
            given = inputs.to(DEVICE), *packed.parts, bias.to(DEVICE)
            assert triton_blocks.multiply(*given, out, columns, True)
            assert is_close(out.cpu(), (x.double() @ weight.double().T + bias).relu())

    @pytest.mark.filterwarnings("ignore:invalid value")  # numpy, in the interpreter
    def test_infinities_and_nans_are_those_of_the_dense_product(self) -> None:
        from pomona.sparse.cuda import triton_blocks

        weight = block_weight(40, 64, 4, 4, 0.6)
        weight[:4] = 1.0  # these rows read every input
        weight[8, int(weight[8].nonzero()[0])] = torch.inf
        packed = BlockTensor.from_dense(weight, 4, 4).to(DEVICE)
        x = torch.randn(4, 64)
        x[1, 5], x[2, 60], x[3, 8] = torch.nan, torch.inf, -torch.inf
        y = torch.empty(4, 40, device=DEVICE)
        assert triton_blocks.multiply(x.to(DEVICE), *packed.parts, None, y, 64, False)
        assert is_close(y.cpu(), x.double() @ weight.double().T)

    def test_any_contents_stay_inside_the_memory(self) -> None:
        from pomona.sparse.cuda import triton_blocks

        packed = BlockTensor.from_dense(block_weight(40, 64, 4, 4, 0.6), 4, 4).to(DEVICE)
        x, y = torch.ones(2, 64, device=DEVICE), torch.empty(2, 40, device=DEVICE)
        for value in (-(1 << 31), -1, 17, (1 << 31) - 1):
            columns, starts = torch.full_like(packed.block_columns, value), torch.full_like(packed.starts, value)
            for parts in ((packed.values, columns, packed.starts), (packed.values, packed.block_columns, starts)):
                assert triton_blocks.multiply(x, *parts, None, y, 64, False)
                assert bool(y.isfinite().all())


@needs_interpreter
def test_in_tritons_interpreter() -> None:
    run_in_interpreter(__file__, "TestTritonBlocks")


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_a_layer_on_a_device() -> None:
    weight = block_weight(512, 1024, 16, 16, 0.9).half().cuda()
    packed, x = pm.BlockTensor.from_dense(weight, 16, 16), torch.randn(33, 1024, device="cuda").half()
    for transposed in (False, True):
        given = x.T.contiguous() if transposed else x
        y = backend.multiply_blocks(given, *packed.parts, None, 512, 1024, False, transposed)
        assert y is not None
        assert is_close((y.T if transposed else y).cpu(), x.cpu().double() @ weight.cpu().double().T)
