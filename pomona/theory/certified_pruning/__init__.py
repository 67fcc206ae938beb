"""Certified pruning: prune as much as leaves a given share of predictions provably unchanged.

certified       `Certified`: the options, the search and its report
margin_costs    what the removal of a weight costs the margins of the predictions
"""

from __future__ import annotations

from .certified import Certified, CertifiedReport, LayerCost

__all__ = ["Certified", "CertifiedReport", "LayerCost"]
