"""Rules that bound each ATen operation on a pair of networks; importing this package registers all of them.

registry    the rule of an operation
calls       an operation on other tensors, and its transpose
affine      layers with weights, products with constants
shared      affine operations with the same coefficients in both networks: moves, sums, average pooling
piecewise   ReLU and other piecewise linear functions
max_pool    maxima
"""

from __future__ import annotations

from . import affine, max_pool, piecewise, shared
from .registry import RULES, Rule, register, rule_of, unsupported

__all__ = ["RULES", "Rule", "affine", "max_pool", "piecewise", "register", "rule_of", "shared", "unsupported"]
