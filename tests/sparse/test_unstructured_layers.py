"""Layers and models with unstructured packed weights: against dense ones, as torch's tools see them, and in files."""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from packing import agree, has_same_state, prune_balanced, prune_unstructured
from safetensors import safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor, nn
from torch.autograd import forward_ad

import pomona as pm
from pomona.sparse import UnstructuredTensor, compress, decompress, load, save
from pomona.sparse.cpu import backend
from pomona.sparse.files import METADATA_KEY, checksum
from pomona.sparse.layers import PackedConv1D, PackedConv2d, PackedLayer, PackedLinear, PackedLSTM

ONLY = {"policy": "all", "formats": ["unstructured"], "patience": 0.0}


class Net(nn.Module):
    """A network with a layer of every type that has a packed form."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(4, 20, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(20, 16, 3, stride=2))
        self.lstm = nn.LSTM(16, 9, num_layers=2, bidirectional=True)
        self.head = nn.Sequential(nn.Linear(18, 33), nn.ReLU(), nn.Linear(33, 5, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.conv(x).flatten(2).permute(2, 0, 1))[0])


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    return prune_unstructured(Net(), 0.8)


@pytest.fixture
def packed_net(net: nn.Module) -> nn.Module:
    return compress(net, **ONLY)


def formats_of(model: nn.Module) -> set[str]:
    return {name for module in model.modules() if isinstance(module, PackedLayer) for name in module.formats.values()}


@torch.no_grad()
def test_a_compressed_model_has_the_same_outputs_and_decompresses_exactly(net: nn.Module) -> None:
    x = torch.randn(2, 4, 9, 9)
    compressed = compress(net, x, **ONLY)
    assert agree(compressed(x), net(x))
    kinds = [type(compressed.get_submodule(name)) for name in ("conv.0", "conv.2", "lstm", "head.0", "head.2")]
    assert kinds == [PackedConv2d, PackedConv2d, PackedLSTM, PackedLinear, PackedLinear]
    assert formats_of(compressed) == {"unstructured"}
    assert all(isinstance(w, UnstructuredTensor) for _, w in compressed.get_submodule("lstm").packed_weights())
    back = decompress(compressed)
    assert has_same_state(back, net)
    assert str(back) == str(net)
    report = compressed.compression
    assert all((layer.packed, layer.format, layer.block) == (True, "unstructured", None) for layer in report.layers)
    assert "unstructured" in str(report)
    assert report.facts()["layers"][0]["format"] == "unstructured"


@pytest.mark.parametrize("shape", [(64,), (3, 64), (2, 5, 64), (0, 64)])
@torch.no_grad()
def test_linear(shape: tuple[int, ...]) -> None:
    layer = prune_unstructured(nn.Linear(64, 40), 0.8)
    x = torch.randn(shape)
    assert agree(compress(layer, **ONLY)(x), layer(x))


@pytest.mark.parametrize(
    "options",
    [{"kernel_size": 3, "padding": 1}, {"kernel_size": 1}, {"kernel_size": 5, "stride": 2, "padding": 2}],
    ids=str,
)
@torch.no_grad()
def test_convolution(options: dict[str, Any]) -> None:
    layer = prune_unstructured(nn.Conv2d(6, 40, **options), 0.7)
    packed = compress(layer, **ONLY)
    for images in (torch.randn(1, 6, 11, 9), torch.randn(3, 6, 10, 13), torch.randn(6, 9, 9)):
        assert agree(packed(images), layer(images))


@torch.no_grad()
def test_the_conv1d_of_hugging_face() -> None:
    transformers = pytest.importorskip("transformers")
    layer = transformers.pytorch_utils.Conv1D(48, 64)
    prune_unstructured(layer, 0.8)
    packed, x = compress(layer, **ONLY), torch.randn(2, 7, 64)
    assert isinstance(packed, PackedConv1D)
    assert agree(packed(x), layer(x))
    assert torch.equal(packed.weight, layer.weight)


@torch.no_grad()
def test_values_in_half_precision(net: nn.Module) -> None:
    x = torch.randn(2, 4, 9, 9)
    compressed = compress(net, dtype=torch.float16, **ONLY)
    assert compressed.get_submodule("head.0").packed_weight("weight").dtype == torch.float16
    assert agree(compressed(x), net(x), 2e-2)
    halves = copy.deepcopy(net).bfloat16()
    assert agree(compress(halves, **ONLY)(x.bfloat16()), halves(x.bfloat16()), 5e-2)


def test_a_summary_has_the_cost_of_the_dense_model(net: nn.Module) -> None:
    expected = pm.summary(net, (4, 9, 9))
    for formats in (["unstructured"], ["balanced"]):
        compressed = compress(net, policy="all", patience=0.0, formats=formats)
        found = pm.summary(compressed, (4, 9, 9))
        assert (found.params, found.nonzeros) == (expected.params, expected.nonzeros)
        assert (found.macs, found.macs_left) == (expected.macs, expected.macs_left)
        assert [layer.name for layer in found.layers] == [layer.name for layer in expected.layers]


# ---- which format is chosen


def fix_times(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
    """Replace the measured times of layers by these, by name of the form, and those of whole models by equal ones."""
    module = sys.modules["pomona.sparse.compress"]  # `pomona.sparse.compress` is the function, not the module

    def time_layer(dense: nn.Module, packed: dict[str, PackedLayer], *_: Any) -> dict[str, float]:
        return {way: seconds[way] for way in ("dense", *packed)}

    monkeypatch.setattr(module, "time_layer", time_layer)
    monkeypatch.setattr(module, "time_models", lambda sides, *_: (dict.fromkeys(sides, 1.0), {}))


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({"dense": 3.0, "balanced": 2.0, "unstructured": 1.0}, "unstructured"),
        ({"dense": 3.0, "balanced": 1.0, "unstructured": 2.0}, "balanced"),
        ({"dense": 1.0, "balanced": 3.0, "unstructured": 2.0}, None),
    ],
)
def test_the_fastest_form_is_chosen(
    seconds: dict[str, float], chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mask is not balanced, but nearly enough for blocks to be packed."""
    fix_times(monkeypatch, **seconds)
    layer = prune_balanced(nn.Linear(256, 64), 32, 3)
    layer.weight.data[:, :64] = 0
    compressed = compress(nn.Sequential(layer), torch.randn(4, 256))
    assert formats_of(compressed) == ({chosen} if chosen else set())
    (report,) = compressed.compression.layers
    assert (report.packed, report.seconds) == (chosen is not None, (seconds["dense"], min(*[*seconds.values()][1:])))


