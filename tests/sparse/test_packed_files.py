"""`save` and `load`: round trips, and the refusal of damaged and forged files."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from packing import prune_balanced
from safetensors import safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

import pomona as pm
from pomona.sparse import compress, load, save
from pomona.sparse.files import METADATA_KEY, checksum
from pomona.sparse.layers import PackedLayer

LANGUAGE = {"name": "lstm_lm", "vocabulary": 30, "hidden": 16, "layers": 1}


def build_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.BatchNorm1d(32), nn.Linear(32, 4, bias=False))


@pytest.fixture
def compressed_model() -> nn.Module:
    return compress(prune_balanced(build_network(), 32, 2), policy="all", patience=0)


def test_a_named_network_is_built_and_loaded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    options = {k: v for k, v in LANGUAGE.items() if k != "name"}
    model = prune_balanced(pm.models.build("lstm_lm", **options), 4, 1)
    compressed_model = compress(model, policy="all", patience=0)
    again = load(save(compressed_model, tmp_path / "model.safetensors", LANGUAGE))
    tokens = torch.randint(30, (2, 5))
    with torch.no_grad():
        assert torch.equal(again(tokens), compressed_model(tokens))
    assert sum(isinstance(m, PackedLayer) for m in again.modules()) == 2
    assert not again.training
    assert all(not parameter.is_meta for parameter in again.parameters())


def test_a_given_network_is_filled(compressed_model: nn.Module, tmp_path: Path) -> None:
    file = save(compressed_model, tmp_path / "model.safetensors")
    again = load(file, build_network().eval())
    x = torch.randn(3, 32)
    with torch.no_grad():
        assert torch.equal(again(x), compressed_model(x))
    assert list(again.state_dict()) == list(compressed_model.state_dict())
    with pytest.raises(pm.PomonaError, match=r"does not name its network: pass one to fill, pm.load\(path, model\)"):
        load(file)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_values_are_loaded(dtype: torch.dtype, tmp_path: Path) -> None:
    compressed_model = compress(prune_balanced(build_network(), 32, 2), policy="all", patience=0, dtype=dtype)
    again = load(save(compressed_model, tmp_path / "model.safetensors"), build_network().eval())
    assert again[0].packed_weight("weight").dtype == dtype
    assert torch.equal(again[0].weight, compressed_model[0].weight)


def test_the_model_is_in_eval_mode(compressed_model: nn.Module, tmp_path: Path) -> None:
    """The batch norm of a loaded model uses its running statistics, whatever mode was saved or given."""
    for number, model in enumerate((build_network().train(), compressed_model.train())):
        given = build_network().train()
        again = load(save(model, tmp_path / str(number)), given)
        assert not any(module.training for module in again.modules())
        x = torch.randn(3, 32)
        statistics = again[2].running_mean.clone()
        with torch.no_grad():
            assert torch.equal(again(x), model.eval()(x))
        assert torch.equal(again[2].running_mean, statistics)


def test_a_dense_model_is_saved_and_loaded(tmp_path: Path) -> None:
    model = build_network().eval()
    again = load(save(model, tmp_path / "plain"), build_network().eval())
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))


def test_the_file_is_plain_safetensors(compressed_model: nn.Module, tmp_path: Path) -> None:
    with safe_open(save(compressed_model, tmp_path / "model.safetensors"), "pt") as file:
        head = json.loads(file.metadata()[METADATA_KEY])
        assert file.get_tensor("0.weight_values").shape == (1, 1, 2, 32)
    assert head["version"] == 1
    assert head["packed"]["0"] == {"weight": {"shape": [32, 32], "block": 32}}


# ---- damaged files


def test_ten_thousand_damaged_files_are_refused(compressed_model: nn.Module, tmp_path: Path) -> None:
    """Bytes are changed, cut off, added or moved: the file is refused, or its contents are unchanged."""
    file = save(compressed_model, tmp_path / "model.safetensors")
    whole, generator = file.read_bytes(), random.Random(0)
    head = 8 + int.from_bytes(whole[:8], "little")
    expected = {name: tensor.clone() for name, tensor in compressed_model.state_dict().items()}
    refused = 0
    network = build_network().eval()
    for count in range(10_000):
        data = bytearray(whole)
        where = generator.randrange(head if count % 2 else len(data))
        match generator.randrange(5):
            case 0:
                data[where] ^= 1 << generator.randrange(8)
            case 1:
                data[where] = generator.randrange(256)
            case 2:
                del data[where:]
            case 3:
                del data[where : where + generator.randrange(1, 9)]
            case 4:
                data[where:where] = os.urandom(generator.randrange(1, 9))
        with file.open("r+b") as place:  # creating the file each time would take ten times longer
            place.write(data)
            place.truncate()
        try:
            again = load(file, network)
        except pm.PomonaError:
            refused += 1
        else:
            assert all(torch.equal(tensor, expected[name]) for name, tensor in again.state_dict().items())
            network = build_network().eval()
    assert refused > 9_900


def write_forged_file(
    compressed_model: nn.Module, path: Path, head: dict[str, Any], tensors: dict[str, Tensor]
) -> Path:
    """Write a file with any contents and a valid checksum; return its path."""
    state = {name: tensor.clone() for name, tensor in compressed_model.state_dict().items()} | tensors
    plan = {"weight": {"shape": [32, 32], "block": 32}}
    facts: dict[str, Any] = {"version": 1, "model": None, "packed": {"0": plan}} | head
    if "3.weight_values" in state and "packed" not in head:
        facts["packed"]["3"] = {"weight": {"shape": [4, 32], "block": 32}}
    path.write_bytes(to_bytes(state, {METADATA_KEY: json.dumps(facts | {"digest": checksum(facts, state)})}))
    return path


HOSTILE: list[tuple[dict[str, Any], dict[str, Tensor], str]] = [
    ({}, {"0.weight_indices": torch.full((1, 1, 1, 32), -1, dtype=torch.int16)}, "the same index"),
    ({}, {"0.weight_values": torch.zeros(1, 1, 40, 32)}, "has values"),
    ({}, {"0.weight_values": torch.zeros(1, 1, 2, 32, dtype=torch.int32)}, "packed values are"),
    ({}, {"0.weight_values": torch.zeros(2)}, "packed values are"),
    ({"version": 5}, {}, "has format version 5, and this pomona reads up to version 4"),
    ({"packed": {"9": {"weight": {"shape": [32, 32], "block": 32}}}}, {}, "does not fit the model"),
    ({"packed": {"0": {"weight": {"shape": [2**40, 32], "block": 32}}}}, {}, "has values"),
    ({"packed": {"0": {"weight": {"shape": [64, 32], "block": 32}}}}, {}, "has values"),
    ({"packed": {"0": {"weight": {"shape": [31, 32], "block": 32}}}}, {}, "outside the matrix"),
    ({"packed": {"0": {"weight": {"shape": [32, 32], "block": -1}}}}, {}, "cannot be packed"),
    ({"packed": {"0": {"weight": {"shape": "no", "block": 32}}}}, {}, "does not fit the model"),
    ({"packed": {"0": {"weight": {"shape": [32, 32], "block": "32"}}}}, {}, "does not fit the model"),
    ({"packed": {"0": {"bias": {"shape": [32, 32], "block": 32}}}}, {}, "does not fit the model"),
    ({"packed": {"2": {"weight": {"shape": [32, 32], "block": 32}}}}, {}, "does not fit the model"),
    ({"packed": [1]}, {}, "does not fit the model"),
    ({}, {"0.bias": torch.zeros(5)}, "does not fit the model"),
    ({}, {"5.extra": torch.zeros(5)}, "does not fit the model"),
]


@pytest.mark.parametrize(("head", "tensors", "message"), HOSTILE, ids=range(len(HOSTILE)))
def test_forged_files_are_refused(
    compressed_model: nn.Module, tmp_path: Path, head: dict[str, Any], tensors: dict[str, Tensor], message: str
) -> None:
    with pytest.raises(pm.PomonaError, match=message):
        load(write_forged_file(compressed_model, tmp_path / "write_forged_file", head, tensors), build_network())


@pytest.mark.parametrize(
    ("known", "message"),
    [
        ({"name": "lstm_lm", "layers": 10**9}, "bytes, too few for a network with layers=1000000000"),
        ({"name": "mlp", "widths": [10**12]}, "bytes, too few for a network with widths="),
        ({"name": "no_such_net"}, "unknown model 'no_such_net'"),
        ({"name": "lstm_lm", "hidden": "many"}, "hidden takes int"),
        ({"name": ["lstm_lm"]}, "unknown model"),
        ("lstm_lm", "does not fit the model"),
        (LANGUAGE, "does not fit the model"),
    ],
)
def test_forged_networks_are_refused(compressed_model: nn.Module, tmp_path: Path, known: Any, message: str) -> None:
    with pytest.raises(pm.PomonaError, match=message):
        load(write_forged_file(compressed_model, tmp_path / "write_forged_file", {"model": known}, {}))


class Recurrent(nn.Module):
    """A network with an LSTM, which keeps its weights in a list too."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(32, 32), nn.Linear(32, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.lstm(x)[0])


