"""How much may be pruned with a guarantee: the theorems of Qian & Klabjan (ICML 2021).

F(x) = W_l σ(W_{l−1} … σ(W_1 x)) loses N_k = ⌊D_k^{1−α}⌋ of the D_k weights of its layers 1 < k < l, a fraction
ρ = D_k^{−α}: the smallest (Theorem 1), random ones (Theorem 2), or whole 2-D kernels of a convolution (Theorem 3). Each
theorem bounds sup ‖f − F‖ over a ball or cube of inputs, with a probability over the draw of the weights, and has three
forms:

    printed=True    the paper's numbers, for comparison. Some do not hold.
    (default)       the paper's statement with its errors corrected (docs/errata.md).
    sharp=True      the same events with the best proof: at any width, for the confidence 1 − δ that is asked for.

Where nothing is guaranteed (a probability of 0 or less) the bound is `vacuous`. The corrected and the sharp form of
Theorem 1 are proven with all their constants (see `distributions`). Theorems 2 and 3 rest on the constant C of Latała's
inequality (Lemma 4), of which only lower bounds are known; `LATALA` is the largest that is measured for square matrices
(Table 3), and `oblong` converts it for other shapes.

distributions   laws of the weights, and norms of random matrices
subgaussian     sub-Gaussian laws (Lemma 2) and dependent weights (E.1)
lemmas          order statistics and random draws
bound           the result of a theorem, and its forms
network         shapes of the layers and propagation of the error
pruning         α, sparsity and counts, and the conditions on α
theorem1 … 3    magnitude, random and kernel pruning
solvers         the largest sparsity and the smallest width
extensions      asymptotic estimates of the appendices
"""

from __future__ import annotations

from .bound import FORMS, Bound, NotCovered, Theorem, TooNarrow
from .distributions import KURTOSIS, LATALA, Gaussian, Law, Moments, Uniform, latala, oblong, shape_factor
from .extensions import EXTENSIONS, Estimate, estimate, removed_norm
from .lemmas import distinct, lemma1, lemma3, lemma5, lemma6, no_repeat, theorem4
from .network import propagated_error
from .pruning import most_alpha
from .solvers import fraction_per_round, largest, least_pruning, measure_chain, narrowest
from .subgaussian import DOMINATION, CorrelatedGaussian, DependentRows, SubGaussian
from .theorem1 import magnitude
from .theorem2 import norm_level, random
from .theorem3 import cnn

__all__ = [
    "DOMINATION",
    "EXTENSIONS",
    "FORMS",
    "KURTOSIS",
    "LATALA",
    "Bound",
    "CorrelatedGaussian",
    "DependentRows",
    "Estimate",
    "Gaussian",
    "Law",
    "Moments",
    "NotCovered",
    "SubGaussian",
    "Theorem",
    "TooNarrow",
    "Uniform",
    "cnn",
    "distinct",
    "estimate",
    "fraction_per_round",
    "largest",
    "latala",
    "least_pruning",
    "lemma1",
    "lemma3",
    "lemma5",
    "lemma6",
    "magnitude",
    "measure_chain",
    "most_alpha",
    "narrowest",
    "no_repeat",
    "norm_level",
    "oblong",
    "propagated_error",
    "random",
    "removed_norm",
    "shape_factor",
    "theorem4",
]
