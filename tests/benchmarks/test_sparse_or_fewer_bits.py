"""The measurement of sparse weights and fewer bits: forms of weights, rows, tables and pictures."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pomona as pm


@pytest.fixture(scope="module")
def forms(load_script: Any) -> Any:
    return load_script("weight_forms")


def test_codes_of_nonzeros_by_hand(forms: Any) -> None:
    """The largest of a row has the code 7: the scales are 2 and 1, and 3 / 2 becomes the even code 2."""
    matrix = torch.tensor([[14.0, 0, 3, -4.2], [0, -7, 0, 0.6]])
    restored, scales = forms.round_to_codes(matrix, "int4")
    assert restored.tolist() == [[14, 0, 4, -4], [0, -7, 0, 1]]
    assert scales == 2
    wide = torch.cat([torch.ones(1, 32), torch.full((1, 8), 0.5)], 1)
    restored, scales = forms.round_to_codes(wide, "int4")
    assert torch.equal(restored, wide)  # the last 8 nonzeros have a scale of their own
    assert scales == 2


def test_bytes_of_dense_and_balanced_forms_by_hand(forms: Any) -> None:
    matrix, dense = torch.randn(64, 256), forms.LAYOUTS[0]
    expected = {"fp32": 4.0, "fp16": 2.0, "int8": 1 + 4 / 256, "int4": 0.5 + 4 / 32}
    for values, per_weight in expected.items():
        assert forms.store_matrix(matrix, dense, values)[1] == 64 * 256 * per_weight
    balanced = next(layout for layout in forms.LAYOUTS if layout.kept == 3)
    restored, nbytes = forms.store_matrix(forms.prune_matrix(matrix, balanced), balanced, "int4")
    assert nbytes == 64 * 8 * (1.5 + 2) + 64 * 4  # a block has three halves of a byte and a word; 256 columns a scale
    assert int((restored != 0).sum()) <= 64 * 8 * 3


@pytest.mark.parametrize("name", ["dense", "balanced", "unstructured"])
def test_every_form_restores_about_the_same_weights(forms: Any, name: str) -> None:
    torch.manual_seed(0)
    for layout in (layout for layout in forms.LAYOUTS if layout.name == name):
        matrix = forms.prune_matrix(torch.randn(64, 288), layout)
        assert float((matrix == 0).float().mean()) == pytest.approx(layout.sparsity, abs=0.01)
        sizes = []
        for values, error in {"fp32": 0.0, "fp16": 1e-3, "int8": 0.02, "int4": 0.15}.items():
            restored, nbytes = forms.store_matrix(matrix, layout, values)
            assert float((restored - matrix).norm() / matrix.norm()) <= error
            assert not restored[matrix == 0].any()
            sizes.append(nbytes)
        assert sizes == sorted(sizes, reverse=True)


def test_weights_are_put_back_and_inputs_rounded(forms: Any) -> None:
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Conv2d(2, 8, 3), nn.Flatten(), nn.Linear(32, 5), nn.Linear(5, 3)),
        torch.randn(4, 2, 4, 4),
    )
    targets = pm.prunable(model).targets
    before = model(x)
    with forms.stored_weights(targets, forms.LAYOUTS[0], "int4"):
        assert not torch.equal(model(x), before)
    assert torch.equal(model(x), before)
    with forms.rounded_inputs(targets):
        rounded = model(x)
    assert not torch.equal(rounded, before)
    assert torch.allclose(rounded, before, atol=0.05)
    assert torch.equal(model(x), before)
    assert forms.round_vectors(torch.tensor([[127.0, 60.4, -2.6]]), False).tolist() == [[127.0, 60.0, -3.0]]


def test_a_transformer_is_trained_and_tested_in_every_form(load_script: Any) -> None:
    pytest.importorskip("transformers")
    language_model, script = load_script("language_model"), load_script("sparse_or_fewer_bits")
    generator = torch.Generator().manual_seed(0)
    parts = {name: torch.randint(0, 7, (count,), generator=generator) for name, count in (("train", 600), ("test", 99))}
    settings = replace(language_model.QUICK, steps=8, warmup=2)
    rows = list(script.train_transformers(settings, 20, 0, parts, 7))
    assert len(rows) == len(script.LAYOUTS) * 6
    for row in rows:
        assert row["zeros"] == pytest.approx(row["sparsity"], abs=0.02)
        assert 1 < row["measured"] < 20
    sizes = {(row["layout"], row["sparsity"], row["values"]): row["bytes"] for row in rows}
    assert sizes["dense", 0.0, "fp32"] == 2 * sizes["dense", 0.0, "fp16"]
    assert sizes["balanced", 0.90625, "int4"] < sizes["balanced", 0.90625, "fp16"] < sizes["dense", 0.0, "int8"]


# ---- products in ONNX Runtime


@pytest.mark.parametrize("batch", [1, 5])
def test_products_in_onnx_runtime_multiply(load_script: Any, batch: int) -> None:
    pytest.importorskip("onnxruntime")
    products = load_script("onnx_products")
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(48, 128, generator=generator), torch.randn(batch, 128, generator=generator)
    exact = x @ weight.T
    limits = {"float32": 1e-5, "int8": 0.05, "int4": 0.2}
    for values, ways in products.dense_products(weight.numpy(), x.numpy()).items():
        for way, multiply in ways.items():
            error = (torch.from_numpy(multiply(x.numpy())) - exact).norm() / exact.norm()
            assert error < limits[values], way


def test_the_fastest_product_is_compared(load_script: Any) -> None:
    pytest.importorskip("onnxruntime")
    script = load_script("quantized_cpu_kernels")
    head = {"rows": 8, "columns": 9, "batch": 1, "state": "warm"}
    sides = {f"{script.ONNX} int8": 6.0, f"{script.ONNX} int4": 8.0, **dict.fromkeys(script.OURS, 2.0)}
    ratios = script.compare([{**head, "side": side, "seconds": seconds} for side, seconds in sides.items()])
    assert [row["ratio"] for row in ratios] == [3.0, 3.0, 4.0, 4.0]
    assert [row["target"] for row in ratios] == [1.0, 1.0, None, None]


# ---- the page

ROWS = [
    ("dense", 0.0, "fp32", "float", 4e6, 4.0),
    ("dense", 0.0, "int8", "float", 1e6, 4.1),
    ("dense", 0.0, "int8", "int8", 1e6, 4.2),
    ("dense", 0.0, "int4", "float", 5e5, 5.0),
    ("balanced", 0.75, "fp16", "float", 9e5, 4.3),
    ("balanced", 0.75, "int4", "float", 4e5, 4.6),
]
SECONDS = [("dense", 0.0, "int8", "int8", 1, 2e-4), ("balanced", 0.75, "int4", "float", 1, 1e-4)]


@pytest.fixture
def page(load_script: Any, empty_results: Path) -> Any:
    """Return the page's script, which reads records with two seeds of a few forms."""
    keys = ("layout", "sparsity", "values", "inputs")
    rows = [
        {**dict(zip(keys, form, strict=True)), "network": "transformer", "measure": "perplexity", "seed": seed}
        | {"bytes": nbytes, "measured": measured + (0.1 if seed else -0.1)}
        for *form, nbytes, measured in ROWS
        for seed in (0, 1)
    ]
    times = [
        {**dict(zip(keys, form, strict=True)), "network": "transformer", "batch": batch, "seconds": seconds}
        for *form, batch, seconds in SECONDS
    ]
    (empty_results / "sparse-or-fewer-bits-transformer.json").write_text(json.dumps({"rows": rows}))
    (empty_results / "sparse-or-fewer-bits-latency.json").write_text(json.dumps({"rows": times}))
    return load_script("sparse_or_fewer_bits_page")


