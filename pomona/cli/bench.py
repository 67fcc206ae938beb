"""`bench` and `export`: what a packed network buys, and the file that holds it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from pomona.errors import PomonaError, require, unknown_name_error

from .base import Json, app, dump, facts, note, show

DTYPES = ("float32", "float16", "bfloat16")


@app.command()
def bench(
    what: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SHAPE|MODEL]...", help="Matrices such as 4096x4096, or networks such as lstm_lm."),
    ] = None,
    batch: Annotated[str, typer.Option("--batch", metavar="N,N", help="How many vectors or samples at a time.")] = "1",
    sparsity: Annotated[float, typer.Option("--sparsity", min=0, max=0.999, help="The share of zeros.")] = 0.9,
    block: Annotated[int, typer.Option("--block", min=2, help="The width of a block.")] = 32,
    dtype: Annotated[str | None, typer.Option("--dtype", help="float32 on a CPU, float16 on a GPU.")] = None,
    device: Annotated[str, typer.Option("--device", help="cpu or cuda; auto takes CUDA where there is one.")] = "auto",
    threads: Annotated[int, typer.Option("--threads", min=1, help="Threads on a CPU.")] = 1,
    seconds: Annotated[float, typer.Option("--seconds", min=0, help="How long each case is measured.")] = 2.0,
    as_json: Json = False,
) -> None:
    """Time dense, CSR, 2:4, block-sparse and balanced, in one run.

    Every output is checked against float64. A network is pruned in balanced blocks, and timed layer by layer
    and as a whole. Without arguments: 1024x1024 and 4096x4096.
    """
    import torch

    from pomona.lab.kernels import benchmark as lab

    batches = whole_numbers(batch)
    if dtype is not None and dtype not in DTYPES:
        raise unknown_name_error("dtype", dtype, DTYPES)
    kind = getattr(torch, dtype) if dtype else None
    if device not in ("auto", "cpu", "cuda"):
        raise unknown_name_error("device", device, ("auto", "cpu", "cuda"))
    require(device != "cuda" or torch.cuda.is_available(), "there is no CUDA device here: use --device cpu.")
    what = what or ["1024x1024", "4096x4096"]
    shapes = [shape for shape in map(lab.read_shape, what) if shape is not None]
    names = [name for name in what if lab.read_shape(name) is None]
    options: dict[str, Any] = {
        "sparsity": sparsity,
        "block": block,
        "dtype": kind,
        "device": device,
        "threads": threads,
        "patience": seconds,
    }
    results: list[Any] = [lab.bench(shapes, batches, **options)] if shapes else []
    for name in names:
        results += [lab.bench_model(name, batch=size, **options) for size in batches]
    if as_json:
        dump([result.facts() for result in results])
        return
    for result in results:
        show(result)
    if lab.native.library() is None:
        note("the native kernels could not be built (is there a C compiler?): on a CPU, PyTorch does the work, slowly.")


def whole_numbers(text: str) -> list[int]:
    """ "1,8,64" as numbers of 1 or more."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise PomonaError(f"--batch takes whole numbers such as 1,8,64, got '{text}'.") from error
    require(min(numbers) >= 1, f"--batch takes numbers of 1 or more, got '{text}'.")
    return numbers


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
    format: Annotated[
        str, typer.Option("--format", help="balanced: packed weights; ticket: the seed of random ones and the mask.")
    ] = "balanced",
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="The file instead of RUN/balanced.safetensors or RUN/model.ticket."),
    ] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="Store the values as float16 or bfloat16.")] = None,
    keep: Annotated[
        str, typer.Option("--keep", help="faster: leave a layer dense where that is faster; all: pack every one.")
    ] = "faster",
    seconds: Annotated[float, typer.Option("--seconds", min=0, help="How long the network is timed.")] = 1.0,
    as_json: Json = False,
) -> None:
    """Write a run's network in a form of its own.

    `balanced`: for networks with balanced blocks, which `pm.load(FILE)` reads without the training code; the report
    says which layers stayed dense, and why. `ticket`: for runs of edge_popup and iterand, read by
    `pomona.sparse.ticket.load(FILE).build()`, bit for bit.
    """
    import torch

    from pomona.lab.runs import export as lab

    if format not in lab.FORMATS:
        raise unknown_name_error("format", format, lab.FORMATS)
    if dtype is not None and dtype not in DTYPES:
        raise unknown_name_error("dtype", dtype, DTYPES)
    if format == "ticket":
        made = lab.ticket(run, out)
        if as_json:
            dump(made)
        else:
            share = f"1/{made['ratio']:.1f} of the float32 state"
            show(facts({**made, "bytes": f"{made['bytes']:,}, {share}", "sparsity": f"{made['sparsity']:.2%}"}))
        return
    report, file = lab.balanced(run, out, dtype=getattr(torch, dtype) if dtype else None, keep=keep, patience=seconds)
    if as_json:
        dump({**report.facts(), "file": str(file)})
    else:
        show(report)
        print(f"the packed network is {file}")
