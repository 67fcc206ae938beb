"""The laws of random weights that `pomona bound` knows by name, each with the assumption that it stands for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from pomona.errors import unknown_name_error

LawName = Annotated[
    str,
    typer.Option("--law", help="Law of the weights: uniform, gaussian, moments, subgaussian, correlated or rows."),
]
SecondMoment = Annotated[float, typer.Option("--K1", help="E w² ≤ K1/n; for subgaussian and rows, the variance proxy.")]
FourthMoment = Annotated[float | None, typer.Option("--K2", help="E w⁴ ≤ K2/n², for --law moments.")]


@dataclass(frozen=True)
class NamedLaw:
    """A law of the theory, and a sentence that says what it assumes of the weights."""

    law: Any
    assumption: str


def find_law(name: str, K1: float, K2: float | None = None) -> NamedLaw:
    """Return the law of this name; n in its assumption is the longer side of a layer's matrix."""
    from pomona.theory import bounds

    fourth = bounds.KURTOSIS * K1**2 if K2 is None else K2
    laws: dict[str, tuple[Callable[[], Any], str]] = {
        "uniform": (
            lambda: bounds.Uniform(math.sqrt(3 * K1)),
            f"independent weights, uniform in ±{math.sqrt(3 * K1):.4g}/√n",
        ),
        "gaussian": (lambda: bounds.Gaussian(K1), f"independent weights of N(0, {K1:g}/n)"),
        "moments": (
            lambda: bounds.Moments(K1, fourth),
            f"independent weights of mean 0 with E w² ≤ {K1:g}/n and E w⁴ ≤ {fourth:.4g}/n²",
        ),
        "subgaussian": (
            lambda: bounds.SubGaussian(K1),
            f"independent sub-Gaussian weights: E exp(tw) ≤ exp(v t²/2) for all t, with a variance proxy v = {K1:g}/n",
        ),
        "correlated": (
            lambda: bounds.CorrelatedGaussian(K1),
            f"jointly Gaussian weights of mean 0 whose covariance has no eigenvalue above {K1:g}/n",
        ),
        "rows": (
            lambda: bounds.DependentRows(K1),
            f"independent rows of dependent weights: E exp⟨t, row⟩ ≤ exp(v ‖t‖²/2) for all vectors t, v = {K1:g}/n",
        ),
    }
    if name not in laws:
        raise unknown_name_error("law", name, laws)
    make, assumption = laws[name]
    return NamedLaw(make(), assumption)
