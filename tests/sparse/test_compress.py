"""Packed layers against the dense ones they stand for, and what `compress` makes of whole models."""

from __future__ import annotations

import copy
import functools
import pickle
import sys
from typing import Any

import pytest
import torch
from packing import balanced_weight, cut
from torch import Tensor, nn

import pomona as pm
from pomona.sparse import BalancedTensor, decompress, layers
from pomona.sparse import compress as patient_compress
from pomona.sparse import timing as clock
from pomona.sparse.compress import Compression, Fused, Layer, find_block
from pomona.sparse.layers import Packed, PackedConv2d, PackedLinear, PackedLSTM

compress = functools.partial(patient_compress, patience=0.0)


def agree(one: Any, other: Any, tolerance: float = 1e-5) -> bool:
    """Whether two nested outputs are the same to rounding."""
    if isinstance(one, Tensor):
        return one.shape == other.shape and torch.allclose(one, other, rtol=tolerance, atol=tolerance)
    return len(one) == len(other) and all(agree(a, b, tolerance) for a, b in zip(one, other, strict=True))


def same_state(one: nn.Module, other: nn.Module) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return list(mine) == list(theirs) and all(torch.equal(mine[name], theirs[name]) for name in mine)


# ---- layers


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(64,), (3, 64), (2, 5, 64), (0, 64)])
def test_linear(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    layer = cut(nn.Linear(64, 40, bias=bias), 32, 3)
    packed = PackedLinear(layer, BalancedTensor.from_dense(layer.weight.detach(), 32))
    x = torch.randn(shape)
    with torch.no_grad():
        assert agree(packed(x), layer(x))
    assert same_state(packed.dense(), layer)
    assert torch.equal(packed.weight, layer.weight)


CONVOLUTIONS = [
    {"kernel_size": 3, "padding": 1},
    {"kernel_size": 3},
    {"kernel_size": 3, "padding": 1, "stride": 2},
    {"kernel_size": 1},
    {"kernel_size": 1, "stride": 2},
    {"kernel_size": 1, "stride": 2, "padding": 1},
    {"kernel_size": 5, "padding": 2},
    {"kernel_size": 3, "padding": 3},
    {"kernel_size": 3, "padding": 2, "dilation": 2},
    {"kernel_size": 3, "padding": 2, "dilation": 2, "stride": 3},
    {"kernel_size": (3, 5), "padding": (0, 2)},
    {"kernel_size": (1, 3), "padding": (0, 1), "stride": (2, 1)},
    {"kernel_size": 3, "padding": "same"},
    {"kernel_size": 2, "padding": "same"},
    {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"},
    {"kernel_size": 3, "padding": 1, "padding_mode": "circular", "stride": 2},
]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("options", CONVOLUTIONS, ids=str)
def test_convolution(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(6, 40, **options)
    layer.weight.data = balanced_weight(*layer.weight.shape, block=6, kept=2)
    packed = PackedConv2d(layer, BalancedTensor.from_dense(layer.weight.detach(), 6))
    for images in (torch.randn(1, 6, 11, 9), torch.randn(3, 6, 10, 13), torch.randn(6, 9, 9)):
        with torch.no_grad():
            assert agree(packed(images), layer(images))
            assert agree(packed(images.transpose(-1, -2)), layer(images.transpose(-1, -2)))
    assert same_state(packed.dense(), layer)


@torch.no_grad()
def test_a_convolution_in_one_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is for GPUs, elsewhere."""
    monkeypatch.setattr(layers, "WHOLE", {"cpu"})
    torch.manual_seed(0)
    for options in CONVOLUTIONS:
        layer = nn.Conv2d(6, 40, **options).half()
        layer.weight.data = balanced_weight(*layer.weight.shape, block=6, kept=2).half()
        packed = PackedConv2d(layer, BalancedTensor.from_dense(layer.weight.detach(), 6))
        packed.relu = True
        for images in (torch.randn(3, 6, 10, 13).half(), torch.randn(6, 9, 9).half()):
            assert agree(packed(images), layer(images).relu(), 1e-2)
        plain = options.get("padding_mode", "zeros") == "zeros" and options != {"kernel_size": 2, "padding": "same"}
        assert packed.gathers(torch.randn(3, 6, 10, 13).half()) is plain
        assert not packed.gathers(torch.randn(3, 6, 10, 13))
    model = nn.Sequential(PackedConv2d(layer := cut(nn.Conv2d(4, 8, 3), 4, 1).half(), pack(layer)))
    x = torch.randn(2, 4, 6, 6).half()
    assert agree(torch.compile(model, backend="aot_eager", fullgraph=True)(x), layer(x), 1e-2)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},))
    assert agree(program.module()(torch.cat([x, x, x])), torch.cat([layer(x)] * 3), 1e-2)
    assert [n for n in program.graph.nodes if n.target is torch.ops.pomona.balanced_conv2d.default]


def pack(layer: nn.Conv2d) -> BalancedTensor:
    return BalancedTensor.from_dense(layer.weight.detach(), 4)


@pytest.mark.parametrize("whole", [set(), {"cpu"}])
def test_an_image_that_is_too_small_is_refused(whole: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "WHOLE", whole)
    layer = cut(nn.Conv2d(4, 8, 3), 4, 1).to(torch.float16 if whole else torch.float32)
    packed = PackedConv2d(layer, pack(layer))
    with pytest.raises(pm.PomonaError, match="an image of 2×9 is too small for a kernel of 3×3"):
        packed(torch.ones(1, 4, 2, 9).to(layer.weight))


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_lstm(bidirectional: bool, batch_first: bool, bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.LSTM(24, 20, 2, bias=bias, batch_first=batch_first, bidirectional=bidirectional)
    cut(layer, 4, 1)
    weights = {name: p.detach() for name, p in layer.named_parameters() if "weight" in name and name != "weight_ih_l1"}
    packed = PackedLSTM(layer, {name: BalancedTensor.from_dense(w, 4) for name, w in weights.items()})
    x = torch.randn(5, 3, 24)
    with torch.no_grad():
        dense = layer(x)
        assert agree(packed(x), dense)
        assert agree(packed(x, dense[1]), layer(x, dense[1]))
        assert agree(packed(x[0]), layer(x[0]))
        sequence = nn.utils.rnn.pack_padded_sequence(x, [5, 4, 2] if not batch_first else [3, 2, 2, 1, 1], batch_first)
        assert agree(packed(sequence)[0].data, layer(sequence)[0].data)
    assert same_state(packed.dense(), layer)


class TestJoint:
    """An LSTM whose packed weights are one matrix a layer, which elsewhere is for GPUs."""

    @pytest.fixture(autouse=True)
    def everywhere(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(layers, "WHOLE", {"cpu"})
        monkeypatch.setattr(PackedLSTM, "run", lambda *_: pytest.fail("step by step"))

    def make(self, **options: Any) -> tuple[nn.LSTM, PackedLSTM]:
        torch.manual_seed(0)
        layer = cut(nn.LSTM(24, 20, 2, **options), 4, 1)
        weights = {name: p.detach() for name, p in layer.named_parameters() if "weight" in name}
        return layer, PackedLSTM(layer, {name: BalancedTensor.from_dense(w, 4) for name, w in weights.items()})

    @pytest.mark.parametrize("bidirectional", [False, True])
    @pytest.mark.parametrize("batch_first", [False, True])
    @pytest.mark.parametrize("bias", [False, True])
    @torch.no_grad()
    def test_the_outputs_and_states(self, bidirectional: bool, batch_first: bool, bias: bool) -> None:
        layer, packed = self.make(bias=bias, batch_first=batch_first, bidirectional=bidirectional)
        x = torch.randn(5, 3, 24)
        dense = layer(x)
        assert agree(packed(x), dense)
        assert agree(packed(x, dense[1]), layer(x, dense[1]))
        assert agree(packed(x[0]), layer(x[0]))
        assert same_state(packed.dense(), layer)
        assert set(packed.state_dict()) == {name for name, _ in packed.named_buffers() if "joint" not in name}

    @torch.no_grad()
    def test_it_follows_the_weights(self) -> None:
        (layer, packed), (other, another) = self.make(), self.make()
        for parameter in other.parameters():
            parameter *= 2
        _, filled = self.make()
        twice = {name: BalancedTensor.from_dense(p.detach(), 4) for name, p in other.named_parameters() if p.ndim > 1}
        filled.load_state_dict(PackedLSTM(other, twice).state_dict())
        x = torch.randn(5, 3, 24)
        assert agree(filled(x), other(x))
        assert not agree(filled(x), layer(x))
        assert agree(copy.deepcopy(packed).double().float()(x), layer(x))
        assert agree(pickle.loads(pickle.dumps(another))(x), layer(x))

    @torch.no_grad()
    def test_compiled_and_exported(self) -> None:
        layer, packed = self.make(bidirectional=True)
        x = torch.randn(5, 3, 24)
        assert agree(torch.compile(packed, backend="aot_eager", fullgraph=True)(x), layer(x))
        program = torch.export.export(packed, (x,))
        assert agree(program.module()(x), layer(x))
        assert [n for n in program.graph.nodes if n.target is torch.ops.pomona.balanced_lstm.default]

    def test_what_does_not_fit_together(self) -> None:
        _, packed = self.make()
        with pytest.raises(pm.PomonaError, match=r"a state has shape \(2, 4, 20\) where \(2, 3, 20\) is needed"):
            packed(torch.randn(5, 3, 24), (torch.zeros(2, 4, 20), torch.zeros(2, 3, 20)))


def test_an_lstm_in_training_or_with_many_vectors_goes_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "WHOLE", {"cpu"})
    layer = cut(nn.LSTM(24, 20, 2, dropout=0.5), 4, 1)
    packed = compress(layer, keep="all")
    assert isinstance(packed, PackedLSTM)
    assert packed.joint_blocks == [24, 20]  # the widest ones: both parts of the first layer have a width of their own
    assert packed.leaps(torch.zeros(1, 8, 24))
    assert not packed.leaps(torch.zeros(1, 9, 24))
    assert not packed.leaps(torch.zeros(1, 8, 24).half())
    assert not packed.train().leaps(torch.zeros(1, 8, 24))
    partly = PackedLSTM(layer, {"weight_ih_l0": BalancedTensor.from_dense(layer.weight_ih_l0.detach(), 4)})
    assert partly.joint_blocks == [0, 0]


@pytest.mark.parametrize("layer", [nn.Linear(16, 8), nn.Conv2d(4, 8, 3, padding=1), nn.LSTM(16, 8)], ids=repr)
def test_gradients_reach_the_input(layer: nn.Module) -> None:
    cut(layer, 4, 1)
    packed = compress(layer, torch.randn(2, 4, 5, 5) if isinstance(layer, nn.Conv2d) else None, keep="all")
    assert isinstance(packed, Packed)
    shape = (2, 4, 5, 5) if isinstance(layer, nn.Conv2d) else (3, 2, 16)
    one = torch.randn(shape).requires_grad_()
    other = one.detach().clone().requires_grad_()
    for model, x in ((layer, one), (packed, other)):
        y = model(x)
        (y[0] if isinstance(y, tuple) else y).square().sum().backward()
    assert one.grad is not None
    assert other.grad is not None
    assert agree(one.grad, other.grad)


# ---- blocks


@pytest.mark.parametrize(
    ("columns", "block", "kept", "found"),
    [(128, 32, 3, 32), (128, 16, 2, 32), (128, 4, 2, 32), (150, 25, 4, 25), (128, 64, 7, 64), (150, 50, 5, 50)],
)
def test_the_blocks_are_found(columns: int, block: int, kept: int, found: int) -> None:
    weight = balanced_weight(64, columns, block=block, kept=kept)
    assert find_block(weight) == found
    assert BalancedTensor.from_dense(weight, found).kept == kept * found // block


def test_a_block_can_be_named() -> None:
    layer = cut(nn.Linear(64, 64), 8, 1)
    packed = compress(layer, keep="all", block=16)
    assert isinstance(packed, PackedLinear)
    assert (packed.take("weight").block, packed.take("weight").kept) == (16, 2)


# ---- models


class Net(nn.Module):
    """A layer of every kind, one of them used twice, and one read by its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(4, 16, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(16, 16, 1))
        self.grouped = nn.Conv2d(16, 16, 3, groups=4)
        self.twice = nn.Linear(16, 16)
        self.again = self.twice
        self.lstm = nn.LSTM(16, 8, bidirectional=True)
        self.head = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.grouped(self.conv(x)).flatten(2).permute(2, 0, 1)
        x = self.again(self.twice(x)) * self.twice.weight.sum()
        return self.head(self.lstm(x)[0])


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    return cut(Net(), 4, 1)


def report(model: nn.Module) -> Compression:
    assert isinstance(model.compression, Compression)
    return model.compression


def test_a_compressed_model_gives_the_same_and_goes_back(net: nn.Module) -> None:
    x = torch.randn(2, 4, 6, 6)
    before = copy.deepcopy(net.state_dict())
    small = compress(net, x, keep="all")
    with torch.no_grad():
        assert agree(small(x), net(x))
    assert small.again is small.twice
    kinds = [
        type(small.get_submodule(name)) for name in ("conv.0", "conv.1", "conv.2", "grouped", "twice", "lstm", "head.1")
    ]
    assert kinds == [PackedConv2d, Fused, PackedConv2d, nn.Conv2d, PackedLinear, PackedLSTM, Fused]
    back = decompress(small)
    assert same_state(back, net)
    assert str(back) == str(net)
    assert not hasattr(back, "compression")
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())


def test_the_report_tells_every_layer(net: nn.Module) -> None:
    told = report(compress(net, (4, 6, 6), keep="all"))
    names = [layer.name for layer in told.layers]
    assert names == ["conv.0", "conv.2", "grouped", "twice", "lstm", "head.0", "head.2"]
    assert told.dense == {"grouped": "a grouped convolution"}
    twice = told.layers[3]
    assert (twice.sparsity, twice.shape, twice.block) == (0.75, (16, 16), 16)
    assert twice.seconds is not None
    assert min(twice.seconds) > 0
    assert set(told.seconds) == {"dense", "all packed", "compressed"}
    assert "all packed" in str(told)
    assert told.facts()["layers"][2]["reason"] == "a grouped convolution"


def test_what_is_slower_packed_stays_dense(net: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[find_block.__module__]  # the package's name for it is the function
    monkeypatch.setattr(
        module,
        "time_layer",
        lambda dense, *_: {"dense": 2.0, "packed": 1.0 if isinstance(dense, nn.LSTM) else 3.0},
    )
    monkeypatch.setattr(module, "whole", lambda sides, *_: (dict(zip(sides, [2.0, 1.0, 1.0], strict=True)), {}))
    x = torch.randn(2, 4, 6, 6)
    small = compress(net, x)
    packed = [name for name, m in small.named_modules() if isinstance(m, Packed)]
    assert packed == ["lstm"]
    assert report(small).dense["head.0"] == "dense is faster here"
    assert type(small.get_submodule("head.1")) is nn.ReLU
    with torch.no_grad():
        assert agree(small(x), net(x))


def test_a_model_that_is_slower_in_all_stays_dense(net: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[find_block.__module__]
    monkeypatch.setattr(module, "time_layer", lambda *_: {"dense": 2.0, "packed": 1.0})
    taken = ([1.0, 1.5, 1.5], [3.0, 4.0, 5.0])  # alone, and as called
    monkeypatch.setattr(module, "whole", lambda sides, *_: tuple(dict(zip(sides, t, strict=True)) for t in taken))
    x = torch.randn(2, 4, 6, 6)
    small = compress(net, x)
    assert not any(isinstance(m, Packed) for m in small.modules())
    assert str(small) == str(net)
    told = report(small)
    assert told.dense["lstm"] == "2.0× faster alone, but the whole model is faster dense"
    assert told.seconds == {"dense": 1.0, "all packed": 1.5, "compressed": 1.0}
    assert told.called == {"dense": 3.0, "all packed": 4.0, "compressed": 3.0}
    assert any(isinstance(m, Packed) for m in compress(net, x, keep="all").modules())


def test_the_report_tells_what_plain_calls_take() -> None:
    seconds = {"dense": 3e-5, "all packed": 1e-5, "compressed": 1e-5}

    def told(compressed: float) -> str:
        called = {"dense": 6e-5, "all packed": compressed, "compressed": compressed}
        layer = Layer("0", "Linear", (8, 8), 0.9, True, "3.0× faster", seconds=(3e-5, 1e-5))
        return " ".join(str(Compression((layer,), 1, seconds, called)).split())

    assert "called plainly, with the host's time, 60.0 → 50.0 µs" in told(5e-5)
    assert "slower" not in told(5e-5)
    assert "60.0 → 70.0 µs; slower that way: capture it in a CUDA graph" in told(7e-5)


def test_calls_are_timed_with_all_that_the_host_does() -> None:
    counts = [0, 0]

    def side(which: int) -> None:
        counts[which] += 1

    sides = [functools.partial(side, which) for which in range(2)]
    times = clock.race(sides, torch.device("cpu"), repeats=6, called=True)
    assert len(times) == 2
    assert counts[0] == counts[1] == (clock.WARM + 6) * (clock.AHEAD + 1)


def test_channels_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense layers keep their layout, packed ones give the same, and are timed with the conversion."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.Conv2d(8, 8, 1))
    model = cut(model, 4, 1).to(memory_format=torch.channels_last)
    x = torch.randn(2, 4, 6, 6).contiguous(memory_format=torch.channels_last)
    layouts: list[bool] = []

    def race(sides: Any, *_: Any, **options: Any) -> list[float]:
        outputs = [side() for side in sides]
        layouts.extend(layers.channels_last(y) for y in outputs)
        return [1.0] * len(sides)

    monkeypatch.setattr(sys.modules[find_block.__module__], "race", race)
    small = compress(model, x)
    assert all(layouts[:6])  # both sides of every layer
    assert not any(isinstance(m, Packed) for m in small.modules())
    full = compress(model, x, keep="all")
    assert sum(isinstance(m, Packed) for m in full.modules()) == 3
    with torch.no_grad():
        assert agree(full(x), model(x))
    for back in (small, decompress(full)):
        assert same_state(back, model)
        assert all(p.is_contiguous(memory_format=torch.channels_last) for p in back.parameters() if p.ndim == 4)


@torch.no_grad()
def test_a_compressed_model_takes_another_layout() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 8))
    small = compress(cut(model, 4, 1), keep="all")
    x = torch.randn(2, 4, 6, 6)
    y = small(x)
    turned = small.to(memory_format=torch.channels_last)
    torch.testing.assert_close(turned(x.contiguous(memory_format=torch.channels_last)), y)
    torch.testing.assert_close(decompress(turned)(x), y, rtol=1e-5, atol=1e-5)


def test_a_model_that_no_cache_holds_is_timed_with_emptied_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    model = cut(nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64)), 32, 3)
    size = 4 * (2 * 32 * 64 + 32 + 64)
    emptied: list[Tensor] = []
    monkeypatch.setattr(clock, "FLUSH", 1 << 12)
    monkeypatch.setattr(clock, "empty", emptied.append)
    for cache, caches in ((size, "warm"), (size - 1, "cold")):
        for module in (clock, sys.modules[find_block.__module__]):
            monkeypatch.setattr(module, "last_cache", lambda _, cache=cache: cache)
        assert not emptied
        told = report(compress(model, patience=0))
        assert told.caches == told.facts()["caches"] == caches
        assert f"with {caches} caches" in str(told)
    assert len(emptied) == 2 * 2 * (clock.WARM + 5)  # both sides of both layers, in every turn
    assert emptied[0].nbytes == 2 * (size - 1)


