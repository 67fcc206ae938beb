"""Models with 2:4 weights and with dense blocks: which layers are packed so, torch's tools, files and forgeries."""

from __future__ import annotations

import copy
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from packing import agree, block_weight, has_same_state, two_of_four_weight, unstructured_weight
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

import pomona as pm
from pomona.sparse import load, save
from pomona.sparse.files import METADATA_KEY, checksum
from pomona.sparse.layers import PackedLayer
from pomona.sparse.ops import block_product, two_of_four_product
from pomona.sparse.structured_masks import pack_structured

NAMES = ["2:4", "blocks"]
kinds = pytest.mark.parametrize("kind", NAMES)


def make_weight(kind: str, rows: int, columns: int, seed: int = 0) -> Tensor:
    """Return a matrix with the structure of a format."""
    if kind == "2:4":
        return two_of_four_weight(rows, columns, seed)
    return block_weight(rows, columns, 4, 4, 0.7, seed)


def prune_structured(model: nn.Module, kind: str) -> nn.Module:
    """Give every weight the structure of a format; return the model in eval mode."""
    for seed, parameter in enumerate(model.parameters()):
        if parameter.ndim > 1:
            matrix = make_weight(kind, parameter.shape[0], parameter[0].numel(), seed)
            parameter.data.copy_((matrix / matrix.shape[1] ** 0.5).view(parameter.shape))
    return model.eval()


def compress(model: nn.Module, kind: str) -> nn.Module:
    """Return the model with every layer packed in one format."""
    return pm.compress(model, policy="all", formats=[kind], patience=0.0)


def formats_of(model: nn.Module) -> set[str]:
    """Return the formats of a model's packed weights."""
    return {name for m in model.modules() if isinstance(m, PackedLayer) for name in m.formats.values()}


class Recurrent(nn.Module):
    """A convolution, an LSTM and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 16, 3, stride=2, padding=1)
        self.lstm = nn.LSTM(64, 20, 2)
        self.head = nn.Linear(20, 8)

    def forward(self, x: Tensor) -> Tensor:
        features = self.conv(x).relu().flatten(2).reshape(len(x), 1, -1)[..., :64]
        return self.head(self.lstm(features)[0])


@kinds
@torch.no_grad()
def test_every_kind_of_layer_is_packed(kind: str) -> None:
    torch.manual_seed(0)
    net = prune_structured(Recurrent(), kind)
    packed = compress(net, kind)
    assert formats_of(packed) == {kind}
    assert [layer.format for layer in packed.compression.layers] == [kind] * 3
    assert kind in str(packed.compression)
    x = torch.randn(3, 4, 8, 8)
    assert agree(packed(x), net(x))
    assert has_same_state(pm.decompress(packed), net)
    assert agree(copy.deepcopy(packed)(x), net(x))
    halves = pm.compress(net, policy="all", formats=[kind], dtype=torch.float16, patience=0.0)
    assert agree(halves(x), net(x), 1e-2)
    assert agree(copy.deepcopy(packed).bfloat16()(x.bfloat16()).float(), net(x), 0.05)


@kinds
@pytest.mark.parametrize("stride", [1, 2])
@torch.no_grad()
def test_convolutions(stride: int, kind: str) -> None:
    torch.manual_seed(0)
    net = prune_structured(nn.Sequential(nn.Conv2d(4, 12, 3, stride, 1), nn.ReLU(), nn.Conv2d(12, 8, 1)), kind)
    packed = compress(net, kind)
    for shape in ((1, 4, 9, 7), (5, 4, 12, 12), (4, 6, 6)):
        x = torch.randn(shape)
        assert agree(packed(x), net(x))


# ---- which layers are packed so


def test_a_format_is_considered_where_all_weights_have_its_structure() -> None:
    pair, four = two_of_four_weight(40, 64), block_weight(40, 64, 4, 4, 0.7)
    assert list(pack_structured({"weight": pair}, NAMES, None)) == ["2:4"]
    assert list(pack_structured({"weight": four}, NAMES, None)) == ["blocks"]
    assert list(pack_structured({"weight": four}, ["2:4"], None)) == []
    assert pack_structured({"a": pair, "b": four}, NAMES, None) == {}
    assert pack_structured({"weight": unstructured_weight(40, 64, 0.8)}, NAMES, None) == {}
    sparser = pair.clone()
    sparser[:, ::3] = 0  # 2:4 too, but a third of the values that the format stores would be zeros
    assert pack_structured({"weight": sparser}, NAMES, None) == {}
    both = pack_structured({"weight": four.half()}, NAMES, torch.bfloat16)
    assert both["blocks"]["weight"].dtype == torch.bfloat16


def test_a_device_without_kernels_has_no_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (two_of_four_product, block_product):
        monkeypatch.delitem(module.BACKENDS, "cpu")
    assert pack_structured({"weight": two_of_four_weight(40, 64)}, NAMES, None) == {}
    assert pack_structured({"weight": block_weight(40, 64, 4, 4, 0.7)}, NAMES, None) == {}


@kinds
def test_the_fastest_form_is_chosen(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = prune_structured(nn.Linear(1024, 512), kind)
    for best in ("dense", "unstructured", kind):
        seen: list[list[str]] = []

        def time_layer(dense: nn.Module, packed: Any, *_: Any, best: str = best, seen: Any = seen) -> dict[str, float]:
            seen.append(list(packed))
            return {name: 1.0 if name == best else 2.0 for name in ("dense", *packed)}

        monkeypatch.setattr(sys.modules["pomona.sparse.compress"], "time_layer", time_layer)
        packed = pm.compress(nn.Sequential(layer), patience=0.0)
        assert formats_of(packed) == ({best} - {"dense"})
        assert kind in seen[0]
        assert set(seen[0]) <= {"balanced", "unstructured", kind}


def test_a_mask_that_fits_no_format_says_so() -> None:
    net = nn.Sequential(nn.Linear(30, 40))
    net[0].weight.data.copy_(unstructured_weight(40, 30, 0.8))
    report = pm.compress(net, policy="all", formats=["2:4"], patience=0.0).compression
    assert [layer.reason for layer in report.layers] == ["the mask fits none of the formats"]


# ---- torch's tools


@kinds
def test_torch_compile_and_export(kind: str) -> None:
    torch.manual_seed(0)
    net = prune_structured(nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 8)), kind)
    packed, x = compress(net, kind), torch.randn(3, 32)
    exported = torch.export.export(packed, (x,))
    assert f"pomona.{'two_of_four' if kind == '2:4' else 'blocks'}" in exported.graph_module.code
    assert agree(exported.module()(x), net(x))
    with torch.no_grad():
        assert agree(torch.compile(packed, backend="aot_eager", fullgraph=True)(x), net(x))


@kinds
@pytest.mark.filterwarnings("ignore:packed weights are multiplied as dense ones")
def test_gradients_of_inputs(kind: str) -> None:
    net = prune_structured(nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 8)), kind)
    x = torch.randn(3, 32, requires_grad=True)
    upstream = torch.randn(3, 8)
    expected = torch.autograd.grad(net(x), x, upstream)
    assert agree(torch.autograd.grad(compress(net, kind)(x), x, upstream), expected)


# ---- files


def build_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 36), nn.ReLU(), nn.BatchNorm1d(36), nn.Linear(36, 4, bias=False)).eval()


@kinds
@torch.no_grad()
def test_a_model_is_saved_and_loaded(kind: str, tmp_path: Path) -> None:
    packed = compress(prune_structured(build_network(), kind), kind)
    again, x = load(save(packed, tmp_path / "model.safetensors"), build_network()), torch.randn(3, 40)
    assert torch.equal(again(x), packed(x))
    assert has_same_state(again, packed)
    assert formats_of(again) == {kind}


@pytest.mark.slow
@kinds
def test_a_thousand_damaged_files_are_refused(kind: str, tmp_path: Path) -> None:
    """Bytes are changed, cut off or added: the file is refused."""
    packed = compress(prune_structured(build_network(), kind), kind)
    file, network = tmp_path / "model.safetensors", build_network()
    whole = save(packed, file).read_bytes()
    places = torch.randint(len(whole), (1000,), generator=torch.Generator().manual_seed(0)).tolist()
    for number, place in enumerate(places):
        changed = bytes([whole[place] ^ 1 << number % 8])
        data = whole[:place] + (changed, b"", changed * 3)[number % 3] + whole[place + 1 :]
        file.write_bytes(data)
        with pytest.raises(pm.PomonaError):
            load(file, network)
    assert not formats_of(network)


def forge(model: nn.Module, path: Path, plan: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """Write a file with any contents and a valid checksum; return its path."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()} | tensors
    layers = {name: m.file_metadata() for name, m in model.named_modules() if isinstance(m, PackedLayer)}
    facts = {"version": 3, "model": None, "packed": layers | plan}
    path.write_bytes(to_bytes(state, {METADATA_KEY: json.dumps(facts | {"digest": checksum(facts, state)})}))
    return path


