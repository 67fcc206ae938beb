"""Convolutions that stay dense and do the ReLU behind them: by cuDNN in one kernel, where that is faster."""

from __future__ import annotations

import copy
import json
import pickle
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from packing import close, cut
from safetensors import safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import pomona as pm
from pomona.models.summary import summary
from pomona.sparse import Compression, compress, decompress, layers, load, save
from pomona.sparse.compress import FUSED, Fused, fuse
from pomona.sparse.files import KEY, digest
from pomona.sparse.layers import Conv2dReLU, PackedConv2d, PackedLinear

OPTIONS: list[dict[str, Any]] = [
    {},
    {"padding": 1},
    {"padding": (0, 2), "stride": (2, 1)},
    {"dilation": 2, "padding": 2},
    {"groups": 2, "stride": 2},
    {"bias": False},
]
KERNEL = ", with its ReLU in one kernel"
DENSE = " alone, but the whole model is faster dense"


class Cudnn:
    """What stands for cuDNN's operator: it tells its calls apart, and may refuse them."""

    def __init__(self) -> None:
        self.calls = 0
        self.able = True

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, *how: Any) -> Tensor:
        self.calls += 1
        if not self.able:
            raise RuntimeError("GET was unable to find an engine to execute this computation")
        return torch.conv2d(x, weight, bias, *how).clamp_min(0)


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> Cudnn:
    """This processor as one that has cuDNN."""
    made = Cudnn()
    monkeypatch.setattr(layers, "CUDNN", {"cpu"})
    monkeypatch.setattr(torch, "cudnn_convolution_relu", made)
    return made


def convolution(**options: Any) -> nn.Conv2d:
    torch.manual_seed(0)
    return nn.Conv2d(4, 6, 3, **options).eval()


def images() -> Tensor:
    return torch.randn(2, 4, 9, 8, generator=torch.Generator().manual_seed(1))


# ---- the layer


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@torch.no_grad()
def test_it_is_the_convolution_and_its_relu(options: dict[str, Any], cudnn: Cudnn) -> None:
    layer, x = convolution(**options), images()
    both = Conv2dReLU.of(layer)
    assert torch.equal(both(x), layer(x).relu())
    assert cudnn.calls == 1
    assert torch.equal(both(x[0, :, :4]), layer(x[0, :, :4]).relu())  # it is for batches, and this is none
    cudnn.able = False
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
        assert torch.equal(Conv2dReLU.of(layer)(x), layer(x).relu())


