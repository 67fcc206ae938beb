"""The convolutions of few channels: the kernels against float64, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from triton_interpreter import DEVICE, HAS_TRITON, INTERPRETED, needs_interpreter, run_in_interpreter

import pomona as pm
from pomona.lab.kernels import convolution as lab
from pomona.lab.kernels.convolution import (
    FastBatchNorm2d,
    FastConv2d,
    convolution,
    fast_convolutions,
    is_supported_convolution,
    is_supported_norm,
)
from pomona.lab.kernels.convolution_shapes import allocate_outputs

DTYPE, NEAR, SUMMED = (torch.bfloat16, 4e-3, 1e-5) if DEVICE == "cuda" else (torch.float32, 1e-6, 1e-6)
SHAPES = [  # images, inputs, outputs, height, width, size, stride
    (2, 3, 16, 8, 8, 3, 1),
    (2, 16, 16, 7, 5, 3, 1),
    (2, 16, 32, 6, 8, 3, 2),
    (3, 16, 32, 7, 9, 1, 2),
    (2, 16, 16, 3, 4, 1, 1),
    (1, 32, 32, 5, 4, 3, 1),
    (2, 32, 64, 5, 5, 3, 2),
    (1, 64, 64, 4, 4, 3, 1),
    (1, 64, 16, 1, 1, 3, 1),
]
if DEVICE == "cuda":  # those of a ResNet-20, too
    SHAPES += [
        (32, 3, 16, 32, 32, 3, 1),
        (32, 16, 16, 32, 32, 3, 1),
        (32, 16, 32, 32, 32, 3, 2),
        (32, 16, 32, 32, 32, 1, 2),
        (32, 32, 32, 16, 16, 3, 1),
        (32, 32, 64, 16, 16, 3, 2),
        (32, 32, 64, 16, 16, 1, 2),
        (32, 64, 64, 8, 8, 3, 1),
    ]


def summed(shape):
    """How far a sum may be off: over the positions of a batch of 32 more than over those of a few images."""
    return SUMMED * (10 if shape[0] >= 32 else 1)


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


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="needs a CUDA device or Triton's interpreter")
class TestKernel:
    pytestmark = [] if INTERPRETED else [pytest.mark.gpu]

    @pytest.mark.parametrize("shape", SHAPES)
    def test_against_float64(self, shape):
        from pomona.lab.kernels import convolution_triton as kernels

        x, weight, g, (y, gx, gw) = draw(shape, DTYPE)
        stride = shape[-1]
        found, sums = kernels.forward(x, weight, stride)
        assert far(found, y) < NEAR
        assert far(sums.sum(1), torch.stack([y.sum((0, 2, 3)), y.square().sum((0, 2, 3))])) < summed(shape)
        if shape[1] >= 16:
            assert far(kernels.input_gradient(g, x, weight, stride), gx) < NEAR
        assert far(kernels.weight_gradient(g, x, weight, stride), gw) < summed(shape)

    @pytest.mark.parametrize("shares", [1, 2, 3])
    def test_any_number_of_shares(self, shares):
        from pomona.lab.kernels import convolution_triton as kernels

        x, weight, g, (*_, gw) = draw(SHAPES[1] if DEVICE == "cuda" else (3, 16, 16, 9, 9, 3, 1), DTYPE)
        assert far(kernels.weight_gradient(g, x, weight, 1, shares), gw) < SUMMED

    @pytest.mark.parametrize("shape", SHAPES[1:7:2])
    def test_the_same_numbers_give_the_same_bits(self, shape):
        from pomona.lab.kernels import convolution_triton as kernels

        x, weight, g, _ = draw(shape, DTYPE)
        stride = shape[-1]
        for _ in range(3 if DEVICE == "cuda" else 1):
            one, two = (
                [
                    *kernels.forward(x, weight, stride),
                    kernels.input_gradient(g, x, weight, stride),
                    kernels.weight_gradient(g, x, weight, stride),
                ]
                for _ in range(2)
            )
            assert all(map(torch.equal, one, two))

    @pytest.mark.parametrize("channels", [16, 64])
    def test_running_statistics_of_a_norm(self, channels):
        from pomona.lab.kernels import convolution_triton as kernels

        torch.manual_seed(0)
        x = torch.randn(5, channels, 3, 3, device=DEVICE) * 3 + 2
        sums = torch.stack([torch.stack([part.sum((0, 2, 3)), part.square().sum((0, 2, 3))]) for part in x.split(2)], 1)
        theirs = nn.BatchNorm2d(channels, momentum=0.3).to(DEVICE)
        ours = nn.BatchNorm2d(channels, momentum=0.3).to(DEVICE)
        for _ in range(2):
            theirs(x)
            state = ours.running_mean, ours.running_var, ours.num_batches_tracked
            mean, scale = kernels.statistics(sums, 45, *state, 0.3, 1e-5)
        torch.testing.assert_close(dict(ours.named_buffers()), dict(theirs.named_buffers()))
        torch.testing.assert_close(mean, x.mean((0, 2, 3)))
        torch.testing.assert_close(scale, (x.var((0, 2, 3), unbiased=False) + 1e-5).rsqrt())


@needs_interpreter
def test_the_kernels_in_the_interpreter():
    run_in_interpreter(__file__, "TestKernel")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_the_operator_and_its_gradients(shape):
    x, weight, g, (y, gx, gw) = draw(shape, torch.bfloat16)
    x.requires_grad_(shape[1] >= 16)
    weight.requires_grad_()
    out, _ = convolution(x, weight, shape[-1])
    out.backward(g)
    assert far(out, y) < NEAR
    assert far(weight.grad, gw) < summed(shape)
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
        with fast_convolutions(model, quickly), torch.autocast("cuda", torch.bfloat16):
            assert sum(isinstance(m, FastConv2d) for m in model.modules()) == quickly * (19 if shortcut == "A" else 21)
            logits = model(x)
        assert not any(isinstance(m, FastConv2d) for m in model.modules())
        logits.float().square().mean().backward()
        found.append((logits.detach().float(), torch.cat([p.grad.flatten() for p in model.parameters()])))
    (plain, plain_grad), (ours, ours_grad) = found
    assert far(ours, plain.double()) < 0.02
    assert far(ours_grad, plain_grad.double()) < 0.05


@pytest.fixture
def stand_in(monkeypatch):
    """Kernels in plain PyTorch, so that a model on the CPU can be quick."""

    class Kernels:
        @staticmethod
        def forward(x, weight, stride):
            y = F.conv2d(x, weight.to(x.dtype), stride=stride, padding=weight.shape[2] // 2)
            y = y.contiguous(memory_format=torch.channels_last)
            _, sums = allocate_outputs(x, weight, stride)
            sums.zero_()[:, 0] = torch.stack([y.float().sum((0, 2, 3)), y.float().square().sum((0, 2, 3))])
            return y, sums

        @staticmethod
        def input_gradient(g, x, weight, stride):
            return nn.grad.conv2d_input(x.shape, weight.to(g.dtype), g, stride, weight.shape[2] // 2).contiguous(
                memory_format=torch.channels_last
            )

        @staticmethod
        def weight_gradient(g, x, weight, stride):
            found = nn.grad.conv2d_weight(x.float(), weight.shape, g.float(), stride, weight.shape[2] // 2)
            return found.contiguous(memory_format=torch.channels_last)

        @staticmethod
        def statistics(sums, count, mean, variance, batches, momentum, eps):
            first, second = sums.sum(1) / count
            spread = second - first.square()
            mean.lerp_(first, momentum)
            variance.lerp_(spread * count / (count - 1), momentum)
            batches += 1
            return first, (spread + eps).rsqrt()

    monkeypatch.setattr(lab, "triton_kernels", lambda: Kernels)
    monkeypatch.setattr(
        lab, "is_supported_convolution", lambda m: type(m) is nn.Conv2d and m.out_channels in lab.SUPPORTED_CHANNELS
    )


def small(affine=True):
    """Two convolutions whose norms may take their sums, and one whose norm may not."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16, affine=affine),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(32, affine=affine, momentum=0.3),
        nn.Conv2d(32, 16, 1, bias=False),
        nn.ReLU(),
        nn.BatchNorm2d(16),
    ).to(memory_format=torch.channels_last)


