"""Table 1 and Figures 1 and 2 of Qian & Klabjan (ICML 2021): the weights of trained networks.

The networks are trained here, so that only orders of magnitude can agree with the paper: E w² = O(1/d) and
E w⁴ = O(1/d²) are the assumptions of Theorem 2.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ... import data as datasets
from ... import models
from .cells import PAPER, Cell, Progress, make_cell
from .printed import PRINTED_MEANS, PRINTED_VARIANCES

LEARNING_RATE = 0.001  # Adam's, in section D.1
COVERTYPE_BATCH_SIZE = 512
DIGITS_BATCH_SIZE = 64
HISTOGRAM_REACH = 4  # standard deviations to each side of the mean


def table1(
    seed: int = 0,
    progress: Progress | None = None,
    *,
    data: tuple[Tensor, Tensor] | None = None,
    width: int = 1024,
    epochs: int = 3,
) -> dict[str, Any]:
    """Table 1: the moments of the weights of a network trained on Covertype."""
    model, cells = train_on_covertype(seed, progress, data, width, epochs), []
    weights = linear_weights(model)
    for k, weight in enumerate(weights, 1):
        w = weight.double()
        is_inner, n = 1 < k < len(weights), max(weight.shape)
        moments = {"mean": (float(w.mean()), PRINTED_MEANS), "variance": (float(w.var()), PRINTED_VARIANCES)}
        for name, (value, printed) in moments.items():
            setting, paper = {"layer": k, "quantity": name}, printed[k - 1] if k <= len(printed) else None
            cells.append(make_cell(f"5×{width}", "dense", setting, value, None, w.numel(), paper))
        if is_inner:
            for name, power in (("d E w²", 2), ("d² E w⁴", 4)):
                value = float((w**power).mean()) * n ** (power // 2)
                setting = {"layer": k, "quantity": name}
                cells.append(make_cell(f"5×{width}", "dense", setting, value, None, w.numel(), None))
    notes = (
        f"The rows of Covertype are scaled and fewer than the paper's, and were seen {epochs} times, not 20: what "
        "counts is that d E w² and d² E w⁴ of layers 2 to 5 are of order 1."
    )
    return {"title": "Moments of trained weights", "paper": f"{PAPER}, Table 1", "notes": notes, "cells": cells}


def figure1(
    seed: int = 0,
    progress: Progress | None = None,
    *,
    data: tuple[Tensor, Tensor] | None = None,
    width: int = 1024,
    epochs: int = 3,
) -> dict[str, Any]:
    """Figure 1: histograms of the weights of a network trained on Covertype."""
    model = train_on_covertype(seed, progress, data, width, epochs)
    cells = histogram_cells(f"5×{width}", linear_weights(model))
    return {"title": "Weights of a trained network", "paper": f"{PAPER}, Figure 1", "cells": cells}


def figure2(seed: int = 0, progress: Progress | None = None, *, rho: float = 2.0, epochs: int = 10) -> dict[str, Any]:
    """Figure 2: histograms of the weights of a convolutional network, here one trained on the digits."""
    digits = datasets.load("digits")
    torch.manual_seed(seed)
    model = models.build("digits_cnn", rho=rho)
    x = digits.train.x.float().sub(255 * digits.mean[0]).div(255 * digits.std[0])  # type: ignore[index]
    train_with_adam(model, x, digits.train.y, epochs, DIGITS_BATCH_SIZE, seed, progress)
    weights = [m.weight.detach() for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    cells = histogram_cells(f"digits_cnn(rho={rho:g})", weights)
    notes = "The paper has an ImageNet VGG16, whose weights are not included here; this is another network."
    return {"title": "Weights of a trained CNN", "paper": f"{PAPER}, Figure 2", "notes": notes, "cells": cells}


def train_on_covertype(
    seed: int, progress: Progress | None, data: tuple[Tensor, Tensor] | None, width: int, epochs: int
) -> nn.Module:
    """Return the trained network of section D.1: 54 inputs, five hidden layers with ReLU, seven classes.

    `data` is (inputs, labels); by default Covertype's training rows are loaded.
    """
    if data is None:
        rows = datasets.load("covertype").train
        data = rows.x, rows.y
    x, y = data
    torch.manual_seed(seed)
    # The paper standardizes the numerical columns to mean 0 and variance 1.
    x = (x - x.mean(0)) / x.std(0).clamp(min=1e-6)
    model = models.build("mlp", in_features=x.shape[1], num_classes=7, hidden=(width,) * 5)
    train_with_adam(model, x, y, epochs, COVERTYPE_BATCH_SIZE, seed, progress)
    return model


def train_with_adam(
    model: nn.Module, x: Tensor, y: Tensor, epochs: int, batch_size: int, seed: int, progress: Progress | None = None
) -> None:
    """Minimize the cross-entropy of `model` on (x, y) with Adam, then put the model into evaluation mode."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    total = epochs * -(-len(x) // batch_size)
    done = 0
    for _ in range(epochs):
        for rows in torch.randperm(len(x), generator=generator).split(batch_size):
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
            done += 1
            if progress:
                progress(done, total)
    model.eval()


def linear_weights(model: nn.Module) -> list[Tensor]:
    """Return the weights of the model's linear layers, in order."""
    return [m.weight.detach() for m in model.modules() if isinstance(m, nn.Linear)]


def histogram_cells(name: str, weights: list[Tensor], bins: int = 61) -> list[Cell]:
    """Return one cell a layer: mean, standard deviation, kurtosis and the histogram of its weights."""
    cells = []
    for k, weight in enumerate(weights, 1):
        w = weight.double().flatten()
        mean, std = float(w.mean()), float(w.std())
        reach = HISTOGRAM_REACH * std
        counts = torch.histc(w, bins, mean - reach, mean + reach)
        cell = make_cell(name, "dense", {"layer": k, "quantity": "weights"}, mean, std, w.numel(), None)
        cell["kurtosis"] = float(((w - mean) ** 4).mean()) / std**4 if std else None
        cell["histogram"] = {"low": mean - reach, "high": mean + reach, "counts": [int(c) for c in counts]}
        cells.append(cell)
    return cells
