"""The kernel for tensor cores: emulated products with every division of the work, and how that is chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from emulation import multiply, needs_compiler
from hypothesis import given
from hypothesis import strategies as st
from packing import balanced_weight, is_close
from slow_cases import slow_after

from pomona.sparse.cuda import tensor_core
from pomona.sparse.cuda.tensor_core_common import STEP_BLOCKS


@needs_compiler
@pytest.mark.usefixtures("emulated_gpu")
class TestProducts:
    @pytest.mark.parametrize(
        "changes",
        slow_after(
            1,
            [
                {"row_tiles": 1, "stages": 2, "stage_steps": 4},
                {"row_tiles": 2, "stages": 4, "slice_k": 1, "stage_steps": 2},
                {"row_tiles": 4, "slice_k": 2, "stage_steps": 8, "stages": 3},
                {"warps": 4, "slice_k": 2, "split_k": 4, "cluster": 4, "stage_steps": 4, "stages": 2},
                {"warps": 16, "slice_k": 8, "split_k": 1, "cluster": 1, "stage_steps": 8, "stages": 2},
                {"slice_k": 1, "split_k": 7, "cluster": 1, "stage_steps": 3, "stages": 1},
                {"slice_k": 2, "split_k": 6, "cluster": 2, "stage_steps": 4, "stages": 1},
                {"slice_k": 4, "split_k": 1, "cluster": 1, "stage_steps": 21, "stages": 1, "row_tiles": 2},
                {
                    "warps": 4,
                    "slice_k": 2,
                    "split_k": 10,
                    "cluster": 2,
                    "stage_steps": 2,
                    "stages": 2,
                },  # one thread block has no columns
            ],
        ),
        ids=str,
    )
    def test_every_config_gives_the_product(self, changes: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
        usual = tensor_core.choose_config(11, 3, 32, 5, 20, 4, True)
        assert usual is not None
        monkeypatch.setattr(tensor_core, "choose_config", lambda *sizes: replace(usual, **changes))
        weight = balanced_weight(140, 2600, block=32, kept=3).half()  # several stages
        x = torch.randn(11, 2600).half()
        y = multiply(tensor_core, x, weight, 32)
        assert is_close(y, x.double() @ weight.double().T)
        assert torch.equal(y, multiply(tensor_core, x, weight, 32)), "whichever thread block arrives last"


class TestConfig:
    """The choice of the division of the work."""

    @pytest.mark.parametrize(
        ("groups", "n", "warps", "slice_k", "split_k"),
        [(512, 16, 16, 1, 8), (512, 64, 8, 1, 4), (256, 16, 16, 4, 4), (128, 16, 8, 8, 2), (8192, 16, 16, 1, 1)],
    )
    def test_all_multiprocessors_have_work(self, groups: int, n: int, warps: int, slice_k: int, split_k: int) -> None:
        config = tensor_core.choose_config(n, 3, 32, groups, groups, 132, True)
        assert config is not None
        assert config == replace(config, vector_tiles=n // 8, warps=warps, slice_k=slice_k, split_k=split_k)

    def test_many_vectors_are_divided_evenly(self) -> None:
        configs = [tensor_core.choose_config(n, 3, 32, 512, 512, 132, True) for n in (64, 72, 128, 136)]
        assert [config.vector_tiles for config in configs if config] == [8, 5, 8, 6]

    def test_a_device_with_less_shared_memory(self) -> None:
        config = tensor_core.choose_config(16, 3, 32, 512, 512, 108, False, 163 << 10)
        assert config is not None
        assert config.shared_bytes(3) <= 163 << 10
        assert tensor_core.choose_config(16, 3, 32, 512, 512, 108, False, 8 << 10) is None

    def test_x_stays_in_shared_memory_where_it_fits(self) -> None:
        configs = [tensor_core.choose_config(n, 3, 32, 512, 512, 132, True) for n in (16, 64)]
        assert [(config.stages, config.stage_steps) for config in configs if config] == [(1, 16), (2, 4)]

    @given(
        n=st.integers(1, 300),
        kept=st.integers(1, 32),
        block=st.integers(1, 32),
        groups=st.integers(1, 2000),
        blocks=st.integers(1, 2000),
        processors=st.integers(1, 200),
        clusters=st.booleans(),
        shared_kib=st.sampled_from([99, 163, 227]),
    )
    def test_every_config_fits_the_device(
        self, n: int, kept: int, block: int, groups: int, blocks: int, processors: int, clusters: bool, shared_kib: int
    ) -> None:
        limit = shared_kib << 10
        config = tensor_core.choose_config(n, kept, block, groups, blocks, processors, clusters, limit)
        if config is None:
            assert kept > 12
            return
        assert config.shared_bytes(kept) <= limit
        assert config.warps % config.slice_k == config.split_k % config.cluster == 0
        assert config.rows // 4 % config.cluster == 0
        assert clusters or config.cluster == 1
        if config.stages == 1:
            assert config.stage_steps * config.split_k * STEP_BLOCKS >= blocks
        else:
            assert config.stage_steps % config.slice_k == 0
