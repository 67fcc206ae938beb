"""Balanced weights as int8 and int4 codes: rounding, round trips, and files."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packing import balanced_weight
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

import pomona as pm
from pomona.sparse import QuantizedBalancedTensor, load, save
from pomona.sparse.files import METADATA_KEY, checksum
from pomona.sparse.layers import build_packed_layer
from pomona.sparse.ops.quantized_product import reference_quantized
from pomona.sparse.quantized import VALUE_TYPES, pack_codes, unpack_codes

pytestmark = pytest.mark.filterwarnings("ignore:packed weights are multiplied as dense ones")
LEVELS = {"int8": 127, "int4": 7}


@pytest.mark.parametrize("values", VALUE_TYPES)
@settings(deadline=None, max_examples=80)
@given(
    st.integers(1, 70),
    st.integers(1, 150),
    st.sampled_from([1, 2, 5, 25, 32, 33, 64, 100, 300]),
    st.integers(1, 40),
    st.sampled_from([None, 1, 32, 64, 1000]),
    st.integers(0, 99),
)
def test_no_value_changes_by_more_than_half_a_scale(
    values: str, rows: int, columns: int, block: int, kept: int, group: int | None, seed: int
) -> None:
    weight = balanced_weight(rows, columns, block=block, kept=min(kept, block), seed=seed)
    packed = QuantizedBalancedTensor.from_dense(weight, block, values, group).verify()
    dense = packed.dense()
    assert dense.dtype == torch.float32
    assert not dense[weight == 0].any()
    scale = packed.scales.transpose(1, 2).flatten(0, 1)[:rows].repeat_interleave(packed.span * block, 1)[:, :columns]
    assert ((dense - weight).abs() <= 0.5 * scale * (1 + 1e-5)).all()
    again = QuantizedBalancedTensor.from_dense(dense, block, values, group)
    assert torch.allclose(again.dense(), dense, rtol=1e-6, atol=0)


def test_a_case_worked_out_by_hand() -> None:
    """Two rows of two blocks of 4: the largest of a row, 14 and 7, get the code 7, so that scales are 2 and 1."""
    weight = torch.tensor([[14.0, 0, 0, 0, 0, -4.9, 0, 0], [0, 7, 0, 0, 2.4, 0, 0, 0]])
    packed = QuantizedBalancedTensor.from_dense(weight, 4, "int4", group=8)
    assert packed.scales[0, 0, :3].tolist() == [2, 1, 0]
    assert unpack_codes(packed.values)[0, :, 0, :2].tolist() == [[7, 7], [-2, 2]]
    assert packed.values.shape == (1, 2, 1, 16)
    assert packed.dense().tolist() == [[14, 0, 0, 0, 0, -4, 0, 0], [0, 7, 0, 0, 2, 0, 0, 0]]
    narrow = QuantizedBalancedTensor.from_dense(weight, 4, "int4", group=4)
    assert narrow.scales.shape == (1, 2, 32)
    assert torch.allclose(narrow.dense(), weight)
    assert reference_quantized(torch.ones(1, 8), *packed.parts, None, *packed.sizes).tolist() == [[10, 9]]


def test_every_pair_of_codes_shares_a_byte() -> None:
    codes = torch.cartesian_prod(torch.arange(-8, 8), torch.arange(-8, 8)).T.to(torch.int8)
    lanes = codes.reshape(2, 16, 16).transpose(0, 1).reshape(16, 32)
    assert torch.equal(unpack_codes(pack_codes(lanes, 4)), lanes)


@pytest.mark.parametrize(("values", "bits"), [("int8", 8), ("int8", 5), ("int4", 4), ("int4", 2)])
@pytest.mark.parametrize("seed", range(5))
def test_weights_of_dpfs_quantize_are_stored_exactly(values: str, bits: int, seed: int) -> None:
    weight = balanced_weight(70, 128, block=32, kept=3, seed=seed)
    pm.Quantize(bits).compress(weight, weight != 0)
    assert torch.equal(QuantizedBalancedTensor.from_dense(weight, 32, values).dense(), weight)


def test_bytes_are_those_of_codes_indices_and_scales() -> None:
    weight = balanced_weight(64, 256, block=32, kept=3)
    blocks, indices = 64 * 8, 64 * 8 * 2
    assert QuantizedBalancedTensor.from_dense(weight, 32, "int8").nbytes == 3 * blocks + indices + 64 * 4
    assert QuantizedBalancedTensor.from_dense(weight, 32, "int4").nbytes == 1.5 * blocks + indices + 64 * 4


@pytest.mark.parametrize(
    ("weight", "options", "message"),
    [
        (torch.ones(2, 4), {"values": "int3"}, "quantised values are int8 or int4, got 'int3'"),
        (torch.ones(2, 4).half(), {}, "only float32 is quantised, got torch.float16"),
        (torch.full((2, 4), torch.inf), {}, "has no scale"),
        (torch.ones(2, 4), {"group": 0}, "at least one column, got group=0"),
    ],
)
def test_what_cannot_be_quantised_is_refused(weight: Tensor, options: dict[str, Any], message: str) -> None:
    with pytest.raises(pm.PomonaError, match=message):
        QuantizedBalancedTensor.from_dense(weight, 4, **options)
    with pytest.raises(pm.PomonaError, match=r"cannot become torch\.float16"):
        QuantizedBalancedTensor.from_dense(torch.ones(2, 4), 4).to(torch.float16)


# ---- layers and files


def packed_layer(values: str) -> nn.Module:
    layer = nn.Linear(64, 40)
    layer.weight.data = balanced_weight(40, 64, block=32, kept=3)
    return build_packed_layer(layer, {"weight": QuantizedBalancedTensor.from_dense(layer.weight.detach(), 32, values)})


@pytest.mark.parametrize("values", VALUE_TYPES)
def test_a_layer_runs_is_copied_and_becomes_dense(values: str) -> None:
    layer, x = packed_layer(values), torch.randn(5, 64)
    y = layer(x)
    assert torch.allclose(y, nn.functional.linear(x, layer.weight, layer.bias), atol=1e-3)
    assert torch.equal(copy.deepcopy(layer)(x), y)
    assert torch.allclose(layer.dense()(x), y, atol=1e-3)
    inputs = x.clone().requires_grad_()
    layer(inputs).sum().backward()
    assert torch.allclose(inputs.grad, layer.weight.sum(0).expand(5, 64), atol=1e-5)


def test_scales_stay_float32_in_a_model_of_half_precision() -> None:
    layer = packed_layer("int8")
    scales = layer.weight_scales.clone()
    layer.half()
    assert layer.bias.dtype == torch.float16
    assert torch.equal(layer.weight_scales, scales)
    assert layer.weight_values.dtype == torch.int8


@pytest.mark.parametrize("values", VALUE_TYPES)
def test_files_round_trip(values: str, tmp_path: Path) -> None:
    model = nn.Sequential(packed_layer(values))
    again = load(save(model, tmp_path / "model.safetensors"), nn.Sequential(nn.Linear(64, 40)))
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
    x = torch.randn(3, 64)
    assert torch.equal(again(x), model(x))


PLAN = {"format": "balanced_quantized", "shape": [40, 64], "block": 32, "span": 2}
HOSTILE: list[tuple[dict[str, Any], dict[str, Tensor], str]] = [
    ({}, {"0.weight_scales": torch.full((2, 1, 32), torch.nan)}, "negative, infinite or NaN"),
    ({}, {"0.weight_scales": torch.full((2, 1, 32), -1.0)}, "negative, infinite or NaN"),
    ({}, {"0.weight_scales": torch.ones(2, 1, 32).double()}, "scales of float32"),
    ({}, {"0.weight_scales": torch.ones(2, 2, 32)}, "do not fit"),
    ({}, {"0.weight_scales": torch.ones(64)}, "do not fit"),
    ({}, {"0.weight_values": torch.ones(2, 2, 3, 32, dtype=torch.int8)}, "outside the matrix"),
    ({}, {"0.weight_values": torch.ones(2, 2, 3, 32, dtype=torch.uint8)}, "codes of 4 bits take 16 bytes, got 32"),
    ({}, {"0.weight_values": torch.ones(2, 2, 3, 32)}, "quantised values are four-dimensional"),
    ({}, {"0.weight_values": torch.ones(7, dtype=torch.int8)}, "quantised values are four-dimensional"),
    ({}, {"0.weight_values": torch.ones(2, 2, 33, 32, dtype=torch.int8)}, "has values"),
    ({}, {"0.weight_indices": torch.zeros(2, 2, 1, 32, dtype=torch.int16)}, "the same index"),
    ({"span": 0}, {}, "do not fit"),
    ({"span": -1}, {}, "do not fit"),
    ({"span": 2**60}, {}, "do not fit"),
    ({"span": "2"}, {}, "does not fit the model"),
    ({"block": -1}, {}, "cannot be packed"),
    ({"shape": [2**40, 64]}, {}, "has values"),
    ({"format": "balanced_int2"}, {}, "in the format 'balanced_int2'"),
]


@pytest.mark.parametrize(("forged", "tensors", "message"), HOSTILE, ids=range(len(HOSTILE)))
def test_forged_files_are_refused(
    forged: dict[str, Any], tensors: dict[str, Tensor], message: str, tmp_path: Path
) -> None:
    state = {**nn.Sequential(packed_layer("int8")).state_dict(), **tensors}
    facts = {"version": 4, "model": None, "packed": {"0": {"weight": {**PLAN, **forged}}}}
    path = tmp_path / "forged"
    path.write_bytes(to_bytes(state, {METADATA_KEY: json.dumps(facts | {"digest": checksum(facts, state)})}))
    with pytest.raises(pm.PomonaError, match=message):
        load(path, nn.Sequential(nn.Linear(64, 40)))
