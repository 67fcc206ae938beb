"""The kind of a module: what its parameters are to a pruning method."""

from __future__ import annotations

from torch import nn


def layer_kind(module: nn.Module) -> str:
    """Return norm, convolution, recurrent, attention, embedding, linear, or other."""
    if "Norm" in type(module).__name__:
        return "norm"
    if isinstance(module, nn.modules.conv._ConvNd):
        return "convolution"
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        return "recurrent"
    if isinstance(module, nn.MultiheadAttention):
        return "attention"
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return "embedding"
    if isinstance(module, (nn.Linear, nn.Bilinear)) or type(module).__name__ == "Conv1D":
        return "linear"
    return "other"


def stores_outputs_second(module: nn.Module) -> bool:
    """Return whether a layer's weight is (in, out, …), as in transposed convolutions and GPT-2's Conv1D."""
    return isinstance(module, nn.modules.conv._ConvTransposeNd) or type(module).__name__ == "Conv1D"
