"""The benchmark of `pomona bench`: dense, CSR, 2:4, block-sparse, balanced and unstructured products, timed in turns.

All implementations but the dense one keep the same number of weights; balanced and CSR keep the same weights. Every
output is compared with the product in float64 before it is timed; one of another library that is inaccurate is marked.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from operator import itemgetter
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

from ... import models
from ...core.targets import prunable
from ...errors import PomonaError, require
from ...patterns import Balanced
from ...sparse import Compression, compress
from ...sparse.cpu import backend as cpu_backend
from ...sparse.timing import FLUSH_BYTES, flush_caches, median_seconds
from .hardware import processor_name
from .implementations import (
    DENSE,
    ROUNDING_LIMITS,
    Implementation,
    first_line,
    is_rounding,
    make_implementations,
    measure_error,
)

INACCURATE, MARK = "less accurate than rounding explains", " !"
CACHE_STATES = ("warm", "cold")  # each implementation right after itself, or after the caches were flushed


@dataclass(frozen=True)
class Measurement:
    """The time of one implementation for one shape and batch size."""

    rows: int
    columns: int
    batch: int
    state: str
    side: str
    seconds: float | None  # None if the implementation is not available here
    speedup: float | None  # relative to dense
    limit: float | None  # the least time to read its bytes from memory, as a share of the measured time
    nbytes: int | None
    error: float | None  # largest difference from float64, relative to the largest value
    note: str = ""


@dataclass(frozen=True)
class Benchmark:
    """All measurements and the machine they were taken on."""

    rows: tuple[Measurement, ...]
    device: str
    dtype: str
    threads: int
    block: int
    kept: int
    bandwidth: float  # bytes per second when reading memory

    @property
    def sparsity(self) -> float:
        """Return the pruned fraction of the balanced weights."""
        return 1 - self.kept / self.block

    def seconds(self, rows: int, columns: int, batch: int, state: str, side: str) -> float | None:
        """Return the time of one measurement, or None if there is none."""
        key = (rows, columns, batch, state, side)
        return next((r.seconds for r in self.rows if (r.rows, r.columns, r.batch, r.state, r.side) == key), None)

    def facts(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {**asdict(self), "sparsity": self.sparsity}

    def __rich__(self) -> Table:
        title = (
            f"{self.device}, {self.dtype}, {self.kept} of {self.block} kept ({self.sparsity:.1%} zeros), "
            f"memory {self.bandwidth / 1e9:,.0f} GB/s"
        )
        table = Table("matrix", "batch", "caches", "", "µs", "× dense", "of the limit", "bytes", "error", title=title)
        last: tuple[Any, ...] = ()
        for row in self.rows:
            head = (row.rows, row.columns, row.batch, row.state)
            names = (f"{row.rows}×{row.columns}", str(row.batch), row.state) if head != last else ("", "", "")
            if head != last and last:
                table.add_section()
            last = head
            if row.seconds is None:
                table.add_row(*names, row.side, "", "", "", "", row.note)
                continue
            table.add_row(
                *names,
                row.side,
                f"{1e6 * row.seconds:,.1f}",
                f"{row.speedup:.2f}",
                f"{row.limit:.0%}",
                f"{row.nbytes:,}",
                f"{row.error:.0e}" + MARK * (row.note == INACCURATE),
            )
        if any(row.note == INACCURATE for row in self.rows):
            table.caption = f"{MARK.strip()} {INACCURATE}"
        return table


@torch.inference_mode()
def benchmark_matrices(
    shapes: Sequence[tuple[int, int]],
    batches: Sequence[int] = (1,),
    *,
    sparsity: float = 0.9,
    block: int = 32,
    dtype: torch.dtype | None = None,
    device: str = "auto",
    threads: int = 1,
    states: Sequence[str] = CACHE_STATES,
    patience: float = 2.0,
    seed: int = 0,
) -> Benchmark:
    """Time every implementation for every shape and batch size, and return the measurements."""
    place = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    dtype = dtype or (torch.float16 if place.type == "cuda" else torch.float32)
    require(dtype in ROUNDING_LIMITS, f"bench runs in float32, float16 or bfloat16, got {dtype}.")
    states = states if place.type == "cpu" else [s for s in states if s == "cold"] or ["cold"]
    draw = partial(torch.randn, generator=torch.Generator(place).manual_seed(seed), device=place)
    kept = block - Balanced(block=block).pruned_per_block(sparsity, block)
    found: list[Measurement] = []
    with benchmark_threads(threads, place):
        flush = torch.zeros(FLUSH_BYTES, dtype=torch.uint8, device=place)
        bandwidth = measure_bandwidth(place)
        for rows, columns in shapes:
            dense = draw(rows, columns) / columns**0.5
            implementations, missing = make_implementations(dense.to(dtype), block, 1 - kept / block)
            for batch, state in product(batches, states):
                x = draw(batch, columns).to(dtype)
                before = partial(flush_caches, flush) if state == "cold" else None
                head = {"rows": rows, "columns": columns, "batch": batch, "state": state}
                found += time_implementations(implementations, missing, x, head, before, bandwidth, patience)
    return Benchmark(tuple(found), describe_device(place), str(dtype).split(".")[1], threads, block, kept, bandwidth)


def time_implementations(
    implementations: Sequence[Implementation],
    missing: dict[str, str],
    x: Tensor,
    head: dict[str, Any],
    before: Callable[[], Any] | None,
    bandwidth: float,
    patience: float,
) -> Iterator[Measurement]:
    """Validate and time all implementations on one input, and yield the measurements."""
    working, failed = [], dict(missing)
    for implementation in implementations:
        try:
            working.append((implementation, measure_error(implementation, x)))
        except (RuntimeError, NotImplementedError, ValueError) as error:  # torch does not support this shape or device
            failed[implementation.name] = first_line(error)
    times = median_seconds(
        [partial(s.run, s.arrange(x)) for s, _ in working], x.device, before=before, patience=patience
    )
    found: dict[str, list[tuple[float, Implementation, float]]] = {}
    for (implementation, error_size), seconds in zip(working, times, strict=True):
        found.setdefault(implementation.name, []).append((seconds, implementation, error_size))
    dense_seconds = found[DENSE][0][0]
    for variants in found.values():
        accurate = [one for one in variants if is_rounding(one[2], x.dtype)]
        seconds, implementation, error_size = min(accurate or variants, key=itemgetter(0))
        nbytes = implementation.nbytes + x.nbytes + x.shape[0] * head["rows"] * x.element_size()
        yield Measurement(
            **head,
            side=implementation.name,
            seconds=seconds,
            speedup=dense_seconds / seconds,
            limit=nbytes / bandwidth / seconds,
            nbytes=implementation.nbytes,
            error=error_size,
            note="" if is_rounding(error_size, x.dtype) else INACCURATE,
        )
    for name, note in ((name, note) for name, note in failed.items() if name not in found):
        yield Measurement(**head, side=name, seconds=None, speedup=None, limit=None, nbytes=None, error=None, note=note)


def measure_bandwidth(device: torch.device) -> float:
    """Return the bytes per second at which memory is read; a GPU is so fast that it reads more of it."""
    memory = torch.zeros(FLUSH_BYTES * (4 if device.type == "cuda" else 1), dtype=torch.uint8, device=device)
    numbers = memory.view(torch.float32 if memory.is_cuda else torch.int64)
    return memory.nbytes / median_seconds([numbers.sum], device, before=lambda: None, repeats=9)[0]


@contextmanager
def benchmark_threads(threads: int, device: torch.device) -> Iterator[None]:
    """Use so many CPU threads in the block, and silence torch's warnings on sparse tensors."""
    before = torch.get_num_threads()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.set_num_threads(threads)
            yield
    finally:
        torch.set_num_threads(before)


