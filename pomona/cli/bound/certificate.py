"""`pomona bound certify` and `fraction`: bounds for the network of a finished run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from pomona.errors import PomonaError, require

from ..output import facts_table, print_json, print_table
from .group import bound
from .options import Delta, Json, Plot, RunFolder
from .output import Series, print_values, write_chart
from .predictions import certify_run_predictions
from .theorem_forms import errors_over_sparsity

if TYPE_CHECKING:
    from torch import nn

    from pomona.theory.certificate import Ball, Certificate, Region

BallRadius = Annotated[float, typer.Option("--radius", help="Radius of the ball of inputs.")]


@bound.command()
def certify(
    run: RunFolder,
    against: Annotated[
        Path | None,
        typer.Option("--against", metavar="RUN", help="Compare RUN, the pruned network, with this run's network."),
    ] = None,
    sparsity: Annotated[
        float | None, typer.Option("--sparsity", help="Or prune RUN's network by magnitude, once, to this sparsity.")
    ] = None,
    pattern: Annotated[str, typer.Option("--pattern", help="The pattern of the pruning.")] = "unstructured",
    allocation: Annotated[str, typer.Option("--allocation", help="uniform, global or erk.")] = "uniform",
    epsilon: Annotated[
        float | None, typer.Option("--epsilon", help="Or find the largest sparsity with a certified error below this.")
    ] = None,
    cube: Annotated[bool, typer.Option("--cube", help="Inputs in [LOW, HIGH] each, instead of a ball.")] = False,
    low: Annotated[float, typer.Option("--low", help="Lower end of the cube.")] = 0.0,
    high: Annotated[float, typer.Option("--high", help="Upper end of the cube.")] = 1.0,
    radius: Annotated[
        float | None,
        typer.Option(
            "--radius", help="Radius of the ball of inputs (1), or with --predictions of the region around each (0)."
        ),
    ] = None,
    predictions: Annotated[
        bool, typer.Option("--predictions", help="Certify the predictions on test examples instead of the outputs.")
    ] = False,
    norm: Annotated[str, typer.Option("--norm", help="Of the radius around an example: linf or l2.")] = "linf",
    examples: Annotated[int, typer.Option("--examples", min=1, help="Test examples whose predictions count.")] = 100,
    steps: Annotated[int, typer.Option("--steps", min=0, help="Steps of the attack; 0 leaves it out.")] = 100,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Bound how far a pruned network can be from the dense one: a certificate, and an attack.

    A run keeps only the network it ends with. The dense network to compare it with is that of another run (--against:
    RUN is the pruned one), or RUN's own network, which is then pruned here (--sparsity).

    With --predictions it is proven for each test example that pruning leaves its class, within --radius of it in the
    units of the network's inputs; with --cube, by one bound for the whole cube.
    """
    from pomona.lab.runs.shrink import load_finished_model
    from pomona.theory import certificate

    ways = [against is not None, sparsity is not None, epsilon is not None]
    require(
        sum(ways) == 1,
        "say what RUN is compared with: --against RUN, or --sparsity S to prune it, or --epsilon E to find how much.",
    )
    require(not predictions or epsilon is None, "--epsilon bounds outputs: leave it out, or --predictions.")
    require(not cube or radius is None, f"--cube and --radius {radius} both choose the inputs: give one of them.")
    ball_radius = 1.0 if radius is None or predictions else radius
    region: Region = certificate.Cube(low, high) if cube else certificate.Ball(ball_radius)
    model, shape = load_finished_model(run)
    input_shape = tuple(shape)
    pruning: dict[str, Any] = {"pattern": pattern, "allocation": allocation}
    if epsilon is not None:
        sparsity = certificate.largest_certified_sparsity(model, input_shape, epsilon, region=region, **pruning)
        if sparsity is None:
            note = "no sparsity is certified to err by so little."
            print_values({"epsilon": epsilon, "sparsity": None, "note": note}, as_json)
            return
    if against is None:
        assert sparsity is not None
        dense, pruned = model, certificate.prune_by_magnitude(model, sparsity, **pruning)
    else:
        dense, pruned = load_finished_model(against)[0], model
    if predictions:
        certify_run_predictions(
            run, dense, pruned,
            radius=radius or 0.0, norm=norm, region=region if cube else None, examples=examples, steps=steps,
            sparsity=sparsity, as_json=as_json,
        )  # fmt: skip
        return
    try:
        found = certificate.certify(dense, pruned, input_shape, region=region, steps=steps)
    except RuntimeError as error:
        raise PomonaError(f"'{run}' and '{against}' are networks of different shapes: give two of one kind.") from error
    if as_json:
        print_json({"sparsity": sparsity, "region": repr(region), **dataclasses.asdict(found)})
    else:
        print_certificate(found, region, sparsity, steps)
    if plot is not None:
        write_layers_chart(plot, found)


