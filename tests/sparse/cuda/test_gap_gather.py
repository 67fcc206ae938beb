"""The kernel for matrices packed with gaps: emulated products, and how its work is divided."""

from __future__ import annotations

import pytest
import torch
from emulation import needs_compiler
from hypothesis import given
from hypothesis import strategies as st
from packing import is_close
from slow_cases import slow_after
from torch import Tensor

from pomona.sparse.cuda import gap_gather
from pomona.sparse.gaps import GapTensor


def sparse_weight(rows: int, columns: int, density: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a random matrix whose rows differ in their number of survivors; the first row is empty."""
    torch.manual_seed(rows + columns)
    share = density * torch.linspace(0, 2, rows).view(-1, 1)
    return (torch.randn(rows, columns) * (torch.rand(rows, columns) < share)).to(dtype)


def multiply(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, relu: bool = False, bits: int | None = None
) -> Tensor:
    """Return x Wᵀ + bias by the kernel."""
    packed = GapTensor.from_dense(weight, bits)
    y = x.new_full((len(x), len(weight)), torch.nan)
    assert gap_gather.multiply(x, *packed.parts, bias, y, x.shape[1], relu)
    return y


@needs_compiler
@pytest.mark.usefixtures("emulated_gpu")
class TestProducts:
    @pytest.mark.parametrize(
        ("dtype", "rows", "columns", "density", "n", "bits"),
        slow_after(
            4,
            [
                (torch.float16, 150, 300, 0.5, 1, 2),
                (torch.float16, 70, 300, 0.1, 1, 6),
                (torch.float32, 33, 95, 0.3, 3, 4),
                (torch.bfloat16, 100, 200, 0.05, 8, 8),
                (torch.float16, 1, 1, 0.9, 1, 2),
                (torch.float16, 40, 9000, 0.02, 2, 6),
                (torch.float16, 700, 64, 0.5, 5, 2),  # more slices than warps
                (torch.float32, 17, 130, 0.4, 9, 2),  # several launches
                (torch.bfloat16, 16, 33, 0.99, 16, 4),
                (torch.float16, 20, 60_000, 0.001, 1, 8),
            ],
        ),
    )
    def test_a_few_vectors(
        self, dtype: torch.dtype, rows: int, columns: int, density: float, n: int, bits: int
    ) -> None:
        weight = sparse_weight(rows, columns, density, dtype)
        x, bias = torch.randn(n, columns).to(dtype), torch.randn(rows)
        y = multiply(x, weight, bias, relu=True, bits=bits)
        assert is_close(y, (x.double() @ weight.double().T + bias).relu())

    def test_a_matrix_of_zeros_gives_the_bias(self) -> None:
        bias = torch.randn(20)
        y = multiply(torch.randn(2, 50), torch.zeros(20, 50), bias)
        assert torch.equal(y, bias.expand(2, 20))

    @pytest.mark.parametrize("column", [0, 5, 99])
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
        packed = GapTensor.from_dense(weight)
        y = torch.full((30, 3), torch.nan)
        assert gap_gather.multiply(x, *packed.parts, None, y.T, 70, False)
        assert is_close(y.T, x.double() @ weight.double().T)

    def test_a_vector_that_is_not_aligned(self) -> None:
        weight, x = sparse_weight(30, 70, 0.2).half(), torch.randn(1, 71).half()[:, 1:]
        assert is_close(multiply(x, weight), x.double() @ weight.double().T)

    def test_wrong_parts_stay_inside_the_memory(self) -> None:
        packed = GapTensor.from_dense(sparse_weight(20, 40, 0.3), 8)
        values, gaps, firsts, starts, owners, lanes = (part.clone() for part in packed.parts)
        gaps.fill_(-1)  # 255 columns each
        firsts.fill_(-1)  # column 65,535
        starts[1] = 1 << 30
        owners.fill_(77)
        lanes[0, 3], lanes[0, 0] = 1000, -7
        y = torch.full((1, 20), torch.nan)
        assert gap_gather.multiply(torch.randn(1, 40), values, gaps, firsts, starts, owners, lanes, None, y, 40, False)

    def test_what_the_kernel_does_not_take(self) -> None:
        packed = GapTensor.from_dense(sparse_weight(20, 40, 0.3))
        for x in (torch.randn(17, 40), torch.randn(1, 40).half()):
            assert not gap_gather.multiply(x, *packed.parts, None, x.new_empty(len(x), 20), 40, False)


@pytest.mark.gpu
class TestOnGPU:
    @pytest.mark.parametrize(
        ("dtype", "rows", "columns", "density", "n"),
        [
            (torch.float16, 777, 4032, 0.3, 1),
            (torch.float16, 8192, 8192, 0.03, 1),  # many thread blocks share slices
            (torch.float32, 3000, 1536, 0.01, 2),  # more shared memory than 48 KiB, most of it for inputs
            (torch.float16, 3000, 1536, 0.05, 8),  # the same, most of it for sums
            (torch.bfloat16, 1030, 40_000, 0.1, 3),
            (torch.float16, 5, 9, 0.4, 16),
            (torch.float16, 70, 60_000, 0.2, 1),
        ],
    )
    def test_products(self, dtype: torch.dtype, rows: int, columns: int, density: float, n: int) -> None:
        weight = sparse_weight(rows, columns, density, dtype).cuda()
        x, bias = torch.randn(n, columns, device="cuda").to(dtype), torch.randn(rows, device="cuda")
        exact = (x.double() @ weight.double().T + bias).relu().cpu()
        y = multiply(x, weight, bias, relu=True)
        assert is_close(y.cpu(), exact)
        packed = GapTensor.from_dense(weight)
        for _ in range(20):  # the order of sums does not depend on which thread block is the last
            assert torch.equal(packed.linear(x, bias, True), y)

    def test_an_infinity(self) -> None:
        weight, x = sparse_weight(500, 900, 0.2).half().cuda(), torch.randn(3, 900).half().cuda()
        x[1, 7] = torch.inf
        assert is_close(multiply(x, weight).cpu(), (x.double() @ weight.double().T).cpu())


class TestConfig:
    @given(
        n=st.integers(1, gap_gather.MAX_VECTORS),
        columns=st.integers(1, 1 << 16),
        dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
        gap_bits=st.sampled_from([2, 4, 6, 8]),
    )
    def test_every_config_fits_the_device(self, n: int, columns: int, dtype: torch.dtype, gap_bits: int) -> None:
        config = gap_gather.choose_config(dtype, n, columns, gap_bits)
        if config is None:
            assert gap_gather.input_bytes(dtype, 1, columns, gap_bits) > 200 << 10
            return
        used = gap_gather.input_bytes(dtype, config.vectors, columns, gap_bits) + gap_gather.static_shared_bytes(config)
        assert used * config.min_blocks <= 227 << 10
        assert gap_gather.static_shared_bytes(config) <= 48 << 10
        assert config.vectors * dtype.itemsize in (2, 4, 8, 16)
        assert config.warps * config.min_blocks <= 64
