"""`pomona bound balanced`: the error of balanced pruning (Yao et al., 2019)."""

from __future__ import annotations

from typing import Annotated

import typer

from .group import bound
from .options import Json, Plot
from .output import print_values, write_chart

CHART_BLOCKS = (64, 16, 4)


@bound.command()
def balanced(
    sparsity: Annotated[float, typer.Option("--sparsity", help="The pruned fraction.")] = 0.9,
    block: Annotated[
        int | None, typer.Option("--block", min=1, help="Weights in a block; unconstrained unless given.")
    ] = None,
    sigma_w: Annotated[float, typer.Option("--sigma-w", help="Standard deviation of a weight.")] = 1.0,
    sigma_x: Annotated[float, typer.Option("--sigma-x", help="Standard deviation of an input.")] = 1.0,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Balanced sparsity: the removed weights and the output's error, next to unconstrained pruning."""
    from pomona.theory import balanced as theory

    values = {
        "removed second moment": theory.removed_second_moment(sparsity, sigma_w, block),
        "output variance": theory.output_variance(sparsity, sigma_w, sigma_x, block),
        "output variance, unconstrained": theory.output_variance(sparsity, sigma_w, sigma_x),
    }
    print_values(values, as_json)
    if plot is None:
        return
    series = {"any": [(s / 64, theory.output_variance(s / 64, sigma_w, sigma_x)) for s in range(1, 64)]}
    for size in CHART_BLOCKS:
        shares = [k / size for k in range(1, size)]
        series[f"blocks of {size}"] = [(s, theory.output_variance(s, sigma_w, sigma_x, size)) for s in shares]
    write_chart(
        plot,
        series,
        title="Error that pruning adds to an output",
        x_label="sparsity",
        y_label="variance",
        log_axes=(False, True),
    )