def test_a_small_balanced_layer_is_packed_in_blocks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    fix_times(monkeypatch, dense=3.0, balanced=2.0, unstructured=1.0)
    layer = prune_balanced(nn.Linear(256, 64), 32, 3)
    assert formats_of(compress(nn.Sequential(layer), torch.randn(4, 256))) == {"balanced"}
    large = prune_balanced(nn.Linear(1024, 512), 32, 3)
    assert formats_of(compress(nn.Sequential(large), torch.randn(4, 1024))) == {"unstructured"}
    assert formats_of(compress(nn.Sequential(large), torch.randn(4, 1024), formats=["balanced"])) == {"balanced"}
    assert formats_of(compress(nn.Sequential(large), torch.randn(4, 1024), block=64)) == {"balanced"}


def test_without_times_the_form_with_fewer_bytes_is_chosen() -> None:
    layer = prune_balanced(nn.Conv2d(32, 64, 3), 32, 3)
    layer.weight.data[:, :12] = 0
    assert formats_of(compress(nn.Sequential(layer), policy="all")) == {"unstructured"}


def test_unstructured_weights_stay_dense_on_other_devices() -> None:
    layer = prune_unstructured(nn.Linear(64, 48), 0.8).to("meta")
    module = sys.modules["pomona.sparse.compress"]
    options = module.LayerOptions(None, None, None, "all", ["unstructured"], 0.0, None)
    assert module.pack_candidates({"weight": torch.zeros(48, 64)}, options)
    weights = {"weight": layer.weight.detach()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "count_nonzero", lambda _: torch.tensor(0))
        assert module.pack_candidates(weights, options) == {}


def test_a_large_unstructured_matrix_is_packed() -> None:
    """The test asserts the decision, which depends on a measured time, and not the time itself."""
    if backend.load_library() is None:
        pytest.skip("needs the native kernels")
    layer = prune_unstructured(nn.Linear(2048, 2048), 0.95)
    assert isinstance(compress(layer), PackedLinear)


