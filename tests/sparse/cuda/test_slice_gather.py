"""The kernel for unstructured matrices: emulated products, and how its work is divided."""

from __future__ import annotations

import pytest
import torch
from emulation import needs_compiler
from hypothesis import given
from hypothesis import strategies as st
from packing import is_close
from slow_cases import slow_after
from torch import Tensor

from pomona.sparse import UnstructuredTensor
from pomona.sparse.cuda import slice_gather
from pomona.sparse.cuda.slice_gather import WARPS, GatherConfig


def sparse_weight(rows: int, columns: int, density: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a random matrix whose rows differ in their number of survivors; the first row is empty."""
    torch.manual_seed(rows + columns)
    share = density * torch.linspace(0, 2, rows).view(-1, 1)
    return (torch.randn(rows, columns) * (torch.rand(rows, columns) < share)).to(dtype)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None, relu: bool = False) -> Tensor:
    """Return x Wᵀ + bias by the kernel."""
    packed = UnstructuredTensor.from_dense(weight)
    y = x.new_full((len(x), len(weight)), torch.nan)
    assert slice_gather.multiply(x, *packed.parts, bias, y, x.shape[1], relu)
    return y


@needs_compiler
@pytest.mark.usefixtures("emulated_gpu")
class TestProducts:
    @pytest.mark.parametrize(
        ("dtype", "rows", "columns", "density", "n"),
        slow_after(
            3,
            [
                (torch.float16, 70, 300, 0.1, 1),
                (torch.float32, 33, 95, 0.3, 3),
                (torch.bfloat16, 100, 200, 0.05, 8),
                (torch.float16, 1, 1, 0.9, 1),
                (torch.float16, 40, 9000, 0.02, 2),
                (torch.float16, 300, 64, 0.5, 5),  # more slices than teams of warps
                (torch.float32, 17, 130, 0.4, 9),  # several launches
                (torch.bfloat16, 16, 33, 0.99, 16),
            ],
        ),
    )
    def test_a_few_vectors(self, dtype: torch.dtype, rows: int, columns: int, density: float, n: int) -> None:
        weight = sparse_weight(rows, columns, density, dtype)
        x, bias = torch.randn(n, columns).to(dtype), torch.randn(rows)
        y = multiply(x, weight, bias, relu=True)
        assert is_close(y, (x.double() @ weight.double().T + bias).relu())

    def test_a_matrix_of_zeros_gives_the_bias(self) -> None:
        bias = torch.randn(20)
        y = multiply(torch.randn(2, 50), torch.zeros(20, 50), bias)
        assert torch.equal(y, bias.expand(2, 20))

    @pytest.mark.parametrize("column", [0, 5, 99])  # padding has the column 0
    def test_an_infinity_meets_pruned_weights(self, column: int) -> None:
        weight = sparse_weight(40, 100, 0.4).half()
        x = torch.randn(2, 100).half()
        x[1, column] = torch.inf
        exact = x.double() @ weight.double().T
        assert is_close(multiply(x, weight), exact)
        assert exact[1].isnan().any()
        assert exact[1].isinf().any()

    def test_strides_of_x_and_y(self) -> None:
        weight, x = sparse_weight(30, 70, 0.2), torch.randn(70, 6).T[::2]
        packed = UnstructuredTensor.from_dense(weight)
        y = torch.full((30, 3), torch.nan)
        assert slice_gather.multiply(x, *packed.parts, None, y.T, 70, False)
        assert is_close(y.T, x.double() @ weight.double().T)

    def test_wrong_indices_and_lanes_stay_inside_the_memory(self) -> None:
        packed = UnstructuredTensor.from_dense(sparse_weight(20, 40, 0.3))
        values, indices, starts, lanes = (part.clone() for part in packed.parts)
        indices.fill_(-1)  # column 65,535
        starts[1] = 1 << 40
        lanes[0, 3], lanes[1, 0] = 1000, -7
        y = torch.full((1, 20), torch.nan)
        assert slice_gather.multiply(torch.randn(1, 40), values, indices, starts, lanes, None, y, 40, False)

    def test_what_the_kernel_does_not_take(self) -> None:
        packed = UnstructuredTensor.from_dense(sparse_weight(20, 40, 0.3))
        for x in (torch.randn(17, 40), torch.randn(1, 40).half()):
            assert not slice_gather.multiply(x, *packed.parts, None, x.new_empty(len(x), 20), 40, False)


@pytest.mark.gpu
class TestOnGPU:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("n", [1, 2, 3, 8, 16])
    @pytest.mark.parametrize(("rows", "columns"), [(777, 4032), (3000, 1536), (5, 9), (1030, 40_000)])
    def test_products(self, dtype: torch.dtype, n: int, rows: int, columns: int) -> None:
        weight = sparse_weight(rows, columns, 0.1, dtype).cuda()
        x, bias = torch.randn(n, columns, device="cuda").to(dtype), torch.randn(rows, device="cuda")
        y = multiply(x, weight, bias, relu=True)
        assert is_close(y.cpu(), (x.double() @ weight.double().T + bias).relu().cpu())

    def test_an_infinity(self) -> None:
        weight, x = sparse_weight(500, 900, 0.2).half().cuda(), torch.randn(3, 900).half().cuda()
        x[1, 7] = torch.inf
        assert is_close(multiply(x, weight).cpu(), (x.double() @ weight.double().T).cpu())

    def test_a_captured_graph(self) -> None:
        weight, x = sparse_weight(500, 900, 0.2).half().cuda(), torch.randn(1, 900).half().cuda()
        multiply(x, weight)
        packed = UnstructuredTensor.from_dense(weight)
        packed.linear(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = packed.linear(x)
        x.copy_(torch.randn(1, 900))
        graph.replay()
        assert is_close(y.cpu(), (x.double() @ weight.double().T).cpu())


class TestConfig:
    @pytest.mark.parametrize(
        ("vectors", "rows", "config"),
        [(1, 8192, (1, 8, 4, 2)), (8, 8192, (8, 4, 2, 1)), (1, 16384, (1, 4, 4, 2)), (1, 777, (1, 16, 4, 2))],
    )
    def test_all_warps_of_an_h200_have_work(self, vectors: int, rows: int, config: GatherConfig) -> None:
        assert slice_gather.choose_config(vectors, -(-rows // 16), 132) == config

    @given(
        n=st.integers(1, slice_gather.MAX_VECTORS),
        columns=st.integers(1, 1 << 16),
        dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
        slices=st.integers(1, 5000),
    )
    def test_every_config_fits_the_device(self, n: int, columns: int, dtype: torch.dtype, slices: int) -> None:
        vectors = slice_gather.choose_vectors(dtype, n, columns)
        if vectors is None:
            assert columns * dtype.itemsize + slice_gather.static_shared_bytes(1) > 200 << 10
            return
        config = slice_gather.choose_config(vectors, slices, 132)
        used = columns * vectors * dtype.itemsize + slice_gather.static_shared_bytes(vectors)
        assert used <= 227 << 10
        assert vectors * dtype.itemsize in (2, 4, 8, 16)
        assert WARPS % config.slice_warps == 0
