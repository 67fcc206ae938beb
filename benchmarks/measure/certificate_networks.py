"""The networks of certified_predictions.py: a digits MLP, a small CIFAR-10 CNN, random ReLU networks, a transformer."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pomona as pm

DIGITS_STEPS = 400
CIFAR_EPOCHS = 5
CIFAR_BATCH = 128


@dataclass(frozen=True)
class Trained:
    """A trained network with inputs in [0, 1]: the examples it is pruned on, held-out ones, and its test accuracy."""

    name: str
    model: nn.Module
    examples: Tensor
    held_out: Tensor
    accuracy: float


def digits_mlp() -> Trained:
    """Return an MLP 64-64-64-10, trained on the scikit-learn digits with weight decay."""
    torch.manual_seed(0)
    data = pm.data.load("digits")
    train, test = (part.x.float().flatten(1) / 255 for part in (data.train, data.test))
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=0.1)
    for _ in range(DIGITS_STEPS):
        optimizer.zero_grad()
        F.cross_entropy(model(train), data.train.y).backward()
        optimizer.step()
    return trained("digits MLP", model, train, test, data.test.y)


def cifar_cnn() -> Trained:
    """Return a CNN of two strided convolutions and two linear layers, trained on CIFAR-10 for a few epochs."""
    torch.manual_seed(0)
    data = pm.data.load("cifar10")
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 4, stride=4), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(16 * 4 * 4, 32), nn.ReLU(), nn.Linear(32, 10)),
    )
    steps = len(data.train.x) // CIFAR_BATCH
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=5e-4, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=CIFAR_EPOCHS * steps)
    for _ in range(CIFAR_EPOCHS):
        order = torch.randperm(len(data.train.x))
        for rows in order[: steps * CIFAR_BATCH].split(CIFAR_BATCH):
            x = data.train.x[rows].float() / 255
            x = x.flip(3) if torch.rand(()) < 0.5 else x
            optimizer.zero_grad()
            F.cross_entropy(model(x), data.train.y[rows]).backward()
            optimizer.step()
            schedule.step()
    test = data.test.x.float() / 255
    return trained("CIFAR-10 CNN", model, data.train.x[:2000].float() / 255, test, data.test.y)


def trained(name: str, model: nn.Module, examples: Tensor, test: Tensor, labels: Tensor) -> Trained:
    """Return a trained network with its test accuracy."""
    model = model.eval()
    with torch.no_grad():
        right = torch.cat([model(part).argmax(1) for part in test.split(1000)]) == labels
    return Trained(name, model, examples, test, float(right.float().mean()))


def random_relu_network(depth: int, seed: int, width: int = 64, inputs: int = 32, outputs: int = 10) -> nn.Sequential:
    """Return a random network of `depth` linear layers with ReLU between them, weights of variance 2 / fan-in."""
    torch.manual_seed(seed)
    widths = [inputs, *[width] * (depth - 1), outputs]
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        layer = nn.Linear(fan_in, fan_out, bias=False)
        nn.init.normal_(layer.weight, std=(2 / fan_in) ** 0.5)
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Transformer(nn.Module):
    """An encoder of pre-norm blocks on a sequence of vectors with positions, and a classifier of its mean."""

    def __init__(self, width: int = 16, heads: int = 2, blocks: int = 2, length: int = 6, classes: int = 4) -> None:
        super().__init__()
        options = {"dim_feedforward": 2 * width, "batch_first": True, "norm_first": True, "dropout": 0.0}
        layer = nn.TransformerEncoderLayer(width, heads, **options)  # type: ignore[arg-type]
        self.encoder = nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False)
        self.position = nn.Parameter(torch.randn(length, width))
        self.classifier = nn.Linear(width, classes)
        self.input_shape = (length, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of the classes."""
        return self.classifier(self.encoder(x + self.position).mean(1))


def random_transformer(seed: int = 0) -> Transformer:
    """Return a transformer of two blocks with its initial weights."""
    torch.manual_seed(seed)
    return Transformer().eval()
