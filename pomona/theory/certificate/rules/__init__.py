"""Rules that bound each ATen operation on a pair of networks; importing this package registers all of them.

registry    the rule of an operation
calls       an operation on other tensors, and its transpose
affine      layers with weights, products with constants
shared      affine operations with the same coefficients in both networks: moves, sums, average pooling
piecewise   ReLU and other piecewise linear functions
max_pool    maxima of windows and axes
extrema     the larger and the smaller of two tensors
activations         smooth functions of one number: scalar_function, smooth_functions, periodic
products            products of two values, division: bilinear
softmax             softmax and log-softmax: distribution
normalisation       layer norm, group norm, instance norm: standardised
embedding           rows of a table
linearised          operations that are linear up to a remainder
"""

from __future__ import annotations

from . import activations, affine, embedding, extrema, max_pool, normalisation, piecewise, products, shared, softmax
from .registry import RULES, Rule, register, rule_of, unsupported

__all__ = [
    "RULES",
    "Rule",
    "activations",
    "affine",
    "embedding",
    "extrema",
    "max_pool",
    "normalisation",
    "piecewise",
    "products",
    "register",
    "rule_of",
    "shared",
    "softmax",
    "unsupported",
]
