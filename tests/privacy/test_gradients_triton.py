"""The Triton kernels of layer gradients and of clipping against PyTorch, on a device or in Triton's interpreter."""

from __future__ import annotations

import contextlib

import pytest
import torch
from triton_interpreter import DEVICE, HAS_TRITON, INTERPRETED, needs_interpreter, run_in_interpreter

from pomona.models.weight_standardization import pull_back, standardize
from pomona.privacy import clipping
from pomona.privacy import layer_gradients as layers

pytestmark = [
    *([] if INTERPRETED else [pytest.mark.gpu]),
    pytest.mark.skipif(
        not HAS_TRITON or (DEVICE == "cpu" and not INTERPRETED),
        reason="needs Triton, and a CUDA device or its interpreter",
    ),
]
# The interpreter computes with numpy, which has no bfloat16.
DTYPE, TOLERANCE = (torch.float16, 2e-3) if INTERPRETED else (torch.bfloat16, 1.5e-2)


@pytest.fixture(autouse=True)
def without_device(monkeypatch):
    """Select no device in the interpreter."""
    if INTERPRETED:
        monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: contextlib.nullcontext())


def random_images(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return random images of 16 bits with their channels last."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, DTYPE).contiguous(memory_format=torch.channels_last)


def assert_near(found: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    """Assert that the norm of the difference is small against that of the expected values."""
    assert found.shape == expected.shape
    assert float((found.float() - expected.float()).norm()) <= tolerance * float(expected.float().norm()) + 1e-6


class TestKernels:
    @pytest.mark.parametrize(("channels", "groups"), [(16, 16), (32, 4), (8, 1)])
    @pytest.mark.parametrize("affine", [True, False])
    def test_group_norm_and_its_gradients(self, channels, groups, affine):
        from pomona.privacy import layer_gradients_triton as kernels

        x, g = random_images(3, channels, 5, 7) + 1, random_images(3, channels, 5, 7, seed=1)
        weight, bias = torch.randn(2, channels, device=DEVICE) if affine else (None, None)
        expected = layers.group_norm(x.float(), groups, weight, bias, 1e-5)
        found = kernels.group_norm(x, groups, weight, bias, 1e-5)
        for one, other in zip(found, expected, strict=True):
            assert_near(one, other)
        assert found[0].is_contiguous(memory_format=torch.channels_last)
        expected = layers.group_norm_gradients(g.float(), x.float(), *expected[1:], groups, weight)
        for one, other in zip(kernels.group_norm_gradients(g, x, *found[1:], groups, weight), expected, strict=True):
            assert_near(one, other)

    @pytest.mark.parametrize(
        ("inputs", "outputs", "kernel", "stride", "padding", "dilation", "views"),
        [(3, 16, 3, 1, 1, 1, 2), (16, 24, 3, 2, 1, 1, 1), (20, 16, 1, 2, 0, 1, 2), (16, 16, (3, 2), 1, 2, 2, 3)],
    )
    def test_weight_gradients_of_convolutions(self, inputs, outputs, kernel, stride, padding, dilation, views):
        from pomona.privacy import layer_gradients_triton as kernels

        x, conv = random_images(2 * views, inputs, 9, 8), torch.nn.Conv2d(inputs, outputs, kernel)
        geometry = layers.Geometry.of(conv.weight, stride, padding, dilation, 1)
        y = torch.conv2d(x.float(), conv.weight.detach().to(DEVICE), None, *geometry.options)
        g = random_images(*y.shape, seed=1)
        found = kernels.conv2d_weight_gradient(x, g, geometry, 2)
        assert_near(found, layers.multiply_patches(x.float(), g.float(), geometry, 2))

    @pytest.mark.parametrize("kernel", [1, 3])
    @pytest.mark.parametrize("are_channels_last", [True, False])
    def test_gradients_of_standardized_weights(self, kernel, are_channels_last):
        from pomona.privacy import layer_gradients_triton as kernels

        weight = torch.randn(12, 5, kernel, kernel, device=DEVICE)
        weight[3] = 0.7  # no deviation: the norm is the least one
        standardized, norms = standardize(weight)
        gradients = torch.randn(4, 12, 5, kernel, kernel, device=DEVICE)
        if are_channels_last:
            gradients = gradients.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
        found = kernels.pull_back_standardization(gradients, standardized, norms)
        assert found.is_contiguous()
        assert_near(found, pull_back(gradients, standardized, norms), 1e-5)

    @pytest.mark.parametrize("dtype", [torch.float32, DTYPE])
    @pytest.mark.parametrize("rows", [1, 70])
    def test_integers_are_those_of_pytorch(self, rows, dtype):
        from pomona.privacy import clipping_triton as kernels

        gradients = torch.randn(rows, 5000, generator=torch.Generator().manual_seed(0))
        gradients[rows // 3] *= 1e4
        gradients[rows // 2, 7] = torch.nan if rows > 1 else 1.0
        gradients = gradients.to(DEVICE, dtype)
        parts = [part.contiguous() for part in gradients.split([4000, 3, 997], 1)]
        grid = clipping.GradientGrid(1.0, 5000)
        wide = [part.float().cpu() for part in parts]
        squares = clipping.sum_squares(wide)
        torch.testing.assert_close(kernels.sum_squares(parts).cpu(), squares, rtol=2**-13, atol=0, equal_nan=True)
        expected = torch.zeros(5000, dtype=torch.int64)
        grid.add_clipped([part.clone() for part in wide], expected)
        total = torch.zeros(5000, dtype=torch.int64, device=DEVICE)
        kernels.add_rounded_rows(parts, grid.scale_rows(squares).to(DEVICE), total)
        # A product and a sum that are rounded once may differ by a unit from those that are rounded twice.
        assert float((total.cpu() - expected).abs().max()) <= rows

    def test_norms_are_within_the_sensitivity(self):
        from pomona.privacy import clipping_triton as kernels

        size = 4099
        grid = clipping.GradientGrid(1.0, size)
        for seed, spread in enumerate((0.0, 1.0, 8.0)):
            generator = torch.Generator().manual_seed(seed)
            values = torch.exp(spread * torch.randn(1, size, generator=generator)).to(DEVICE)
            total = torch.zeros(size, dtype=torch.int64, device=DEVICE)
            kernels.add_rounded_rows([values], grid.scale_rows(kernels.sum_squares([values])), total)
            limit = (clipping.UNITS * (1 - clipping.OTHER_ROWS)) ** 2
            assert sum(value * value for value in total.tolist()) <= limit


@needs_interpreter
def test_kernels_in_the_interpreter() -> None:
    run_in_interpreter(__file__, "TestKernels")
