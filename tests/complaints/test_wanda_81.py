"""https://github.com/locuslab/wanda/issues/81: memory usage and inference speed of a pruned Llama do not change."""

from __future__ import annotations

import torch
from complaint_models import count_bytes, make_llama, make_tokens

import pomona as pm


def test_a_pruned_llama_takes_less_memory_and_gives_the_same_outputs() -> None:
    """The user pruned llama-7b, and its memory and its speed were those of the dense model."""
    model = make_llama()
    calibration = [{"input_ids": make_tokens(step)} for step in range(4)]
    pm.Wanda(sparsity=0.75, pattern=pm.Balanced(block=32)).prune(model, calibration)
    assert count_bytes(model) == count_bytes(make_llama())  # zeros take as many bytes as other numbers
    packed = pm.compress(model, make_tokens(), policy="all", patience=0.0)
    assert count_bytes(packed) < 0.5 * count_bytes(model)
    with torch.no_grad():
        expected, actual = model.eval()(make_tokens()).logits, packed.eval()(make_tokens()).logits
    assert torch.allclose(actual, expected, atol=1e-5)
    timed = [layer for layer in packed.compression.layers if layer.seconds]  # the report has both times of each layer
    assert len(timed) == 14
