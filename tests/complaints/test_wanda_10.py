"""https://github.com/locuslab/wanda/issues/10: LoRA weights that are merged into a sparse model fill its zeros."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from complaint_models import find_zeros, make_llama, make_tokens, prune_at_once, train_llama

import pomona as pm

STEPS = 12


def train_adapter(model: Any) -> Any:
    """Train a LoRA adapter on a frozen model and return the model with the adapter merged into its weights."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj"], lora_dropout=0.0)
    adapted = peft.get_peft_model(model, config)
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=0.02)
    train_llama(adapted, optimizer, [0] * STEPS)
    return adapted.merge_and_unload()


@torch.no_grad()
def measure_loss(model: Any) -> float:
    """Return the loss on the tokens that are trained."""
    return float(model.eval()(make_tokens(), labels=make_tokens()).loss)


def test_a_merged_adapter_keeps_the_zeros_exactly() -> None:
    """Users feared that W + BA is dense and asked for W + m ⊙ BA, with the mask m of the pruned model."""
    model = make_llama()
    pruner = prune_at_once(model, pm.OneShot(sparsity=0.5))
    zeros, before = find_zeros(model, pruner.masks()), measure_loss(model)
    merged = train_adapter(model)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not find_zeros(merged, [name])[name].any()  # merging alone fills every zero
    pruner.apply(merged)
    assert all(torch.equal(found, zeros[name]) for name, found in find_zeros(merged, zeros).items())
    assert measure_loss(merged) < before  # the kept part of the adapter helps


def test_the_kept_weights_can_be_fine_tuned_after_the_merge() -> None:
    """What the mask removes of BA is lost; a few steps of `pm.Finetune` on the kept weights make up for it."""
    model = make_llama()
    pruner = prune_at_once(model, pm.OneShot(sparsity=0.5, pattern=pm.NM(2, 4)))
    merged = train_adapter(model)
    pruner.apply(merged)
    merged.requires_grad_(True)
    zeros, before = find_zeros(merged, pruner.masks()), measure_loss(merged)
    optimizer = torch.optim.AdamW(merged.parameters(), lr=0.01, weight_decay=0.1)
    holder = pm.Finetune().attach(merged, optimizer, total_steps=STEPS)
    train_llama(merged.train(), optimizer, [0] * STEPS)
    holder.finish()
    assert all(torch.equal(found, zeros[name]) for name, found in find_zeros(merged, zeros).items())
    assert measure_loss(merged) < before


def test_the_mask_can_be_read_from_a_checkpoint() -> None:
    """A sparse model of others comes without a pruner: `pm.Finetune` reads the mask from its zeros."""
    model = make_llama()
    prune_at_once(model, pm.OneShot(sparsity=0.5))
    holder = prune_at_once(model, pm.Finetune())
    zeros = find_zeros(model, holder.masks())
    merged = train_adapter(model)
    holder.apply(merged)
    assert all(torch.equal(found, zeros[name]) for name, found in find_zeros(merged, zeros).items())