@pytest.mark.parametrize("packed", [False, True])
def test_a_refused_file_changes_nothing(tmp_path: Path, packed: bool) -> None:
    torch.manual_seed(1)
    model, given = Recurrent(4), Recurrent(5).train()
    if packed:
        model = compress(prune_balanced(model, 32, 2), policy="all", patience=0)
    file = save(model, tmp_path / "model.safetensors")
    lstm, x = given.lstm, torch.randn(3, 2, 32)
    before, expected = dict(given.state_dict()), given(x)
    with pytest.raises(pm.PomonaError, match=r"the model as \(5, 32\)|does not fit the model"):
        load(file, given)
    assert given.lstm is lstm
    assert given.training
    assert all(tensor.data_ptr() == before[name].data_ptr() for name, tensor in given.state_dict().items())
    assert torch.equal(given(x), expected)
    given.last = nn.Linear(32, 4)
    assert torch.equal(load(file, given)(x), model.eval()(x))


def test_a_refused_plan_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compressed_model = compress(prune_balanced(build_network(), 32, 2), policy="all", patience=0)
    file = write_forged_file(compressed_model, tmp_path / "planned", {"planned": True}, {})

    def fail(model: nn.Module) -> None:
        raise RuntimeError("no plan")

    monkeypatch.setattr("pomona.sparse.files.plan_network", fail)
    given = build_network().train()
    with pytest.raises(pm.PomonaError, match="no plan"):
        load(file, given)
    assert [type(module) for module in given] == [nn.Linear, nn.ReLU, nn.BatchNorm1d, nn.Linear]
    assert all(module.training for module in given.modules())


