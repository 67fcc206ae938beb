"""https://github.com/microsoft/nni/issues/5187: an error when NNI prunes and speeds up ALBERT."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from complaint_models import TOKENS, count_executed_macs, prune_at_once

import pomona as pm

pytestmark = pytest.mark.filterwarnings("ignore:the forward of .* cannot be traced:UserWarning")


def make_albert() -> Any:
    """Return an ALBERT with one small group of layers that runs twice, built from its config."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.AlbertConfig(
        vocab_size=TOKENS, embedding_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=32,
    )  # fmt: skip
    return transformers.AlbertForSequenceClassification(config).eval()


def test_the_feed_forward_layers_become_smaller_and_heads_stay() -> None:
    """Speeding up the pruned transformer failed, since queries and keys cannot be removed one by one from a head."""
    pytest.importorskip("torch_pruning")
    model, tokens = make_albert(), torch.randint(TOKENS, (2, 16))
    pruner = prune_at_once(model, pm.OneShot(sparsity=0.5, pattern=pm.Filter(), allocation="uniform"))
    layer = "albert.encoder.albert_layer_groups.0.albert_layers.0"
    assert f"{layer}.attention.query.weight" in pruner.masks()
    shrunk = pm.shrink(model, tokens)
    assert tuple(shrunk.removed[f"{layer}.ffn"]) == (64, 32)
    assert shrunk.kept[f"{layer}.attention.query"] == "16 because the forward pass divides them, as into heads"
    assert count_executed_macs(shrunk.model, tokens) < 0.8 * count_executed_macs(model, tokens)
    with torch.no_grad():
        assert torch.allclose(shrunk.model(tokens).logits, model(tokens).logits, atol=1e-5)


def test_weights_of_attention_can_be_pruned_and_packed() -> None:
    """Single weights and balanced blocks need no heads: every layer of the transformer is pruned and packed."""
    model, tokens = make_albert(), torch.randint(TOKENS, (2, 16))
    pruner = prune_at_once(model, pm.OneShot(sparsity=0.75, pattern=pm.Balanced(block=16)))
    assert sum("attention" in name for name in pruner.masks()) == 4
    packed = pm.compress(model, tokens, policy="all", patience=0.0)
    assert sum(layer.packed for layer in packed.compression.layers) == len(pruner.masks())
    with torch.no_grad():
        assert torch.allclose(packed(tokens).logits, model(tokens).logits, atol=1e-5)
