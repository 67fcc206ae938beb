"""Small models of the kinds that users complained about, and measures of what they cost, shared by these tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.flop_counter import FlopCounterMode

import pomona as pm

TOKENS = 64


def make_llama(seed: int = 0) -> Any:
    """Return a Llama of two small layers, built from its config."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=TOKENS, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def make_tokens(step: int = 0) -> Tensor:
    """Return the token ids of a step, which are the same in every run."""
    return torch.randint(TOKENS, (4, 16), generator=torch.Generator().manual_seed(step))


def train_llama(model: Any, optimizer: Optimizer, steps: Iterable[int]) -> None:
    """Train on the tokens of each step with a loop that knows nothing of a pruner."""
    for step in steps:
        tokens = make_tokens(step)
        optimizer.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()


def prune_at_once(model: nn.Module, pruner: pm.Pruner) -> pm.Pruner:
    """Prune a model without training it, and return the finished pruner."""
    pruner.attach(model, torch.optim.SGD(model.parameters(), lr=0.0), total_steps=1)
    pruner.finish()
    return pruner


@torch.no_grad()
def count_executed_macs(model: nn.Module, *inputs: Tensor) -> int:
    """Return the multiply-accumulate operations that torch really executes in a forward pass."""
    with FlopCounterMode(display=False) as counter:
        model(*inputs)
    return counter.get_total_flops() // 2


def count_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's parameters and buffers, those that are shared counted once."""
    return sum(tensor.nbytes for tensor in {id(t): t for t in (*model.parameters(), *model.buffers())}.values())


def find_zeros(model: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    """Return where the named parameters are zero."""
    parameters = dict(model.named_parameters())
    return {name: parameters[name].detach() == 0 for name in names}
