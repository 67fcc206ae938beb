"""`pomona bound convergence`: dynamic pruning with feedback (Lin et al., 2020), section 4."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from pomona.errors import require

from ..output import print_json
from .group import bound
from .options import Json, Plot
from .output import write_chart

CHART_POINTS = 24


@bound.command()
def convergence(
    L: Annotated[float, typer.Option("--L", help="Smoothness of the loss.")],
    G: Annotated[float, typer.Option("--G", help="Root of E‖g‖².")],
    T: Annotated[int, typer.Option("--T", min=0, help="The last step's number, counted from 0.")],
    delta: Annotated[float, typer.Option("--delta", help="δ = ‖w − w̃‖²/‖w‖² of the masks.")],
    norm: Annotated[float, typer.Option("--norm", help="‖w‖.")],
    mu: Annotated[float | None, typer.Option("--mu", help="Strong convexity, for Theorem 4.1.")] = None,
    gap: Annotated[float | None, typer.Option("--gap", help="f(w_0) − f*, for Theorem 4.2.")] = None,
    sharp: Annotated[bool, typer.Option("--sharp", help="Use the best constants instead of the paper's.")] = False,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """DPF: Theorems 4.1 (with --mu) and 4.2 (with --gap) from measured quantities.

    Theorem 4.1 comes with the dense iterates of the same run, and with plain SGD: its last model, and that model pruned
    once.
    """
    require(mu is not None or gap is not None, "give --mu for Theorem 4.1, or --gap for Theorem 4.2, or both.")

    def estimates_at(steps: int) -> list[Any]:
        return convergence_estimates(steps, mu, gap, G, L=L, delta=delta, norm=norm, sharp=sharp)

    found = estimates_at(T)
    if as_json:
        print_json([estimate_json(estimate) for estimate in found])
    else:
        for estimate in found:
            print(estimate)
    if plot is not None:
        steps = sorted({round(max(T, 1) ** (k / CHART_POINTS)) for k in range(1, CHART_POINTS + 1)})
        series = {e.name: [(t, estimates_at(t)[k].bound) for t in steps] for k, e in enumerate(found)}
        write_chart(plot, series, title="Convergence of dynamic pruning", x_label="steps T", y_label="bound")


def convergence_estimates(steps: int, mu: float | None, gap: float | None, G: float, **measured: Any) -> list[Any]:
    """Return the estimates after `steps` steps: four of Theorem 4.1 if μ is given, one of Theorem 4.2 if the gap is."""
    from pomona.theory import convergence as theory

    run = {**measured, "G": G, "T": steps}
    nonconvex = [] if gap is None else [theory.nonconvex(gap=gap, **run)]
    if mu is None:
        return nonconvex
    pruned, sgd = theory.convex(mu=mu, **run), theory.last(L=measured["L"], mu=mu, G=G, T=steps)
    dense = theory.dense(gap=pruned.bound, T=steps, **measured)
    one_shot = theory.one_shot(gap=sgd.bound, **measured)
    return [pruned, dense, sgd, one_shot, *nonconvex]


def estimate_json(estimate: Any) -> dict[str, Any]:
    """Return an estimate as the command's JSON output has it."""
    terms = {name: term.value for name, term in estimate.terms.items()}
    return {"name": estimate.name, "bound": estimate.bound, "vacuous": estimate.vacuous, "terms": terms}
