"""`shrink`: what becomes of a finished run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .base import Json, app, dump, show

if TYPE_CHECKING:
    pass


@app.command()
def shrink(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run that pruned filters.")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="The smaller network's file instead of RUN/shrunk.pt2.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Take a run's removed filters out for good.

    Writes the smaller dense network as a program that torch.export.load runs without pomona, and shows
    parameters, MACs and the time of both on one CPU thread.
    """
    from pomona.lab.runs import shrink as lab

    shrunk, file = lab.shrink_run(run, out)
    if as_json:
        dump({**shrunk.facts(), "file": str(file)})
    else:
        show(shrunk)
        print(f"the smaller network is {file}")
