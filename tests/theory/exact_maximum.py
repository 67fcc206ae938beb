"""The exact maximum of a linear form on two ReLU networks over a box, by one linear program for each piece."""

from __future__ import annotations

import math

import numpy as np
from scipy.optimize import linprog
from torch import nn


def exact_maximum(
    networks: tuple[nn.Sequential, nn.Sequential], low: np.ndarray, high: np.ndarray, objective: tuple
) -> float:
    """Return the largest objective[0] · dense(x) + objective[1] · pruned(x) over a box.

    The networks are Linear and ReLU in turn. Each neuron whose sign is open is split; on each piece both networks are
    affine.
    """
    layers = [
        [(m.weight.detach().numpy(), m.bias.detach().numpy()) for m in n if isinstance(m, nn.Linear)] for n in networks
    ]
    start = np.eye(len(low)), np.zeros(len(low))
    return explore(layers, [start, start], 0, 0, [], (low, high), objective)


def explore(layers, values, side: int, depth: int, rows: list, box: tuple, objective: tuple) -> float:
    """Return the maximum over the inputs that satisfy the rows (a, b): a·x ≤ b, from one layer of one network on."""
    if depth == len(layers[0]):
        slope = sum(c @ value[0] for c, value in zip(objective, values, strict=True))
        constant = sum(c @ value[1] for c, value in zip(objective, values, strict=True))
        return solve(slope, rows, box) + constant
    weight, bias = layers[side][depth]
    slope, constant = weight @ values[side][0], weight @ values[side][1] + bias
    return split(layers, values, side, depth, rows, box, objective, slope, constant, 0)


def split(layers, values, side, depth, rows, box, objective, slope, constant, neuron: int) -> float:
    """Return the maximum with the neurons of a layer from this one on still to be split."""
    last = depth == len(layers[0]) - 1
    if last or neuron == len(slope):
        after = [*values]
        after[side] = slope, constant
        return explore(layers, after, 1 - side, depth + side, rows, box, objective)
    best = -math.inf
    for active in (True, False):
        sign = -1.0 if active else 1.0
        more = [*rows, (sign * slope[neuron], -sign * constant[neuron])]
        if solve(np.zeros_like(slope[neuron]), more, box) == -math.inf:
            continue
        new_slope, new_constant = slope.copy(), constant.copy()
        if not active:
            new_slope[neuron], new_constant[neuron] = 0, 0
        best = max(best, split(layers, values, side, depth, more, box, objective, new_slope, new_constant, neuron + 1))
    return best


def solve(slope: np.ndarray, rows: list, box: tuple) -> float:
    """Return the largest slope · x in a box that satisfies the rows, or −∞ if there is none."""
    matrix = np.array([a for a, _ in rows]) if rows else None
    limits = np.array([b for _, b in rows]) if rows else None
    result = linprog(-slope, A_ub=matrix, b_ub=limits, bounds=list(zip(*box, strict=True)), method="highs")
    return -result.fun if result.status == 0 else -math.inf
