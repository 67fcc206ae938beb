"""Networks that read an image as a sequence: an LSTM over its rows, and a transformer over its patches."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ..errors import require
from .registry import register


class RowLSTM(nn.Module):
    """An LSTM that reads an image row by row, and a linear classifier on its last state."""

    def __init__(
        self,
        *,
        num_classes: int = 10,
        in_channels: int = 1,
        image_size: int = 28,
        hidden: int = 128,
        layers: int = 1,
    ) -> None:
        super().__init__()
        self.lstm = nn.LSTM(in_channels * image_size, hidden, layers, batch_first=True)
        self.linear = nn.Linear(hidden, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.transpose(1, 2).flatten(2)  # (batch, height, channels · width)
        return self.linear(self.lstm(rows)[0][:, -1])


class TransformerBlock(nn.Module):
    """Self-attention and a two-layer network, each behind a layer norm and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.qkv, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.mlp_norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.attention_norm(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class VisionTransformer(nn.Module):
    """A transformer over the patches of an image; the classifier reads the mean of the patches."""

    def __init__(
        self,
        *,
        num_classes: int = 10,
        in_channels: int = 1,
        image_size: int = 8,
        patch: int = 2,
        width: int = 32,
        heads: int = 4,
        layers: int = 2,
    ) -> None:
        super().__init__()
        require(image_size % patch == 0, f"patch={patch} does not divide images of {image_size}×{image_size} pixels.")
        require(width % heads == 0, f"heads={heads} does not divide a width of {width}.")
        self.patches = nn.Conv2d(in_channels, width, patch, patch)
        self.position = nn.Parameter(torch.zeros(1, (image_size // patch) ** 2, width))
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(layers)))
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, num_classes)
        nn.init.normal_(self.position, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.position
        return self.linear(self.norm(self.blocks(tokens)).mean(1))


register(
    "digits_lstm", "a small LSTM over the rows of scikit-learn's digits", (1, 8, 8), RowLSTM, image_size=8, hidden=64
)
register("digits_transformer", "a small transformer for scikit-learn's digits", (1, 8, 8), VisionTransformer)