def test_a_model_pruned_by_dpf_is_packed_exactly() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = pm.DPF(sparsity=0.9, every=2)
    pruner.attach(model, optimizer, total_steps=20)
    x, y = torch.randn(50, 64), torch.randint(4, (50,))
    for _step in range(20):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    pruner.finish()
    compressed = compress(model, x, **ONLY)
    assert formats_of(compressed) == {"unstructured"}
    with torch.no_grad():
        assert agree(compressed(x), model(x))
    assert has_same_state(decompress(compressed), model)


# ---- torch's tools


@torch.no_grad()
def test_copies_pickles_and_state_dicts(packed_net: nn.Module) -> None:
    x = torch.randn(2, 4, 9, 9)
    y = packed_net(x)
    assert torch.equal(copy.deepcopy(packed_net)(x), y)
    assert torch.equal(pickle.loads(pickle.dumps(packed_net))(x), y)
    other = copy.deepcopy(packed_net)
    for buffer in other.buffers():
        buffer.zero_()
    other.load_state_dict(packed_net.state_dict())
    assert torch.equal(other(x), y)
    assert {name.rsplit("_", 1)[1] for name in packed_net.head.state_dict() if "weight" in name} == {
        "values",
        "indices",
        "starts",
        "lanes",
    }


@torch.no_grad()
def test_compiled_and_exported() -> None:
    torch.manual_seed(0)
    layers = nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 8)
    model = prune_unstructured(nn.Sequential(*layers), 0.8)
    x = torch.randn(2, 4, 6, 6)
    compressed, expected = compress(model, **ONLY), model(x)
    assert agree(torch.compile(compressed, backend="aot_eager", fullgraph=True)(x), expected)
    program = torch.export.export(compressed, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},))
    assert agree(program.module()(torch.cat([x, x, x])), torch.cat([expected] * 3))
    assert any("pomona.unstructured" in str(node.target) for node in program.graph.nodes)


@pytest.mark.parametrize("relu", [False, True])
def test_forward_and_backward_mode(relu: bool) -> None:
    model = nn.Sequential(prune_unstructured(nn.Linear(64, 32), 0.8), *[nn.ReLU()] * relu)
    compressed = compress(model, **ONLY)
    x, tangent = torch.randn(3, 64), torch.randn(3, 64)
    expected = torch.func.jvp(model, (x,), (tangent,))
    torch.testing.assert_close(torch.func.jvp(compressed, (x,), (tangent,)), expected)
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(compressed(forward_ad.make_dual(x, tangent)))
        torch.testing.assert_close(tuple(found), expected)
    grads = []
    for one in (model, compressed):
        leaf = x.clone().requires_grad_()
        one(leaf).square().sum().backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(*grads)


def test_double_is_refused_in_a_sentence() -> None:
    packed = compress(prune_unstructured(nn.Linear(64, 32), 0.8), **ONLY)
    with pytest.raises(pm.PomonaError, match="packed values are of .* got torch.float64: convert the dense model"):
        packed.double()(torch.randn(1, 64).double())