def test_tensors_that_cannot_run_together_are_refused(tmp_path: Path) -> None:
    model = build_network()
    bias, count = model[0].bias.detach(), model[2].num_batches_tracked
    forged = [
        ({"0.bias": bias.half()}, r"has 0.bias as torch.float16 and 0.weight as torch.float32, where the model has"),
        ({"2.running_mean": torch.zeros(32).half()}, r"has 2.running_mean as torch.float16 and 0.weight as"),
        ({"0.bias": bias.to(torch.int8)}, r"has 0.bias as torch.int8 where the model has torch.float32"),
        ({"2.num_batches_tracked": count.float()}, "has 2.num_batches_tracked as torch.float32 where"),
    ]
    for number, (tensors, message) in enumerate(forged):
        with pytest.raises(pm.PomonaError, match=message):
            load(write_forged_file(model, tmp_path / str(number), {"packed": {}}, tensors), build_network())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_networks_of_other_dtypes_are_loaded(tmp_path: Path, dtype: torch.dtype) -> None:
    """A network that was converted as a whole, one whose batch norms stayed float32, and one of two dtypes itself."""
    whole, mixed, own = build_network().to(dtype), build_network().to(dtype), build_network()
    mixed[2].float()
    own[3].to(dtype)
    for number, (model, given) in enumerate(
        ((whole, build_network()), (mixed, build_network()), (own, build_network()))
    ):
        if model is own:
            given[3].to(dtype)
        again = load(save(model, tmp_path / str(number)), given)
        assert [t.dtype for t in again.state_dict().values()] == [t.dtype for t in model.state_dict().values()]
    with pytest.raises(pm.PomonaError, match="give a model whose tensors have the dtypes of the file"):
        load(tmp_path / "2", build_network())


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(pm.PomonaError, match="there is no file"):
        load(tmp_path / "nothing")
    with pytest.raises(pm.PomonaError, match="is damaged, or not a safetensors file"):
        load(tmp_path)
    (tmp_path / "text").write_text("hello")
    with pytest.raises(pm.PomonaError, match="is damaged, or not a safetensors file"):
        load(tmp_path / "text")
    (tmp_path / "others").write_bytes(to_bytes({"x": torch.ones(1)}))
    with pytest.raises(pm.PomonaError, match=r"was not written by pm\.save"):
        load(tmp_path / "others")
    (tmp_path / "deep").write_bytes(to_bytes({"x": torch.ones(1)}, {METADATA_KEY: "[" * 100_000}))
    with pytest.raises(pm.PomonaError, match="is damaged"):
        load(tmp_path / "deep")


def test_a_path_that_cannot_be_written_is_refused(compressed_model: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(pm.PomonaError, match="cannot be written: No such file or directory"):
        save(compressed_model, tmp_path / "no" / "model.safetensors")
    with pytest.raises(pm.PomonaError, match="unknown model 'resnet2'"):
        save(compressed_model, tmp_path / "model.safetensors", "resnet2")
    assert list(tmp_path.iterdir()) == []
