"""Options that several `pomona bound` commands share, and parsers of comma-separated lists."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pomona.errors import PomonaError, require

from ..options import Json

__all__ = [
    "Alpha",
    "Delta",
    "Epsilon",
    "Json",
    "Lipschitz",
    "Plot",
    "Radius",
    "RunFolder",
    "Sparsity",
    "Widths",
    "parse_counts",
    "parse_numbers",
]

Widths = Annotated[str, typer.Option("--widths", metavar="D,D,…", help="d_0, …, d_l: inputs, hidden layers, outputs.")]
Alpha = Annotated[
    float | None, typer.Option("--alpha", help="Prune D^(1−α) of a layer's D weights; 0 is all, 1 is one.")
]
Sparsity = Annotated[float | None, typer.Option("--sparsity", help="The pruned fraction D^−α, instead of --alpha.")]
Epsilon = Annotated[
    float | None,
    typer.Option(
        "--epsilon", help="The allowed error. Solve for the largest sparsity, or with --alpha/--sparsity for the width."
    ),
]
Delta = Annotated[float, typer.Option("--delta", help="The probability with which the bound may fail.")]
Lipschitz = Annotated[float, typer.Option("--lipschitz", help="Lipschitz constant of the activations.")]
Radius = Annotated[float, typer.Option("--radius", help="Radius of the ball of inputs, or side of the cube.")]
Plot = Annotated[Path | None, typer.Option("--plot", metavar="FILE.svg", help="Also write a chart to this file.")]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")]


def parse_numbers(text: str) -> list[float]:
    """Return the numbers of a list such as 1.5,2,1.5; raise PomonaError for other text."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise PomonaError(f"'{text}' is no list of numbers, such as 1.5,2,1.5.") from error


def parse_counts(text: str, least: int = 4) -> tuple[int, ...]:
    """Return the whole numbers of a list such as 64,1024,10; raise PomonaError for fewer than `least` of them."""
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise PomonaError(f"'{text}' is no list of whole numbers, such as 64,1024,1024,10.") from error
    require(
        len(values) >= least and min(values) >= 1,
        f"{least} whole numbers or more are needed, each at least 1, got '{text}'.",
    )
    return values
