"""Attention heads and neurons of Hugging Face's transformers, removed with the outputs of the masked model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import pomona as pm
from pomona.errors import PomonaError
from pomona.sparse.shrink.transformer_layouts import find_unit_groups

transformers = pytest.importorskip("transformers")

WIDTH, HEADS, NEURONS, LAYERS = 32, 4, 48, 2
SIZE = WIDTH // HEADS
# The layers that read heads, and those that read neurons.
READERS = {
    "bert": ("*.attention.output.dense", "bert.encoder.layer.?.output.dense"),
    "gpt2": ("*.attn.c_proj", "*.mlp.c_proj"),
    "vit": ("*.attention.o_proj", "*.mlp.fc2"),
    "llama": ("*.self_attn.o_proj", "*.mlp.down_proj"),
    "grouped": ("*.self_attn.o_proj", "*.mlp.down_proj"),
    "opt": ("*.self_attn.out_proj", "*.fc2"),
    "distilbert": ("*.attention.out_lin", "*.ffn.lin2"),
}


def build(kind: str) -> tuple[nn.Module, dict[str, Any]]:
    """Return a small model with random weights and biases, and an example of its inputs."""
    torch.manual_seed(0)
    common = {
        "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": NEURONS,
        "vocab_size": 60, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
    }  # fmt: skip
    t = transformers
    make = {
        "bert": lambda: t.BertForSequenceClassification(t.BertConfig(**common)),
        "gpt2": lambda: t.GPT2LMHeadModel(
            t.GPT2Config(n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_inner=NEURONS, vocab_size=60, bos_token_id=0)
        ),
        "vit": lambda: t.ViTForImageClassification(
            t.ViTConfig(image_size=8, patch_size=2, num_channels=1, num_labels=3, **common)
        ),
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**common)),
        "grouped": lambda: t.LlamaForCausalLM(t.LlamaConfig(**common, num_key_value_heads=2)),
        "phi3": lambda: t.Phi3ForCausalLM(t.Phi3Config(**common)),
        "opt": lambda: t.OPTForCausalLM(t.OPTConfig(**common, ffn_dim=NEURONS, word_embed_proj_dim=WIDTH)),
        "distilbert": lambda: t.DistilBertForSequenceClassification(
            t.DistilBertConfig(dim=WIDTH, n_layers=LAYERS, n_heads=HEADS, hidden_dim=NEURONS, vocab_size=60)
        ),
    }
    model = make[kind]().double().eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, 0, 0.3)
    if kind == "vit":
        return model, {"pixel_values": torch.randn(2, 1, 8, 8, dtype=torch.float64)}
    return model, {"input_ids": torch.randint(1, 60, (2, 9))}


def other_example(example: dict[str, Any]) -> dict[str, Any]:
    """Return inputs that differ from an example in values and length."""
    if "pixel_values" in example:
        return {"pixel_values": torch.randn(5, 1, 8, 8, dtype=torch.float64)}
    return {"input_ids": torch.randint(1, 60, (3, 7))}


@torch.no_grad()
def logits(model: nn.Module, example: dict[str, Any]) -> torch.Tensor:
    return model.eval()(**example).logits


@pytest.mark.parametrize("kind", ["bert", "gpt2", "vit", "llama", "grouped"])
@pytest.mark.parametrize("method", ["magnitude", "wanda"])
def test_heads_and_neurons_are_removed(kind, method):
    model, example = build(kind)
    groups = 2 if kind == "grouped" else HEADS  # heads that can go one by one
    head_readers, neuron_readers = READERS[kind]
    heads = {"pattern": pm.Block((None, WIDTH // groups)), "include": head_readers}
    neurons = {"pattern": pm.Block((None, 1)), "include": neuron_readers}
    for options in (heads, neurons):
        if method == "wanda":
            pm.Wanda(0.5, **options).prune(model, [example])
        else:
            pm.prune(model, 0.5, allocation="uniform", **options)
    shrunk = pm.shrink(model, example)
    for inputs in (example, other_example(example)):
        torch.testing.assert_close(logits(shrunk.model, inputs), logits(model, inputs))
    left = {group.kind: group.units for group in find_unit_groups(shrunk.model)}
    assert left == {"head": groups // 2, "neuron": NEURONS // 2}
    before, after = pm.summary(model, example), pm.summary(shrunk.model, example)
    assert (shrunk.params.before, shrunk.params.after) == (before.params, after.params)
    assert (shrunk.macs.before, shrunk.macs.after) == (before.macs, after.macs)
    kv = 0.5 if kind == "grouped" else 1
    gates = 3 if kind in ("llama", "grouped") else 2
    weights = (2 + 2 * kv) * WIDTH * WIDTH + gates * WIDTH * NEURONS
    products = 2 * (17 if kind == "vit" else 9) * WIDTH
    tokens = 17 if kind == "vit" else 9
    assert before.macs - after.macs == LAYERS * tokens * (weights + products) // 2
    assert shrunk.difference < 1e-12


@pytest.mark.parametrize("kind", ["opt", "distilbert"])
def test_other_families(kind):
    model, example = build(kind)
    pm.prune(model, 0.5, pattern=pm.Block((None, SIZE)), include=READERS[kind][0], allocation="uniform")
    pm.prune(model, 0.5, pattern=pm.Block((None, 1)), include=READERS[kind][1], allocation="uniform")
    shrunk = pm.shrink(model, example)
    inputs = other_example(example)
    torch.testing.assert_close(logits(shrunk.model, inputs), logits(model, inputs))
    assert len(shrunk.removed) == LAYERS * 4


def test_gate_and_up_projection_in_one_layer():
    """Phi-3 holds both in one layer. Its heads stay: their number is read from the configuration."""
    model, example = build("phi3")
    pm.prune(model, 0.5, pattern=pm.Block((None, 1)), include="*.down_proj", allocation="uniform")
    shrunk = pm.shrink(model, example)
    inputs = other_example(example)
    torch.testing.assert_close(logits(shrunk.model, inputs), logits(model, inputs))
    assert shrunk.removed["model.layers.0.mlp.gate_up_proj"] == (2 * NEURONS, NEURONS)


@pytest.mark.parametrize("kind", ["bert", "gpt2", "vit", "llama"])
def test_constants_of_biases_move_into_the_next_bias(kind):
    """A value that is zero but for its bias is a constant: softmax sums to one, and a neuron is the same everywhere."""
    model, example = build(kind)
    for group in find_unit_groups(model):
        part = group.values[-1]
        with torch.no_grad():
            part.matrices(group.units)[: group.units // 4] = 0
    expected = logits(model, example)
    shrunk = pm.shrink(model, example)
    inputs = other_example(example)
    torch.testing.assert_close(logits(shrunk.model, inputs), logits(model, inputs))
    assert torch.equal(logits(model, example), expected)  # the model itself has not changed
    for group in find_unit_groups(shrunk.model):
        assert group.units == (HEADS if group.kind == "head" else NEURONS) * 3 // 4


def test_queries_of_zero_are_not_removed():
    """A head without queries looks everywhere alike: its values still count."""
    model, example = build("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.zero_()
            layer.self_attn.k_proj.weight.zero_()
    with pytest.raises(PomonaError, match=r"no attention head or neuron without effect; .*heads .*\(None, 8\)"):
        pm.shrink(model, example)


def test_one_unit_stays():
    model, example = build("gpt2")
    with torch.no_grad():
        model.transformer.h[0].attn.c_proj.weight.zero_()
        model.transformer.h[1].mlp.c_proj.weight.zero_()
    shrunk = pm.shrink(model, example)
    torch.testing.assert_close(logits(shrunk.model, example), logits(model, example))
    assert shrunk.removed["transformer.h.0.attn.c_attn"] == (3 * WIDTH, 3 * SIZE)
    assert shrunk.removed["transformer.h.1.mlp.c_fc"] == (NEURONS, 1)


def test_a_shrunk_decoder_generates_with_its_cache_and_trains():
    model, example = build("grouped")
    pm.prune(model, 0.5, pattern=pm.Block((None, 16)), include="*.o_proj", allocation="uniform")
    small = pm.shrink(model, example).model
    ids = example["input_ids"]
    tokens = [m.generate(ids, max_new_tokens=5, do_sample=False) for m in (model, small)]
    assert torch.equal(*tokens)
    assert model.config.use_cache
    assert small.config.use_cache
    small(**example).logits.sum().backward()
    assert all(p.grad is not None for p in small.parameters())


def test_a_constant_without_a_bias_to_take_it_stays_and_is_reported():
    config = transformers.LlamaConfig(
        hidden_size=WIDTH, num_hidden_layers=1, num_attention_heads=HEADS, intermediate_size=NEURONS, vocab_size=60,
        mlp_bias=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).double().eval()
    mlp = model.model.layers[0].mlp
    mlp.down_proj.bias = None
    with torch.no_grad():
        for part in (mlp.gate_proj, mlp.up_proj):
            nn.init.normal_(part.bias)
            part.weight[:3] = 0
        mlp.down_proj.weight[:, 5] = 0
    example = {"input_ids": torch.randint(0, 60, (2, 9))}
    shrunk = pm.shrink(model, example)
    assert shrunk.removed["model.layers.0.mlp.up_proj"] == (NEURONS, NEURONS - 1)
    assert "3 neurons, constant" in shrunk.kept["model.layers.0.mlp.up_proj"]
    torch.testing.assert_close(logits(shrunk.model, example), logits(model, example))
