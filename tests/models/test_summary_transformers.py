"""The cost of Hugging Face's transformers, made from a config, beside a count by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pomona as pm

transformers = pytest.importorskip("transformers")


def attention_products(tokens: int, width: int) -> int:
    """The products of queries with keys, and of the attention weights with the values, for all heads together."""
    return 2 * tokens * tokens * width


def build_on_meta(kind: str, config: object) -> nn.Module:
    with torch.device("meta"):
        return getattr(transformers, kind)(config)


@pytest.mark.parametrize(("heads", "batch"), [(12, 1), (12, 3)])
def test_gpt2(heads, batch):
    """GPT-2 with 124 M parameters: Conv1D layers, and an output layer that is tied to the embedding."""
    width, tokens, layers, vocabulary = 768, 16, 12, 50257
    model = build_on_meta("GPT2LMHeadModel", transformers.GPT2Config(n_head=heads))
    result = pm.summary(model, {"input_ids": torch.zeros(batch, tokens, dtype=torch.long, device="meta")})
    block = (3 + 1 + 4 + 4) * width * width
    assert result.params == 124_439_808
    assert result.params == (
        (vocabulary + 1024) * width + layers * (block + (3 + 1 + 4 + 1) * width + 4 * width) + 2 * width
    )
    assert result.macs == (tokens * (layers * block + vocabulary * width) + layers * attention_products(tokens, width))
    rows = {layer.name: layer for layer in result.layers}
    assert rows["transformer.h.3.attn.c_attn"].macs == tokens * 3 * width * width
    assert rows["transformer.h.3.attn"].macs == attention_products(tokens, width)
    assert rows["transformer.h.3.attn"].activation_macs == attention_products(tokens, width)
    assert (rows["lm_head"].params, rows["lm_head"].macs) == (0, tokens * vocabulary * width)
    assert rows["transformer.wte"].macs == 0


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_bert(implementation):
    width, inner, tokens, layers = 48, 100, 7, 3
    config = transformers.BertConfig(
        hidden_size=width, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=4, vocab_size=50,
        max_position_embeddings=20, attn_implementation=implementation, num_labels=3,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config)
    ids = torch.randint(0, 50, (2, tokens))
    result = pm.summary(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    weights = 4 * width * width + 2 * width * inner
    pooler = width * width + 3 * width
    assert result.macs == layers * (tokens * weights + attention_products(tokens, width)) + pooler
    assert result.params == sum(p.numel() for p in model.parameters())
    assert result.params == (
        (50 + 20 + 2) * width + 2 * width  # embeddings of words, positions and segments, and their norm
        + layers * (weights + 4 * width + inner + width + 4 * width)
        + pooler + width + 3
    )  # fmt: skip


def test_vit():
    width, inner, layers, patches = 32, 80, 2, 16
    config = transformers.ViTConfig(
        image_size=8, patch_size=2, num_channels=3, num_labels=5, hidden_size=width, num_hidden_layers=layers,
        num_attention_heads=4, intermediate_size=inner,
    )  # fmt: skip
    model = transformers.ViTForImageClassification(config)
    result = pm.summary(model, {"pixel_values": torch.randn(2, 3, 8, 8)})
    tokens, weights = patches + 1, 4 * width * width + 2 * width * inner
    products = attention_products(tokens, width)
    assert result.macs == patches * 12 * width + layers * (tokens * weights + products) + 5 * width
    assert result.params == sum(p.numel() for p in model.parameters())


def test_llama():
    """Two queries share a key, the feed-forward layer is SwiGLU; the angles of the positions count no MACs."""
    width, inner, tokens, layers, vocabulary = 64, 96, 10, 2, 100
    config = transformers.LlamaConfig(
        hidden_size=width, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=vocabulary,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    example = {"input_ids": torch.randint(0, vocabulary, (2, tokens))}
    weights = (2 + 2 * 0.5) * width * width + 3 * width * inner
    result = pm.summary(model, example)
    assert result.macs == layers * (tokens * weights + attention_products(tokens, width)) + tokens * vocabulary * width
    assert result.params == layers * (weights + 2 * width) + 2 * vocabulary * width + width
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[:, :24] = 0
    left = pm.summary(model, example)
    assert (left.macs, left.macs_left) == (result.macs, result.macs - tokens * width * 24)


def test_a_weight_counts_its_zeros_wherever_it_is_applied():
    class Mixed(nn.Module):
        """A weight on the left of a product, one that is computed from a parameter, and one outside any layer."""

        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Parameter(torch.eye(6))
            self.experts = nn.Parameter(torch.ones(2, 5, 4))
            self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))

        def forward(self, x):
            return self.normed(torch.einsum("btd,edf->btf", self.mix @ x, self.experts))

    model = Mixed()
    with torch.no_grad():
        model.normed.weight = torch.tensor([[1.0, 0, 0, 0], [0, 1, 1, 0], [1, 1, 1, 1]])
    result = pm.summary(model, torch.randn(3, 6, 5))
    assert result.macs_left == 6 * 5 + 6 * 5 * 4 + 6 * 7
    assert result.macs == 36 * 5 + 6 * 5 * 4 + 6 * 12


def test_mixture_of_experts():
    """Each token passes one of four experts, whose weights are slices of one parameter."""
    width, inner, tokens, layers, vocabulary, chosen = 32, 48, 9, 2, 60, 2
    config = transformers.MixtralConfig(
        hidden_size=width, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=vocabulary, num_local_experts=4, num_experts_per_tok=chosen,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config)
    example = {"input_ids": torch.randint(0, vocabulary, (2, tokens))}
    result = pm.summary(model, example)
    weights = 4 * width * width + 4 * width + chosen * 3 * width * inner
    assert result.macs == layers * (tokens * weights + attention_products(tokens, width)) + tokens * vocabulary * width
    rows = {layer.name: layer for layer in result.layers}
    assert rows["model.layers.1.mlp.experts"].macs == tokens * chosen * 3 * width * inner
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.experts.down_proj[:, :, : inner // 2] = 0
    left = pm.summary(model, example)
    assert result.macs - left.macs_left == layers * tokens * chosen * width * inner // 2
    on_meta = build_on_meta("MixtralForCausalLM", config)
    assert pm.summary(on_meta, {"input_ids": example["input_ids"].to("meta")}).macs == result.macs
