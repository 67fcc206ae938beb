"""Six small networks of different kinds for scikit-learn's digits, with the optimizer that trains each.

The LSTM and the transformer read an image as a sequence of eight rows. The classifiers read all positions of an image,
not their mean, so that a network of one filter in each layer can still tell the classes apart: at 98 % little more is
left.
With `affine=False` norms have no gain and shift, as methods that select among random weights require.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pomona as pm
from pomona.models.layers import init_he_uniform
from pomona.models.resnet_cifar import ResNetCifar

ROWS = PIXELS = 8  # an image has 8 rows of 8 pixels
CLASSES = 10


def make_cnn(affine: bool = True) -> nn.Module:
    """Return four convolutions with batch norm, 16 to 64 filters, and a linear classifier of all positions."""
    model = pm.models.build("digits_cnn", affine=affine)
    model.head = nn.Sequential(nn.Flatten(), nn.Linear(64 * 4 * 4, CLASSES))
    return model


def make_mlp() -> nn.Module:
    """Return an MLP with two hidden layers of 512, of which 98 % sparsity leaves ten neurons each."""
    return pm.models.build("mlp", in_features=ROWS * PIXELS, hidden=(512, 512))


def make_resnet(affine: bool = True) -> nn.Module:
    """Return a ResNet-8 of 16 to 64 filters with batch norm, and a linear classifier of all positions."""
    model = ResNetCifar(8, in_channels=1, affine=affine)
    model.head = nn.Sequential(nn.Flatten(), nn.Linear(64 * 2 * 2, CLASSES))
    return model


def make_fcn() -> nn.Module:
    """Return two 3×3 and two 1×1 convolutions without norms; the last one is the classifier of all positions."""
    features = [nn.Conv2d(1, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    features += [nn.Conv2d(64, 192, 1), nn.ReLU()]
    positions = 192 * 4 * 4
    head = [nn.Flatten(), nn.Unflatten(1, (positions, 1, 1)), nn.Conv2d(positions, CLASSES, 1), nn.Flatten()]
    model = nn.Sequential(*features, *head)
    init_he_uniform(model)
    return model


class RowLSTM(nn.Module):
    """An LSTM over the rows of an image, and a linear classifier of all of its states."""

    def __init__(self, hidden: int = 128) -> None:
        super().__init__()
        self.lstm = nn.LSTM(PIXELS, hidden, batch_first=True)
        self.head = nn.Linear(ROWS * hidden, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.flatten(1, 2))[0].flatten(1))


class TransformerBlock(nn.Module):
    """Self-attention and two linear layers, each behind a layer norm and beside a shortcut."""

    def __init__(self, width: int, heads: int, affine: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(width, elementwise_affine=affine) for _ in range(2))
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.linear1, self.linear2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm1(x)
        x = x + self.attention(rows, rows, rows, need_weights=False)[0]
        return x + self.linear2(F.relu(self.linear1(self.norm2(x))))


class RowTransformer(nn.Module):
    """A transformer over the rows of an image, and a linear classifier of all rows."""

    def __init__(self, width: int = 64, heads: int = 4, blocks: int = 2, affine: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Linear(PIXELS, width)
        self.position = nn.Parameter(torch.randn(ROWS, width) / width**0.5)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads, affine) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width, elementwise_affine=affine)
        self.head = nn.Linear(ROWS * width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.embedding(x.flatten(1, 2)) + self.position
        return self.head(self.norm(self.blocks(rows)).flatten(1))


@dataclass(frozen=True)
class Network:
    """A network of the matrix: what it is, how it is built, and the optimizer that trains it."""

    description: str
    build: Callable[..., nn.Module]  # takes `affine` where the network has norms
    optimizer: str  # "sgd" or "adam"
    rate: float  # the learning rate, constant
    has_norms: bool = False
    has_kernels: bool = False  # whether convolutions have kernels of several weights

    def make_model(self, affine: bool = True) -> nn.Module:
        """Return the network, untrained; `affine` says whether its norms have a gain and a shift."""
        return self.build(affine=affine) if self.has_norms else self.build()

    def make_optimizer(self, model: nn.Module, rate: float | None = None) -> torch.optim.Optimizer:
        """Return the network's optimizer, with its own learning rate where none is given. Nothing is clipped."""
        rate = self.rate if rate is None else rate
        if self.optimizer == "adam":
            return torch.optim.Adam(model.parameters(), rate)
        return torch.optim.SGD(model.parameters(), rate, momentum=0.9)


NETWORKS = {
    "CNN": Network(
        "four 3×3 convolutions of 16 to 64 filters with batch norm",
        make_cnn,
        "sgd",
        0.1,
        has_norms=True,
        has_kernels=True,
    ),
    "MLP": Network("two hidden layers of 512", make_mlp, "sgd", 0.05),
    "ResNet": Network(
        "ResNet-8: three residual blocks of 16, 32 and 64 filters with batch norm",
        make_resnet,
        "sgd",
        0.1,
        has_norms=True,
        has_kernels=True,
    ),
    "FCN": Network(
        "two 3×3 convolutions of 64 filters and two 1×1 convolutions, the last of which is the classifier",
        make_fcn,
        "adam",
        0.003,
        has_kernels=True,
    ),
    "LSTM": Network("an LSTM of 128 units over the rows", RowLSTM, "adam", 0.005),
    "Transformer": Network(
        "two blocks of width 64 with four heads over the rows", RowTransformer, "adam", 0.002, has_norms=True
    ),
}
