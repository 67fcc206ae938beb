"""Encodings of sparse weights in files: worked by hand, round trips, and the refusal of damaged and forged parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

import pomona as pm
from pomona.sparse.files import METADATA_KEY, checksum
from pomona.sparse.weight_encodings import csr, encode_tensors, two_of_four


def sparse_weight(shape: tuple[int, ...], density: float, seed: int) -> Tensor:
    """Return a random weight with about this share of nonzeros."""
    generator = torch.Generator().manual_seed(seed)
    kept = torch.rand(shape, generator=generator) < density
    return torch.where(kept, torch.randn(shape, generator=generator), 0)


SHAPES = st.lists(st.integers(1, 9), min_size=2, max_size=4).map(tuple)


def test_compressed_rows_by_hand() -> None:
    weight = torch.tensor([[0.0, 2.0, 0.0], [0.0, 0.0, 0.0], [3.0, 0.0, 4.0]])
    parts = csr.encode(weight)
    assert {name: part.tolist() for name, part in parts.items()} == {
        "crow": [0, 1, 1, 3],
        "col": [1, 0, 2],
        "values": [2.0, 3.0, 4.0],
    }
    assert parts["crow"].dtype == parts["col"].dtype == torch.uint8


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@settings(max_examples=40, deadline=None)
@given(SHAPES, st.floats(0, 1), st.integers(0, 99))
def test_compressed_rows_are_those_of_torch_and_round_trip(shape: tuple[int, ...], density: float, seed: int) -> None:
    weight = sparse_weight(shape, density, seed)
    parts, theirs = csr.encode(weight), weight.flatten(1).to_sparse_csr()
    assert torch.equal(parts["crow"].long(), theirs.crow_indices())
    assert torch.equal(parts["col"].long(), theirs.col_indices())
    assert torch.equal(parts["values"], theirs.values())
    assert torch.equal(csr.decode(parts, weight.shape), weight)


@pytest.mark.parametrize(
    ("columns", "dtype"), [(256, torch.uint8), (257, torch.uint16), (65_536, torch.uint16), (65_537, torch.int32)]
)
def test_columns_take_the_smallest_integers(columns: int, dtype: torch.dtype) -> None:
    weight = torch.zeros(2, columns)
    weight[1, -1] = 1
    parts = csr.encode(weight)
    assert parts["col"].dtype == dtype
    assert torch.equal(csr.decode(parts, weight.shape), weight)


def test_two_of_four_by_hand() -> None:
    weight = torch.tensor([[0.0, 5.0, 0.0, 6.0, 7.0, 0.0, 0.0, 0.0]])
    parts = two_of_four.encode(weight)
    assert parts is not None
    assert parts["values"].tolist() == [[5.0, 6.0], [7.0, 0.0]]
    # Places 1 and 3 are 0b1101, places 0 and 1 are 0b0100; the first group is in the lower half.
    assert parts["places"].tolist() == [0b0100_1101]
    assert two_of_four.encode(torch.ones(1, 4)) is None


@settings(max_examples=40, deadline=None)
@given(SHAPES, st.integers(0, 99))
def test_two_of_four_round_trips_whatever_the_rows(shape: tuple[int, ...], seed: int) -> None:
    weight = sparse_weight(shape, 1.0, seed)
    flat = weight.view(shape[0], -1)
    flat[:, [column for column in range(flat.shape[1]) if column % 4 in (seed % 4, (seed + 1) % 4)]] = 0
    parts = two_of_four.encode(weight)
    assert parts is not None
    assert torch.equal(two_of_four.decode(parts, weight.shape), weight)


def test_only_weights_that_become_smaller_are_encoded() -> None:
    state = {
        "sparse": sparse_weight((32, 32), 0.1, 0),
        "dense": torch.randn(32, 32),
        "bias": torch.zeros(1000),
        "count": torch.zeros(40, 40, dtype=torch.long),
    }
    stored, described = encode_tensors(state, "csr")
    assert list(described) == ["sparse"]
    assert set(stored) == {"sparse.crow", "sparse.col", "sparse.values", "dense", "bias", "count"}


# ---- files


def build_network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 40)).eval()


def write_network(path: Path, encoding: str) -> nn.Module:
    """Write a pruned network; return it."""
    torch.manual_seed(0)
    model = build_network()
    for layer in (model[0], model[3]):
        mask = two_of_four_mask(layer.weight) if encoding == "2:4" else torch.rand_like(layer.weight) < 0.2
        layer.weight.data.mul_(mask)
    pm.save(model, path, encoding=encoding)
    return model


def two_of_four_mask(weight: Tensor) -> Tensor:
    """Return a mask that keeps the first two of every four weights of a row."""
    return (torch.arange(weight[0].numel()) % 4 < 2).expand(len(weight), -1).reshape(weight.shape)


@pytest.mark.parametrize("encoding", ["csr", "2:4"])
def test_a_file_loads_as_an_ordinary_network(encoding: str, tmp_path: Path) -> None:
    model = write_network(tmp_path / "x", encoding)
    again = pm.load(tmp_path / "x", build_network())
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), model.state_dict().values(), strict=True))
    assert all(type(a) is type(b) for a, b in zip(again.modules(), model.modules(), strict=True))
    pm.save(model, tmp_path / "plain")
    assert (tmp_path / "x").stat().st_size < (tmp_path / "plain").stat().st_size


def forge(path: Path, part: str, change: Any, **header: Any) -> None:
    """Change one tensor of a file, or entries of its header, and make its checksum right again."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        stored = json.loads(file.metadata()[METADATA_KEY])
    tensors = load_file(path)
    if part:
        tensors[part] = change(tensors[part])
    stored.pop("digest")
    stored |= header
    text = json.dumps(stored | {"digest": checksum(stored, tensors)})
    path.write_bytes(to_bytes(tensors, {METADATA_KEY: text}))