@kinds
def test_forged_files_are_refused(kind: str, tmp_path: Path) -> None:
    packed = compress(prune_structured(build_network(), kind), kind)
    described = {"shape": [36, 40], "format": kind}
    shapes: list[Any] = [[2**40, 40], [36, 2**40], [40, 36], [-36, 40], [36], [36, 40, 1], "no", None]
    plans: list[dict[str, Any]] = [{"0": {"weight": described | {"shape": shape}}} for shape in shapes]
    plans += [{"0": {"weight": described | {"format": name}}} for name in ("other", "balanced", None, ["blocks"])]
    plans += [{"9": {"weight": described}}, {"0": {"bias": described}}, {"0": {}}]
    state = packed.state_dict()
    parts = [name for name in state if name.startswith("0.weight_")]
    changes = torch.zeros_like, lambda tensor: tensor[:-1].contiguous(), Tensor.double
    changed: list[dict[str, Tensor]] = [
        {part: tensor}
        for part, change in itertools.product(parts, changes)
        if not torch.equal(tensor := change(state[part]), state[part])
    ]
    integers = [name for name in parts if not state[name].is_floating_point()]
    for name, step in itertools.product(integers, (1, -1, 1 << 14)):
        changed.append({name: state[name] + torch.tensor(step, dtype=state[name].dtype)})
    refused = 0
    for plan, tensors in [*((plan, {}) for plan in plans), *(({}, tensors) for tensors in changed)]:
        file = forge(packed, tmp_path / "forged", plan, tensors)
        try:
            again = load(file, build_network())
        except pm.PomonaError:
            refused += 1
        else:  # values of zero, and places that are valid, are a weight too
            assert tensors
            layers = [module for module in again.modules() if isinstance(module, PackedLayer)]
            assert all(weight.verify() for layer in layers for _, weight in layer.packed_weights())
    assert refused >= len(plans) + len(changed) - 3
