"""DPF's default: what it consists of, and that it never destroys a network that incremental pruning can train."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import pomona as pm
from pomona.errors import PomonaError
from pomona.methods import METHODS


def test_the_default_is_soft_settled_and_bounded():
    method = pm.DPF(sparsity=0.9).method
    assert (method.compressor, method.settle, method.feedback) == (pm.SoftThreshold(), 0.1, 1.0)


@pytest.mark.parametrize("pattern", ["filter", "kernel", "balanced(block=4)", "nm(n=2, m=4)", "block(shape=(2, 2))"])
def test_patterns_of_groups_have_a_plain_mask(pattern: str):
    options = {} if pattern.startswith("nm") else {"sparsity": 0.5}
    method = pm.DPF(pattern=pattern, **options).method
    assert (method.compressor, method.settle, method.feedback) == (None, 0.1, 1.0)


def test_the_printed_algorithm_is_one_option_away():
    printed = METHODS.resolve("dpf(printed=true)")
    assert printed == METHODS.resolve("dpf(every=16, settle=0, compressor='none', feedback=inf)")
    assert printed == pm.DPF(printed=True, settle=0, compressor=None, feedback=None).method
    assert pm.DPF(printed=False).method == pm.DPF().method
    assert pm.DPF(printed=True, schedule="cubic(until=1.0)").method.fixed_from == 1  # the mask never rests


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("settle", 0.2, "with settle=0, got settle=0.2: leave out one of them"),
        ("compressor", "soft", "with compressor=None, got compressor='soft': leave out one of them"),
        ("feedback", 2.0, "with feedback=None, got feedback=2.0: leave out one of them"),
    ],
)
def test_the_printed_algorithm_refuses_other_options(option: str, value: object, message: str):
    with pytest.raises(PomonaError, match=message):
        pm.DPF(printed=True, **{option: value})


@cache
def load_digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the training and test images of digits, standardized, with their classes."""
    data = pm.data.load("digits")
    (mean,), (std,) = data.mean, data.std
    train, test = ((split.x.float() / 255 - mean) / std for split in (data.train, data.test))
    return train, data.train.y, test, data.test.y


def train_digits(pruner: pm.Pruner, seed: int, epochs: int) -> tuple[float, float]:
    """Train the digits network by SGD at 0.1 without clipping; return its accuracy in %, and the largest latent."""
    images, classes, test_images, test_classes = load_digits()
    torch.manual_seed(seed)
    model = pm.models.build("digits_cnn")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    steps, largest = len(classes) // 64, 0.0
    pruner.attach(model, optimizer, total_steps=epochs * steps)
    for _ in range(epochs):
        for batch in torch.randperm(len(classes))[: 64 * steps].view(steps, 64):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), classes[batch]).backward()
            optimizer.step()
        largest = max([largest, *(slot.latent.abs().max().item() for slot in pruner.slots if slot.latent is not None)])
    pruner.finish()
    with torch.no_grad():
        return 100 * (model.eval()(test_images).argmax(1) == test_classes).float().mean().item(), largest


def test_a_short_training_at_98_percent_does_not_diverge():
    accuracy, largest = train_digits(pm.DPF(sparsity=0.98, every=4), seed=0, epochs=5)
    assert accuracy > 60
    assert largest < 10
    _, unbounded = train_digits(pm.DPF(sparsity=0.98, every=4, feedback=math.inf), seed=0, epochs=5)
    assert unbounded > 10  # so that this test can fail


@pytest.mark.slow
@pytest.mark.parametrize("sparsity", [0.95, 0.98])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_default_stays_near_incremental(sparsity: float, seed: int):
    accuracy, largest = train_digits(pm.DPF(sparsity=sparsity, every=4), seed, epochs=16)
    incremental, _ = train_digits(pm.Incremental(sparsity=sparsity, every=4), seed, epochs=16)
    assert accuracy > incremental - 6  # at a constant learning rate, single runs differ by some points
    assert largest < 10