FORK = """
import os
import torch
from pomona.sparse import UnstructuredTensor
torch.manual_seed(0)
torch.set_num_threads(2)
weight = torch.where(torch.rand(600, 512) < 0.1, torch.randn(600, 512), 0)
packed = UnstructuredTensor.from_dense(weight)
x = torch.randn(40, 512)
before = packed.linear(x[:1])
child = os.fork()
if child == 0:
    torch.set_num_threads(1)
    same = torch.equal(packed.linear(x[:1]), before) and torch.allclose(packed.linear(x), x @ weight.T, atol=1e-4)
    os._exit(0 if same else 3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_multiplies() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["0"]


# ---- files


def build_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 33), nn.ReLU(), nn.BatchNorm1d(33), nn.Linear(33, 4, bias=False)).eval()


@pytest.fixture
def small_net() -> nn.Module:
    return compress(prune_unstructured(build_network(), 0.8), **ONLY)


@torch.no_grad()
def test_a_model_is_saved_and_loaded(small_net: nn.Module, tmp_path: Path) -> None:
    file = save(small_net, tmp_path / "model.safetensors")
    again, x = load(file, build_network()), torch.randn(3, 40)
    assert torch.equal(again(x), small_net(x))
    assert list(again.state_dict()) == list(small_net.state_dict())
    assert formats_of(again) == {"unstructured"}
    with safe_open(file, "pt") as opened:
        head = json.loads(opened.metadata()[METADATA_KEY])
    assert head["version"] == 3
    assert head["packed"]["0"] == {"weight": {"shape": [33, 40], "format": "unstructured"}}


def test_two_thousand_damaged_files_are_refused(small_net: nn.Module, tmp_path: Path) -> None:
    """Bytes are changed, cut off or added: the file is refused, or its contents are unchanged."""
    file = save(small_net, tmp_path / "model.safetensors")
    whole, generator = file.read_bytes(), random.Random(0)
    head = 8 + int.from_bytes(whole[:8], "little")
    expected, network, refused = small_net.state_dict(), build_network(), 0
    for count in range(2_000):
        data = bytearray(whole)
        where = generator.randrange(head if count % 2 else len(data))
        match generator.randrange(3):
            case 0:
                data[where] ^= 1 << generator.randrange(8)
            case 1:
                del data[where : where + generator.randrange(1, 9)]
            case 2:
                data[where:where] = generator.randbytes(generator.randrange(1, 9))
        with file.open("r+b") as place:  # creating the file each time would take ten times longer
            place.write(data)
            place.truncate()
        try:
            again = load(file, network)
        except pm.PomonaError:
            refused += 1
        else:
            assert all(torch.equal(tensor, expected[name]) for name, tensor in again.state_dict().items())
            network = build_network()
    assert refused > 1_950


def forge(model: nn.Module, path: Path, plan: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """Write a file with any contents and a valid checksum; return its path."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()} | tensors
    weights = {
        name: module.file_metadata() for name, module in model.named_modules() if isinstance(module, PackedLayer)
    }
    facts = {"version": 3, "model": None, "packed": weights | plan}
    path.write_bytes(to_bytes(state, {METADATA_KEY: json.dumps(facts | {"digest": checksum(facts, state)})}))
    return path


def test_forged_files_are_refused(small_net: nn.Module, tmp_path: Path) -> None:
    state = small_net.state_dict()
    indices, starts, lanes = (state[f"0.weight_{part}"] for part in ("indices", "starts", "lanes"))
    described = {"shape": [33, 40], "format": "unstructured"}
    cases: list[tuple[dict[str, Any], dict[str, Tensor], str]] = [
        ({}, {"0.weight_indices": torch.full_like(indices, -1)}, "outside the 40 columns"),
        ({}, {"0.weight_indices": torch.full_like(indices, 39)}, "the same place"),
        ({}, {"0.weight_starts": starts + 1}, "do not lead from 0"),
        ({}, {"0.weight_starts": starts * (1 << 40)}, "do not lead from 0"),
        ({}, {"0.weight_lanes": lanes + 1}, "are not the 33 rows"),
        ({}, {"0.weight_lanes": lanes[:2].contiguous()}, "slices of lanes"),
        ({}, {"0.weight_values": torch.zeros(2)}, "an unstructured matrix of 33×40"),
        ({}, {"0.weight_values": indices}, "unstructured values are of"),
        ({"0": {"weight": described | {"shape": [2**40, 40]}}}, {}, "slices of lanes"),
        ({"0": {"weight": described | {"shape": [33, 2**40]}}}, {}, "slices of lanes"),
        ({"0": {"weight": described | {"shape": [40, 33]}}}, {}, "are not the 40 rows"),
        ({"0": {"weight": described | {"shape": "no"}}}, {}, "does not fit the model"),
        ({"0": {"weight": described | {"format": "other"}}}, {}, "a weight in the format 'other'"),
        ({"0": {"weight": described | {"format": ["balanced"]}}}, {}, "does not fit the model"),
        ({"0": {"weight": {"shape": [33, 40]}}}, {}, "does not fit the model"),
        ({"9": {"weight": described}}, {}, "does not fit the model"),
    ]
    for plan, tensors, message in cases:
        with pytest.raises(pm.PomonaError, match=message):
            load(forge(small_net, tmp_path / "forged", plan, tensors), build_network())
