"""The kernel for matrices packed with bitmaps: emulated products, and how its work is divided."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from emulation import needs_compiler
from hypothesis import given
from hypothesis import strategies as st
from packing import is_close
from slow_cases import slow_after
from torch import Tensor

from pomona.sparse.bitmap import BitmapTensor
from pomona.sparse.cuda import bitmap_tiles
from pomona.sparse.cuda.tensor_core_common import MAX_SHARED_BYTES


def sparse_weight(rows: int, columns: int, density: float, dtype: torch.dtype = torch.float16) -> Tensor:
    """Return a random matrix whose rows differ in their number of survivors; the first row is empty."""
    torch.manual_seed(rows + columns)
    share = density * torch.linspace(0, 2, rows).view(-1, 1)
    return (torch.randn(rows, columns) * (torch.rand(rows, columns) < share)).to(dtype)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None, relu: bool = False) -> Tensor:
    """Return x Wᵀ + bias by the kernel."""
    packed = BitmapTensor.from_dense(weight)
    y = x.new_full((len(x), len(weight)), torch.nan)
    assert bitmap_tiles.multiply(x, *packed.parts, bias, y, x.shape[1], packed.most, relu)
    return y


@needs_compiler
@pytest.mark.usefixtures("emulated_gpu")
class TestProducts:
    @pytest.mark.parametrize(
        ("dtype", "rows", "columns", "density", "n"),
        slow_after(
            3,
            [
                (torch.float16, 150, 300, 0.5, 1),
                (torch.bfloat16, 64, 64, 0.9, 8),
                (torch.float16, 1, 1, 0.9, 3),
                (torch.float16, 300, 1000, 0.1, 11),
                (torch.float16, 70, 333, 0.3, 20),
                (torch.float16, 65, 129, 1.0, 70),
                (torch.bfloat16, 30, 5000, 0.02, 2),
            ],
        ),
    )
    def test_any_vectors(self, dtype: torch.dtype, rows: int, columns: int, density: float, n: int) -> None:
        weight = sparse_weight(rows, columns, density, dtype)
        x, bias = torch.randn(n, columns).to(dtype), torch.randn(rows)
        y = multiply(x, weight, bias, relu=True)
        assert is_close(y, (x.double() @ weight.double().T + bias).relu())

    @pytest.mark.parametrize(
        "changes",
        slow_after(
            1,
            [
                {"warps": 4, "slice_k": 2, "split_k": 3, "cluster": 1, "stages": 2},
                {"warps": 16, "slice_k": 8, "split_k": 1, "cluster": 1, "stages": 3},
                {"warps": 8, "slice_k": 1, "split_k": 4, "cluster": 2, "stages": 4},
                {"warps": 4, "slice_k": 4, "split_k": 9, "cluster": 1, "stages": 2},  # one thread block has no columns
            ],
        ),
        ids=str,
    )
    def test_every_config_gives_the_product(self, changes: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
        usual = bitmap_tiles.choose_config(9, 3, 13, 3000, 4, True)
        assert usual is not None
        monkeypatch.setattr(bitmap_tiles, "choose_config", lambda *sizes: replace(usual, **changes))
        weight, x = sparse_weight(140, 800, 0.4), torch.randn(9, 800).half()
        y = multiply(x, weight)
        assert is_close(y, x.double() @ weight.double().T)
        assert torch.equal(y, multiply(x, weight)), "whichever thread block arrives last"

    def test_a_matrix_of_zeros_gives_the_bias(self) -> None:
        bias = torch.randn(20).half()
        y = multiply(torch.randn(2, 50).half(), torch.zeros(20, 50).half(), bias)
        assert torch.equal(y, bias.expand(2, 20))

    def test_an_infinity_meets_pruned_weights(self) -> None:
        weight, x = sparse_weight(40, 100, 0.4), torch.randn(2, 100).half()
        x[1, 5] = torch.inf
        exact = x.double() @ weight.double().T
        assert is_close(multiply(x, weight), exact)
        assert exact[1].isnan().any()
        assert exact[1].isinf().any()

    def test_strides_of_x_and_y(self) -> None:
        weight, x = sparse_weight(30, 70, 0.2), torch.randn(70, 6).half().T[::2]
        packed = BitmapTensor.from_dense(weight)
        y = torch.full((30, 3), torch.nan).half()
        assert bitmap_tiles.multiply(x, *packed.parts, None, y.T, 70, packed.most, False)
        assert is_close(y.T, x.double() @ weight.double().T)

    def test_wrong_parts_stay_inside_the_memory(self) -> None:
        packed = BitmapTensor.from_dense(sparse_weight(70, 200, 0.3))
        values, words, starts = (part.clone() for part in packed.parts)
        words.fill_(-1)
        for wrong in (-(1 << 31), (1 << 31) - 1):
            starts[1:-1] = wrong
            y = torch.full((1, 70), torch.nan).half()
            assert bitmap_tiles.multiply(torch.randn(1, 200).half(), values, words, starts, None, y, 200, 9, False)

    def test_what_the_kernel_does_not_take(self) -> None:
        packed = BitmapTensor.from_dense(sparse_weight(20, 40, 0.3, torch.float32))
        x = torch.randn(1, 40)
        assert not bitmap_tiles.multiply(x, *packed.parts, None, x.new_empty(1, 20), 40, packed.most, False)
        half = packed.to(torch.float16)
        assert not bitmap_tiles.multiply(x, *half.parts, None, x.new_empty(1, 20), 40, packed.most, False)


@pytest.mark.gpu
class TestOnGPU:
    @pytest.mark.parametrize(
        ("dtype", "rows", "columns", "density", "n"),
        [
            (torch.float16, 777, 4032, 0.3, 1),
            (torch.float16, 8192, 8192, 0.5, 1),
            (torch.bfloat16, 3000, 1536, 0.05, 8),
            (torch.float16, 3000, 1536, 0.3, 16),
            (torch.float16, 1030, 40_000, 0.1, 3),
            (torch.bfloat16, 5, 9, 0.4, 16),
            (torch.float16, 5120, 13_824, 0.1, 64),
            (torch.float16, 500, 900, 1.0, 100),
        ],
    )
    def test_products(self, dtype: torch.dtype, rows: int, columns: int, density: float, n: int) -> None:
        weight = sparse_weight(rows, columns, density, dtype).cuda()
        x, bias = torch.randn(n, columns, device="cuda").to(dtype), torch.randn(rows, device="cuda")
        exact = (x.double() @ weight.double().T + bias).relu().cpu()
        y = multiply(x, weight, bias, relu=True)
        assert is_close(y.cpu(), exact)
        packed = BitmapTensor.from_dense(weight)
        for _ in range(20):  # the order of sums does not depend on which thread block is the last
            assert torch.equal(packed.linear(x, bias, True), y)

    def test_an_infinity(self) -> None:
        weight, x = sparse_weight(500, 900, 0.2).cuda(), torch.randn(3, 900).half().cuda()
        x[1, 7] = torch.inf
        assert is_close(multiply(x, weight).cpu(), (x.double() @ weight.double().T).cpu())


class TestConfig:
    @given(
        n=st.integers(1, 300),
        slabs=st.integers(1, 1000),
        steps=st.integers(1, 1000),
        most=st.integers(0, 4096),
        processors=st.integers(1, 200),
        clusters=st.booleans(),
    )
    def test_every_config_fits_the_device(
        self, n: int, slabs: int, steps: int, most: int, processors: int, clusters: bool
    ) -> None:
        config = bitmap_tiles.choose_config(n, slabs, steps, most, processors, clusters)
        if config is None:
            assert n > 8
            return
        assert config.shared_bytes(steps, bitmap_tiles.stage_pieces(most)) <= MAX_SHARED_BYTES
        assert config.warps % config.slice_k == config.split_k % config.cluster == 0
        assert config.rows // 4 % config.cluster == 0
        assert clusters or config.cluster == 1
        assert config.split_k <= steps
