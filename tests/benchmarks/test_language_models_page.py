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
