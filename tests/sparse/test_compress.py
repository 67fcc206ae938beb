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
from pomona.sparse import compress as patient_compress
from pomona.sparse.compress import Compression, LayerReport, find_block
from pomona.sparse.cpu import backend
from pomona.sparse.layers import PackedConv2d, PackedLayer, PackedLinear, PackedLSTM
from pomona.sparse.layers.base import is_channels_last
from pomona.sparse.surgery import Fused

compress = functools.partial(patient_compress, patience=0.0)


@pytest.mark.parametrize(
    ("columns", "block", "kept", "found"),
    [(128, 32, 3, 32), (128, 16, 2, 32), (128, 4, 2, 32), (150, 25, 4, 25), (128, 64, 7, 64), (150, 50, 5, 50)],
)
def test_the_blocks_are_found(columns: int, block: int, kept: int, found: int) -> None:
    weight = balanced_weight(64, columns, block=block, kept=kept)
    assert find_block(weight) == found
    assert BalancedTensor.from_dense(weight, found).kept == kept * found // block


def test_a_block_can_be_named() -> None:
    layer = prune_balanced(nn.Linear(64, 64), 8, 1)
    packed = compress(layer, policy="all", block=16)
    assert isinstance(packed, PackedLinear)
    assert (packed.packed_weight("weight").block, packed.packed_weight("weight").kept) == (16, 2)


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
    return prune_balanced(Net(), 4, 1)


def report(model: nn.Module) -> Compression:
    assert isinstance(model.compression, Compression)
    return model.compression


def test_a_compressed_model_gives_the_same_and_goes_back(net: nn.Module) -> None:
    x = torch.randn(2, 4, 6, 6)
    before = copy.deepcopy(net.state_dict())
    small = compress(net, x, policy="all")
    with torch.no_grad():
        assert agree(small(x), net(x))
    assert small.again is small.twice
    kinds = [
        type(small.get_submodule(name)) for name in ("conv.0", "conv.1", "conv.2", "grouped", "twice", "lstm", "head.1")
    ]
    assert kinds == [PackedConv2d, Fused, PackedConv2d, nn.Conv2d, PackedLinear, PackedLSTM, Fused]
    back = decompress(small)
    assert has_same_state(back, net)
    assert str(back) == str(net)
    assert not hasattr(back, "compression")
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())


def test_the_report_tells_every_layer(net: nn.Module) -> None:
    told = report(compress(net, (4, 6, 6), policy="all"))
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
    monkeypatch.setattr(module, "time_models", lambda sides, *_: (dict(zip(sides, [2.0, 1.0, 1.0], strict=True)), {}))
    x = torch.randn(2, 4, 6, 6)
    small = compress(net, x)
    packed = [name for name, m in small.named_modules() if isinstance(m, PackedLayer)]
    assert packed == ["lstm"]
    assert report(small).dense["head.0"] == "dense is faster here"
    assert type(small.get_submodule("head.1")) is nn.ReLU
    with torch.no_grad():
        assert agree(small(x), net(x))


