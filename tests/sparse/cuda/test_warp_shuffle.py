"""The kernel for a few vectors: emulated products, and how its work is divided."""

from __future__ import annotations

import pytest
import torch
from emulation import multiply, needs_compiler
from hypothesis import given
from hypothesis import strategies as st
from packing import balanced_weight, is_close
from slow_cases import slow_after

from pomona.sparse.cuda import warp_shuffle
from pomona.sparse.cuda.warp_shuffle import ShuffleConfig
from pomona.sparse.format import LANES


@needs_compiler
@pytest.mark.usefixtures("emulated_gpu")
class TestProducts:
    @pytest.mark.parametrize(
        ("dtype", "rows", "columns", "block", "kept", "n"),
        slow_after(
            3,
            [
                (torch.float32, 32, 64, 32, 3, 1),
                (torch.float16, 70, 300, 32, 3, 1),
                (torch.bfloat16, 40, 130, 25, 4, 2),
                (torch.float32, 33, 95, 32, 1, 3),
                (torch.float16, 64, 64, 16, 7, 5),
                (torch.bfloat16, 100, 200, 32, 6, 8),
                (torch.float32, 40, 70, 32, 32, 1),
                (torch.float16, 96, 33, 32, 2, 16),
                (torch.float16, 33, 9000, 32, 2, 1),  # several rounds of all warps
                (torch.bfloat16, 70, 1107, 32, 3, 1),  # pairs of blocks, and single ones at the end
                (torch.float16, 40, 2000, 25, 5, 1),
            ],
        ),
    )
    def test_a_few_vectors(self, dtype: torch.dtype, rows: int, columns: int, block: int, kept: int, n: int) -> None:
        weight = balanced_weight(rows, columns, block=block, kept=kept, dtype=dtype)
        x, bias = torch.randn(n, columns).to(dtype), torch.randn(rows)
        y = multiply(warp_shuffle, x, weight, block, bias, relu=True)
        assert is_close(y, (x.double() @ weight.double().T + bias).relu())

    def test_several_groups_and_more_warps_than_blocks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(warp_shuffle, "choose_config", lambda *sizes: ShuffleConfig(3, 4, 2))
        weight = balanced_weight(100, 96, block=32, kept=4).half()
        x = torch.randn(7, 96).half()
        assert is_close(multiply(warp_shuffle, x, weight, 32), x.double() @ weight.double().T)

    @pytest.mark.parametrize("column", [5, 1030, 1099])  # in a pair of blocks, in a single one, in the last
    def test_one_vector_with_an_infinity(self, column: int) -> None:
        weight = balanced_weight(40, 1100, block=32, kept=3).half()
        x = torch.randn(1, 1100).half()
        x[0, column] = torch.inf
        exact = x.double() @ weight.double().T
        assert is_close(multiply(warp_shuffle, x, weight, 32), exact)
        assert exact.isnan().any()


class TestConfig:
    """The choice of the division of the work, as measured on an H200 with 3 of 32 kept, or 5 of 25 for an LSTM."""

    @pytest.mark.parametrize(
        ("n", "groups", "config"),
        [
            (1, 512, (1, 16, 8)),
            (2, 512, (1, 16, 4)),
            (4, 512, (2, 16, 4)),
            (4, 256, (1, 16, 4)),
            (8, 512, (2, 8, 4)),
            (8, 256, (1, 16, 4)),
            (16, 512, (1, 16, 2)),
        ],
    )
    def test_the_fastest_config_is_chosen(self, n: int, groups: int, config: tuple[int, int, int]) -> None:
        assert warp_shuffle.choose_config(n, 3, groups, groups, 132) == config

    def test_a_step_of_an_lstm(self) -> None:
        assert [warp_shuffle.choose_config(1, kept, 1, 120, 1) for kept in (4, 5)] == [(1, 16, 4)] * 2

    @given(
        n=st.integers(1, warp_shuffle.MAX_VECTORS),
        kept=st.integers(1, 32),
        groups=st.integers(1, 2000),
        blocks=st.integers(1, 2000),
    )
    def test_every_config_fits_the_device(self, n: int, kept: int, groups: int, blocks: int) -> None:
        row_groups, warps, unroll = warp_shuffle.choose_config(n, kept, groups, blocks, 132)
        assert row_groups * n * warps * LANES * 4 <= 48 << 10, "the sums of all warps lie in shared memory"
        assert {row_groups, warps, unroll} <= {1, 2, 4, 8, 16}
        assert warps < 2 * blocks
        pairs = warp_shuffle.choose_block_pairs(torch.float16, n, kept, blocks, warps)
        assert pairs * 2 * warps <= blocks, "all warps have some"
        assert n == 1 or pairs == 0
