"""The `export` command: write a run's network in a compact file format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pomona.errors import unknown_name_error

from .application import app
from .bench import DTYPES
from .options import Json
from .output import facts_table, print_json, print_table


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")],
    file_format: Annotated[
        str, typer.Option("--format", help="balanced: packed weights; ticket: the seed of random weights and the mask.")
    ] = "balanced",
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FILE", help="Output file instead of RUN/balanced.safetensors or RUN/model.ticket."
        ),
    ] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="Store the values as float16 or bfloat16.")] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            help="faster: leave a layer dense where dense is faster; all: pack every layer.",
            show_default="faster",
        ),
    ] = None,
    keep: Annotated[str | None, typer.Option("--keep", hidden=True)] = None,  # the former name of --policy
    seconds: Annotated[float, typer.Option("--seconds", min=0, help="Time to measure the network.")] = 1.0,
    as_json: Json = False,
) -> None:
    """Write the network of a run in a compact file format.

    `balanced`: for networks with balanced blocks; `pm.load(FILE)` reads it without the training code. The report
    shows which layers remain dense, and why. `ticket`: for runs of edge_popup and iterand; bit for bit the same
    network from `pomona.sparse.ticket.load(FILE).build()`.
    """
    import torch

    from pomona.lab.runs import export as lab

    if file_format not in lab.FORMATS:
        raise unknown_name_error("format", file_format, lab.FORMATS)
    if dtype is not None and dtype not in DTYPES:
        raise unknown_name_error("dtype", dtype, DTYPES)
    if file_format == "ticket":
        made = lab.export_ticket(run, out)
        if as_json:
            print_json(made)
        else:
            size = f"{made['bytes']:,}, 1/{made['ratio']:.1f} of the float32 state"
            print_table(facts_table({**made, "bytes": size, "sparsity": f"{made['sparsity']:.2%}"}))
        return
    report, file = lab.export_balanced(
        run,
        out,
        dtype=getattr(torch, dtype) if dtype else None,
        keep=policy or keep or "faster",
        patience=seconds,
    )
    if as_json:
        print_json({**report.facts(), "file": str(file)})
    else:
        print_table(report)
        print(f"the packed network is {file}")