def compiled(model, x):
    return torch.compile(lambda model, x: model(x), backend="aot_eager", fullgraph=True, dynamic=False)(model, x)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("call", [compiled, nn.Module.__call__])
def test_norms_compute_the_same_with_fast_convolutions(call, affine):
    torch._dynamo.reset()
    torch.manual_seed(1)
    x, g = torch.randn(4, 3, 6, 6), torch.randn(4, 16, 3, 3)
    found = []
    for quickly in (False, True):
        model = small(affine)
        with fast_convolutions(model, quickly):
            assert sum(isinstance(m, FastBatchNorm2d) for m in model) == 3 * quickly
            for _ in range(2):
                model.zero_grad()
                with torch.autocast("cpu", torch.bfloat16):
                    y = (call if quickly else nn.Module.__call__)(model, x)
                y.backward(g.to(y.dtype))
        assert {type(m) for m in model} == {nn.Conv2d, nn.BatchNorm2d, nn.ReLU}
        assert not any(hasattr(m, "channel_sums") for m in model)
        found.append((y.detach(), [p.grad for p in model.parameters()], dict(model.named_buffers())))
    (y, grads, buffers), (our_y, our_grads, our_buffers) = found
    assert far(our_y, y.double()) < 0.01
    assert far(torch.cat([g.flatten() for g in our_grads]), torch.cat([g.flatten() for g in grads]).double()) < 0.02
    torch.testing.assert_close(our_buffers, buffers, rtol=1e-3, atol=1e-3)