def set_first(value: int) -> Any:
    """Return a function that sets the first entry of a copy."""

    def change(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[0] = value
        return tensor

    return change


@pytest.mark.parametrize(
    ("encoding", "part", "change", "message"),
    [
        ("csr", "3.weight.crow", set_first(1), "row pointers of a CSR weight do not lead from 0"),
        ("csr", "3.weight.col", set_first(8), "a column of a CSR weight is outside its 8 columns"),
        ("csr", "0.weight.col", lambda col: col.flip(0), "do not increase along a row"),
        ("csr", "3.weight.values", lambda values: values[:-1], "CSR parts have wrong sizes"),
        ("2:4", "3.weight.places", set_first(0), "the two places of a 2:4 group do not increase"),
        ("2:4", "3.weight.places", lambda places: places[:-1], "have 80 groups of two values"),
        ("2:4", "0.weight.places", lambda places: places | 0xCC, "is outside the matrix"),
    ],
)
def test_forged_parts_are_refused_in_one_sentence(
    encoding: str, part: str, change: Any, message: str, tmp_path: Path
) -> None:
    write_network(tmp_path / "x", encoding)
    forge(tmp_path / "x", part, change)
    with pytest.raises(pm.PomonaError, match=message) as caught:
        pm.load(tmp_path / "x", build_network())
    assert "\n" not in str(caught.value)


def test_a_forged_shape_allocates_nothing(tmp_path: Path) -> None:
    write_network(tmp_path / "x", "csr")
    entry = {"encoding": "csr", "shape": [2**30, 2**30], "parts": ["crow", "col", "values"]}
    forge(tmp_path / "x", "", None, encoded={"3.weight": entry})
    with pytest.raises(pm.PomonaError, match=r"the file has 3.weight as \(1073741824, 1073741824\), the model as"):
        pm.load(tmp_path / "x", build_network())


@pytest.mark.parametrize("encoding", ["csr", "2:4"])
def test_a_changed_byte_and_a_cut_file_are_refused(encoding: str, tmp_path: Path) -> None:
    write_network(tmp_path / "x", encoding)
    data = bytearray((tmp_path / "x").read_bytes())
    data[-1] ^= 1
    (tmp_path / "changed").write_bytes(data)
    (tmp_path / "cut").write_bytes(data[:-9])
    for name in ("changed", "cut"):
        with pytest.raises(pm.PomonaError, match="is damaged"):
            pm.load(tmp_path / name, build_network())