@pytest.mark.gpu
def test_on_a_gpu_some_calls_in_a_row_are_timed() -> None:
    x = torch.zeros(3, device="cuda")
    replay, calls = clock.recorded(lambda: x.add_(1), 5)
    before = x[0].item()
    replay()
    assert calls == 5
    assert x.tolist() == [before + 5] * 3
    cold, warm = (clock.race([lambda: x.add_(1)], x.device, before=b, repeats=5)[0] for b in (lambda: None, None))
    assert 0 < warm < 1
    assert 0 < cold < 1


def test_the_last_cache_has_some_size() -> None:
    assert clock.last_cache(torch.device("cpu")) >= 1 << 18


def test_a_large_matrix_at_ninety_per_cent_is_packed_and_faster() -> None:
    """No timing is asserted: the decision is, and it is made by one."""
    layer = nn.Linear(2048, 2048)
    layer.weight.data = balanced_weight(2048, 2048, block=32, kept=3)
    if pm.sparse.native.library() is None:
        pytest.skip("needs the native kernels")
    assert isinstance(compress(layer), PackedLinear)


def test_values_can_be_stored_as_halves(net: nn.Module) -> None:
    x = torch.randn(2, 4, 6, 6)
    small = compress(net, x, keep="all", dtype=torch.float16)
    assert small.get_submodule("twice").take("weight").dtype == torch.float16
    with torch.no_grad():
        assert agree(small(x), net(x), 2e-2)
        assert not agree(small(x), net(x), 1e-7)


