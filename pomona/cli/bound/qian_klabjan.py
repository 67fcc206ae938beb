"""`pomona bound magnitude`, `random`, `norm`, `cnn` and `estimate`: the theorems of Qian & Klabjan (2021)."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Any

import typer

from pomona.errors import require

from .group import bound
from .laws import FourthMoment, LawName, SecondMoment, find_law
from .options import (
    Alpha,
    Delta,
    Epsilon,
    Json,
    Lipschitz,
    Plot,
    Radius,
    Sparsity,
    Widths,
    parse_counts,
    parse_numbers,
)
from .output import print_values, write_chart
from .theorem_forms import show_theorem

DEFAULT_WIDTHS = "64,1024,1024,10"


@bound.command()
def magnitude(
    widths: Widths = DEFAULT_WIDTHS,
    alpha: Alpha = None,
    sparsity: Sparsity = None,
    epsilon: Epsilon = None,
    delta: Delta = 0.05,
    law: Annotated[str, typer.Option("--law", help="Law of the weights; Theorem 1 knows only uniform.")] = "uniform",
    K: Annotated[float, typer.Option("--K", help="Weights are uniform in ±K/√n.")] = math.sqrt(3),
    lipschitz: Lipschitz = 1.0,
    radius: Radius = 1.0,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Theorem 1 of Qian & Klabjan: prune the smallest weights."""
    from pomona.theory import bounds

    named = find_law(law, K**2 / 3)
    options = {"law": named.law, "lipschitz": lipschitz, "radius": radius}
    sizes = parse_counts(widths)
    show_theorem(
        bounds.magnitude, sizes, alpha, sparsity, epsilon, delta, options, plot, as_json, assumption=named.assumption
    )


