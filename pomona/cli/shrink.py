"""The `shrink` command: write a run's network without its pruned filters."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .application import app
from .options import Json
from .output import print_json, print_table


@app.command()
def shrink(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run that pruned filters.")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Output file instead of RUN/shrunk.pt2.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write the network of a run without its pruned filters.

    The smaller dense network is a program that torch.export.load runs without pomona. Shows parameters, MACs and the
    time on one CPU thread of both networks.
    """
    from pomona.lab.runs import shrink as lab

    shrunk, file = lab.shrink_run(run, out)
    if as_json:
        print_json({**shrunk.facts(), "file": str(file)})
    else:
        print_table(shrunk)
        print(f"the smaller network is {file}")
