"""`compress` with `bits`: balanced weights as int8 and int4 codes, in whole models."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from packing import balanced_weight, has_same_state, prune_balanced
from torch import Tensor, nn

import pomona as pm
from pomona.sparse import QuantizedBalancedTensor, compress, decompress
from pomona.sparse.layers import PackedLayer, PackedLinear

BITS = (4, 8)


class Net(nn.Module):
    """A convolution, an LSTM and two linear layers, one of them without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.lstm = nn.Conv2d(4, 32, 3, padding=1), nn.LSTM(32, 32)
        self.hidden, self.out = nn.Sequential(nn.Linear(32, 64), nn.ReLU()), nn.Linear(64, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        features = self.conv(x).flatten(2).permute(2, 0, 1)
        return self.out(self.hidden(self.lstm(features)[0][-1]))


def make_net() -> nn.Module:
    torch.manual_seed(0)
    net = Net().eval()
    for layer, block in ((net.conv, 36), (net.lstm, 32), (net.hidden, 32), (net.out, 32)):
        prune_balanced(layer, block, 3)
    return net


def make_linear(columns: int = 64, bias: bool = True) -> nn.Linear:
    layer = nn.Linear(columns, 40, bias)
    layer.weight.data = balanced_weight(40, columns, block=32, kept=3)
    return layer


@pytest.mark.parametrize("bits", BITS)
def test_every_layer_computes_with_the_rounded_weights(bits: int) -> None:
    net, x = make_net(), torch.randn(2, 4, 4, 4)
    compressed = compress(net, x, policy="all", bits=bits)
    formats = {layer.name: layer.format for layer in compressed.compression.layers}
    assert set(formats.values()) == {"balanced_quantized"}
    rounded = decompress(compressed)
    with torch.no_grad():
        expected = rounded(x)
        torch.testing.assert_close(compressed(x), expected, rtol=1e-3, atol=1e-3)
        assert not torch.allclose(expected, net(x), rtol=0, atol=1e-6)
    for name, weight in net.named_parameters():
        largest = weight.abs().max()
        error = (rounded.get_parameter(name) - weight).abs().max()
        assert error <= (largest / (2 ** (bits - 1) - 1) / 2 * 1.001 if "weight" in name else 0)
        assert bool((rounded.get_parameter(name)[weight == 0] == 0).all())


@pytest.mark.parametrize("bits", BITS)
def test_the_report_has_the_bytes_of_codes_scales_and_indices(bits: int) -> None:
    """40 rows are two groups of 32: 2 blocks of 3 codes, an index word of 16 bits for each block, one scale a row."""
    compressed = compress(nn.Sequential(make_linear()), policy="all", bits=bits)
    (layer,) = compressed.compression.layers
    stored = 64 * (2 * 3 * bits // 8 + 2 * 2 + 4)
    assert (layer.format, layer.block, layer.kept, layer.bits) == ("balanced_quantized", 32, 3, bits)
    assert layer.bytes == (40 * 64 * 4, stored)
    assert f"3 of 32, int{bits}" in str(compressed.compression)


@pytest.mark.parametrize("bits", BITS)
def test_copies_files_and_states(bits: int, tmp_path: Path) -> None:
    net, x = make_net(), torch.randn(2, 4, 4, 4)
    compressed = compress(net, x, policy="all", bits=bits)
    with torch.no_grad():
        y = compressed(x)
        assert torch.equal(copy.deepcopy(compressed)(x), y)
        loaded = pm.load(pm.save(compressed, tmp_path / "net.safetensors"), make_net())
        assert has_same_state(loaded, compressed)
        assert torch.equal(loaded(x), y)
        other = compress(make_net(), x, policy="all", bits=bits)
        other.hidden[0].weight_values.zero_()
        other.load_state_dict(compressed.state_dict())
        assert torch.equal(other(x), y)


@pytest.mark.parametrize("kind", ["balanced", "csr"])
def test_exports_hold_the_rounded_weights(kind: str, tmp_path: Path) -> None:
    model, x = nn.Sequential(make_linear(640)).eval(), torch.randn(2, 640)
    compressed = compress(model, x, policy="all", bits=4)
    report = pm.export(compressed, tmp_path / "file.safetensors", kind, x, note=lambda _: None)
    assert report.difference is not None
    assert report.difference < 1e-3
    assert report.bytes < 0.25 * model[0].weight.nbytes


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_models_of_half_precision_keep_their_dtype(dtype: torch.dtype, bias: bool) -> None:
    layer = make_linear(bias=bias).to(dtype)
    packed = compress(layer, policy="all", bits=4)
    x = torch.randn(3, 64).to(dtype)
    assert packed(x).dtype == packed.weight.dtype == decompress(packed)(x).dtype == dtype
    torch.testing.assert_close(packed(x), decompress(packed)(x), rtol=2e-2, atol=2e-2)
    assert decompress(packed.float()).weight.dtype == torch.float32


def test_values_stored_in_half_precision_become_weights_of_the_layers_own_dtype() -> None:
    layer, x = make_linear(), torch.randn(3, 64)
    back = decompress(compress(layer, policy="all", dtype=torch.float16))
    assert back.weight.dtype == torch.float32
    torch.testing.assert_close(back(x), layer(x), rtol=1e-2, atol=1e-2)


def test_quantised_layers_are_packed_only_where_they_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["pomona.sparse.compress"]
    monkeypatch.setattr(module, "time_layer", lambda *_: {"dense": 2.0, "balanced_quantized": 3.0})
    compressed = compress(nn.Sequential(make_linear()), bits=8)
    assert isinstance(compressed[0], nn.Linear)
    assert compressed.compression.dense == {"0": "dense is faster here"}
    assert torch.equal(compressed[0].weight, make_linear().weight)  # not rounded


def test_other_formats_compete_where_they_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module, seen = sys.modules["pomona.sparse.compress"], []

    def record(dense: nn.Module, packed: dict[str, PackedLayer], *_: Any) -> dict[str, float]:
        seen.extend(packed)
        return {"dense": 9.0, "unstructured": 3.0, "balanced": 2.0, "balanced_quantized": 1.0}

    monkeypatch.setattr(module, "time_layer", record)
    layer = nn.Linear(1024, 1024)
    layer.weight.data = balanced_weight(1024, 1024, block=32, kept=3)
    names = ["balanced", "balanced_quantized", "unstructured"]
    compressed = compress(layer, bits=8, formats=names)
    assert isinstance(compressed, PackedLinear)
    assert isinstance(compressed.packed_weight("weight"), QuantizedBalancedTensor)
    assert {"balanced", "balanced_quantized"} <= set(seen) <= set(names)


def test_nothing_is_rounded_unless_asked_for() -> None:
    net = make_net()
    compressed = compress(net, policy="all")
    assert all(layer.format != "balanced_quantized" for layer in compressed.compression.layers)
    assert all(torch.equal(a, b) for a, b in zip(decompress(compressed).parameters(), net.parameters(), strict=True))


def test_a_weight_that_is_not_finite_stays_dense() -> None:
    layer = make_linear()
    layer.weight.data[0, 0] = torch.nan
    compressed = compress(nn.Sequential(layer), policy="all", bits=4)
    assert compressed.compression.dense == {"0": "a weight with an infinity or NaN cannot be quantised"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 3}, "quantised to 4 or 8 bits, got bits=3"),
        ({"formats": ["balanced_quantized"]}, "rounds weights: give bits=4 or 8"),
        ({"bits": 4, "formats": ["balanced"]}, "bits=4 is for the format 'balanced_quantized'"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(pm.PomonaError, match=message):
        compress(make_linear(), **options)
