"""`pomona bound iterand`: the width of a random network that contains a target (Chijiwa et al., 2021)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.table import Table

from .group import bound
from .options import Json, Plot, parse_counts
from .output import print_result, write_chart

CHART_DRAWS = [round(10 ** (k / 8)) for k in range(33)]


@bound.command()
def iterand(
    widths: Annotated[str, typer.Option("--widths", metavar="D,D,…", help="The target's d_0, …, d_l.")] = "3,4,2",
    epsilon: Annotated[float, typer.Option("--epsilon", help="The allowed error.")] = 0.5,
    delta: Annotated[float, typer.Option("--delta", help="The probability of failure.")] = 0.1,
    R: Annotated[str, typer.Option("--R", metavar="R,R,…", help="Draws of each weight.")] = "1,10,100",
    trial: Annotated[int, typer.Option("--trial", min=0, help="Build the target in this many random networks.")] = 0,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """IteRand: the hidden widths at which a random network contains a target, as printed and as the proof needs."""
    from pomona.theory import iterand as theory

    sizes, rows = parse_counts(widths, 2), []
    for draws in parse_counts(R, 1):
        row: dict[str, Any] = {
            "R": draws,
            "widths": theory.widths(sizes, epsilon, delta, draws),
            "printed": theory.widths(sizes, epsilon, delta, draws, printed=True),
        }
        if trial:
            row["trial"] = dataclasses.asdict(theory.trial(sizes, epsilon, delta, draws, seeds=trial))
        rows.append(row)
    print_result(rows, widths_table(rows), as_json)
    if plot is None:
        return
    series = {
        name: [(draws, max(theory.widths(sizes, epsilon, delta, draws, printed=printed))) for draws in CHART_DRAWS]
        for name, printed in (("needed", False), ("printed", True))
    }
    write_chart(plot, series, title="The widest hidden layer", x_label="draws R of each weight", y_label="width")


def widths_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of the hidden widths, one line for each R, with the results of the trials where there are any."""
    has_trials = "trial" in rows[0]
    table = Table("R", "hidden widths", "printed", *["fits of trials"] * has_trials, box=None)
    for row in rows:
        fits = [f"{row['trial']['fits']} of {row['trial']['seeds']}"] if has_trials else []
        table.add_row(str(row["R"]), *(", ".join(f"{w:,}" for w in row[k]) for k in ("widths", "printed")), *fits)
    return table
