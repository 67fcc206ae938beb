"""Convolutions by the kernels for tensor cores: emulated, on a device, and how their work is divided."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from emulation import needs_compiler
from hypothesis import assume, given
from hypothesis import strategies as st
from packing import balanced_weight, is_close
from slow_cases import slow_after
from torch.nn import functional as F

from pomona.sparse import BalancedTensor
from pomona.sparse.conv_geometry import ConvGeometry
from pomona.sparse.cuda import conv2d, hopper_wgmma, tensor_core
from pomona.sparse.cuda.tensor_core_common import MAX_SHARED_BYTES, TensorCoreConfig
from pomona.sparse.format import DTYPES, LANES

MAJORS = pytest.mark.parametrize("major", [8, hopper_wgmma.MAJOR])  # by tensor_core.cu, by hopper_wgmma.cu


@needs_compiler
class TestConvolution:
    @MAJORS
    @pytest.mark.parametrize(
        ("dtype", "shape", "images", "block", "kept", "options"),
        slow_after(
            1,
            [
                (torch.float16, (64, 8, 3, 3), (1, 8, 6, 6), 32, 3, ((1, 1), (1, 1), (1, 1))),
                (torch.bfloat16, (70, 16, 3, 3), (2, 16, 7, 5), 25, 4, ((2, 1), (1, 0), (1, 2))),
                (torch.float16, (33, 40, 1, 1), (3, 40, 5, 6), 16, 2, ((1, 2), (0, 0), (1, 1))),
                (
                    torch.float16,
                    (600, 5, 2, 4),
                    (1, 5, 4, 9),
                    8,
                    1,
                    ((1, 1), (2, 3), (2, 1)),
                ),  # more rows than a thread block has
                (torch.bfloat16, (20, 30, 5, 5), (2, 30, 6, 6), 32, 7, ((1, 1), (2, 2), (1, 1))),
                (
                    torch.float16,
                    (40, 3, 1, 5),
                    (1, 3, 20, 21),
                    32,
                    2,
                    ((1, 1), (0, 2), (1, 1)),
                ),  # fewer columns than a block
            ],
        ),
    )
    def test_any_geometry(
        self, dtype: torch.dtype, shape: tuple[int, ...], images: tuple[int, ...], block: int, kept: int,
        options: tuple[tuple[int, int], ...], major: int, emulated_gpu: SimpleNamespace,
    ) -> None:  # fmt: skip
        emulated_gpu.major = major
        weight = balanced_weight(shape[0], *shape[1:], block=block, kept=kept, dtype=dtype)
        x, bias = torch.randn(images).to(dtype), torch.randn(shape[0])
        packed = BalancedTensor.from_dense(weight, block)
        geometry = ConvGeometry((shape[2], shape[3]), *options)
        y = conv2d.convolve(x, packed.values, packed.indices, bias, shape[0], block, geometry, True)
        assert y is not None
        exact = F.conv2d(x.double(), weight.double(), bias.double(), *options).relu()
        assert is_close(y, exact)

    @pytest.mark.parametrize(
        "config",
        slow_after(
            1,
            [
                tensor_core.MmaConfig(32, 2, 8, 1, 8, 4, 2, 2, 8),
                tensor_core.MmaConfig(32, 2, 8, 1, 6, 4, 2, 2, 2),
                tensor_core.MmaConfig(32, 4, 8, 2, 2, 4, 4, 2),
                tensor_core.MmaConfig(32, 1, 8, 8, 1, 2, 8, 3),
                hopper_wgmma.WgmmaConfig(32, 1, 1, 2, 2, 2, 0),
                hopper_wgmma.WgmmaConfig(32, 2, 2, 6, 2, 3, 0),
                hopper_wgmma.WgmmaConfig(32, 4, 1, 3, 1, 4, 0),
                hopper_wgmma.WgmmaConfig(32, 8, 2, 4, 2, 4, 1),
            ],
        ),
        ids=str,
    )
    def test_every_config_gives_the_convolution(
        self, config: TensorCoreConfig, emulated_gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        emulated_gpu.major = hopper_wgmma.MAJOR if isinstance(config, hopper_wgmma.WgmmaConfig) else 8
        for module in (conv2d, hopper_wgmma):
            monkeypatch.setattr(module, "choose_config", lambda *sizes: config)
        weight = balanced_weight(140, 150, 3, 3, block=32, kept=3, dtype=torch.float16)
        packed = BalancedTensor.from_dense(weight, 32)
        x = torch.randn(2, 150, 5, 6).half()
        geometry = ConvGeometry((3, 3), (1, 1), (1, 1), (1, 1))
        y = conv2d.convolve(x, packed.values, packed.indices, None, 140, 32, geometry, False)
        assert y is not None
        assert is_close(y, F.conv2d(x.double(), weight.double(), padding=1))

    @MAJORS
    def test_infinities_and_nans_are_those_of_the_dense_convolution(
        self, major: int, emulated_gpu: SimpleNamespace
    ) -> None:
        emulated_gpu.major = major
        weight = balanced_weight(40, 8, 3, 3, block=32, kept=5, dtype=torch.float16)
        packed = BalancedTensor.from_dense(weight, 32)
        x = torch.randn(2, 8, 9, 7).half()
        x[0, 3, 2, 2], x[1, 5, 0, 6] = torch.inf, torch.nan
        geometry = ConvGeometry((3, 3), (1, 1), (1, 1), (1, 1))
        y = conv2d.convolve(x, packed.values, packed.indices, None, 40, 32, geometry, False)
        assert y is not None
        exact = F.conv2d(x.double(), weight.double(), padding=1)
        assert 0 < int(exact.isfinite().sum()) < exact.numel()
        assert is_close(y, exact)

    @pytest.mark.parametrize(
        ("rows", "columns", "n", "kept", "vector_tiles", "slice_k", "split_k"),
        [
            (512, 4608, 196, 3, 2, 1, 8),
            (512, 4608, 784, 3, 4, 1, 4),
            (256, 2304, 3136, 4, 4, 2, 1),
            (64, 576, 50176, 10, 2, 8, 1),
        ],
    )
    def test_all_multiprocessors_have_work(
        self, rows: int, columns: int, n: int, kept: int, vector_tiles: int, slice_k: int, split_k: int
    ) -> None:
        config = conv2d.choose_config(n, kept, 32, rows // 32, columns // 32, 132, True)
        assert config == replace(config, vector_tiles=vector_tiles, slice_k=slice_k, split_k=split_k)

    @given(
        n=st.integers(1, 100000),
        kept=st.integers(1, 13),
        block=st.integers(13, 32),
        groups=st.integers(1, 300),
        blocks=st.integers(1, 300),
        processors=st.integers(1, 200),
        clusters=st.booleans(),
    )
    def test_every_config_fits_the_device(
        self, n: int, kept: int, block: int, groups: int, blocks: int, processors: int, clusters: bool
    ) -> None:
        assume(tensor_core.max_vector_tiles(kept) >= 1)
        config = conv2d.choose_config(n, kept, block, groups, blocks, processors, clusters)
        assert config.shared_bytes(kept) <= MAX_SHARED_BYTES
        assert config.warps % config.slice_k == config.stage_steps % config.slice_k == 0
        assert config.warps * LANES % (8 * config.vector_tiles) == 0
        assert config.split_k % config.cluster == config.rows // 4 % config.cluster == 0
        assert clusters or config.cluster == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize(
    ("rows", "channels", "side", "images", "kept"), [(512, 512, 14, 1, 3), (256, 128, 28, 2, 4), (70, 20, 9, 3, 7)]
)
def test_a_convolution_on_a_device(
    rows: int, channels: int, side: int, images: int, kept: int, dtype: torch.dtype
) -> None:
    weight = balanced_weight(rows, channels, 3, 3, block=32, kept=kept, dtype=dtype)
    packed = BalancedTensor.from_dense(weight, 32).to("cuda")
    x, bias = torch.randn(images, channels, side, side).to(dtype), torch.randn(rows)
    geometry = ConvGeometry((3, 3), (1, 1), (1, 1), (1, 1))
    exact = F.conv2d(x.double(), weight.double(), bias.double(), padding=1).relu()
    for layout in (torch.contiguous_format, torch.channels_last):
        given = x.cuda().contiguous(memory_format=layout)
        y = conv2d.convolve(given, packed.values, packed.indices, bias.cuda(), rows, 32, geometry, True)
        assert y is not None
        assert is_close(y.cpu(), exact)