def test_dense_and_unstructured_layers_say_why_they_stay() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64).double())
    uneven = model[1].weight.data
    uneven[:] = 0
    uneven[:4] = 1.0  # rows that are full among rows that are empty
    told = report(compress(model))
    assert told.dense == {
        "0": "0% zeros are too few",
        "1": "no blocks with equal counts were found",
        "2": "torch.float64 has no packed form",
    }


def test_a_wrapped_model_is_unwrapped() -> None:
    layer = cut(nn.Linear(64, 64), 32, 3)
    assert isinstance(compress(nn.DataParallel(layer), keep="all"), PackedLinear)


def test_compiled_and_exported() -> None:
    torch.manual_seed(0)
    model = cut(nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 8)), 4, 1)
    x = torch.randn(2, 4, 6, 6)
    small = compress(model, x, keep="all").eval()
    with torch.no_grad():
        expected = model(x)
        assert agree(torch.compile(small, backend="aot_eager", fullgraph=True)(x), expected)
        program = torch.export.export(small, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},))
        assert agree(program.module()(torch.cat([x, x, x])), torch.cat([expected] * 3))
    assert any("pomona.balanced" in str(node.target) for node in program.graph.nodes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": "fast"}, "unknown keep 'fast': did you mean 'faster'"),
        ({"dtype": torch.int8}, "float32, float16 or bfloat16, got torch.int8"),
        ({"block": 0, "keep": "all"}, "columns wide, got 0"),
        ({"example": "x"}, "such as"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(pm.PomonaError, match=message):
        compress(cut(nn.Linear(64, 64), 32, 3), **options)


def test_a_pruned_and_trained_model_is_packed_exactly() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = pm.DPF(sparsity=0.9, pattern=pm.Balanced(block=32), every=2)
    pruner.attach(model, optimizer, total_steps=20)
    x, y = torch.randn(50, 64), torch.randint(4, (50,))
    for _step in range(20):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    pruner.finish()
    small = compress(model, x, keep="all")
    packed = small.get_submodule("0").take("weight")
    assert (packed.block, packed.kept) == (32, 3)
    with torch.no_grad():
        assert agree(small(x), model(x))
