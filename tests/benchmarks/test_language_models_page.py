"""The tables of the page about language models."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def page(load_script):
    return load_script("language_models_page")


def test_perplexities_stand_under_their_case(page):
    means = [
        {"method": "dense", "sparsity": 0.0, "pattern": "dense", "mean": 4.0, "std": 0.1},
        {"method": "wanda", "sparsity": 0.5, "pattern": "unstructured", "mean": 4.5, "std": 0.2},
        {"method": "wanda", "sparsity": 0.5, "pattern": "2:4", "mean": 5.25, "std": 0.0},
    ]
    assert page.format_perplexities(means).splitlines() == [
        "|  | 50 % | 2:4 |",
        "|---|---|---|",
        "| dense | 4.00 ± 0.10 | 4.00 ± 0.10 |",
        "| Wanda | 4.50 ± 0.20 | 5.25 ± 0.00 |",
    ]


def test_without_a_record_the_page_says_so(page):
    assert page.format_perplexities([]) == "*Not measured yet.*"


def test_a_large_model_has_its_time_and_memory(page, monkeypatch):
    row = {
        "method": "sparsegpt", "parameters": 6_738_415_616, "blocks": 32, "model_bytes": 13_476_831_232, "windows": 128,
        "tokens": 2048, "seconds": 96.0, "seconds_per_block": 3.0, "peak_bytes": 21_500_000_000,
    }  # fmt: skip
    record = {"device": "cuda", "machine": {"gpus": [{"name": "H200"}], "cpu": "EPYC"}}
    monkeypatch.setattr(page, "read_rows", lambda pattern, key: [(record, row)])
    (line,) = page.format_large_models().splitlines()[2:]
    assert line == "| SparseGPT, H200 | 6.74 billion in 32 blocks, 13.5 GB | 128 × 2048 | 96 s | 3.0 s | 21.5 GB |"


def test_decoders_have_a_table_each_with_their_speeds(page):
    shapes = {"llama": {"layers": 3, "width": 2048}}
    row = {"model": "llama", "format": "dense", "dtype": "float32", "weight_bytes": 616_562_688}
    small = row | {"format": "balanced int4", "weight_bytes": 19_000_000}
    rows = [
        row | {"batch": 8, "tokens_per_second": 1049.9, "speedup": 1.0},
        row | {"batch": 1, "tokens_per_second": 19.2, "speedup": 1.0},
        small | {"batch": 1, "tokens_per_second": 78.4, "speedup": 4.1},
        small | {"batch": 8, "tokens_per_second": 406.0, "speedup": 8.14},
    ]
    record = {"device": "cpu", "threads": 1, "shapes": shapes, "rows": rows, "machine": {"gpus": [], "cpu": "EPYC"}}
    assert page.format_decoding([record]).splitlines() == [
        "**Llama, 3 blocks, 2,048 wide**, EPYC, 1 thread:",
        "",
        "| weights | activations | bytes | tokens/s, batch 1 | tokens/s, batch 8 |",
        "|---|---|---|---|---|",
        "| dense | float32 | 617 MB | 19 (1.00×) | 1,050 (1.00×) |",
        "| balanced int4 | float32 | 19 MB | 78 (4.10×) | 406 (8.14×) |",
    ]
    assert page.format_decoding([]) == "*Not measured yet.*"
