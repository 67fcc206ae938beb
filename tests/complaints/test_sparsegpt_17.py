"""https://github.com/IST-DASLab/sparsegpt/issues/17: fine-tuning a sparsified LLaMa without losing its zeros."""

from __future__ import annotations

from pathlib import Path

import torch
from complaint_models import find_zeros, make_llama, prune_at_once, train_llama

import pomona as pm


def test_a_sparse_checkpoint_is_fine_tuned_with_its_zeros(tmp_path: Path) -> None:
    """The user was told to store the mask of the checkpoint and to zero its weights after every optimizer step."""
    model = make_llama()
    names = prune_at_once(model, pm.OneShot(sparsity=0.5)).masks()
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)  # another process, which has no pruner and no masks
    zeros = find_zeros(loaded, names)
    optimizer = torch.optim.AdamW(loaded.parameters(), lr=0.01, weight_decay=0.1)
    holder = pm.Finetune().attach(loaded, optimizer, total_steps=6)
    for step in range(6):
        train_llama(loaded, optimizer, [step])
        assert all(torch.equal(found, zeros[name]) for name, found in find_zeros(loaded, names).items())
    holder.finish()
    for state in optimizer.state.values():  # nothing is left in Adam's moments that could move a zero
        assert all(torch.isfinite(value).all() for value in state.values())
    trained = [name for name in names if not torch.equal(loaded.get_parameter(name), model.get_parameter(name))]
    assert len(trained) == len(names)
    counted = pm.summary(loaded, (16,))
    assert counted.params - counted.nonzeros == sum(int(z.sum()) for z in zeros.values())
