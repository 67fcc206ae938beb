"""Convolutions that stay dense and compute the ReLU after them, by cuDNN in one kernel."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from packing import is_close
from substitute_cudnn import Cudnn, child_types, convolution, images
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from pomona.models.summary import summary
from pomona.sparse.layers import Conv2dReLU
from pomona.sparse.surgery import fuse_relus

OPTIONS: list[dict[str, Any]] = [
    {},
    {"padding": 1},
    {"padding": (0, 2), "stride": (2, 1)},
    {"dilation": 2, "padding": 2},
    {"groups": 2, "stride": 2},
    {"bias": False},
]
FUSED_PAIR = [Conv2dReLU, nn.ReLU]


def fuse(layer: nn.Conv2d) -> nn.Module:
    """Return a convolution and a ReLU after it in a Sequential that runs both as one."""
    return fuse_relus(nn.Sequential(layer, nn.ReLU()), ["0"])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@torch.no_grad()
def test_the_output_is_that_of_the_convolution_and_its_relu(options: dict[str, Any], cudnn: Cudnn) -> None:
    layer, x = convolution(**options), images()
    model, fused = fuse(layer), Conv2dReLU.from_conv2d(layer)
    assert torch.equal(model(x), layer(x).relu())
    assert cudnn.calls == 1
    assert torch.equal(model(x[0, :, :4]), layer(x[0, :, :4]).relu())  # a single image: cuDNN takes batches only
    cudnn.supported = False
    assert torch.equal(model(x), layer(x).relu())
    assert cudnn.calls == 2
    assert torch.equal(fused(x), layer(x))  # called by itself
    assert fused.weight is layer.weight
    assert fused.extra_repr() == layer.extra_repr()
    assert type(fused.dense()) is nn.Conv2d
    assert fused.dense().weight is layer.weight


def test_without_cudnn_pytorch_computes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cudnn_convolution_relu", lambda *_: pytest.fail("there is no cuDNN here"))
    layer, x = convolution(), images()
    with torch.no_grad():
        assert torch.equal(fuse(layer)(x), layer(x).relu())


class PassThroughMode(TorchDispatchMode):
    """A dispatch mode that observes every operator and changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_cudnn_is_called_only_where_it_can_compute_the_layer(cudnn: Cudnn, monkeypatch: pytest.MonkeyPatch) -> None:
    fused, x = fuse(convolution()), images()
    fused(x)  # needs a gradient
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            assert fused(x).dtype == torch.bfloat16
        with PassThroughMode():
            fused(x)
        torch.func.vmap(fused)(x.unsqueeze(1))
        torch.jit.trace(fused, (x,), check_trace=False)
        copy.deepcopy(fused).double()(x.double())
        for wrong in (x[:, :3], x.half()):  # raises the error of PyTorch
            with pytest.raises(RuntimeError, match="channels|type"):
                fused(wrong)
        sure = (torch, "are_deterministic_algorithms_enabled", lambda: True)
        for asked in (sure, *((torch.backends.cudnn, *it) for it in (("enabled", False), ("deterministic", True)))):
            with monkeypatch.context() as patch:
                patch.setattr(*asked)
                fused(x)
    assert cudnn.calls == 0
    with torch.inference_mode():
        fused(x)
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU]):  # a profiler must see the same kernels
        fused(x)
    assert cudnn.calls == 2


def test_it_is_trained_as_the_convolution(cudnn: Cudnn) -> None:
    plain, x = convolution(), images()
    fused = copy.deepcopy(fuse(plain))
    for model in (nn.Sequential(plain, nn.ReLU()), fused):
        model(x).square().sum().backward()
    assert plain.weight.grad is not None
    assert fused[0].weight.grad is not None
    assert torch.equal(fused[0].weight.grad, plain.weight.grad)
    assert cudnn.calls == 0


def test_it_is_copied_pickled_and_printed(cudnn: Cudnn) -> None:
    fused, x = Conv2dReLU.from_conv2d(convolution()), images()
    with torch.no_grad():
        for other in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
            assert type(other) is Conv2dReLU
            assert other.weight is not fused.weight
            assert torch.equal(other(x, relu=True), fused(x, relu=True))
    assert str(fused).startswith("Conv2dReLU(4, 6, kernel_size=(3, 3)")
    assert summary(nn.Sequential(fused), (4, 9, 8)).macs == summary(nn.Sequential(fused.dense()), (4, 9, 8)).macs


@torch.no_grad()
def test_a_reparametrized_weight_is_computed_at_every_call(cudnn: Cudnn) -> None:
    layer, x = convolution(), images()
    prune.random_unstructured(layer, "weight", 0.5)
    fused = Conv2dReLU.from_conv2d(layer)
    assert torch.equal(fused(x, relu=True), layer(x).relu())
    layer.weight_orig *= 2
    assert torch.equal(fused(x, relu=True), F.conv2d(x, layer.weight_orig * layer.weight_mask, layer.bias).relu())
    assert cudnn.calls == 0


@pytest.mark.parametrize("options", [{"padding": "same"}, {"padding": 1, "padding_mode": "reflect"}], ids=str)
def test_convolutions_with_other_padding_are_not_fused(options: dict[str, Any]) -> None:
    model = nn.Sequential(convolution(**options), nn.ReLU())
    assert str(fuse_relus(copy.deepcopy(model), ["0"])) == str(model)


# ---- on a device


@pytest.mark.gpu
@pytest.mark.usefixtures("nondeterministic_cudnn")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@torch.no_grad()
def test_cudnn_matches_float64(
    options: dict[str, Any], layout: torch.memory_format, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output may lie in memory that held NaNs: cuDNN is told to add zero times the old contents."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    layer = nn.Conv2d(8, 16, 3, **options).to("cuda", dtype).to(memory_format=layout)
    x = torch.randn(2, 8, 12, 11, device="cuda", dtype=dtype).contiguous(memory_format=layout)
    fused = partial(Conv2dReLU.from_conv2d(layer), relu=True)
    assert fused.func.can_use_cudnn(x)
    settings = layer.stride, layer.padding, layer.dilation, layer.groups
    bias = None if layer.bias is None else layer.bias.double()
    exact = F.conv2d(x.double(), layer.weight.double(), bias, *settings).relu()
    y = fused(x)
    assert is_close(y, exact)
    assert y.is_contiguous(memory_format=layout)
    for _ in range(3):
        spoilt = [torch.full_like(y, float("nan")) for _ in range(4)]
        del spoilt
        assert is_close(fused(x), exact)


@pytest.mark.gpu
@pytest.mark.usefixtures("nondeterministic_cudnn")
def test_with_a_gradient_in_a_graph_and_compiled_on_a_device() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.ReLU()).cuda().half()
    fused = fuse_relus(copy.deepcopy(plain), ["0", "2"])
    assert child_types(fused) == FUSED_PAIR + FUSED_PAIR
    x = torch.randn(2, 8, 12, 12, device="cuda").half()
    for model in (plain, fused):
        model(x).float().square().sum().backward()
    assert fused[0].weight.grad is not None
    assert torch.allclose(fused[0].weight.grad, plain[0].weight.grad, rtol=1e-2, atol=1e-2)
    with torch.no_grad():
        expected = plain(x)
        near = partial(torch.allclose, rtol=1e-2, atol=1e-2)
        assert near(fused(x), expected)
        assert near(torch.compile(fused, backend="aot_eager", fullgraph=True)(x), expected)
        given, graph = x.clone(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = fused(given)
        given.copy_(-x)
        graph.replay()
        assert near(y, plain(-x))