def describe_device(device: torch.device) -> str:
    """Return the name of a device, and for a CPU the instruction set that the kernels use."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    level = cpu_backend.supported_instruction_sets()[0] if cpu_backend.load_library() is not None else "PyTorch only"
    return f"{processor_name()}, {level}"


# ---- whole models


def prune_balanced(model: nn.Module, sparsity: float, block: int) -> nn.Module:
    """Prune the smallest weights of every block in every layer that is pruned by default, and return the model."""
    pattern = Balanced(block=block, pad=True)
    for target in prunable(model).targets:
        weight = target.parameter.detach()
        weight.copy_(torch.where(pattern.select_masks([weight.abs()], sparsity)[0], weight, 0))
    return model.eval()


def benchmark_model(
    model: nn.Module | str,
    shape: Sequence[int] | None = None,
    *,
    batch: int = 1,
    sparsity: float = 0.9,
    block: int = 32,
    dtype: torch.dtype | None = None,
    device: str = "auto",
    threads: int = 1,
    patience: float = 2.0,
) -> Compression:
    """Prune a model in balanced blocks, and time it dense, packed, and as `compress` leaves it.

    `model` is the name of a registered model, or a model that is already pruned, with the shape of one sample.
    """
    place = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    if isinstance(model, str):
        shape = shape or models.info(model).input_shape
        model = prune_balanced(models.build(model), sparsity, block)
    require(shape is not None, "the shape of one sample is needed, such as (3, 224, 224).")
    model = model.to(place, dtype).eval()
    tokens = any(isinstance(m, nn.Embedding) for m in model.modules())
    kind = torch.long if tokens else dtype or torch.float32
    sample = torch.zeros(batch, *shape, dtype=kind) if tokens else torch.randn(batch, *shape, dtype=kind)  # type: ignore
    with benchmark_threads(threads, place):
        return compress(model, sample.to(place), patience=patience).compression  # type: ignore[return-value]


def parse_matrix_shape(text: str) -> tuple[int, int] | None:
    """Return the rows and columns of a text such as "4096x1024", or None if it has another form."""
    found = re.fullmatch(r"(\d+)[x×](\d+)", text)
    if found is None:
        return None
    rows, columns = map(int, found.groups())
    if min(rows, columns) < 1:
        raise PomonaError(f"a matrix has at least one row and column, got '{text}'.")
    return rows, columns
