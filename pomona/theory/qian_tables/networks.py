"""The networks behind Table 1 and Figures 1 and 2 of Qian & Klabjan (ICML 2021): trained here, or read from a file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor, nn

from ... import data as datasets
from ... import models
from ...data.dataset import Dataset
from ...data.split import Split
from ...errors import PomonaError, require
from .cells import Progress

LEARNING_RATE = 0.001  # Adam's, in section D.1
COVERTYPE_BATCH_SIZE = 512
COVERTYPE_EPOCHS = 20
CIFAR_BATCH_SIZE = 32
CIFAR_IMAGES, CIFAR_EPOCHS = 1_000, 2  # what one core trains a VGG-16 on in a minute or two
CIFAR_TEST_IMAGES = 500


@dataclass(frozen=True)
class Network:
    """The weights of a network, layer by layer, its name, and a sentence about how it was made."""

    name: str
    weights: tuple[Tensor, ...]
    origin: str


def train_on_covertype(
    seed: int = 0,
    progress: Progress | None = None,
    *,
    data: Dataset | None = None,
    width: int = 1024,
    epochs: int = COVERTYPE_EPOCHS,
) -> Network:
    """Return the trained network of section D.1: 54 inputs, five hidden layers with ReLU, seven classes.

    The inputs are standardized to mean 0 and variance 1, which the paper does with the numerical columns.
    """
    data = data or datasets.load("covertype")
    mean, std = data.train.x.mean(0), data.train.x.std(0).clamp(min=1e-6)
    train, test = (Split((part.x - mean) / std, part.y) for part in (data.train, data.test))
    torch.manual_seed(seed)
    model = models.build("mlp", in_features=train.x.shape[1], num_classes=7, hidden=(width,) * 5)
    train_with_adam(model, train, epochs, COVERTYPE_BATCH_SIZE, seed, progress)
    origin = describe_training(f"{len(train):,} rows of Covertype", epochs, measure_accuracy(model, test), len(test))
    return Network(f"5×{width}", layer_weights(model), origin)


def train_on_cifar10(
    seed: int = 0,
    progress: Progress | None = None,
    *,
    data: Dataset | None = None,
    images: int = CIFAR_IMAGES,
    epochs: int = CIFAR_EPOCHS,
) -> Network:
    """Return a VGG-16 with batch norm, 13 convolutions and 3 linear layers, trained on the first images of CIFAR-10."""
    data = data or datasets.load("cifar10")
    require(data.mean is not None and data.std is not None, f"'{data.name}' has no mean and std of its channels.")
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (data.mean, data.std))
    train, test = (
        Split((part.x[:count] / 255 - mean) / std, part.y[:count])
        for part, count in ((data.train, images), (data.test, CIFAR_TEST_IMAGES))
    )
    torch.manual_seed(seed)
    model = models.build("vgg16_d", hidden=(512, 512))
    train_with_adam(model, train, epochs, CIFAR_BATCH_SIZE, seed, progress)
    origin = describe_training(f"{len(train):,} images of CIFAR-10", epochs, measure_accuracy(model, test), len(test))
    return Network("VGG-16", layer_weights(model), origin)


def describe_training(examples: str, epochs: int, accuracy: float, tested: int) -> str:
    """Return a sentence about what a network was trained on and how well it does."""
    return (
        f"It was trained here with Adam for {epochs} epochs on {examples} and classifies {accuracy:.1%} of {tested:,} "
        "test examples correctly."
    )


def train_with_adam(
    model: nn.Module, data: Split, epochs: int, batch_size: int, seed: int, progress: Progress | None = None
) -> None:
    """Minimize the cross-entropy of `model` on the data with Adam, then put the model into evaluation mode."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    total = epochs * -(-len(data) // batch_size)
    done = 0
    for _ in range(epochs):
        for rows in torch.randperm(len(data), generator=generator).split(batch_size):
            optimizer.zero_grad()
            F.cross_entropy(model(data.x[rows]), data.y[rows]).backward()
            optimizer.step()
            done += 1
            if progress:
                progress(done, total)
    model.eval()


@torch.no_grad()
def measure_accuracy(model: nn.Module, data: Split, batch_size: int = 500) -> float:
    """Return the share of the data that a model in evaluation mode classifies correctly."""
    correct = sum(
        int((model(x).argmax(1) == y).sum())
        for x, y in zip(data.x.split(batch_size), data.y.split(batch_size), strict=True)
    )
    return correct / len(data)


def layer_weights(model: nn.Module) -> tuple[Tensor, ...]:
    """Return the weights of the model's convolutions and linear layers, in order."""
    return tuple(m.weight.detach() for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear))


def read_network(file: Path) -> Network:
    """Return the convolutions and matrices of a state dict: every tensor with two dimensions or more.

    The layers have the order of a torch file. A safetensors file does not keep an order: convolutions come first, then
    matrices, each sorted by name.
    """
    require(file.is_file(), f"'{file}' is not a file: --weights takes a state dict, of safetensors or of torch.save.")
    state = read_state_dict(file)
    found = {name: tensor for name, tensor in state.items() if tensor.dim() >= 2 and tensor.is_floating_point()}
    require(bool(found), f"'{file}' has no weights of two dimensions or more: give a state dict of a network.")
    for name, tensor in found.items():
        require(bool(tensor.isfinite().all()), f"{name} in '{file}' has values that are not finite.")
    return Network(file.name, tuple(found.values()), f"Its weights were read from {file.name}.")


def read_state_dict(file: Path) -> Mapping[str, Tensor]:
    """Return the tensors of a safetensors file, sorted, or of a torch file, which is read without running its code."""
    if file.suffix == ".safetensors":
        try:
            state = safetensors.torch.load_file(file)
        except SafetensorError as error:
            raise PomonaError(f"'{file}' is not a safetensors file ({error}): give a state dict.") from error
        return dict(sorted(state.items(), key=lambda item: (-item[1].dim(), natural_order(item[0]))))
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises errors of many kinds, the pickle module's among them
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise PomonaError(f"'{file}' cannot be read as a state dict ({reason}): save model.state_dict().") from error
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise PomonaError(f"'{file}' holds a {type(state).__name__} that is no state dict: save model.state_dict().")
    return state


def natural_order(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts names with numbers by their value: features.2 before features.10."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]
