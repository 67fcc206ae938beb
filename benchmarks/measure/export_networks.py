"""The networks of the export matrix: small ones of every kind, pruned in the pattern that a format is for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import pomona as pm

SPARSITY, BLOCK = 0.9, 32
TRANSFORMER = {"hidden": 256, "layers": 4, "heads": 4, "vocabulary": 8192, "tokens": 64}
TINY_TRANSFORMER = {"hidden": 32, "layers": 1, "heads": 2, "vocabulary": 96, "tokens": 16}


@dataclass(frozen=True)
class Network:
    """A network and an input of one sample."""

    name: str
    build: Callable[[bool], tuple[nn.Module, Any]]  # takes whether the network is to be tiny


def random_tokens(vocabulary: int, count: int) -> Tensor:
    """Return one sequence of random token ids."""
    return torch.randint(1, vocabulary, (1, count))


def build_resnet(tiny: bool) -> tuple[nn.Module, Any]:
    """Return ResNet-20 for CIFAR, and an image; a tiny network is the same network."""
    return pm.models.build("resnet20"), torch.randn(1, 3, 32, 32)


def build_wide_resnet(tiny: bool) -> tuple[nn.Module, Any]:
    """Return WideResNet-28-2, or one of 10 layers, and an image."""
    model = pm.models.wide_resnet.WideResNet(10, 1) if tiny else pm.models.build("wrn28_2")
    return model, torch.randn(1, 3, 32, 32)


def build_lstm(tiny: bool) -> tuple[nn.Module, Any]:
    """Return an LSTM classifier of token ids, and a sequence."""
    size = {"vocabulary": 96, "embedding": 32, "hidden": 32} if tiny else {"vocabulary": 5000, "embedding": 128}
    return pm.models.build("lstm", **size), random_tokens(size["vocabulary"], 16 if tiny else 64)


def build_bert(tiny: bool) -> tuple[nn.Module, Any]:
    """Return a BERT classifier from its configuration, and the keyword arguments of a tokenizer."""
    import transformers

    size = TINY_TRANSFORMER if tiny else TRANSFORMER
    config = transformers.BertConfig(
        vocab_size=size["vocabulary"],
        hidden_size=size["hidden"],
        num_hidden_layers=size["layers"],
        num_attention_heads=size["heads"],
        intermediate_size=4 * size["hidden"],
        max_position_embeddings=size["tokens"],
    )
    tokens = random_tokens(size["vocabulary"], size["tokens"])
    example = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    return transformers.BertForSequenceClassification(config), example


def build_gpt2(tiny: bool) -> tuple[nn.Module, Any]:
    """Return a GPT-2 language model from its configuration, and token ids."""
    import transformers

    size = TINY_TRANSFORMER if tiny else TRANSFORMER
    config = transformers.GPT2Config(
        vocab_size=size["vocabulary"],
        n_embd=size["hidden"],
        n_layer=size["layers"],
        n_head=size["heads"],
        n_positions=size["tokens"],
        bos_token_id=0,
        eos_token_id=0,
    )
    tokens = random_tokens(size["vocabulary"], size["tokens"])
    return transformers.GPT2LMHeadModel(config), {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def build_vit(tiny: bool) -> tuple[nn.Module, Any]:
    """Return a ViT classifier from its configuration, and an image."""
    import transformers

    size = TINY_TRANSFORMER if tiny else TRANSFORMER
    config = transformers.ViTConfig(
        hidden_size=size["hidden"],
        num_hidden_layers=size["layers"],
        num_attention_heads=size["heads"],
        intermediate_size=4 * size["hidden"],
        image_size=32,
        patch_size=8 if tiny else 4,
        num_labels=10,
    )
    return transformers.ViTForImageClassification(config), {"pixel_values": torch.randn(1, 3, 32, 32)}


NETWORKS = (
    Network("ResNet-20", build_resnet),
    Network("WideResNet-28-2", build_wide_resnet),
    Network("LSTM", build_lstm),
    Network("BERT", build_bert),
    Network("GPT-2", build_gpt2),
    Network("ViT", build_vit),
)


@torch.no_grad()
def prune(model: nn.Module, pattern: pm.Unstructured | pm.Balanced | pm.NM) -> nn.Module:
    """Prune every target whose rows the pattern divides to SPARSITY, or to the pattern's own; return the model."""
    sparsity = SPARSITY if pattern.sparsity is None else pattern.sparsity
    for target in (choice.target for choice in pm.prunable(model) if choice.taken):
        weight = model.get_parameter(target.name)
        try:
            pattern.validate_shape(target.name, weight.shape)
        except pm.PomonaError:
            continue
        [mask] = pattern.select_masks([weight.abs()], sparsity)
        weight.copy_(torch.where(mask, weight, 0))
    return model
