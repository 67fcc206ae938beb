"""https://github.com/vllm-project/llm-compressor/issues/1028: how to prune, then fine-tune, then load the model."""

from __future__ import annotations

from pathlib import Path

import torch
from complaint_models import make_llama, make_tokens, prune_at_once, train_llama

import pomona as pm


def test_prune_fine_tune_and_load_with_transformers(tmp_path: Path) -> None:
    """The user wanted 2:4 sparsity and fine-tuning without quantization, and a model that others can load."""
    model = make_llama()
    names = prune_at_once(model, pm.OneShot(pattern=pm.NM(2, 4))).masks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    holder = pm.Finetune().attach(model, optimizer, total_steps=8)
    train_llama(model, optimizer, range(8))
    holder.finish()
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    for name in names:
        groups = loaded.get_parameter(name).detach().reshape(-1, 4)
        assert bool(((groups != 0).sum(1) == 2).all())
    with torch.no_grad():
        assert torch.equal(loaded.eval()(make_tokens()).logits, model.eval()(make_tokens()).logits)
