"""Convergence of dynamic pruning with feedback: section 4 of Lin et al. (ICLR 2020).

A run makes the steps w_{t+1} = w_t − γ_t g(w̃_t), t = 0 … T, with E g(w̃) = ∇f(w̃) for an L-smooth f. Its masks may be
arbitrary, and enter by δ_t = ‖w_t − w̃_t‖² / ‖w_t‖² (equation 1). Every estimate is a sum of terms, each a constant of
the proof times a measured quantity.

`G` (the root of E‖g(w̃_t)‖²), `delta` and `norm` (‖w_t‖) are numbers, or arrays whose last axis is t. Other axes are
runs, over which the expectation is taken. `Trace` measures them on a run, `curvature` estimates L.

The proofs give up a share θ of the gap (or of the gradient) to pay for the pruning error. The paper has θ = 1/2
everywhere; `sharp=True` takes the best. The proofs, and the errors in the paper, are in docs/convergence.md.

estimate       an upper bound and its terms
step_sizes     learning rates and averaging weights of the theorems
time_series    validation and averaging of quantities over steps and runs
theorems       the estimates
run_trace      measurement of a run
"""

from __future__ import annotations

from .estimate import Estimate, Term
from .run_trace import Trace, curvature
from .step_sizes import rate, rates, weights
from .theorems import convex, dense, last, nonconvex, one_shot

__all__ = [
    "Estimate",
    "Term",
    "Trace",
    "convex",
    "curvature",
    "dense",
    "last",
    "nonconvex",
    "one_shot",
    "rate",
    "rates",
    "weights",
]
