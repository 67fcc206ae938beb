"""`pomona bound gip`: the randomized top-k mask of Gradients Index Pruning (Yang et al., 2023)."""

from __future__ import annotations

from typing import Annotated

import typer

from pomona.errors import require

from ..output import print_status
from .group import bound
from .options import Json, Plot
from .output import print_values, write_chart

CHART_THETAS = [10 ** (k / 8) for k in range(-24, 9)]  # from a random mask to the exact top-m


@bound.command()
def gip(
    d: Annotated[int, typer.Option("--d", min=1, help="Number of gradients.")],
    m: Annotated[int, typer.Option("--m", min=0, help="Number of gradients that are kept.")],
    epsilon: Annotated[float | None, typer.Option("--epsilon", help="The privacy budget.")] = None,
    theta: Annotated[float | None, typer.Option("--theta", help="Or the mechanism's θ.")] = None,
    sigma: Annotated[float, typer.Option("--sigma", help="Standard deviation of a gradient.")] = 1.0,
    exact: Annotated[
        bool | None,
        typer.Option(
            "--exact/--asymptotic",
            help="Compute the error for d values, or its limit for d → ∞. Exact up to d = 10⁹ unless given.",
            show_default=False,
        ),
    ] = None,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Private index pruning: θ, ε, swapped indices and the error of the pruned gradient.

    The gradients are independent, of N(0, σ²). θ, ε, the swaps and ψ are exact. The error is exact as well: it has the
    order statistics of d values. The limit for d → ∞ and the paper's formula, which is wrong, stand next to it.
    """
    from pomona.theory import gip as theory

    require((epsilon is None) != (theta is None), "give one of --epsilon and --theta.")
    if theta is None:
        assert epsilon is not None
        theta = theory.theta_for_epsilon(epsilon, d, m)
    is_exact = d <= theory.EXACT_LIMIT if exact is None else exact
    values = {
        "theta": theta,
        "epsilon": theory.epsilon_for_theta(theta, d, m),
        "expected swaps": theory.expected_swaps(theta, d, m),
        "log psi": theory.log_psi(theta, d, m),
        **({"mean squared error, exact": theory.pruning_mse(theta, d, m, sigma, exact=True)} if is_exact else {}),
        "mean squared error, d → ∞": theory.pruning_mse(theta, d, m, sigma, exact=False),
        "mean squared error, printed": theory.pruning_mse(theta, d, m, sigma, printed=True),
    }
    if exact is None and not is_exact and not as_json:
        print_status(f"the error is the limit for d → ∞: the exact one is computed up to d = {theory.EXACT_LIMIT:,}.")
    print_values(values, as_json)
    if plot is None:
        return
    forms = {"exact" if is_exact else "d → ∞": {"exact": is_exact}, "printed": {"printed": True}}
    series = {
        name: [(theory.epsilon_for_theta(t, d, m), theory.pruning_mse(t, d, m, sigma, **form)) for t in CHART_THETAS]
        for name, form in forms.items()
    }
    write_chart(
        plot,
        series,
        title="Error of a private mask",
        subtitle=f"the error of {m:,} of {d:,} gradients, over the budget of one draw",
        x_label="ε",
        y_label="mean squared error",
        log_axes=(True, False),
    )