def print_certificate(found: Certificate, region: Region, sparsity: float | None, steps: int) -> None:
    """Print the layers of a certificate as a table, then its bound and the attack's result."""
    if found.layers:  # known where the norms of all layers are
        table = Table("layer", "‖W*‖ dense", "‖W‖ pruned", "‖removed‖", "outputs apart by at most", box=None)
        for layer in found.layers:
            table.add_row(escape(layer.name), *(f"{v:.4g}" for v in dataclasses.astuple(layer)[1:]))
        print_table(table)
    print_table(
        facts_table(
            {
                "region": region,
                **({"sparsity": f"{sparsity:.4f}"} if sparsity is not None else {}),
                "certified": f"sup ‖f − F‖ ≤ {found.error:.4g}, proven by {found.domain}",
                "found": f"‖f − F‖ = {found.found:.4g} by {steps} steps of an attack" if steps else "no attack",
                "of outputs": f"that move by at most {found.output:.4g} in the region",
            }
        )
    )


def write_layers_chart(file: Path, found: Certificate) -> None:
    """Write a chart of the norms and the gap of each layer of a certificate."""
    layers = list(enumerate(found.layers, 1))
    series = {
        "apart": [(k, layer.gap) for k, layer in layers if layer.gap > 0],
        "‖removed‖": [(k, layer.removed) for k, layer in layers if layer.removed > 0],
        "‖W‖": [(k, layer.dense) for k, layer in layers if layer.dense > 0],
    }
    title = "Certificate, layer by layer"
    write_chart(file, series, title=title, x_label="layer", y_label="norm", log_axes=(False, True))


@bound.command()
def fraction(
    run: RunFolder,
    epsilon: Annotated[float, typer.Option("--epsilon", help="How far one round of pruning may move the outputs.")],
    delta: Delta = 0.05,
    radius: BallRadius = 1.0,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Find how much one round of iterative pruning may remove from a run's network.

    Theorem 1 of Qian & Klabjan answers for networks that are drawn like this one (chains of linear layers, their inner
    weights), the certificate for this network and all its pruned layers.
    """
    from pomona.lab.runs.shrink import load_finished_model
    from pomona.theory import bounds, certificate

    model, shape = load_finished_model(run)
    found: dict[str, Any] = {"epsilon": epsilon, "delta": delta}
    try:
        found["theorem"] = bounds.fraction_per_round(model, epsilon, delta, radius=radius)
    except PomonaError as error:
        found |= {"theorem": None, "note": str(error)}
    input_shape, region = tuple(shape), certificate.Ball(radius)
    found["certified"] = certificate.largest_certified_sparsity(model, input_shape, epsilon, region=region)
    print_values(found, as_json)
    if plot is None:
        return
    series: Series = {"certificate": certified_errors(model, input_shape, region), "Theorem 1": []}
    if "note" not in found:
        widths, K = bounds.measure_chain(model)
        options = {"law": bounds.Uniform(K), "radius": radius}
        series["Theorem 1"] = errors_over_sparsity(bounds.magnitude, widths, delta, options)["sharp"]
    write_chart(
        plot,
        series,
        title="Guaranteed error of one round of pruning",
        subtitle=f"the certificate for this network, Theorem 1 for those drawn like it (sharp, δ = {delta:g})",
        x_label="sparsity",
        y_label="sup ‖f − F‖ at most",
        log_axes=(False, True),
    )


def certified_errors(model: nn.Module, input_shape: tuple[int, ...], region: Ball) -> list[tuple[float, float]]:
    """Return (sparsity, certified error) of a model that is pruned by magnitude, at 15 sparsities."""
    from pomona.theory import certificate

    points = []
    for sparsity in (k / 16 for k in range(1, 16)):
        pruned = certificate.prune_by_magnitude(model, sparsity)
        points.append((sparsity, certificate.certify(model, pruned, input_shape, region=region, steps=0).error))
    return points
