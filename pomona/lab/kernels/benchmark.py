"""What a packed matrix buys in time: dense, CSR, 2:4, block-sparse and balanced, in turns in one run.

All sides but the dense one keep the same count of weights; balanced and CSR the very same. Every output
is checked against the product in float64 before it is timed.
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
from torch.nn.functional import linear

from ... import models
from ...core.targets import prunable
from ...errors import PomonaError, require
from ...patterns import Balanced, Block
from ...sparse import BalancedTensor, Compression, compress
from ...sparse import cpu as native
from ...sparse.timing import FLUSH, empty, race

DENSE, BALANCED = "dense", "balanced"
STATES = ("warm", "cold")  # each side right after itself, or after the caches were emptied
TILES = {"cpu": 8, "cuda": 32}  # blocks of the block-sparse peer
ROUNDING = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}  # largest error over largest value


@dataclass(frozen=True)
class Side:
    """One way to multiply: what it runs, the weight it means, what it reads, and how it wants its input laid out.

    Of several with one name the fastest counts.
    """

    name: str
    run: Callable[[Tensor], Tensor]
    weight: Tensor
    nbytes: int
    arrange: Callable[[Tensor], Tensor] = lambda x: x


@dataclass(frozen=True)
class Measured:
    """The time of one side for one shape and batch."""

    rows: int
    columns: int
    batch: int
    state: str
    side: str
    seconds: float | None  # None where it cannot be done here
    speedup: float | None  # over dense
    limit: float | None  # share of the time that reading its bytes from memory takes at the least
    nbytes: int | None
    error: float | None  # largest difference from float64, over the largest value
    note: str = ""


@dataclass(frozen=True)
class Bench:
    """All rows, and what they were measured on."""

    rows: tuple[Measured, ...]
    device: str
    dtype: str
    threads: int
    block: int
    kept: int
    bandwidth: float  # bytes a second, reading memory

    @property
    def sparsity(self) -> float:
        return 1 - self.kept / self.block

    def seconds(self, rows: int, columns: int, batch: int, state: str, side: str) -> float | None:
        """The time of one row, None where there is none."""
        key = (rows, columns, batch, state, side)
        return next((r.seconds for r in self.rows if (r.rows, r.columns, r.batch, r.state, r.side) == key), None)

    def facts(self) -> dict[str, Any]:
        """Everything as plain values."""
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
                f"{row.error:.0e}",
            )
        return table


@torch.inference_mode()
def bench(
    shapes: Sequence[tuple[int, int]],
    batches: Sequence[int] = (1,),
    *,
    sparsity: float = 0.9,
    block: int = 32,
    dtype: torch.dtype | None = None,
    device: str = "auto",
    threads: int = 1,
    states: Sequence[str] = STATES,
    patience: float = 2.0,
    seed: int = 0,
) -> Bench:
    """Time every side for every shape and batch."""
    place = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    dtype = dtype or (torch.float16 if place.type == "cuda" else torch.float32)
    require(dtype in ROUNDING, f"bench runs in float32, float16 or bfloat16, got {dtype}.")
    states = states if place.type == "cpu" else [s for s in states if s == "cold"] or ["cold"]
    draw = partial(torch.randn, generator=torch.Generator(place).manual_seed(seed), device=place)
    kept = block - Balanced(block=block).pruned_per_block(sparsity, block)
    found: list[Measured] = []
    with using(threads, place):
        flush = torch.zeros(FLUSH, dtype=torch.uint8, device=place)
        bandwidth = reading(place)
        for rows, columns in shapes:
            dense = draw(rows, columns) / columns**0.5
            sides, missing = line_up(dense.to(dtype), block, 1 - kept / block)
            for batch, state in product(batches, states):
                x = draw(batch, columns).to(dtype)
                before = partial(empty, flush) if state == "cold" else None
                head = {"rows": rows, "columns": columns, "batch": batch, "state": state}
                found += compete(sides, missing, x, head, before, bandwidth, patience)
    return Bench(tuple(found), hardware(place), str(dtype).split(".")[1], threads, block, kept, bandwidth)


def compete(
    sides: Sequence[Side],
    missing: dict[str, str],
    x: Tensor,
    head: dict[str, Any],
    before: Callable[[], Any] | None,
    bandwidth: float,
    patience: float,
) -> Iterator[Measured]:
    """Check and time all sides on one input."""
    able, failed = [], dict(missing)
    for side in sides:
        try:
            able.append((side, deviation(side, x)))
        except (RuntimeError, NotImplementedError, ValueError) as error:  # a peer that this shape or device has not
            failed[side.name] = str(error).splitlines()[0][:60]
    times = race([partial(s.run, s.arrange(x)) for s, _ in able], x.device, before=before, patience=patience)
    found: dict[str, list[tuple[float, Side, float]]] = {}
    for (side, deviates), seconds in zip(able, times, strict=True):
        found.setdefault(side.name, []).append((seconds, side, deviates))
    base = found[DENSE][0][0]
    for ways in found.values():
        seconds, side, deviates = min(ways, key=itemgetter(0))
        nbytes = side.nbytes + x.nbytes + x.shape[0] * head["rows"] * x.element_size()
        yield Measured(
            **head,
            side=side.name,
            seconds=seconds,
            speedup=base / seconds,
            limit=nbytes / bandwidth / seconds,
            nbytes=side.nbytes,
            error=deviates,
        )
    for name, why in ((name, why) for name, why in failed.items() if name not in found):
        yield Measured(**head, side=name, seconds=None, speedup=None, limit=None, nbytes=None, error=None, note=why)


def deviation(side: Side, x: Tensor) -> float:
    """How far an output is from the product in float64, which rounding must explain."""
    exact = x.double() @ side.weight.double().T
    error = float((side.run(side.arrange(x)).double() - exact).abs().max() / exact.abs().max())
    if not error <= ROUNDING[x.dtype]:
        raise AssertionError(f"{side.name} is wrong: it differs from float64 by {error:.1e} of the largest value")
    return error


def line_up(weight: Tensor, block: int, sparsity: float) -> tuple[list[Side], dict[str, str]]:
    """Every side for one matrix, and which are missing, and why."""
    mask = Balanced(block=block, pad=True).select_masks([weight.abs()], sparsity)[0]
    pruned = torch.where(mask, weight, 0)
    packed = BalancedTensor.from_dense(pruned, block)
    sides = [
        Side(DENSE, lambda x: linear(x, weight), weight, weight.nbytes),
        *compressed_rows(pruned),
        Side(BALANCED, packed.linear, pruned, packed.nbytes),
    ]
    missing: dict[str, str] = {}
    for name, make in (("block-sparse", block_sparse), ("2:4", two_of_four)):
        try:
            sides.insert(-1, make(name, weight, sparsity))
        except (RuntimeError, NotImplementedError, ValueError) as error:
            missing[name] = str(error).splitlines()[0][:60]
    return sides, missing


def compressed_rows(pruned: Tensor) -> list[Side]:
    """CSR (MKL, cuSPARSE), with indices of 32 bits: for lone vectors, and for several in a row or side by side."""
    csr = pruned.to_sparse_csr()
    csr = torch.sparse_csr_tensor(csr.crow_indices().int(), csr.col_indices().int(), csr.values(), csr.shape)
    nbytes = csr.values().nbytes + csr.col_indices().nbytes + csr.crow_indices().nbytes

    def run(x: Tensor) -> Tensor:
        return (csr @ x[0]).unsqueeze(0) if len(x) == 1 else (csr @ x.T).T

    return [
        Side("CSR", run, pruned, nbytes),
        Side("CSR", lambda turned: (csr @ turned).T, pruned, nbytes, lambda x: x.T.contiguous()),
    ]


def block_sparse(name: str, weight: Tensor, sparsity: float) -> Side:
    """Whole tiles kept or pruned (BSR), as many weights in all."""
    size = TILES[weight.device.type]
    if any(side % size for side in weight.shape):
        raise ValueError(f"tiles of {size}×{size} do not divide it")
    mask = Block((size, size)).select_masks([weight.abs()], sparsity)[0]
    pruned = torch.where(mask, weight, 0)
    bsr = pruned.to_sparse_bsr((size, size))
    nbytes = bsr.values().nbytes + bsr.col_indices().nbytes + bsr.crow_indices().nbytes
    return Side(f"{name} {size}×{size}", lambda x: linear(x, bsr) if x.is_cuda else (bsr @ x.T).T, pruned, nbytes)


def two_of_four(name: str, weight: Tensor, sparsity: float) -> Side:
    """The GPU's own 2:4, whose sparsity is 50 % whatever was asked for."""
    if weight.device.type != "cuda":
        raise ValueError("only a GPU has it")
    from torch.sparse import to_sparse_semi_structured

    pruned = torch.where(Balanced(block=4).select_masks([weight.abs()], 0.5)[0], weight, 0)
    packed = to_sparse_semi_structured(pruned)
    return Side(name, lambda x: linear(x, packed), pruned, weight.nbytes * 9 // 16)


def reading(device: torch.device) -> float:
    """Bytes a second when memory is read from one end to the other; on a GPU more of it, as that takes it so little."""
    memory = torch.zeros(FLUSH * (4 if device.type == "cuda" else 1), dtype=torch.uint8, device=device)
    numbers = memory.view(torch.float32 if memory.is_cuda else torch.int64)
    return memory.nbytes / race([numbers.sum], device, before=lambda: None, repeats=9)[0]


@contextmanager
def using(threads: int, device: torch.device) -> Iterator[None]:
    """So many threads on the CPU, and torch's notes on its sparse tensors left out."""
    before = torch.get_num_threads()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.set_num_threads(threads)
            yield
    finally:
        torch.set_num_threads(before)


def hardware(device: torch.device) -> str:
    """A device in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    from ..runs import environment as env

    level = native.levels()[0] if native.library() is not None else "PyTorch only"
    return f"{env.machine()['cpu']}, {level}"


# ---- whole models


def prune(model: nn.Module, sparsity: float, block: int) -> nn.Module:
    """Cut the smallest weights of every block, once, in every layer that is pruned by default."""
    pattern = Balanced(block=block, pad=True)
    for target in prunable(model).targets:
        weight = target.parameter.detach()
        weight.copy_(torch.where(pattern.select_masks([weight.abs()], sparsity)[0], weight, 0))
    return model.eval()


def bench_model(
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
    """Prune a model of ours or yours in balanced blocks and time it dense, packed, and as `compress` leaves it."""
    place = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    if isinstance(model, str):
        shape = shape or models.info(model).input_shape
        model = prune(models.build(model), sparsity, block)
    require(shape is not None, "the shape of one sample is needed, such as (3, 224, 224).")
    model = model.to(place, dtype).eval()
    tokens = any(isinstance(m, nn.Embedding) for m in model.modules())
    kind = torch.long if tokens else dtype or torch.float32
    sample = torch.zeros(batch, *shape, dtype=kind) if tokens else torch.randn(batch, *shape, dtype=kind)  # type: ignore
    with using(threads, place):
        return compress(model, sample.to(place), patience=patience).compression  # type: ignore[return-value]


def read_shape(text: str) -> tuple[int, int] | None:
    """ "4096x1024" as rows and columns; None where it is no such thing."""
    found = re.fullmatch(r"(\d+)[x×](\d+)", text)
    if found is None:
        return None
    rows, columns = map(int, found.groups())
    if min(rows, columns) < 1:
        raise PomonaError(f"a matrix has at least one row and column, got '{text}'.")
    return rows, columns