class Mode(TorchDispatchMode):
    """One who looks on."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_cudnn_is_only_asked_for_what_it_can_do(cudnn: Cudnn, monkeypatch: pytest.MonkeyPatch) -> None:
    both, x = Conv2dReLU.of(convolution()), images()
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
    both = copy.deepcopy(Conv2dReLU.of(plain))
    for model in (nn.Sequential(plain, nn.ReLU()), both):
        model(x).square().sum().backward()
    assert plain.weight.grad is not None
    assert both.weight.grad is not None
    assert torch.equal(both.weight.grad, plain.weight.grad)
    assert cudnn.calls == 0


def test_it_is_copied_pickled_and_told(cudnn: Cudnn) -> None:
    both, x = Conv2dReLU.of(convolution()), images()
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
    both = Conv2dReLU.of(layer)
    assert torch.equal(both(x), layer(x).relu())
    layer.weight_orig *= 2
    assert torch.equal(both(x), F.conv2d(x, layer.weight_orig * layer.weight_mask, layer.bias).relu())
    assert cudnn.calls == 0


@pytest.mark.parametrize("options", [{"padding": "same"}, {"padding": 1, "padding_mode": "reflect"}], ids=str)
def test_other_borders_stay_as_they_are(options: dict[str, Any]) -> None:
    model = nn.Sequential(convolution(**options), nn.ReLU())
    assert str(fuse(copy.deepcopy(model), ["0"])) == str(model)


# ---- the choice


def network() -> nn.Sequential:
    """A convolution that can be packed, one that cannot, one that no ReLU follows, and a linear layer."""
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.ReLU(inplace=True)]
    rest = [nn.Conv2d(8, 4, 1), nn.Flatten(), nn.Linear(4 * 16, 8), nn.ReLU()]
    return cut(nn.Sequential(*convolutions, *rest), 4, 1)


def sample() -> Tensor:
    return torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(1))


Race = Callable[[dict[str, float], dict[str, float]], None]


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Race:
    """Times that are told beforehand, by layer and by whole model, in place of measured ones."""

    def tell(alone: dict[str, float], whole: dict[str, float]) -> None:
        module = sys.modules[fuse.__module__]

        def race(sides: Sequence[Callable[[], Any]], *_: Any, **__: Any) -> list[float]:
            ways = ["dense", "fused", "packed"] if len(sides) == 3 else ["dense", "packed"]
            outputs = [side() for side in sides]
            assert all(torch.allclose(y, outputs[0], atol=1e-5) for y in outputs)
            grouped = len(sides) == 2 and outputs[0].shape == (2, 8, 4, 4)
            return [alone[way] for way in (["dense", "fused"] if grouped else ways)]

        def times(sides: dict[str, nn.Module], *_: Any) -> tuple[dict[str, float], dict[str, float]]:
            assert kinds(sides["all packed"])[-4:] == PACKED
            for way in {"all packed", FUSED} & sides.keys():  # the convolution that cannot be packed
                assert (kinds(sides[way])[-6:-4] == BOTH) == (FUSED in sides)
            return {way: whole[way] for way in sides}, {}

        monkeypatch.setattr(module, "race", race)
        monkeypatch.setattr(module, "whole", times)

    return tell


def kinds(model: nn.Module) -> list[type[nn.Module]]:
    return [type(m) for m in model.children()]


def report(model: nn.Module) -> Compression:
    assert isinstance(model.compression, Compression)
    return model.compression


EVEN = {"dense": 1.0, "all packed": 1.0, "compressed": 1.0, FUSED: 1.0}
BOTH = [Conv2dReLU, Fused]
REST = [nn.Conv2d, nn.Flatten, nn.Linear, nn.ReLU]
PACKED = [PackedConv2d, nn.Flatten, PackedLinear, Fused]


@pytest.mark.parametrize(
    ("alone", "expected", "reason", "seconds", "saved"),
    [
        ({"dense": 3.0, "fused": 2.0, "packed": 1.0}, [PackedConv2d, Fused, *BOTH, *PACKED], "2.0× faster", (2, 1), 1),
        (
            {"dense": 3.0, "fused": 1.0, "packed": 3.5},
            [*BOTH, *BOTH, *REST],
            "dense is faster here" + KERNEL,
            (1, 3.5),
            2,
        ),
        (
            {"dense": 1.0, "fused": 2.0, "packed": 3.0},
            [nn.Conv2d, nn.ReLU, nn.Conv2d, nn.ReLU, *REST],
            "dense is faster here",
            (1, 3),
            0,
        ),
    ],
    ids=["packed", "fused", "dense"],
)
def test_the_fastest_of_three_is_taken(
    alone: dict[str, float],
    expected: list[type[nn.Module]],
    reason: str,
    seconds: tuple[float, float],
    saved: float,
    cudnn: Cudnn,
    timed: Race,
) -> None:
    timed(alone, EVEN)
    model, x = network(), sample()
    small = compress(model, x)
    assert kinds(small) == expected
    with torch.no_grad():
        assert torch.allclose(small(x), model(x), atol=1e-5)
    told = report(small)
    first, grouped = told.layers[:2]
    assert (first.reason, first.seconds, first.saved) == (reason, seconds, saved)
    assert grouped.reason == "a grouped convolution" + KERNEL * (saved > 0)
    assert (grouped.seconds, grouped.saved) == (None, saved)
    assert (FUSED in told.seconds) == (saved > 0)
    assert (FUSED in str(told)) == (saved > 0)
    assert told.facts()["layers"][0]["saved"] == saved
    back = decompress(small)
    assert str(back) == str(model)
    assert all(torch.equal(a, b) for a, b in zip(back.state_dict().values(), model.state_dict().values(), strict=True))


def test_all_packed_leaves_dense_convolutions_what_they_gain(cudnn: Cudnn, timed: Race) -> None:
    timed({"dense": 3.0, "fused": 1.0, "packed": 4.0}, EVEN)
    assert kinds(compress(network(), sample(), keep="all")) == [PackedConv2d, Fused, *BOTH, *PACKED]


@pytest.mark.parametrize(
    ("fused", "dense", "compressed", "expected", "reasons"),
    [
        (1.0, 3.0, 2.0, BOTH, ("4.0× faster" + DENSE + KERNEL, "a grouped convolution" + KERNEL)),
        (1.5, 1.0, 2.0, [nn.Conv2d, nn.ReLU], ("4.0× faster" + DENSE, "a grouped convolution")),
        (1.0, 3.0, 1.01, [PackedConv2d, Fused], ("4.0× faster", "a grouped convolution" + KERNEL)),
    ],
    ids=["fused", "dense", "compressed"],
)
def test_a_model_is_as_fast_as_its_fastest_dense_way(
    fused: float,
    dense: float,
    compressed: float,
    expected: list[type[nn.Module]],
    reasons: tuple[str, str],
    cudnn: Cudnn,
    timed: Race,
) -> None:
    whole = {"dense": dense, FUSED: fused, "all packed": 9.0, "compressed": compressed}
    timed({"dense": 5.0, "fused": 4.0, "packed": 1.0}, whole)
    small = compress(network(), sample())
    assert kinds(small)[:2] == expected
    told = report(small)
    assert tuple(layer.reason for layer in told.layers[:2]) == reasons
    best = compressed if compressed < 2 else min(dense, fused)
    assert told.seconds == whole | {"compressed": best}


def test_a_model_in_which_nothing_is_sparse_gains_as_well(cudnn: Cudnn, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[fuse.__module__]
    monkeypatch.setattr(module, "race", lambda sides, *_, **__: [2.0, 1.0][: len(sides)] + [0.5] * (len(sides) - 2))
    small = compress(nn.Sequential(convolution(), nn.ReLU()), images())
    assert kinds(small) == BOTH
    assert report(small).layers[0].reason == "0% zeros are too few" + KERNEL
    assert report(small).seconds == {"dense": 2.0, "all packed": 1.0, "compressed": 0.5, FUSED: 0.5}


def test_without_cudnn_nothing_changes(timed: Race) -> None:
    timed({"dense": 1.0, "packed": 2.0}, EVEN)
    small = compress(network(), sample())
    assert kinds(small) == kinds(network())
    assert set(report(small).seconds) == {"dense", "all packed", "compressed"}


def test_what_was_compressed_is_considered_anew(cudnn: Cudnn, timed: Race) -> None:
    timed({"dense": 3.0, "fused": 1.0, "packed": 2.0}, EVEN)
    small = compress(network(), sample())
    assert kinds(small) == [*BOTH, *BOTH, *PACKED]
    timed({"dense": 3.0, "fused": 2.0, "packed": 1.0}, EVEN)
    again = compress(small, sample())
    assert kinds(again) == [PackedConv2d, Fused, *BOTH, *PACKED]
    assert kinds(small)[:2] == BOTH
    assert str(decompress(again)) == str(network())


def test_compiled_and_exported_it_is_the_plain_way(cudnn: Cudnn, timed: Race) -> None:
    timed({"dense": 3.0, "fused": 1.0, "packed": 2.0}, EVEN)
    model, x = network(), sample()
    small = compress(model, x).eval()
    calls = cudnn.calls
    with torch.no_grad():
        assert torch.allclose(torch.compile(small, backend="aot_eager", fullgraph=True)(x), model(x), atol=1e-5)
        program = torch.export.export(small, (x,))
        assert torch.allclose(program.module()(x), model(x), atol=1e-5)
    assert cudnn.calls == calls
    assert not any("cudnn" in str(node.target) for node in program.graph.nodes)


# ---- files


@pytest.fixture
def small(cudnn: Cudnn, timed: Race) -> nn.Module:
    timed({"dense": 3.0, "fused": 1.0, "packed": 2.0}, EVEN)
    return compress(network(), sample())


def test_it_comes_back_from_a_file(small: nn.Module, tmp_path: Path) -> None:
    file = save(small, tmp_path / "model.safetensors")
    again = load(file, network())
    assert kinds(again) == kinds(small)
    assert list(again.state_dict()) == list(small.state_dict())
    assert {"0.weight", "0.bias", "2.weight"} < set(small.state_dict())
    with torch.no_grad():
        assert torch.equal(again(sample()), small(sample()))


def test_files_without_and_with_more_of_it(small: nn.Module, tmp_path: Path) -> None:
    file = save(small, tmp_path / "model.safetensors")
    with safe_open(file, "pt") as given:
        head = json.loads(given.metadata()[KEY])
        tensors = {name: given.get_tensor(name) for name in given.keys()}  # noqa: SIM118 - it is no dictionary
    assert head.pop("fused") == ["0", "2"]
    del head["digest"]

    def write(**more: Any) -> Path:
        facts, other = head | more, tmp_path / "other"
        other.write_bytes(to_bytes(tensors, {KEY: json.dumps(facts | {"digest": digest(facts, tensors)})}))
        return other

    assert kinds(load(write(), network()))[:2] == [nn.Conv2d, nn.ReLU]  # an older file
    for odd in ("1", "4", "5", "6"):  # a ReLU, packed layers, and one without weights
        with pytest.raises(pm.PomonaError, match=f"the file has {odd} with a ReLU behind it, the model has not"):
            load(write(fused=[odd]), network())
    for odd in (["9"], [1], 3, "4.2", {"0": {}, "x": 1}):
        with pytest.raises(pm.PomonaError, match="does not fit the model"):
            load(write(fused=odd), network())


# ---- on a device


@pytest.mark.gpu
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
    both = Conv2dReLU.of(layer)
    assert both.at_once(x)
    how = layer.stride, layer.padding, layer.dilation, layer.groups
    bias = None if layer.bias is None else layer.bias.double()
    exact = F.conv2d(x.double(), layer.weight.double(), bias, *how).relu()
    y = both(x)
    assert close(y, exact)
    assert y.is_contiguous(memory_format=layout)
    for _ in range(3):
        spoilt = [torch.full_like(y, float("nan")) for _ in range(4)]
        del spoilt
        assert close(both(x), exact)


@pytest.mark.gpu
def test_with_a_gradient_in_a_graph_and_compiled_on_a_device() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.ReLU()).cuda().half()
    both = fuse(copy.deepcopy(plain), ["0", "2"])
    assert kinds(both) == BOTH + BOTH
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


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_model_is_compressed_on_a_device(layout: torch.memory_format, tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = [nn.Conv2d(8, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.Flatten()]
    model = cut(nn.Sequential(*shape, nn.Linear(32 * 256, 64)), 32, 3).cuda().half().to(memory_format=layout)
    x = torch.randn(1, 8, 16, 16, device="cuda").half().contiguous(memory_format=layout)
    small = compress(model, x, patience=0.05)
    with torch.no_grad():
        assert torch.allclose(small(x), model(x), rtol=1e-2, atol=1e-2)
        again = load(save(small, tmp_path / "model"), copy.deepcopy(model)).cuda()
        assert kinds(again) == kinds(small)
        assert torch.allclose(again(x), small(x), rtol=1e-2, atol=1e-2)
    for layer, module in ((layer, small.get_submodule(layer.name)) for layer in report(small).layers):
        assert isinstance(module, Conv2dReLU) == (not layer.packed and layer.saved > 0)
    assert str(decompress(small)) == str(model)
