"""A certificate: an upper bound on the difference of two networks from measured norms, and an attack from below.

Theorem 1 of Qian & Klabjan (ICML 2021) follows ‖f − F‖ from layer to layer with norms that hold for most random
matrices. Here the norms are those of the two given networks, so the bound holds with certainty:

    ‖W y − W* y*‖ ≤ ‖W‖ ‖y − y*‖ + ‖(W − W*) y*‖,        and ‖y*‖ is known near the value at the region's centre.

Three numbers travel through the network's graph: how far the values of f and of F can be from those at the centre, and
from each other. Biases and the shifts of batch norm are in the values at the centre; a batch norm is folded into the
layer before it. Everything is float64, with proven upper bounds of the norms (`spectral`) and a margin for rounding.

The attack climbs ‖f(x) − F(x)‖ by projected gradient steps. The true supremum lies between the two.

regions           the inputs: a ball or a cube
affine_map        linear layers, convolutions and batch norms, with their norms
lipschitz         Lipschitz constants of the other operations
paired_value      the knowledge about one value of both networks
propagation       the pass through the graph
gradient_attack   projected gradient ascent
certification     `certify` and the search for the largest certified sparsity
"""

from __future__ import annotations

from .certification import Certificate, certify, cut, largest, largest_certified_sparsity, prune_by_magnitude
from .gradient_attack import attack
from .norm_bounds import Layer
from .regions import Ball, Cube, Region

__all__ = [
    "Ball",
    "Certificate",
    "Cube",
    "Layer",
    "Region",
    "attack",
    "certify",
    "cut",
    "largest",
    "largest_certified_sparsity",
    "prune_by_magnitude",
]
