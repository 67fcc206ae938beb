"""The convolutions of few channels: the kernels against float64, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pomona as pm
from pomona.lab.convolution import Quick, convolution, fits, quick

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [  # images, inputs, outputs, height, width, size, stride
    (2, 3, 16, 8, 8, 3, 1),
    (2, 16, 16, 7, 5, 3, 1),
    (2, 16, 32, 8, 8, 3, 2),
    (3, 16, 32, 7, 9, 1, 2),
    (1, 32, 32, 6, 6, 3, 1),
    (2, 32, 64, 5, 5, 3, 2),
    (1, 64, 64, 8, 8, 3, 1),
    (1, 64, 16, 1, 1, 3, 1),
]


def draw(shape, dtype=torch.float32):
    """An input, a weight and a gradient with channels last, and what float64 makes of them."""
    images, inputs, outputs, height, width, size, stride = shape
    torch.manual_seed(0)
    x = torch.randn(images, inputs, height, width, device=DEVICE).to(dtype, memory_format=torch.channels_last)
    weight = torch.randn(outputs, inputs, size, size, device=DEVICE).to(memory_format=torch.channels_last)
    exact = x.double().requires_grad_(), weight.to(dtype).double().requires_grad_()
    y = F.conv2d(*exact, stride=stride, padding=size // 2)
    g = torch.randn(y.shape, device=DEVICE).to(dtype, memory_format=torch.channels_last)
    return x, weight, g, (y.detach(), *torch.autograd.grad(y, exact, g.double()))


def far(found, exact):
    return float((found.detach().double() - exact).norm() / exact.norm())


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="needs a CUDA device or Triton's interpreter")
class TestKernel:
    pytestmark = [] if INTERPRETED else [pytest.mark.gpu]

    @pytest.mark.parametrize("shape", SHAPES)
    def test_against_float64(self, shape):
        from pomona.lab import convolution_triton as kernels

        x, weight, g, (y, gx, gw) = draw(shape, torch.bfloat16 if DEVICE == "cuda" else torch.float32)
        stride, near = shape[-1], 4e-3 if DEVICE == "cuda" else 1e-6
        assert far(kernels.forward(x, weight, stride), y) < near
        if stride == 1 and shape[1] >= 16:
            assert far(kernels.input_gradient(g, x, weight), gx) < near
        for shares in (1, 3, 88):
            assert far(kernels.weight_gradient(g, x, weight, stride, shares), gw) < (1e-5 if DEVICE == "cuda" else 1e-6)


@pytest.mark.skipif(DEVICE == "cuda" or INTERPRETED, reason="the kernels are tested directly")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.skipif(np.lib.NumpyVersion(np.__version__) >= "2.4.0", reason="Triton's interpreter needs numpy < 2.4")
def test_the_kernels_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", __file__, "-k", "TestKernel"]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_the_operator_and_its_gradients(shape):
    x, weight, g, (y, gx, gw) = draw(shape, torch.bfloat16)
    x.requires_grad_(shape[1] >= 16)
    weight.requires_grad_()
    out = convolution(x, weight, shape[-1])
    out.backward(g)
    assert far(out, y) < 4e-3
    assert far(weight.grad, gw) < 1e-5
    assert weight.grad.dtype == torch.float32
    assert weight.grad.is_contiguous(memory_format=torch.channels_last)
    if x.requires_grad:
        assert far(x.grad, gx) < 6e-3


@pytest.mark.gpu
@pytest.mark.parametrize("shortcut", ["A", "B"])
def test_a_network_is_the_same_within_rounding(shortcut):
    torch.manual_seed(0)
    model = pm.models.build("resnet20", num_classes=10, shortcut=shortcut).cuda().to(memory_format=torch.channels_last)
    x = torch.randn(32, 3, 32, 32, device="cuda").to(memory_format=torch.channels_last)
    found = []
    for quickly in (False, True):
        model.zero_grad()
        with quick(model, quickly), torch.autocast("cuda", torch.bfloat16):
            assert sum(isinstance(m, Quick) for m in model.modules()) == quickly * (19 if shortcut == "A" else 21)
            logits = model(x)
        assert not any(isinstance(m, Quick) for m in model.modules())
        logits.float().square().mean().backward()
        found.append((logits.detach().float(), torch.cat([p.grad.flatten() for p in model.parameters()])))
    (plain, plain_grad), (ours, ours_grad) = found
    assert far(ours, plain.double()) < 0.02
    assert far(ours_grad, plain_grad.double()) < 0.05


def test_the_shapes_are_known_without_a_kernel():
    x, weight = torch.empty(2, 16, 9, 9, device="meta"), torch.empty(32, 16, 3, 3, device="meta")
    assert convolution(x, weight, 2).shape == F.conv2d(x, weight, stride=2, padding=1).shape
    assert convolution(x, weight, 1).shape == F.conv2d(x, weight, padding=1).shape


def test_what_is_not_on_a_gpu_is_left_alone():
    model = pm.models.build("resnet20", num_classes=10)
    assert not any(fits(module) for module in model.modules())
    with quick(model):
        assert {type(m) for m in model.modules() if isinstance(m, nn.Conv2d)} == {nn.Conv2d}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("known", "options"),
    [
        (True, {}),
        (True, {"in_channels": 3}),
        (True, {"stride": 2}),
        (True, {"kernel_size": 1, "padding": 0}),
        (False, {"bias": True}),
        (False, {"groups": 2}),
        (False, {"dilation": 2}),
        (False, {"padding": 0}),
        (False, {"kernel_size": 5, "padding": 2}),
        (False, {"stride": 3}),
        (False, {"padding_mode": "reflect"}),
        (False, {"out_channels": 24}),
        (False, {"in_channels": 128}),
    ],
)
def test_which_convolutions_are_known(known, options):
    plain = {"in_channels": 16, "out_channels": 32, "kernel_size": 3, "padding": 1, "bias": False}
    assert fits(nn.Conv2d(**(plain | options)).cuda()) is known
