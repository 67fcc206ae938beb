"""Heads and neurons of more families of Hugging Face's transformers, and parts that cannot be removed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import pomona as pm
from pomona.errors import PomonaError

transformers = pytest.importorskip("transformers")

WIDTH, HEADS, NEURONS, LAYERS = 32, 4, 48, 2
SIZE = WIDTH // HEADS
COMMON = {
    "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": NEURONS,
    "vocab_size": 60, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "max_position_embeddings": 40,
}  # fmt: skip
GPT = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_inner": NEURONS, "vocab_size": 60, "bos_token_id": 0}
T5 = {
    "d_model": WIDTH, "d_kv": SIZE, "d_ff": NEURONS, "num_layers": LAYERS, "num_heads": HEADS, "vocab_size": 60,
    "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
BART = {
    f"{part}_{name}": value
    for part in ("encoder", "decoder")
    for name, value in (("layers", LAYERS), ("attention_heads", HEADS), ("ffn_dim", NEURONS))
}
# Class, configuration, the layers that read heads (none where they cannot be removed), and those that read neurons.
FAMILIES: dict[str, tuple[str, dict[str, Any], str | None, str]] = {
    "phi": ("PhiForCausalLM", COMMON, "*.self_attn.dense", "*.mlp.fc2"),
    "gpt_neox": ("GPTNeoXForCausalLM", COMMON, "*.attention.dense", "*.mlp.dense_4h_to_h"),
    "gptj": ("GPTJForCausalLM", GPT | {"rotary_dim": 4}, "*.attn.out_proj", "*.mlp.fc_out"),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", GPT, None, "*.mlp.c_proj"),  # one key and one value for all heads
    "bloom": ("BloomForCausalLM", COMMON | {"n_head": HEADS, "n_layer": LAYERS}, None, "*.mlp.dense_4h_to_h"),
    "falcon": ("FalconForCausalLM", COMMON | {"ffn_hidden_size": NEURONS}, None, "*.mlp.dense_4h_to_h"),
    "modernbert": (
        "ModernBertForSequenceClassification", COMMON | {"cls_token_id": 1, "sep_token_id": 2}, "*.attn.Wo", "*.mlp.Wo"
    ),
    "deberta": ("DebertaV2ForSequenceClassification", COMMON, None, "*.layer.?.output.dense"),
    "t5": ("T5ForConditionalGeneration", T5, None, "*.wo"),
    "t5_gated": ("T5ForConditionalGeneration", T5 | {"feed_forward_proj": "gated-gelu"}, None, "*.wo"),
    "bart": ("BartForConditionalGeneration", COMMON | BART | {"d_model": WIDTH}, "*.out_proj", "*.fc2"),
    "qwen3": ("Qwen3ForCausalLM", COMMON | {"head_dim": SIZE, "num_key_value_heads": HEADS}, "*.o_proj", "*.down_proj"),
}  # fmt: skip


def build(kind: str) -> tuple[nn.Module, dict[str, Any]]:
    """Return a small model with random weights and biases, and an example of its inputs."""
    torch.manual_seed(0)
    name, options, *_ = FAMILIES[kind]
    config = getattr(transformers, name).config_class(**options)
    model = getattr(transformers, name)(config).eval()
    for leaf, parameter in model.named_parameters():
        if leaf.endswith("bias"):
            nn.init.normal_(parameter, 0, 0.3)
    return model, draw_inputs(model, 2, 9)


def draw_inputs(model: nn.Module, batch: int, tokens: int) -> dict[str, Any]:
    inputs = {"input_ids": torch.randint(1, 60, (batch, tokens))}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.randint(1, 60, (batch, 5))
    return inputs


@torch.no_grad()
def logits(model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    return model(**inputs).logits


@pytest.mark.parametrize("kind", FAMILIES)
def test_heads_and_neurons_are_removed(kind):
    model, example = build(kind)
    _, _, heads, neurons = FAMILIES[kind]
    for glob, size in ((heads, SIZE), (neurons, 1)):
        if glob is not None:
            pm.prune(model, 0.5, pattern=pm.Block((None, size)), include=glob, allocation="uniform")
    shrunk = pm.shrink(model, example)
    for inputs in (example, draw_inputs(model, 3, 7)):
        torch.testing.assert_close(logits(shrunk.model, inputs), logits(model, inputs), rtol=1e-4, atol=1e-5)
    plain = dict(model.named_modules())
    removed = [name for glob in (heads, neurons) if glob is not None for name in names_matching(model, glob)]
    for name in removed:
        assert shrunk.model.get_submodule(name).weight.numel() == plain[name].weight.numel() // 2, name
    before, after = pm.summary(model, example), pm.summary(shrunk.model, example)
    assert (shrunk.macs.before, shrunk.macs.after) == (before.macs, after.macs)


def names_matching(model: nn.Module, glob: str) -> list[str]:
    return [choice.target.name.removesuffix(".weight") for choice in pm.prunable(model, include=glob) if choice.taken]


@pytest.mark.parametrize("kind", ["phi", "gpt_neox", "gptj"])
def test_a_shrunk_decoder_generates_with_its_cache(kind):
    model, example = build(kind)
    pm.prune(model, 0.5, pattern=pm.Block((None, SIZE)), include=FAMILIES[kind][2], allocation="uniform")
    small = pm.shrink(model, example).model
    one, other = (m.generate(example["input_ids"], max_new_tokens=5, do_sample=False) for m in (model, small))
    assert torch.equal(one, other)


def test_one_key_for_all_queries_within_one_layer():
    """Its heads cannot go, and the neurons beside them can."""
    model, example = build("gpt_bigcode")
    pm.prune(model, 0.5, pattern=pm.Block((None, SIZE)), include="*.attn.c_proj", allocation="uniform")
    pm.prune(model, 0.5, pattern=pm.Block((None, 1)), include="*.mlp.c_proj", allocation="uniform")
    shrunk = pm.shrink(model, example)
    assert set(shrunk.removed) == {f"transformer.h.{index}.mlp.c_fc" for index in range(LAYERS)}
    torch.testing.assert_close(logits(shrunk.model, example), logits(model, example), rtol=1e-4, atol=1e-5)


def test_layers_that_are_not_plain_are_refused():
    model, example = build("qwen3")
    pm.prune(model, 0.5, pattern=pm.Block((None, 1)), include="*.down_proj", allocation="uniform")
    compressed = pm.compress(model, example, policy="all", patience=0.01)
    with pytest.raises(PomonaError, match=r"layers\.0\.mlp\.down_proj is packed: .* pm\.decompress\(model\)"):
        pm.shrink(compressed, example)
    assert pm.shrink(pm.decompress(compressed), example).removed
    pm.posttraining.add_lora(model, rank=2)
    with pytest.raises(PomonaError, match=r"q_proj computes its weight at each call: .* merge_lora"):
        pm.shrink(model, example)
    assert pm.shrink(pm.posttraining.merge_lora(model), example).removed
