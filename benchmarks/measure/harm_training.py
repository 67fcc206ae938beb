"""Train one cell of the harm matrix: a method, a pattern, a network, a sparsity and a seed, on scikit-learn's digits.

A user's loop: a constant learning rate, no clipping, `attach`, the steps, `finish`. Methods have their defaults, with
these exceptions.

- DPF updates its masks every 16 steps, as in training of 1,600 steps and more.
- SNIP gets the loss of one batch at `attach`, as its documentation asks.
- Edge-popup and IteRand train scores for random weights: their networks have norms without gain and shift, scores have
  a learning rate of their own, and kernels are ranked over all layers with a floor of half the overall density (within
  layers, one of the first layer's 16 kernels would be left; with a low floor, the classifier loses its weights).
- Methods whose masks change until the last step (SFP, ST-3 and Feather) get training images at `finish`, by which the
  statistics of batch norms are estimated again, as the warning about stale ones recommends.
- A lottery trains three times, each time as long as other methods, and prunes in two steps.
- Fine-tuning holds the zeros that are there: the first half of training is dense, then pm.OneShot prunes the network,
  and the second half is fine-tuning. The matrix takes this cell as the reference of its pattern and sparsity.

A layer that a pattern does not fit (blocks of 4×4 in rows of 9 weights) is excluded, as the refusal recommends, and
listed in the cell.
"""

from __future__ import annotations

import functools
import time
import traceback
import warnings
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from harm_networks import NETWORKS
from torch import Tensor, nn
from torch.nn import functional as F

import pomona as pm
from pomona.methods import METHODS, Method, make_pruner
from pomona.patterns import PATTERNS

BATCH, EPOCHS = 32, 8
SNIP_BATCH = 128
DENSE = "dense"  # in place of a method: no pruning
REFERENCE = "finetune"
PATTERN_OPTIONS: dict[str, dict[str, Any]] = {
    "unstructured": {},
    "balanced": {"block": 64, "pad": True},
    "nm": {"n": 2, "m": 4},
    "block": {"shape": (4, 4)},
    "kernel": {},
    "filter": {},
}
SCORE_RATES = {"sgd": 0.5, "adam": 0.01}  # learning rates of scores
KERNEL_FLOOR = 0.5  # of scores of kernels: the share of the overall density that each layer keeps at least
METHOD_OPTIONS: dict[str, dict[str, Any]] = {
    "dpf": {"every": 16},  # the default of longer trainings
    "iterand": {"every": 20},  # K_per of recipes/iterand-digits.toml
    "lottery": {"retrainings": 2},
}
CHANGED_LAST = ("feather", "sfp", "st3")  # methods whose masks change at the last step
MAX_WARNINGS, MAX_MESSAGE = 5, 400  # of a cell, in the record


@dataclass(frozen=True)
class Cell:
    """One cell of the matrix."""

    method: str
    pattern: str
    network: str
    sparsity: float
    seed: int = 0
    epochs: int = EPOCHS

    @property
    def name(self) -> str:
        """The name that `--only` matches."""
        return f"{self.method}/{self.pattern}/{self.network}/{self.sparsity:g}/{self.seed}"

    def make_method(self, model: nn.Module, name: str) -> tuple[Method, list[str]]:
        """Return the method called `name`, at the cell's sparsity, and the layers that its pattern does not fit."""
        pattern = PATTERNS.resolve({"name": self.pattern, **PATTERN_OPTIONS[self.pattern]})
        options = {"sparsity": self.sparsity, "pattern": pattern, **METHOD_OPTIONS.get(name, {})}
        if pattern.sparsity is not None:
            options["allocation"] = "uniform"  # every layer has the sparsity of the pattern; SET's default is refused
        elif METHODS[name].weights == "score" and self.pattern == "kernel":
            options["allocation"] = f"global(floor={KERNEL_FLOOR * (1 - self.sparsity):g})"
        allowed = {field.name for field in fields(METHODS[name]) if field.init}
        options = {key: value for key, value in options.items() if key in allowed}
        spec = METHODS.resolve({"name": name, **options})
        misfits = [choice.target.name for choice in spec.prunable(model).misfits]
        return METHODS.resolve({"name": name, **options, "exclude": misfits}) if misfits else spec, misfits


