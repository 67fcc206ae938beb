"""A certificate: an upper bound on the difference of two given networks over a region, and an attack from below.

Theorem 1 of Qian & Klabjan (ICML 2021) follows ‖f − F‖ from layer to layer with norms that hold for most random
matrices. Here both networks are given, so the bounds hold with certainty. `torch.export` turns the networks into one
graph of functional operations, whose values are bounded in three ways; the best one is the certificate. Everything is
float64 with a margin for rounding, and an operation that no bound is known for is refused.

The attack climbs ‖f(x) − F(x)‖ by projected gradient steps. The true supremum lies between the two.

regions           the inputs: a ball or a cube
exported_network  the export of one network
steps             the operations of two networks
paired_graph      the common graph of two networks
affine_map        linear layers, convolutions and batch norms, with their norms
lipschitz         Lipschitz constants of the other operations
paired_value      the knowledge about one value of both networks in the Euclidean norm
norm_bounds       the pass through the graph with norms
intervals         intervals of the values of two networks and of their gap
forward           the pass through the graph with intervals
linear_bounds     intervals that are refined by linear forms on the input
rules             the rule of each operation for intervals and linear forms
domains           the best of the bounds
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
