"""Rules for piecewise linear functions of one number: ReLU, leaky ReLU, ReLU6, clamp, absolute value."""

from __future__ import annotations
