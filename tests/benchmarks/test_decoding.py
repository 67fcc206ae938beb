"""The benchmark of decoders, with tiny ones: every output is compared, and a wrong one is noticed."""

from __future__ import annotations

import argparse
import json
import re
import sys

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def decoding(load_script):
    return load_script("decoding")


def build(decoding, kind: str) -> tuple[nn.Module, nn.Module]:
    """Return a decoder and its reference."""
    return [decoding.build_model(kind, decoding.QUICK, torch.float32, "cpu") for _ in range(2)]


@pytest.mark.parametrize("kind", [pytest.param("gpt2", marks=pytest.mark.slow), "llama"])
def test_every_format_is_measured_and_recorded(decoding, kind, monkeypatch, tmp_path, capsys):
    record = tmp_path / "record.json"
    words = f"--quick --device cpu --models {kind} --batches 2 --turns 1 --steps 4"
    monkeypatch.setattr(sys, "argv", ["decoding.py", *words.split(), "--json", str(record)])
    decoding.main()
    rows = {row["format"]: row for row in json.loads(record.read_text())["rows"]}
    apart = "balanced int4, layer by layer"  # GPT-2 has one layer for queries, keys and values
    assert list(rows) == [name for name in decoding.FORMATS if kind == "llama" or name != apart]
    matrices = {"gpt2": 4 * 128 * 128 + 2 * 128 * 256, "llama": 4 * 128 * 128 + 3 * 128 * 256}[kind] * 2
    assert rows["dense"]["weight_bytes"] == 4 * matrices
    assert rows["dense bfloat16"]["weight_bytes"] == 2 * matrices
    assert rows["balanced"]["weight_bytes"] == matrices // 32 * (3 * 4 + 2)
    for row in rows.values():
        assert row["tokens"] == 2 * 4
        assert row["tokens_per_second"] == pytest.approx(2 / row["seconds"])
        assert row["error"] < {"float32": 1e-4, "bfloat16": 3e-2}[row["dtype"]]
    assert "balanced int4" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_steps_with_a_cache_are_the_forward_of_the_whole_text(decoding, kind):
    model, _ = build(decoding, kind)
    decoder = decoding.Decoder(model, batch=3, context=12)
    prompt = torch.randint(97, (3, 5))
    for _ in range(2):  # what an earlier text left in the cache does not matter
        tokens, logits = decoder.decode(prompt, 4)
        with torch.no_grad():
            expected = model(input_ids=torch.cat([prompt, tokens[:, :-1]], 1)).logits[:, 4:]
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(tokens, expected.argmax(-1))
        prompt = prompt.flip(0)


@pytest.mark.parametrize("shared", [True, False])
def test_layers_that_read_one_input_are_stacked(decoding, shared):
    dense, reference = build(decoding, "llama")
    name = "balanced int4" if shared else "balanced int4, layer by layer"
    model, _ = decoding.convert(dense, decoding.FORMATS[name], reference)
    block = model.model.layers[1]
    assert [layer.shared is not None for layer in (block.self_attn.v_proj, block.mlp.up_proj)] == [shared] * 2
    assert block.self_attn.o_proj.shared is block.mlp.down_proj.shared is None
    assert decoding.compare(decoding.Decoder(model, 1, 16), reference, 4)["equal_tokens"] == 4


def test_the_reference_has_the_weights_of_the_format(decoding):
    dense, reference = build(decoding, "llama")
    before = {name: p.clone() for name, p in dense.named_parameters()}
    model, size = decoding.convert(dense, decoding.FORMATS["balanced int4"], reference)
    assert all(torch.equal(p, before[name]) for name, p in dense.named_parameters())
    for name in decoding.find_block_layers(dense):
        weight, packed = reference.get_submodule(name).weight, model.get_submodule(name)
        assert torch.equal(weight, packed.weight)
        assert int((weight != 0).sum()) <= weight.numel() * 3 // 32
    assert size == sum(model.get_submodule(n).packed_weight("weight").nbytes for n in decoding.find_block_layers(dense))


def test_a_wrong_output_stops_the_measurement(decoding):
    dense, reference = build(decoding, "gpt2")
    model, _ = decoding.convert(dense, decoding.FORMATS["balanced"], reference)
    decoder = decoding.Decoder(model, 1, 16)
    assert decoding.compare(decoder, reference, 4)["error"] < 1e-5
    layer = model.get_submodule(decoding.find_block_layers(dense)[2])
    layer.weight_values[0] *= 1.5
    with pytest.raises(SystemExit, match="logits differ"):
        decoding.compare(decoder, reference, 4)


@pytest.mark.parametrize(("kind", "limit"), [("Int8Linear", 1 / 127), ("Int4Linear", 1 / 15)])
def test_dense_layers_of_few_bits_compute_with_their_rounded_weights(load_script, kind, limit):
    torch.manual_seed(0)
    layer, x = nn.Linear(256, 64), torch.randn(2, 3, 256).bfloat16()
    few = getattr(load_script("dense_few_bits"), kind)(layer.weight.detach(), layer.bias.detach().bfloat16())
    weight = few.dense_weight()
    assert (weight - layer.weight).abs().max() <= limit * layer.weight.abs().max() * 1.1
    expected = nn.functional.linear(x.float(), weight, few.bias.float())
    torch.testing.assert_close(few(x).float(), expected, rtol=2e-2, atol=2e-2)


def test_a_format_without_a_kernel_is_left_out(decoding, capsys, monkeypatch):
    monkeypatch.setattr(decoding.quantized_product, "BACKENDS", {})
    options = argparse.Namespace(device="cpu", steps=2, turns=1, batches=[1], formats=["dense", "balanced int4"])
    rows = decoding.measure_model("gpt2", decoding.QUICK, options)
    assert [row["format"] for row in rows] == ["dense"]
    assert re.search("balanced int4 +is not measured: no kernel on cpu", capsys.readouterr().out)
