"""How wide a random network must be to contain a target network: Chijiwa et al. (NeurIPS 2021), appendix A.

The target is f(x) = F_l σ(F_{l−1} σ(… F_1 x)) with ‖F_i‖_F ≤ 1. The random network g is twice as deep. Its entries are
U[−1, 1], and each may be resampled up to R − 1 times. A weight w of F_i is represented by two hidden units, one for
x > 0 and one for x < 0, each chosen from d′ (`units`):

    w x = w σ(x) − w σ(−x) ≈ v σ(u x) + v′ σ(u′ x),   |u − 1|, |v − w|, |u′ + 1|, |v′ + w| ≤ τ.

The paper's errors, and their size, are in docs/errata.md. `width` corrects two: the draws of one unit are not R²
independent pairs, so a unit fits with probability π = p_u p_v, p = 1 − (1 − τ/2)^R; and the inputs of a later layer,
for x in the cube, are as large as √d_0 + ε, not 2.

hidden_widths         the widths that the theorem needs
failure_probability   the probability that no unit fits
construction          the random network and its masks
"""

from __future__ import annotations

from .construction import Subnetwork, Trial, build, forward, success, trial
from .failure_probability import failure, failure_printed, failure_simulated
from .hidden_widths import reaches, tolerance, width, width_printed, widths

__all__ = [
    "Subnetwork",
    "Trial",
    "build",
    "failure",
    "failure_printed",
    "failure_simulated",
    "forward",
    "reaches",
    "success",
    "tolerance",
    "trial",
    "width",
    "width_printed",
    "widths",
]
