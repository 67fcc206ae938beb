"""`compress` and `decompress`: the choice of layers and blocks, the report, and whole models."""

from __future__ import annotations

import copy
import functools
import sys
from typing import Any

import pytest
import torch
from packing import agree, balanced_weight, has_same_state, prune_balanced
from torch import Tensor, nn

import pomona as pm
from pomona.sparse import BalancedTensor, decompress, timing
from pomona.sparse import compress as compress_with_default_patience
from pomona.sparse.compress import Compression, LayerReport, find_block
from pomona.sparse.cpu import backend
from pomona.sparse.layers import PackedConv2d, PackedLayer, PackedLinear, PackedLSTM
from pomona.sparse.layers.base import is_channels_last

compress = functools.partial(compress_with_default_patience, patience=0.0)


@pytest.mark.parametrize(
    ("columns", "block", "kept", "found"),
    [(128, 32, 3, 32), (128, 16, 2, 32), (128, 4, 2, 32), (150, 25, 4, 25), (128, 64, 7, 64), (150, 50, 5, 50)],
)
def test_the_block_width_is_found(columns: int, block: int, kept: int, found: int) -> None:
    weight = balanced_weight(64, columns, block=block, kept=kept)
    assert find_block(weight) == found
    assert BalancedTensor.from_dense(weight, found).kept == kept * found // block


def test_the_block_width_can_be_given() -> None:
    layer = prune_balanced(nn.Linear(64, 64), 8, 1)
    packed = compress(layer, policy="all", block=16)
    assert isinstance(packed, PackedLinear)
    assert (packed.packed_weight("weight").block, packed.packed_weight("weight").kept) == (16, 2)


# ---- models


class Net(nn.Module):
    """A network with a layer of every type, of which one is used twice and its weight is read directly."""

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
    return prune_balanced(Net(), 4, 1)


def report(model: nn.Module) -> Compression:
    assert isinstance(model.compression, Compression)
    return model.compression


def test_a_compressed_model_has_the_same_outputs_and_decompresses_exactly(net: nn.Module) -> None:
    x = torch.randn(2, 4, 6, 6)
    before = copy.deepcopy(net.state_dict())
    compressed = compress(net, x, policy="all")
    with torch.no_grad():
        assert agree(compressed(x), net(x))
    assert compressed.again is compressed.twice
    kinds = [
        type(compressed.get_submodule(name))
        for name in ("conv.0", "conv.1", "conv.2", "grouped", "twice", "lstm", "head.1")
    ]
    assert kinds == [PackedConv2d, nn.ReLU, PackedConv2d, nn.Conv2d, PackedLinear, PackedLSTM, nn.ReLU]
    back = decompress(compressed)
    assert has_same_state(back, net)
    assert str(back) == str(net)
    assert not hasattr(back, "compression")
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())


def test_the_report_has_every_layer(net: nn.Module) -> None:
    result = report(compress(net, (4, 6, 6), policy="all"))
    names = [layer.name for layer in result.layers]
    assert names == ["conv.0", "conv.2", "grouped", "twice", "lstm", "head.0", "head.2"]
    assert result.dense == {"grouped": "a grouped convolution"}
    twice = result.layers[3]
    assert (twice.sparsity, twice.shape, twice.block) == (0.75, (16, 16), 16)
    assert twice.seconds is not None
    assert min(twice.seconds) > 0
    assert set(result.seconds) == {"dense", "all packed", "compressed"}
    assert "all packed" in str(result)
    assert result.facts()["layers"][2]["reason"] == "a grouped convolution"


