"""The benchmark of a pruned language model, at a tiny size on random text."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def language_model(load_script):
    return load_script("language_model")


@pytest.fixture(scope="module")
def rows(language_model):
    generator = torch.Generator().manual_seed(0)
    parts = {
        "train": torch.randint(0, 7, (600,), generator=generator),
        "test": torch.randint(0, 7, (300,), generator=generator),
    }
    return list(language_model.measure_models(replace(language_model.QUICK, steps=20), 0, parts, 7))


def test_every_method_has_a_row_in_every_case(rows):
    found = [(row["method"], row["pattern"], row["sparsity"]) for row in rows]
    cases = [("unstructured", 0.5), ("unstructured", 0.7), ("2:4", 0.5)]
    methods = ["magnitude", "wanda", "sparsegpt", "dpf"]
    assert found == [("dense", "dense", 0.0), *((method, *case) for case in cases for method in methods)]
    for row in rows:
        assert row["reached"] == pytest.approx(row["sparsity"], abs=0.02)  # whole weights of each output
        assert 1 < row["perplexity"] < 20


def test_the_perplexity_of_a_uniform_model_is_its_vocabulary(language_model):
    class Uniform(torch.nn.Module):
        def forward(self, input_ids):
            class Output:
                logits = torch.zeros(*input_ids.shape, 7)

            return Output

    assert language_model.perplexity(Uniform(), torch.randint(0, 7, (300,)), 32) == pytest.approx(7)


def test_means_and_deviations_by_hand(language_model):
    rows = [
        {"method": "dpf", "sparsity": 0.5, "pattern": "2:4", "perplexity": value, "seed": seed}
        for seed, value in enumerate((4.0, 5.0, 9.0))
    ]
    (mean,) = language_model.summarize(rows)
    assert (mean["mean"], mean["runs"]) == (6.0, 3)
    assert mean["std"] == pytest.approx(math.sqrt((4 + 1 + 9) / 2))


def test_the_learning_rate_rises_and_falls_to_a_tenth(language_model):
    settings = language_model.Settings(steps=100, warmup=10)
    rates = [language_model.learning_rate(settings, step) for step in range(101)]
    assert rates[0] == 0.1
    assert max(rates) == rates[9] == rates[10] == 1.0
    assert rates[100] == pytest.approx(0.1)
    assert rates[10:] == sorted(rates[10:], reverse=True)