@bound.command()
def random(
    widths: Widths = DEFAULT_WIDTHS,
    alpha: Alpha = None,
    sparsity: Sparsity = None,
    epsilon: Epsilon = None,
    delta: Delta = 0.05,
    law: LawName = "uniform",
    K1: SecondMoment = 1.0,
    K2: FourthMoment = None,
    norms: Annotated[str | None, typer.Option("--norms", metavar="N,N,…", help="Known bounds of ‖W_k‖.")] = None,
    deltas: Annotated[
        str | None, typer.Option("--deltas", metavar="D,D,…", help="Probabilities with which --norms fail.")
    ] = None,
    distinct: Annotated[bool, typer.Option("--distinct", help="Draw without replacement (E.2).")] = False,
    lipschitz: Lipschitz = 1.0,
    radius: Radius = 1.0,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Theorem 2 of Qian & Klabjan: prune weights at random."""
    from pomona.theory import bounds

    named = find_law(law, K1, K2)
    options = {"law": named.law, "lipschitz": lipschitz, "radius": radius, "replacement": not distinct}
    options |= {"norms": norms and parse_numbers(norms), "deltas": deltas and parse_numbers(deltas)}
    sizes = parse_counts(widths)
    show_theorem(
        bounds.random, sizes, alpha, sparsity, epsilon, delta, options, plot, as_json, assumption=named.assumption
    )


@bound.command()
def norm(
    shape: Annotated[str, typer.Option("--shape", metavar="ROWS,COLUMNS", help="Outputs and inputs of the layer.")],
    law: LawName = "subgaussian",
    K1: SecondMoment = 1.0,
    K2: FourthMoment = None,
    delta: Delta = 0.05,
    as_json: Json = False,
) -> None:
    """Lemmas 2 to 4 of Qian & Klabjan: the norm of a layer with random weights, independent or not."""
    from pomona.theory import bounds

    rows, columns = parse_counts(shape, 2)
    require(0 < delta < 1, f"delta is a probability between 0 and 1, got {delta:g}.")
    named = find_law(law, K1, K2)
    values: dict[str, Any] = {"assumption": named.assumption}
    if not isinstance(named.law, bounds.DependentRows):
        values["mean norm, at most"] = named.law.expected(rows, columns)
    values[f"norm, at most, except with probability {delta:g}"] = bounds.norm_level(named.law, (rows, columns), delta)
    values["basis"] = "by a measured C" if isinstance(named.law, bounds.Moments) else "proven"
    print_values(values, as_json)


@bound.command()
def cnn(
    widths: Annotated[
        str, typer.Option("--widths", metavar="D,D,…", help="Channels of the image and the convolutions; classes.")
    ] = "3,64,64,64,10",
    image: Annotated[int, typer.Option("--image", help="p: height and width of the image.")] = 32,
    kernel: Annotated[int, typer.Option("--kernel", help="q: height and width of a kernel.")] = 3,
    alpha: Alpha = None,
    sparsity: Sparsity = None,
    epsilon: Epsilon = None,
    delta: Delta = 0.05,
    C1: Annotated[float, typer.Option("--C1", help="E w² ≤ C1/p²d.")] = 1.0,
    C2: Annotated[float | None, typer.Option("--C2", help="E w⁴ ≤ C2/p⁴d²; a Gaussian's 3 C1² unless given.")] = None,
    beta1: Annotated[float | None, typer.Option("--beta1", help="β1 of the theorem; the best unless given.")] = None,
    beta2: Annotated[float | None, typer.Option("--beta2", help="β2 of the theorem; the best unless given.")] = None,
    lipschitz: Lipschitz = 1.0,
    radius: Radius = 1.0,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Theorem 3 of Qian & Klabjan: prune 2-D kernels of convolutions at random."""
    from pomona.theory import bounds

    options: dict[str, Any] = {"image": image, "kernel": kernel, "C1": C1, "C2": 3 * C1**2 if C2 is None else C2}
    options |= {"beta1": beta1, "beta2": beta2, "lipschitz": lipschitz, "radius": radius}
    show_theorem(bounds.cnn, parse_counts(widths), alpha, sparsity, epsilon, delta, options, plot, as_json)


@bound.command()
def estimate(
    extension: Annotated[str, typer.Argument(metavar="C.1|C.2|E.1|E.2|E.3", help="The section of the appendix.")],
    widths: Widths = DEFAULT_WIDTHS,
    alpha: Alpha = None,
    sparsity: Sparsity = None,
    law: Annotated[str, typer.Option("--law", help="Distribution of the weights: uniform or gaussian.")] = "gaussian",
    K: Annotated[float, typer.Option("--K", help="Uniform in ±K/√n, or Gaussian of variance K/n.")] = 1.0,
    kernel: Annotated[int, typer.Option("--kernel", min=1, help="q: height and width of a kernel, for C.2.")] = 3,
    correlation: Annotated[
        float, typer.Option("--correlation", help="Correlation of any two weights of a layer, for E.1.")
    ] = 0.0,
    lipschitz: Lipschitz = 1.0,
    radius: Radius = 1.0,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Asymptotic estimates of the appendices of Qian & Klabjan, for wide layers; they are not bounds."""
    from pomona.theory import bounds

    laws: dict[str, Any] = {"uniform": bounds.Uniform, "gaussian": bounds.Gaussian}
    require(law in laws, f"unknown law '{law}': choose one of {', '.join(laws)}.")
    require(correlation == 0 or extension == "E.1", f"--correlation belongs to E.1, not to {extension}: leave it out.")
    options: dict[str, Any] = {"law": laws[law](K), "kernel": kernel, "lipschitz": lipschitz, "radius": radius}
    options["correlation"] = correlation
    sizes = parse_counts(widths)
    found = bounds.estimate(extension, sizes, alpha=alpha, sparsity=sparsity, **options)
    print_values(dataclasses.asdict(found), as_json)
    if plot is None:
        return
    series, shares = {}, [k / 50 for k in range(1, 50)]
    for name in (name for name in bounds.EXTENSIONS if name != "E.1" or law == "gaussian"):
        points = ((s, bounds.estimate(name, sizes, sparsity=s, **options).error) for s in shares)
        series[name] = [(s, error) for s, error in points if 0 < error < math.inf]
    write_chart(
        plot,
        series,
        title="Estimated error over sparsity",
        subtitle="asymptotic, no bound: the extensions of appendices C and E",
        x_label="sparsity",
        y_label="sup ‖f − F‖, about",
        dashed=[name for name in series if name != extension],
        log_axes=(False, True),
    )
