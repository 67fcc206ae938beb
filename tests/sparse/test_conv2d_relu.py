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
from pomona.sparse.surgery import Fused, fuse_relus

OPTIONS: list[dict[str, Any]] = [
    {},
    {"padding": 1},
    {"padding": (0, 2), "stride": (2, 1)},
    {"dilation": 2, "padding": 2},
    {"groups": 2, "stride": 2},
    {"bias": False},
]
BOTH = [Conv2dReLU, Fused]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@torch.no_grad()
def test_it_is_the_convolution_and_its_relu(options: dict[str, Any], cudnn: Cudnn) -> None:
    layer, x = convolution(**options), images()
    both = Conv2dReLU.from_conv2d(layer)
    assert torch.equal(both(x), layer(x).relu())
    assert cudnn.calls == 1
    assert torch.equal(both(x[0, :, :4]), layer(x[0, :, :4]).relu())  # it is for batches, and this is none
    cudnn.supported = False
    assert torch.equal(both(x), layer(x).relu())
    assert cudnn.calls == 2
    assert both.weight is layer.weight
    assert both.extra_repr() == layer.extra_repr()
    assert type(both.dense()) is nn.Conv2d
    assert both.dense().weight is layer.weight


def test_elsewhere_it_is_done_the_plain_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cudnn_convolution_relu", lambda *_: pytest.fail("there is no cuDNN here"))
    layer, x = convolution(), images()
    with torch.no_grad():
        assert torch.equal(Conv2dReLU.from_conv2d(layer)(x), layer(x).relu())


class Mode(TorchDispatchMode):
    """One who looks on."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_cudnn_is_only_asked_for_what_it_can_do(cudnn: Cudnn, monkeypatch: pytest.MonkeyPatch) -> None:
    both, x = Conv2dReLU.from_conv2d(convolution()), images()
    both(x)  # a gradient is asked for
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            assert both(x).dtype == torch.bfloat16
        with Mode():
            both(x)
        torch.func.vmap(both)(x.unsqueeze(1))
        torch.jit.trace(both, (x,), check_trace=False)
        copy.deepcopy(both).double()(x.double())
        for wrong in (x[:, :3], x.half()):  # what it says is what PyTorch says
            with pytest.raises(RuntimeError, match="channels|type"):
                both(wrong)
        sure = (torch, "are_deterministic_algorithms_enabled", lambda: True)
        for asked in (sure, *((torch.backends.cudnn, *it) for it in (("enabled", False), ("deterministic", True)))):
            with monkeypatch.context() as patch:
                patch.setattr(*asked)
                both(x)
    assert cudnn.calls == 0
    with torch.inference_mode():
        both(x)
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU]):  # a profile is of what else would run
        both(x)
    assert cudnn.calls == 2


def test_it_is_trained_as_the_convolution(cudnn: Cudnn) -> None:
    plain, x = convolution(), images()
    both = copy.deepcopy(Conv2dReLU.from_conv2d(plain))
    for model in (nn.Sequential(plain, nn.ReLU()), both):
        model(x).square().sum().backward()
    assert plain.weight.grad is not None
    assert both.weight.grad is not None
    assert torch.equal(both.weight.grad, plain.weight.grad)
    assert cudnn.calls == 0


def test_it_is_copied_pickled_and_told(cudnn: Cudnn) -> None:
    both, x = Conv2dReLU.from_conv2d(convolution()), images()
    with torch.no_grad():
        for other in (copy.deepcopy(both), pickle.loads(pickle.dumps(both))):
            assert type(other) is Conv2dReLU
            assert other.weight is not both.weight
            assert torch.equal(other(x), both(x))
    assert str(both).startswith("Conv2dReLU(4, 6, kernel_size=(3, 3)")
    assert summary(nn.Sequential(both), (4, 9, 8)).macs == summary(nn.Sequential(both.dense()), (4, 9, 8)).macs


@torch.no_grad()
def test_a_weight_that_is_made_anew_at_every_call_is_taken_as_it_is(cudnn: Cudnn) -> None:
    layer, x = convolution(), images()
    prune.random_unstructured(layer, "weight", 0.5)
    both = Conv2dReLU.from_conv2d(layer)
    assert torch.equal(both(x), layer(x).relu())
    layer.weight_orig *= 2
    assert torch.equal(both(x), F.conv2d(x, layer.weight_orig * layer.weight_mask, layer.bias).relu())
    assert cudnn.calls == 0


@pytest.mark.parametrize("options", [{"padding": "same"}, {"padding": 1, "padding_mode": "reflect"}], ids=str)
def test_other_borders_stay_as_they_are(options: dict[str, Any]) -> None:
    model = nn.Sequential(convolution(**options), nn.ReLU())
    assert str(fuse_relus(copy.deepcopy(model), ["0"])) == str(model)


# ---- on a device


@pytest.mark.gpu
@pytest.mark.usefixtures("nondeterministic_cudnn")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@torch.no_grad()
def test_cudnn_gives_what_is_meant(
    options: dict[str, Any], layout: torch.memory_format, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where memory held NaNs: PyTorch lets cuDNN add no times what was in the output's place."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    layer = nn.Conv2d(8, 16, 3, **options).to("cuda", dtype).to(memory_format=layout)
    x = torch.randn(2, 8, 12, 11, device="cuda", dtype=dtype).contiguous(memory_format=layout)
    both = Conv2dReLU.from_conv2d(layer)
    assert both.can_use_cudnn(x)
    how = layer.stride, layer.padding, layer.dilation, layer.groups
    bias = None if layer.bias is None else layer.bias.double()
    exact = F.conv2d(x.double(), layer.weight.double(), bias, *how).relu()
    y = both(x)
    assert is_close(y, exact)
    assert y.is_contiguous(memory_format=layout)
    for _ in range(3):
        spoilt = [torch.full_like(y, float("nan")) for _ in range(4)]
        del spoilt
        assert is_close(both(x), exact)


@pytest.mark.gpu
@pytest.mark.usefixtures("nondeterministic_cudnn")
def test_with_a_gradient_in_a_graph_and_compiled_on_a_device() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.ReLU()).cuda().half()
    both = fuse_relus(copy.deepcopy(plain), ["0", "2"])
    assert child_types(both) == BOTH + BOTH
    x = torch.randn(2, 8, 12, 12, device="cuda").half()
    for model in (plain, both):
        model(x).float().square().sum().backward()
    assert both[0].weight.grad is not None
    assert torch.allclose(both[0].weight.grad, plain[0].weight.grad, rtol=1e-2, atol=1e-2)
    with torch.no_grad():
        expected = plain(x)
        near = partial(torch.allclose, rtol=1e-2, atol=1e-2)
        assert near(both(x), expected)
        assert near(torch.compile(both, backend="aot_eager", fullgraph=True)(x), expected)
        given, graph = x.clone(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = both(given)
        given.copy_(-x)
        graph.replay()
        assert near(y, plain(-x))
