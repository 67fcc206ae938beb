"""Appendix D of Qian & Klabjan (ICML 2021), recomputed: Tables 1 to 3, Figures 1 and 2.

printed           the values in the paper
cells             one cell of a result table, and its distance from the printed value
random_matrices   Tables 2 and 3: the constants of Lemmas 3 and 4
networks          the networks behind Table 1 and the figures: trained here, or read from a file
trained_weights   Table 1, Figures 1 and 2: moments and histograms of trained weights
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .cells import standard_errors_off
from .networks import Network, read_network, train_on_cifar10, train_on_covertype
from .printed import LEMMA4_TERMS, PRINTED_MEANS, PRINTED_TABLE2, PRINTED_TABLE3, PRINTED_VARIANCES, QUANTILES
from .random_matrices import table2, table3
from .trained_weights import figure1, figure2, table1

__all__ = [
    "LEMMA4_TERMS",
    "PRINTED_MEANS",
    "PRINTED_TABLE2",
    "PRINTED_TABLE3",
    "PRINTED_VARIANCES",
    "QUANTILES",
    "TABLES",
    "Network",
    "figure1",
    "figure2",
    "read_network",
    "standard_errors_off",
    "table1",
    "table2",
    "table3",
    "train_on_cifar10",
    "train_on_covertype",
]

# The functions behind `pomona table NAME`; the first line of each docstring is the table's title there.
TABLES: dict[str, Callable[..., dict[str, Any]]] = {
    "qian-table1": table1,
    "qian-table2": table2,
    "qian-table3": table3,
    "qian-figure1": figure1,
    "qian-figure2": figure2,
}
