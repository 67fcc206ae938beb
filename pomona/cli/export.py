"""The `export` command: write a run's network to a file to deploy it from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pomona.errors import unknown_name_error

from .application import app
from .bench import DTYPES
from .options import Json
from .output import print_json, print_note, print_table


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")],
    file_format: Annotated[
        str,
        typer.Option(
            "--format", help="onnx, torch-export, safetensors, csr, 2:4, balanced, ticket or openvino; see below."
        ),
    ] = "balanced",
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Output file instead of RUN/model.onnx and the like."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="Store the values as float16 or bfloat16 (balanced), or float16 (openvino)."),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            help="faster: leave a layer dense where dense is faster; all: pack every layer (balanced).",
            show_default="faster",
        ),
    ] = None,
    keep: Annotated[str | None, typer.Option("--keep", hidden=True)] = None,  # the former name of --policy
    pack: Annotated[
        bool | None, typer.Option("--pack/--no-pack", help="Store weights without their zeros (onnx, openvino).")
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option("--tolerance", min=0, help="Largest difference of outputs, relative to the largest output."),
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", min=0, help="Time to measure the network.")] = 1.0,
    as_json: Json = False,
) -> None:
    """Write the network of a run to a file, load the file, compare and time it.

    `onnx`, `torch-export` and `openvino` run without Pomona and take any batch size. `safetensors`, `csr` and `2:4`
    hold the state, all of it or without zeros; `balanced` holds packed weights: `pm.load(FILE)` reads them without
    the training code. `ticket`: for runs of edge_popup and iterand; bit for bit the same network from
    `pomona.sparse.ticket.load(FILE).build()`. A note says what was not packed, and what became neither smaller nor
    faster.
    """
    import torch

    from pomona.lab.runs.export import export_run

    if dtype is not None and dtype not in DTYPES:
        raise unknown_name_error("dtype", dtype, DTYPES)
    given = {"dtype": getattr(torch, dtype) if dtype else None, "policy": policy or keep, "pack": pack}
    options = {name: value for name, value in given.items() if value is not None}
    report = export_run(run, file_format, out, note=print_note, tolerance=tolerance, seconds=seconds, **options)
    if as_json:
        print_json(report.facts())
    else:
        print_table(report)