def test_a_model_that_is_slower_in_all_stays_dense(net: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[find_block.__module__]
    monkeypatch.setattr(module, "time_layer", lambda *_: {"dense": 2.0, "packed": 1.0})
    taken = ([1.0, 1.5, 1.5], [3.0, 4.0, 5.0])  # alone, and as called
    monkeypatch.setattr(module, "time_models", lambda sides, *_: tuple(dict(zip(sides, t, strict=True)) for t in taken))
    x = torch.randn(2, 4, 6, 6)
    small = compress(net, x)
    assert not any(isinstance(m, PackedLayer) for m in small.modules())
    assert str(small) == str(net)
    told = report(small)
    assert told.dense["lstm"] == "2.0× faster alone, but the whole model is faster dense"
    assert told.seconds == {"dense": 1.0, "all packed": 1.5, "compressed": 1.0}
    assert told.called == {"dense": 3.0, "all packed": 4.0, "compressed": 3.0}
    assert any(isinstance(m, PackedLayer) for m in compress(net, x, policy="all").modules())


def test_the_report_tells_what_plain_calls_take() -> None:
    seconds = {"dense": 3e-5, "all packed": 1e-5, "compressed": 1e-5}

    def told(compressed: float) -> str:
        called = {"dense": 6e-5, "all packed": compressed, "compressed": compressed}
        layer = LayerReport("0", "Linear", (8, 8), 0.9, True, "3.0× faster", seconds=(3e-5, 1e-5))
        return " ".join(str(Compression((layer,), 1, seconds, called)).split())

    assert "called plainly, with the host's time, 60.0 → 50.0 µs" in told(5e-5)
    assert "slower" not in told(5e-5)
    assert "60.0 → 70.0 µs; slower that way: capture it in a CUDA graph" in told(7e-5)


def test_channels_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense layers keep their layout, packed ones give the same, and are timed with the conversion."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.Conv2d(8, 8, 1))
    model = prune_balanced(model, 4, 1).to(memory_format=torch.channels_last)
    x = torch.randn(2, 4, 6, 6).contiguous(memory_format=torch.channels_last)
    layouts: list[bool] = []

    def race(sides: Any, *_: Any, **options: Any) -> list[float]:
        outputs = [side() for side in sides]
        layouts.extend(is_channels_last(y) for y in outputs)
        return [1.0] * len(sides)

    monkeypatch.setattr(sys.modules[find_block.__module__], "median_seconds", race)
    small = compress(model, x)
    assert all(layouts[:6])  # both sides of every layer
    assert not any(isinstance(m, PackedLayer) for m in small.modules())
    full = compress(model, x, policy="all")
    assert sum(isinstance(m, PackedLayer) for m in full.modules()) == 3
    with torch.no_grad():
        assert agree(full(x), model(x))
    for back in (small, decompress(full)):
        assert has_same_state(back, model)
        assert all(p.is_contiguous(memory_format=torch.channels_last) for p in back.parameters() if p.ndim == 4)


@torch.no_grad()
def test_a_compressed_model_takes_another_layout() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 8))
    small = compress(prune_balanced(model, 4, 1), policy="all")
    x = torch.randn(2, 4, 6, 6)
    y = small(x)
    transposed = small.to(memory_format=torch.channels_last)
    torch.testing.assert_close(transposed(x.contiguous(memory_format=torch.channels_last)), y)
    torch.testing.assert_close(decompress(transposed)(x), y, rtol=1e-5, atol=1e-5)


def test_a_model_that_no_cache_holds_is_timed_with_emptied_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    model = prune_balanced(nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64)), 32, 3)
    size = 4 * (2 * 32 * 64 + 32 + 64)
    emptied: list[Tensor] = []
    monkeypatch.setattr(timing, "FLUSH_BYTES", 1 << 12)
    monkeypatch.setattr(timing, "flush_caches", emptied.append)
    for cache, caches in ((size, "warm"), (size - 1, "cold")):
        for module in (timing, sys.modules[find_block.__module__]):
            monkeypatch.setattr(module, "last_cache_bytes", lambda _, cache=cache: cache)
        assert not emptied
        told = report(compress(model, patience=0))
        assert told.caches == told.facts()["caches"] == caches
        assert f"with {caches} caches" in str(told)
    assert len(emptied) == 2 * 2 * (timing.WARMUP_TURNS + 5)  # both sides of both layers, in every turn
    assert emptied[0].nbytes == 2 * (size - 1)


def test_a_large_matrix_at_ninety_per_cent_is_packed_and_faster() -> None:
    """No timing is asserted: the decision is, and it is made by one."""
    layer = nn.Linear(2048, 2048)
    layer.weight.data = balanced_weight(2048, 2048, block=32, kept=3)
    if backend.load_library() is None:
        pytest.skip("needs the native kernels")
    assert isinstance(compress(layer), PackedLinear)


def test_values_can_be_stored_as_halves(net: nn.Module) -> None:
    x = torch.randn(2, 4, 6, 6)
    small = compress(net, x, policy="all", dtype=torch.float16)
    assert small.get_submodule("twice").packed_weight("weight").dtype == torch.float16
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
    layer = prune_balanced(nn.Linear(64, 64), 32, 3)
    assert isinstance(compress(nn.DataParallel(layer), policy="all"), PackedLinear)


def test_compiled_and_exported() -> None:
    torch.manual_seed(0)
    model = prune_balanced(
        nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 8)), 4, 1
    )
    x = torch.randn(2, 4, 6, 6)
    small = compress(model, x, policy="all").eval()
    with torch.no_grad():
        expected = model(x)
        assert agree(torch.compile(small, backend="aot_eager", fullgraph=True)(x), expected)
        program = torch.export.export(small, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},))
        assert agree(program.module()(torch.cat([x, x, x])), torch.cat([expected] * 3))
    assert any("pomona.balanced" in str(node.target) for node in program.graph.nodes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "fast"}, "unknown policy 'fast': did you mean 'faster'"),
        ({"dtype": torch.int8}, "float32, float16 or bfloat16, got torch.int8"),
        ({"block": 0, "policy": "all"}, "columns wide, got 0"),
        ({"example": "x"}, "such as"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
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
    small = compress(model, x, policy="all")
    packed = small.get_submodule("0").packed_weight("weight")
    assert (packed.block, packed.kept) == (32, 3)
    with torch.no_grad():
        assert agree(small(x), model(x))
