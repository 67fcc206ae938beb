"""The `bench` command: time dense and sparse kernels."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from pomona.errors import PomonaError, require, unknown_name_error

from .application import app
from .options import Json
from .output import print_json, print_note, print_table

DTYPES = ("float32", "float16", "bfloat16")
DEVICES = ("auto", "cpu", "cuda")
DEFAULT_SHAPES = ("1024x1024", "4096x4096")


@app.command()
def bench(
    what: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SHAPE|MODEL]...", help="Matrices such as 4096x4096, or networks such as lstm_lm."),
    ] = None,
    batch: Annotated[str, typer.Option("--batch", metavar="N,N", help="Batch sizes, separated by commas.")] = "1",
    sparsity: Annotated[float, typer.Option("--sparsity", min=0, max=0.999, help="Share of zeros.")] = 0.9,
    block: Annotated[int, typer.Option("--block", min=2, help="Width of a balanced block.")] = 32,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="Data type; by default float32 on a CPU and float16 on a GPU.")
    ] = None,
    device: Annotated[str, typer.Option("--device", help="cpu or cuda; auto selects CUDA if available.")] = "auto",
    threads: Annotated[int, typer.Option("--threads", min=1, help="Number of CPU threads.")] = 1,
    seconds: Annotated[float, typer.Option("--seconds", min=0, help="Time to measure each case.")] = 2.0,
    as_json: Json = False,
) -> None:
    """Time dense and sparse kernels side by side.

    Compares dense, CSR, 2:4, block-sparse, balanced and unstructured kernels. Every output is compared with a float64
    reference. A network is pruned in balanced blocks, and timed layer by layer and as a whole. Without arguments:
    1024x1024 and 4096x4096.
    """
    import torch

    from pomona.lab.kernels import benchmark as lab

    batches = parse_batch_sizes(batch)
    if dtype is not None and dtype not in DTYPES:
        raise unknown_name_error("dtype", dtype, DTYPES)
    if device not in DEVICES:
        raise unknown_name_error("device", device, DEVICES)
    require(device != "cuda" or torch.cuda.is_available(), "there is no CUDA device here: use --device cpu.")
    what = what or list(DEFAULT_SHAPES)
    shapes = [shape for shape in map(lab.parse_matrix_shape, what) if shape is not None]
    names = [name for name in what if lab.parse_matrix_shape(name) is None]
    options: dict[str, Any] = {
        "sparsity": sparsity,
        "block": block,
        "dtype": getattr(torch, dtype) if dtype else None,
        "device": device,
        "threads": threads,
        "patience": seconds,
    }
    results: list[Any] = [lab.benchmark_matrices(shapes, batches, **options)] if shapes else []
    for name in names:
        results += [lab.benchmark_model(name, batch=size, **options) for size in batches]
    if as_json:
        print_json([result.facts() for result in results])
        return
    for result in results:
        print_table(result)
    if lab.cpu_backend.load_library() is None:
        print_note(
            "the native kernels could not be built (is a C compiler installed?): the slower PyTorch fallback was "
            "timed on the CPU."
        )


def parse_batch_sizes(text: str) -> list[int]:
    """Return the batch sizes in a text such as "1,8,64"; raise PomonaError unless all are at least 1."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise PomonaError(f"--batch takes whole numbers such as 1,8,64, got '{text}'.") from error
    require(min(numbers) >= 1, f"--batch takes numbers of 1 or more, got '{text}'.")
    return numbers
