"""Table 1 and Figures 1 and 2 of Qian & Klabjan (ICML 2021): the weights of trained networks.

The networks are trained here, so that only orders of magnitude can agree with the paper: E w² = O(1/d) and
E w⁴ = O(1/d²) are the assumptions of Theorem 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, histc

from ...errors import require
from .cells import PAPER, Cell, Progress, make_cell
from .networks import Network, read_network, train_on_cifar10, train_on_covertype
from .printed import PRINTED_MEANS, PRINTED_VARIANCES

HISTOGRAM_REACH = 4  # standard deviations to each side of the mean


def table1(
    seed: int = 0,
    progress: Progress | None = None,
    *,
    weights: Path | None = None,
    network: Network | None = None,
) -> dict[str, Any]:
    """Table 1: the moments of the weights of a network trained on Covertype."""
    network = network or (read_network(weights) if weights else train_on_covertype(seed, progress))
    matrices = [weight.double() for weight in network.weights if weight.dim() == 2]
    require(
        len(matrices) > 2, f"Table 1 is about linear layers, three or more, and {network.name} has {len(matrices)}."
    )
    comparable = weights is None and len(matrices) == len(PRINTED_MEANS)
    cells: list[Cell] = []

    def add_cell(layer: int, quantity: str, value: float, count: int, paper: float | None = None) -> None:
        setting = {"layer": layer, "quantity": quantity}
        cells.append(make_cell(network.name, "dense", setting, value, None, count, paper))

    for k, w in enumerate(matrices, 1):
        printed = (PRINTED_MEANS[k - 1], PRINTED_VARIANCES[k - 1]) if comparable else (None, None)
        add_cell(k, "mean", float(w.mean()), w.numel(), printed[0])
        add_cell(k, "variance", float(w.var()), w.numel(), printed[1])
        if 1 < k < len(matrices):
            d = max(w.shape)
            add_cell(k, "d E w²", d * float((w**2).mean()), w.numel())
            add_cell(k, "d² E w⁴", d**2 * float((w**4).mean()), w.numel())
    return {
        "title": "Moments of trained weights",
        "paper": f"{PAPER}, Table 1",
        "notes": f"{network.origin} Theorem 2 assumes that d E w² and d² E w⁴ of the inner layers are of order 1.",
        "cells": cells,
    }


def figure1(
    seed: int = 0,
    progress: Progress | None = None,
    *,
    weights: Path | None = None,
    network: Network | None = None,
) -> dict[str, Any]:
    """Figure 1: histograms of the weights of a network trained on Covertype."""
    network = network or (read_network(weights) if weights else train_on_covertype(seed, progress))
    return histograms_of(network, "Weights of a trained network", f"{PAPER}, Figure 1")


def figure2(
    seed: int = 0,
    progress: Progress | None = None,
    *,
    weights: Path | None = None,
    network: Network | None = None,
) -> dict[str, Any]:
    """Figure 2: histograms of the weights of a VGG-16, here one trained briefly on CIFAR-10."""
    network = network or (read_network(weights) if weights else train_on_cifar10(seed, progress))
    return histograms_of(network, "Weights of a VGG-16", f"{PAPER}, Figure 2")


def histograms_of(network: Network, title: str, paper: str) -> dict[str, Any]:
    """Return a figure with the histograms of a network's weights."""
    return {
        "title": title,
        "paper": paper,
        "notes": network.origin,
        "cells": histogram_cells(network.name, network.weights),
    }


def histogram_cells(name: str, weights: Sequence[Tensor], bins: int = 61) -> list[Cell]:
    """Return one cell a layer: mean, standard deviation, kurtosis and the histogram of its weights."""
    cells = []
    for k, weight in enumerate(weights, 1):
        w = weight.double().flatten()
        mean, std = float(w.mean()), float(w.std())
        reach = HISTOGRAM_REACH * std
        counts = histc(w, bins, mean - reach, mean + reach)
        cell = make_cell(name, "dense", {"layer": k, "quantity": "weights"}, mean, std, w.numel(), None)
        cell["kurtosis"] = float(((w - mean) ** 4).mean()) / std**4 if std else None
        cell["histogram"] = {"low": mean - reach, "high": mean + reach, "counts": [int(c) for c in counts]}
        cells.append(cell)
    return cells
