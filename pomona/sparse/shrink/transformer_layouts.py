"""Attention heads and feed-forward neurons of Hugging Face's transformers, found by the names of their layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...core.layer_kind import layer_kind
from .unit_group import RowSlice, UnitGroup, count_columns, count_rows


@dataclass(frozen=True)
class Layout:
    """Names of the layers that produce the units of a module, and of the layer that reads them."""

    producers: tuple[str, ...]
    reader: str
    fused: int = 1  # how many layers each producer holds, one after the other
    interleaved: bool = False  # whether the query, key and value of a head lie together


ATTENTION = (
    Layout(("q_proj", "k_proj", "v_proj"), "o_proj"),  # Llama, Mistral, Qwen, Gemma, ViT
    Layout(("q_proj", "k_proj", "v_proj"), "out_proj"),  # OPT, CLIP, BART, Whisper
    Layout(("self.query", "self.key", "self.value"), "output.dense"),  # BERT, RoBERTa
    Layout(("attention.query", "attention.key", "attention.value"), "output.dense"),  # ViT before transformers 5
    Layout(("query", "key", "value"), "dense"),  # ALBERT
    Layout(("q_lin", "k_lin", "v_lin"), "out_lin"),  # DistilBERT
    Layout(("q_proj", "k_proj", "v_proj"), "dense"),  # Phi
    Layout(("c_attn",), "c_proj", fused=3),  # GPT-2
    Layout(("Wqkv",), "Wo", fused=3),  # ModernBERT
    Layout(("query_key_value",), "dense", interleaved=True),  # GPT-NeoX
)
FEED_FORWARD = (
    Layout(("gate_proj", "up_proj"), "down_proj"),  # SwiGLU of Llama, Mistral, Qwen, Gemma
    Layout(("gate_up_proj",), "down_proj", fused=2),  # SwiGLU of Phi-3
    Layout(("intermediate.dense",), "output.dense"),  # BERT, RoBERTa
    Layout(("fc1",), "fc2"),  # ViT, OPT, CLIP, BART, Whisper
    Layout(("Wi",), "Wo", fused=2),  # gated layer of ModernBERT
    Layout(("c_fc",), "c_proj"),  # GPT-2
    Layout(("fc_in",), "fc_out"),  # GPT-J
    Layout(("dense_h_to_4h",), "dense_4h_to_h"),  # GPT-NeoX
    Layout(("ffn",), "ffn_output"),  # ALBERT
    Layout(("lin1",), "lin2"),  # DistilBERT
)


def find_unit_groups(model: nn.Module) -> list[UnitGroup]:
    """Return the heads and neurons of all blocks, in the order of the model.

    Nothing is returned where there is neither attention nor a gate: two linear layers alone may be part of any network.
    """
    groups = [
        group for module in model.modules() for group in (*find_heads(module), *find_neurons(module)) if group.fits()
    ]
    uses = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    own = [group for group in groups if all(uses[id(p)] == 1 for p in group.parameters())]  # none that is tied
    return own if any(group.kind == "head" or len(group.producers) > 1 for group in own) else []


def find_heads(module: nn.Module) -> Iterator[UnitGroup]:
    """Yield the attention heads of a module: a key's head with all the queries' heads that share it."""
    for layout, slices, reader in match_layouts(module, ATTENTION):
        holder = next((m for m in module.modules() if head_size(m)), None)
        parts = 3 if layout.interleaved else 1
        # A key that all queries share within one layer has other slices than the layout.
        if holder is not None and slices[0].rows == parts * count_columns(reader):
            heads = slices[-1].rows // (parts * head_size(holder))
            yield UnitGroup("head", heads, slices, slices[-1:], reader, holder)


def find_neurons(module: nn.Module) -> Iterator[UnitGroup]:
    """Yield the neurons between the two, or three, layers of a feed-forward module."""
    for _, slices, reader in match_layouts(module, FEED_FORWARD):
        yield UnitGroup("neuron", count_columns(reader), slices, slices, reader, module)


def match_layouts(
    module: nn.Module, layouts: tuple[Layout, ...]
) -> Iterator[tuple[Layout, tuple[RowSlice, ...], nn.Module]]:
    """Yield each layout whose layers a module has, with its producers and its reader."""
    for layout in layouts:
        producers = [find_linear(module, name) for name in layout.producers]
        reader = find_linear(module, layout.reader)
        if reader is not None and all(producer is not None for producer in producers):
            slices = tuple(part for producer in producers for part in divide_rows(producer, layout.fused))
            yield layout, slices, reader


def divide_rows(layer: Any, parts: int) -> list[RowSlice]:
    """Return the outputs of a layer as consecutive slices of equal size."""
    rows = count_rows(layer) // parts
    return [RowSlice(layer, part * rows, rows) for part in range(parts)]


def find_linear(module: nn.Module, path: str) -> nn.Module | None:
    """Return the linear layer at a path below a module, or None where there is none."""
    for name in path.split("."):
        child = module._modules.get(name)
        if child is None:
            return None
        module = child
    return module if layer_kind(module) == "linear" and hasattr(module, "weight") else None


def head_size(module: nn.Module) -> int:
    """Return the size of a head that an attention module states, or 0."""
    sizes = (getattr(module, name, None) for name in ("head_dim", "attention_head_size", "head_size"))
    return next((size for size in sizes if isinstance(size, int)), 0)