class Given(nn.Module):
    """Stands for a convolution: something with sums."""

    def forward(self, x):
        y = x * 1.5
        self.channel_sums[:] = y, torch.stack([y.sum((0, 2, 3)), y.square().sum((0, 2, 3))])[:, None].detach()
        return y


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("affine", [True, False])
def test_a_norm_uses_given_sums(affine, monkeypatch):
    torch._dynamo.reset()
    torch.manual_seed(0)
    monkeypatch.setattr(lab, "FastConv2d", Given)
    monkeypatch.setattr(lab, "is_supported_convolution", lambda m: type(m) is nn.Identity)
    x, g = torch.randn(6, 5, 3, 4) * 3 + 2, torch.randn(6, 5, 3, 4)
    found = []
    for quickly in (False, True):
        norm = nn.BatchNorm2d(5, affine=affine)
        for p in norm.parameters():
            nn.init.normal_(p, generator=torch.Generator().manual_seed(3))
        model = nn.Sequential(nn.Identity(), norm)
        leaf = x.clone().requires_grad_()
        with fast_convolutions(model, quickly):
            for _ in range(2):
                model.zero_grad()
                leaf.grad = None
                y = compiled(model, leaf) if quickly else norm(leaf * 1.5)
                y.backward(g)
        found.append([y.detach(), leaf.grad, *(p.grad for p in model.parameters()), *model.buffers()])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("stand_in")
def test_norms_use_the_sums_of_their_own_convolution(monkeypatch):
    torch._dynamo.reset()
    counts = []
    statistics = lab.statistics
    monkeypatch.setattr(
        lab, "statistics", lambda sums, *others: counts.append(sums.shape[2]) or statistics(sums, *others)
    )
    model = small()
    x = torch.randn(4, 3, 6, 6)
    with fast_convolutions(model):
        compiled(model, x)
        assert counts == [16, 32]  # and not by the norm behind the ReLU
        assert model[0].channel_sums == []
        counts.clear()
        model.eval()
        compiled(model, x)
        model.train()(x)
    assert counts == []


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(("most", "outputs"), [(18432, [16, 32, 16]), (18431, [16]), (6911, [])])
def test_large_convolutions_are_left_to_cudnn(monkeypatch, most, outputs):
    calls = []
    monkeypatch.setattr(lab, "MAX_WORK", most)
    monkeypatch.setattr(lab, "convolution", lambda x, w, stride: calls.append(len(w)) or convolution(x, w, stride))
    model = small()
    with fast_convolutions(model), torch.autocast("cpu", torch.bfloat16):
        y = model(torch.randn(4, 3, 6, 6))  # 3 · 16 · 144, 16 · 32 · 36 and 32 · 16 · 36
    assert calls == outputs
    assert y.shape == (4, 16, 3, 3)


@pytest.mark.slow
@pytest.mark.usefixtures("stand_in")
def test_one_compilation_serves_two_models():
    from torch._dynamo.testing import CompileCounter  # it takes seconds to import

    torch._dynamo.reset()
    x = torch.randn(4, 3, 6, 6)
    count = CompileCounter()
    forward = torch.compile(lambda model, x: model(x), backend=count, fullgraph=True, dynamic=False)
    for model in (small(), small()):
        with fast_convolutions(model):
            forward(model, x)
    assert count.frame_count == 1


def test_which_norms_are_supported():
    assert is_supported_norm(nn.BatchNorm2d(16))
    assert is_supported_norm(nn.BatchNorm2d(16, affine=False))
    assert not is_supported_norm(nn.BatchNorm2d(16, momentum=None))
    assert not is_supported_norm(nn.BatchNorm2d(16, track_running_stats=False))
    assert not is_supported_norm(nn.SyncBatchNorm(16))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_shapes_are_known_without_a_kernel(shape):
    x, weight, _, (y, *_) = draw(shape)
    found, sums = convolution(x.to("meta"), weight.to("meta"), shape[-1])
    assert found.shape == y.shape
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert sums.shape[::2] == (2, shape[2])


def test_models_on_the_cpu_are_unchanged():
    model = pm.models.build("resnet20", num_classes=10)
    assert not any(is_supported_convolution(module) for module in model.modules())
    with fast_convolutions(model):
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
def test_which_convolutions_are_supported(known, options):
    plain = {"in_channels": 16, "out_channels": 32, "kernel_size": 3, "padding": 1, "bias": False}
    assert is_supported_convolution(nn.Conv2d(**(plain | options)).cuda()) is known
