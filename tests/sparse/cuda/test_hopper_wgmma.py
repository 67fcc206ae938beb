"""The kernel for Hopper: emulated products with every division of the work, and how that is chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from emulation import multiply, needs_compiler
from hypothesis import given
from hypothesis import strategies as st
from packing import balanced_weight, is_close
from slow_cases import slow_after
from torch.nn import functional as F

from pomona.sparse.cuda import hopper_wgmma
from pomona.sparse.cuda.tensor_core_common import MAX_SHARED_BYTES, pad_blocks


@needs_compiler
@pytest.mark.usefixtures("emulated_gpu")
class TestProducts:
    @pytest.mark.parametrize(
        ("config", "kept"),  # the places of up to four survivors are kept, those of more are recomputed
        slow_after(
            1,
            [
                (hopper_wgmma.WgmmaConfig(32, 2, 1, 1, 1, 2, 0), 4),
                (hopper_wgmma.WgmmaConfig(32, 3, 2, 4, 2, 3, 0), 3),
                (hopper_wgmma.WgmmaConfig(32, 1, 2, 7, 1, 6, 0), 5),
                (hopper_wgmma.WgmmaConfig(32, 4, 1, 6, 2, 1, 0), 3),
                (hopper_wgmma.WgmmaConfig(32, 8, 2, 2, 2, 2, 1), 3),
                (hopper_wgmma.WgmmaConfig(32, 8, 1, 9, 1, 4, 1), 7),
                (hopper_wgmma.WgmmaConfig(32, 2, 2, 10, 2, 4, 0), 2),  # one thread block has no columns
            ],
        ),
        ids=str,
    )
    def test_every_config_gives_the_product(
        self, config: hopper_wgmma.WgmmaConfig, kept: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(hopper_wgmma, "choose_config", lambda *sizes: config)
        weight = balanced_weight(300, 1100, block=32, kept=kept).half()
        x = torch.randn(11, 1100).half()
        y = multiply(hopper_wgmma, x, weight, 32)
        assert is_close(y, x.double() @ weight.double().T)
        assert torch.equal(y, multiply(hopper_wgmma, x, weight, 32)), "whichever thread block arrives last"

    @pytest.mark.parametrize(
        ("n", "columns", "width", "vector_tiles"),
        [(8, 128, 32, 1), (11, 296, 32, 2), (5, 1100, 32, 1), (70, 200, 16, 8)],
    )
    def test_input_is_arranged_as_the_tensor_cores_read_it(
        self, n: int, columns: int, width: int, vector_tiles: int
    ) -> None:
        x, columns = pad_blocks(torch.randn(n, columns).half(), -(-columns // width), width, width)
        steps, slices = -(-columns // (4 * width)), -(-n // (8 * vector_tiles))
        arranged = hopper_wgmma.WgmmaConfig(width, vector_tiles, 1, 1, 1, 2, 0).arrange_input(
            x, columns, -(-columns // width)
        )
        whole = F.pad(x, (0, steps * 4 * width - columns, 0, slices * 8 * vector_tiles - n))
        # slices of tiles of vectors; steps of four blocks of pairs of columns
        pieces = whole.view(slices, vector_tiles, 8, steps, 4, width // 2, 2)
        assert arranged is not None
        assert torch.equal(arranged, pieces.permute(0, 3, 5, 1, 2, 4, 6).reshape(slices, -1))


class TestConfig:
    """The choice of the division of the work."""

    @pytest.mark.parametrize(
        ("size", "n", "vector_tiles", "warpgroups", "split_k"),
        [
            (16384, 16, 2, 2, 4),
            (16384, 32, 4, 2, 4),
            (16384, 64, 8, 2, 4),
            (8192, 16, 2, 2, 8),
            (8192, 64, 8, 2, 8),
            (2048, 16, 2, 1, 16),
        ],
    )
    def test_all_multiprocessors_have_work(
        self, size: int, n: int, vector_tiles: int, warpgroups: int, split_k: int
    ) -> None:
        config = hopper_wgmma.choose_config(n, 3, 32, size // 32, size // 32, 132)
        assert config == replace(
            config,
            vector_tiles=vector_tiles,
            warpgroups=warpgroups,
            split_k=split_k,
            cluster=2,
            swap_operands=vector_tiles == 8,
        )

    @given(
        n=st.integers(1, 3000),
        kept=st.integers(1, hopper_wgmma.MAX_KEPT),
        block=st.integers(12, 32),
        groups=st.integers(1, 2000),
        blocks=st.integers(1, 2000),
        processors=st.integers(1, 200),
        gather=st.booleans(),
    )
    def test_every_config_fits_the_device(
        self, n: int, kept: int, block: int, groups: int, blocks: int, processors: int, gather: bool
    ) -> None:
        config = hopper_wgmma.choose_config(n, kept, block, groups, blocks, processors, gather)
        assert config.shared_bytes <= MAX_SHARED_BYTES
        assert config.split_k % config.cluster == config.rows // 4 % config.cluster == 0
        assert config.swap_operands == (config.vector_tiles == 8)
        assert not gather or config.vector_tiles in (1, 2, 4, 8), "a lane's position is always the same"