def test_layers_that_are_slower_packed_stay_dense(net: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["pomona.sparse.compress"]  # `pomona.sparse.compress` is the function, not the module
    monkeypatch.setattr(
        module,
        "time_layer",
        lambda dense, *_: {"dense": 2.0, "balanced": 1.0 if isinstance(dense, nn.LSTM) else 3.0},
    )
    monkeypatch.setattr(module, "time_models", lambda sides, *_: (dict(zip(sides, [2.0, 1.0, 1.0], strict=True)), {}))
    monkeypatch.setattr(module, "plan_copy", lambda *_: None)  # the convolutions in one call are no choice here
    x = torch.randn(2, 4, 6, 6)
    compressed = compress(net, x)
    packed = [name for name, m in compressed.named_modules() if isinstance(m, PackedLayer)]
    assert packed == ["lstm"]
    assert report(compressed).dense["head.0"] == "dense is faster here"
    assert type(compressed.get_submodule("head.1")) is nn.ReLU
    with torch.no_grad():
        assert agree(compressed(x), net(x))


def test_a_model_that_is_slower_as_a_whole_stays_dense(net: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["pomona.sparse.compress"]
    monkeypatch.setattr(module, "time_layer", lambda *_: {"dense": 2.0, "balanced": 1.0})
    measured = ([1.0, 1.5, 1.5], [3.0, 4.0, 5.0])  # on the device, and as plain calls
    monkeypatch.setattr(
        module, "time_models", lambda sides, *_: tuple(dict(zip(sides, t, strict=True)) for t in measured)
    )
    x = torch.randn(2, 4, 6, 6)
    compressed = compress(net, x)
    assert not any(isinstance(m, PackedLayer) for m in compressed.modules())
    assert str(compressed) == str(net)
    result = report(compressed)
    assert result.dense["lstm"] == "2.0× faster alone, but the whole model is faster dense"
    assert result.seconds == {"dense": 1.0, "all packed": 1.5, "compressed": 1.0}
    assert result.called == {"dense": 3.0, "all packed": 4.0, "compressed": 3.0}
    assert any(isinstance(m, PackedLayer) for m in compress(net, x, policy="all").modules())


def test_the_report_has_the_times_of_plain_calls() -> None:
    seconds = {"dense": 3e-5, "all packed": 1e-5, "compressed": 1e-5}

    def describe(seconds_compressed: float) -> str:
        called = {"dense": 6e-5, "all packed": seconds_compressed, "compressed": seconds_compressed}
        layer = LayerReport("0", "Linear", (8, 8), 0.9, True, "3.0× faster", seconds=(3e-5, 1e-5))
        return " ".join(str(Compression((layer,), 1, seconds, called)).split())

    assert "plain calls, host time included, 60.0 → 50.0 µs" in describe(5e-5)
    assert "slower" not in describe(5e-5)
    assert "60.0 → 70.0 µs, slower than dense: capture the model in a CUDA graph" in describe(7e-5)


def test_channels_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense layers keep their memory format; packed layers return it, and the conversion is part of their time."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.Conv2d(8, 8, 1))
    model = prune_balanced(model, 4, 1).to(memory_format=torch.channels_last)
    x = torch.randn(2, 4, 6, 6).contiguous(memory_format=torch.channels_last)
    layouts: list[bool] = []

    def collect_layouts(sides: Any, *_: Any, **options: Any) -> list[float]:
        outputs = [side() for side in sides]
        layouts.extend(is_channels_last(y) for y in outputs)
        return [1.0] * len(sides)

    monkeypatch.setattr(sys.modules["pomona.sparse.compress"], "median_seconds", collect_layouts)
    compressed = compress(model, x)
    assert all(layouts[:6])  # dense and packed, of every layer
    assert not any(isinstance(m, PackedLayer) for m in compressed.modules())
    full = compress(model, x, policy="all")
    assert sum(isinstance(m, PackedLayer) for m in full.modules()) == 3
    with torch.no_grad():
        assert agree(full(x), model(x))
    for back in (compressed, decompress(full)):
        assert has_same_state(back, model)
        assert all(p.is_contiguous(memory_format=torch.channels_last) for p in back.parameters() if p.ndim == 4)


@torch.no_grad()
def test_a_compressed_model_can_change_its_memory_format() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 8))
    compressed = compress(prune_balanced(model, 4, 1), policy="all")
    x = torch.randn(2, 4, 6, 6)
    y = compressed(x)
    converted = compressed.to(memory_format=torch.channels_last)
    torch.testing.assert_close(converted(x.contiguous(memory_format=torch.channels_last)), y)
    torch.testing.assert_close(decompress(converted)(x), y, rtol=1e-5, atol=1e-5)