def test_tables_by_hand(page: Any) -> None:
    found = page.read_forms("transformer")
    assert page.read_forms("resnet20") == []
    rows = page.format_forms(found).splitlines()
    assert rows[2] == "| dense | fp32 | float | 4,000 kB | 4.00 ± 0.14 |  |  |"
    assert rows[7] == "| balanced 75 % | int4 | float | 400 kB | 4.60 ± 0.14 | 100 |  |"
    budgets = page.format_budgets(found).splitlines()
    assert budgets[2].startswith("| 1/4: 1,000 kB | dense, int8: 4.10 ± 0.14, 1,000 kB | balanced 75 %, fp16: 4.30")
    assert budgets[3].startswith("| 1/6: 667 kB | dense, int4: 5.00 ± 0.14, 500 kB | balanced 75 %, int4: 4.60")
    assert budgets[4].startswith("| 1/8: 500 kB | dense, int4: 5.00 ± 0.14, 500 kB | balanced 75 %, int4: 4.60")
    assert budgets[6] == "| 1/32: 125 kB | none | none |"
    speeds = page.format_speeds(found).splitlines()
    assert speeds[2:] == [
        "| 1 | dense, int8, int8 inputs | 200 | 4.20 ± 0.14 |",
        "| 1 | balanced 75 %, int4 | 100 | 4.60 ± 0.14 |",
    ]


def test_pictures_have_a_marker_for_each_form(page: Any) -> None:
    pictures = page.draw_pictures()
    assert list(pictures) == [
        "sparse-or-fewer-bits-transformer-bytes.svg",
        "sparse-or-fewer-bits-transformer-latency-1.svg",
    ]
    for picture, forms in zip(pictures.values(), (5, 2), strict=True):
        paths = [element for element in ElementTree.fromstring(picture).iter() if element.tag.endswith("path")]
        legend = sum(
            ", " in (e.text or "") and e.get("font-size") == "11.5" for e in ElementTree.fromstring(picture).iter()
        )
        assert len(paths) == forms + legend


def test_round_costs_and_their_units(load_script: Any) -> None:
    chart = load_script("tradeoff_chart")
    assert [chart.scale_text(value, {1e3: "kB", 1e6: "MB"}) for value in (500.0, 2e4, 1e6, 5e7)] == [
        "0.5 kB",
        "20 kB",
        "1 MB",
        "50 MB",
    ]
    assert chart.round_values(30, 600) == [10, 20, 50, 100, 200, 500, 1000, 2000, 5000]