@functools.cache
def load_digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the normalized training images, their classes, and the same for the test images."""
    digits = pm.data.load("digits")
    assert digits.mean
    assert digits.std
    (x, y), (x_test, y_test) = (
        ((split.x.float() / 255 - digits.mean[0]) / digits.std[0], split.y) for split in (digits.train, digits.test)
    )
    return x, y, x_test, y_test


class Training:
    """The training of one cell."""

    def __init__(self, cell: Cell) -> None:
        self.cell, self.network = cell, NETWORKS[cell.network]
        self.figures: dict[str, Any] = {}  # what was measured of the masks
        self.steps_taken = 0
        torch.manual_seed(cell.seed)
        is_scored = cell.method != DENSE and METHODS[cell.method].weights == "score"
        self.rate = SCORE_RATES[self.network.optimizer] if is_scored else self.network.rate
        self.model = self.network.make_model(affine=not is_scored)
        self.generator = torch.Generator().manual_seed(cell.seed)
        self.steps_per_epoch = len(load_digits()[0]) // BATCH
        self.steps = cell.epochs * self.steps_per_epoch

    def run(self) -> None:
        """Train by the cell's method."""
        if self.cell.method == DENSE:
            self.train_dense(self.steps)
        elif self.cell.method == "lottery":
            self.train_lottery()
        elif self.cell.method == "finetune":
            self.train_dense(self.steps // 2)
            self.train_attached(self.prune_once(), self.steps - self.steps // 2)
        else:
            spec, self.figures["left_out"] = self.cell.make_method(self.model, self.cell.method)
            self.train_attached(make_pruner(spec), self.steps)

    def make_optimizer(self) -> torch.optim.Optimizer:
        """Return a new optimizer."""
        return self.network.make_optimizer(self.model, self.rate)

    def train_dense(self, steps: int) -> None:
        """Train without a pruner."""
        self.take_steps(self.make_optimizer(), steps)

    def train_attached(self, pruner: pm.Pruner, steps: int) -> None:
        """Train with a pruner attached to a new optimizer, and measure its masks."""
        optimizer, method = self.make_optimizer(), pruner.method
        options: dict[str, Any] = {}
        if getattr(method, "every", 0) is None:  # the method counts epochs
            options["steps_per_epoch"] = self.steps_per_epoch
        if method.name == "snip":
            options["loss"] = self.snip_loss
        pruner.attach(self.model, optimizer, total_steps=steps, **options)
        self.take_steps(optimizer, steps)
        largest = max(float(slot.moved.detach().abs().max()) for slot in pruner.slots)
        pruner.finish(load_digits()[0].split(BATCH) if method.name in CHANGED_LAST else None)
        self.figures |= {**describe_masks(pruner), "largest_latent": float(f"{largest:.4g}")}

    def train_lottery(self) -> None:
        """Train in rounds."""
        spec, self.figures["left_out"] = self.cell.make_method(self.model, self.cell.method)
        lottery = make_pruner(spec)
        lottery.rounds(self.model, lambda model, pruner, index: self.train_attached(pruner, self.steps))  # type: ignore[attr-defined]

    def prune_once(self) -> pm.Pruner:
        """Prune the model by magnitude, and return a pruner that holds its zeros."""
        spec, self.figures["left_out"] = self.cell.make_method(self.model, "oneshot")
        pruner = make_pruner(spec)
        pruner.attach(self.model, self.make_optimizer())
        pruner.finish()
        return pm.Finetune(include=tuple(pruner.masks()), pattern=spec.pattern)

    def snip_loss(self) -> Tensor:
        """Return the loss of the first training images."""
        x, y, *_ = load_digits()
        return F.cross_entropy(self.model(x[:SNIP_BATCH]), y[:SNIP_BATCH])

    def take_steps(self, optimizer: torch.optim.Optimizer, steps: int) -> None:
        """Train for so many steps, in epochs of shuffled batches."""
        x, y, *_ = load_digits()
        self.model.train()
        order = torch.empty(0, dtype=torch.long)
        for _ in range(steps):
            if len(order) < BATCH:
                order = torch.randperm(len(x), generator=self.generator)
            rows, order = order[:BATCH], order[BATCH:]
            optimizer.zero_grad()
            F.cross_entropy(self.model(x[rows]), y[rows]).backward()
            optimizer.step()
            self.steps_taken += 1

    @torch.no_grad()
    def accuracy(self) -> float:
        """Return the accuracy on the test images, in per cent."""
        *_, x, y = load_digits()
        return round(100 * float((self.model.eval()(x).argmax(1) == y).float().mean()), 2)


def describe_masks(pruner: pm.Pruner) -> dict[str, Any]:
    """Return how much a pruner has left: of all weights, of the thinnest layer, and of outputs."""
    masks = pruner.masks()
    densities = {name: float(mask.float().mean()) for name, mask in masks.items()}
    thinnest = min(densities, key=lambda name: densities[name])
    count = sum(mask.numel() for mask in masks.values())
    outputs = [slot.kept_outputs() for slot in pruner.slots if slot.mask.ndim > 1]
    return {
        "reached": round(1 - sum(int(mask.sum()) for mask in masks.values()) / count, 5),
        "zeros": round(sum(int((slot.parameter == 0).sum()) for slot in pruner.slots) / count, 5),
        "least_density": round(densities[thinnest], 5),
        "thinnest_layer": thinnest,
        "empty_layers": sum(density == 0 for density in densities.values()),
        "outputs": sum(len(kept) for kept in outputs),
        "empty_outputs": sum(int((~kept).sum()) for kept in outputs),
    }


def train_cell(cell: Cell) -> dict[str, Any]:
    """Train a cell and return its row of the record: figures, the sentence of a refusal, or the error of a crash."""
    start, row = time.perf_counter(), {**asdict(cell), "status": "trained"}
    training: Training | None = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            training = Training(cell)
            training.run()
            row |= {**training.figures, "accuracy": training.accuracy()}
        except pm.PomonaError as refusal:
            row |= {"status": "refused", "message": str(refusal), "step": training.steps_taken if training else 0}
        except Exception as error:  # a crash is a finding; the other cells are trained
            place = traceback.extract_tb(error.__traceback__)[-1]
            message = f"{type(error).__name__}: {error} ({place.name}, line {place.lineno})"
            row |= {"status": "crashed", "message": message[:MAX_MESSAGE]}
    messages = dict.fromkeys(str(warning.message)[:MAX_MESSAGE] for warning in caught)
    return {**row, "warnings": list(messages)[:MAX_WARNINGS], "seconds": round(time.perf_counter() - start, 2)}