def test_a_model_larger_than_the_cache_is_timed_with_cold_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    model = prune_balanced(nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64)), 32, 3)
    size = 4 * (2 * 32 * 64 + 32 + 64)
    flushed: list[Tensor] = []
    monkeypatch.setattr(timing, "FLUSH_BYTES", 1 << 12)
    monkeypatch.setattr(timing, "flush_caches", flushed.append)
    for cache, caches in ((size, "warm"), (size - 1, "cold")):
        for module in (timing, sys.modules["pomona.sparse.compress"]):
            monkeypatch.setattr(module, "last_cache_bytes", lambda _, cache=cache: cache)
        assert not flushed
        result = report(compress(model, patience=0))
        assert result.caches == result.facts()["caches"] == caches
        assert f"with {caches} caches" in str(result)
    assert len(flushed) == 2 * 2 * (timing.WARMUP_TURNS + 5)  # dense and packed, of both layers, in every turn
    assert flushed[0].nbytes == 2 * (size - 1)


def test_a_large_matrix_at_ninety_percent_sparsity_is_packed() -> None:
    """The test asserts the decision, which depends on a measured time, and not the time itself."""
    layer = nn.Linear(2048, 2048)
    layer.weight.data = balanced_weight(2048, 2048, block=32, kept=3)
    if backend.load_library() is None:
        pytest.skip("needs the native kernels")
    assert isinstance(compress(layer), PackedLinear)


def test_values_can_be_stored_in_half_precision(net: nn.Module) -> None:
    x = torch.randn(2, 4, 6, 6)
    compressed = compress(net, x, policy="all", dtype=torch.float16)
    assert compressed.get_submodule("twice").packed_weight("weight").dtype == torch.float16
    with torch.no_grad():
        assert agree(compressed(x), net(x), 2e-2)
        assert not agree(compressed(x), net(x), 1e-7)


def test_layers_that_stay_dense_have_a_reason() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64).double())
    uneven = model[1].weight.data
    uneven[:] = 0
    uneven[:4] = 1.0  # full rows among empty ones
    result = report(compress(model, formats=["balanced"]))
    assert result.dense == {
        "0": "0% zeros are too few",
        "1": "no blocks with equal counts were found",
        "2": "torch.float64 has no packed form",
    }


def test_keep_is_another_name_of_policy() -> None:
    layer = prune_balanced(nn.Linear(64, 64), 32, 3)
    assert isinstance(compress(layer, keep="all"), PackedLinear)
    with pytest.raises(pm.PomonaError, match="unknown policy 'fast': did you mean 'faster'"):
        compress(layer, keep="fast")


def test_a_wrapped_model_is_unwrapped() -> None:
    layer = prune_balanced(nn.Linear(64, 64), 32, 3)
    assert isinstance(compress(nn.DataParallel(layer), policy="all"), PackedLinear)


def test_compiled_and_exported() -> None:
    torch.manual_seed(0)
    model = prune_balanced(
        nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 8)), 4, 1
    )
    x = torch.randn(2, 4, 6, 6)
    compressed = compress(model, x, policy="all").eval()
    with torch.no_grad():
        expected = model(x)
        assert agree(torch.compile(compressed, backend="aot_eager", fullgraph=True)(x), expected)
        program = torch.export.export(compressed, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},))
        assert agree(program.module()(torch.cat([x, x, x])), torch.cat([expected] * 3))
    assert any("pomona.balanced" in str(node.target) for node in program.graph.nodes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "fast"}, "unknown policy 'fast': did you mean 'faster'"),
        ({"dtype": torch.int8}, "float32, float16 or bfloat16, got torch.int8"),
        ({"block": 0, "policy": "all"}, "columns wide, got 0"),
        ({"formats": ["unstructuerd"]}, "unknown format 'unstructuerd': did you mean 'unstructured'"),
        ({"example": "x"}, "such as"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(pm.PomonaError, match=message):
        compress(prune_balanced(nn.Linear(64, 64), 32, 3), **options)


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
    compressed = compress(model, x, policy="all")
    packed = compressed.get_submodule("0").packed_weight("weight")
    assert (packed.block, packed.kept) == (32, 3)
    with torch.no_grad():
        assert agree(compressed(x), model(x))
