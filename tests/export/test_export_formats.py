"""`pm.export`: every format is written, loads back, and computes what the network does."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from export_cases import build_network, export_quietly, images, prune_randomly, require_packages
from slow_cases import slow_unless
from torch import nn

import pomona as pm
from pomona.export import FORMATS
from pomona.sparse import ticket

STATE_FORMATS = ("safetensors", "csr", "2:4")
PLAIN = [name for name in FORMATS if name not in ("ticket", "balanced")]


@pytest.mark.parametrize("file_format", slow_unless([name for name in PLAIN if name != "onnx"], PLAIN))
def test_a_pruned_network_is_written_checked_and_left_as_it_is(file_format: str, tmp_path: Path) -> None:
    require_packages(file_format)
    model = build_network().train()
    state = copy.deepcopy(model.state_dict())
    report = export_quietly(model, tmp_path, file_format, images())
    assert report.difference is not None
    assert report.difference <= report.tolerance
    files = [path for path in tmp_path.iterdir() if path.suffix != ".part"]
    assert report.bytes == sum(path.stat().st_size for path in files)
    assert not any("partial" in path.name for path in files)
    assert report.latency["before"] > 0 < report.latency["after"]
    json.dumps(report.facts())
    assert model.training
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_onnx_runs_in_stock_onnx_runtime_for_any_batch_and_is_smaller(tmp_path: Path) -> None:
    require_packages("onnx")
    import onnx
    import onnxruntime

    model = build_network()
    report = export_quietly(model, tmp_path, "onnx", images())
    dense = export_quietly(model, tmp_path / "..", "onnx", images(), pack=False)
    assert report.packed == 2  # the last layer and the convolution are too small, or have two parts
    assert report.bytes < 0.4 * dense.bytes
    proto = onnx.load(report.file)
    onnx.checker.check_model(proto, full_check=True)
    assert "/" not in proto.graph.node[-1].doc_string + str(proto.graph.node[-1].metadata_props)
    session = onnxruntime.InferenceSession(report.file, providers=["CPUExecutionProvider"])
    for batch in (1, 5):
        [found] = session.run(None, {session.get_inputs()[0].name: images(batch).numpy()})
        with torch.no_grad():
            assert np.allclose(found, model(images(batch)).numpy(), atol=1e-5)


@pytest.mark.parametrize("file_format", ["onnx", pytest.param("openvino", marks=pytest.mark.slow)])
def test_a_compressed_network_runs_where_no_kernel_of_ours_does(file_format: str, tmp_path: Path) -> None:
    require_packages(file_format)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).eval()
    mask = pm.Balanced(32).select_masks([model[0].weight.detach().abs()], 0.9)[0]
    model[0].weight.data.mul_(mask)
    small = pm.compress(model, policy="all", patience=0)
    assert any(type(layer).__name__ == "PackedLinear" for layer in small.modules())
    report = export_quietly(small, tmp_path, file_format, torch.randn(3, 64))
    assert report.packed == 1
    assert report.difference is not None
    assert report.difference < 1e-5


def test_the_program_of_a_compressed_network_keeps_its_packed_weights(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).eval()
    mask = pm.Balanced(32).select_masks([model[0].weight.detach().abs()], 0.9)[0]
    model[0].weight.data.mul_(mask)
    report = export_quietly(pm.compress(model, policy="all", patience=0), tmp_path, "torch-export", torch.randn(3, 64))
    assert report.packed == 1
    program = torch.export.load(report.file).module()
    x = torch.randn(7, 64)
    with torch.no_grad():
        assert torch.allclose(program(x), model(x), atol=1e-5)


@pytest.mark.parametrize("file_format", STATE_FORMATS)
def test_the_files_of_a_state_load_without_an_example(file_format: str, tmp_path: Path) -> None:
    model = pm.models.build("digits_cnn", rho=0.5)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            flat = parameter.data.flatten(1)
            flat[:, torch.arange(flat.shape[1]) % 4 > 1] = 0
            parameter.data.copy_(flat.view(parameter.shape))
    architecture = {"name": "digits_cnn", "rho": 0.5}
    report = export_quietly(model, tmp_path, file_format, None, architecture=architecture)
    assert report.difference is None
    assert report.latency == {}
    again = pm.load(report.file)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())


def test_2_4_takes_little_more_than_half_the_bytes(tmp_path: Path) -> None:
    model = nn.Linear(256, 256, bias=False)
    model.weight.data.view(-1, 4)[:, ::2] = 0
    report = export_quietly(model, tmp_path, "2:4", None)
    header = report.bytes - 256 * 256 * 4 * (8 + 0.5) / 16
    assert 0 < header < 600
    assert report.packed == 1


def test_balanced_weights_stay_packed_and_keep_the_report_of_each_layer(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    mask = pm.Balanced(32).select_masks([model[0].weight.detach().abs()], 0.9)[0]
    model[0].weight.data.mul_(mask)
    report = export_quietly(model, tmp_path, "balanced", torch.randn(1, 64), policy="all", dtype=torch.float16)
    assert report.packed == 1
    assert report.tolerance == 2e-2
    assert [layer["packed"] for layer in report.facts()["layers"]] == [True, False]
    assert "PackedLinear" in str(pm.load(report.file, copy.deepcopy(model)))


@pytest.mark.parametrize("finished", [False, True])
def test_a_ticket_needs_the_pruner_that_drew_the_weights(finished: bool, tmp_path: Path) -> None:
    model = pm.models.build("digits_cnn", rho=0.5, affine=False)
    pruner = pm.EdgePopup(sparsity=0.5)
    pruner.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), total_steps=2)
    if finished:
        pruner.finish()
    report = export_quietly(model, tmp_path, "ticket", torch.randn(1, 1, 8, 8), pruner=pruner)
    assert report.difference == 0
    assert report.ratio > 10
    assert report.facts()["method"] == "edge_popup"
    state = ticket.load(report.file).state
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    with pytest.raises(pm.PomonaError, match=r"pass pruner= of a score method \(edge_popup, iterand\)"):
        export_quietly(model, tmp_path, "ticket", None)
    with pytest.raises(pm.PomonaError, match="dpf trains weights: a ticket holds random ones"):
        export_quietly(model, tmp_path, "ticket", None, pruner=pm.DPF(sparsity=0.5))


@pytest.mark.slow
def test_recurrent_layers_are_one_operator_in_openvino(tmp_path: Path) -> None:
    require_packages("openvino")
    model = prune_randomly(pm.models.build("lstm", vocabulary=96, embedding=32, hidden=32))
    report = export_quietly(model, tmp_path, "openvino", torch.randint(1, 96, (2, 12)))
    text = Path(report.file).read_text()
    assert text.count('type="LSTMSequence"') == 1


@pytest.mark.slow
def test_openvino_tries_its_sparse_decompression_on_a_processor_with_amx(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_packages("openvino")
    model = build_network()
    said = export_quietly(model, tmp_path, "openvino", images()).facts()["sparse_decompression"]
    if not torch.cpu._is_amx_tile_supported():
        assert said == "off: it needs a processor with AMX, and acts on 8-bit weights only"
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    said = export_quietly(model, tmp_path, "openvino", images()).facts()["sparse_decompression"]
    assert said.startswith(("off: it is no faster here", "on (CPU_SPARSE_WEIGHTS_DECOMPRESSION_RATE="))


@pytest.mark.slow
def test_half_precision_weights_in_openvino_are_smaller(tmp_path: Path) -> None:
    require_packages("openvino")
    sizes = [
        export_quietly(build_network(0.5), tmp_path, "openvino", images(), dtype=dtype).bytes
        for dtype in (torch.float32, torch.float16)
    ]
    assert sizes[1] < 0.85 * sizes[0]


# ---- networks of others


def build_transformer(kind: str) -> tuple[nn.Module, dict[str, Any]]:
    """Return a tiny Hugging Face network and its keyword arguments."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    tokens = torch.randint(1, 96, (1, 8))
    text = {"attention_mask": torch.ones_like(tokens), "input_ids": tokens}  # not the order of the forward method
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    if kind == "bert":
        config = transformers.BertConfig(vocab_size=96, max_position_embeddings=16, **sizes)
        return transformers.BertForSequenceClassification(config), text
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=96, n_positions=16, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
        )
        return transformers.GPT2LMHeadModel(config), text
    config = transformers.ViTConfig(image_size=16, patch_size=8, **sizes)
    return transformers.ViTForImageClassification(config), {"pixel_values": torch.randn(1, 3, 16, 16)}


CASES = [(kind, file_format) for kind in ("bert", "gpt2", "vit") for file_format in PLAIN]


@pytest.mark.parametrize(("kind", "file_format"), slow_unless([("bert", "csr")], CASES))
def test_keyword_arguments_and_named_outputs_are_kept(kind: str, file_format: str, tmp_path: Path) -> None:
    require_packages(file_format)
    model, example = build_transformer(kind)
    report = export_quietly(prune_randomly(model), tmp_path, file_format, example)
    assert report.difference is not None
    assert report.difference <= report.tolerance
    if file_format == "onnx":
        assert set(report.facts()["inputs"]) == set(example)
        assert report.facts()["outputs"] == ["logits"]
    if kind == "gpt2":
        assert model.config.use_cache  # only the copy that is exported goes without
