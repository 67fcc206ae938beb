"""Tables 2 and 3 of Qian & Klabjan (ICML 2021): the constants of Lemmas 3 and 4, measured on random matrices.

Each row draws as many matrices as the paper did.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from .cells import PAPER, Cell, Progress, make_cell
from .printed import LEMMA4_TERMS, PRINTED_TABLE2, PRINTED_TABLE3, QUANTILES

CHUNK_ENTRIES = 2**23  # matrix entries held in memory at a time


def table2(seed: int = 0, progress: Progress | None = None, *, runs: int = 1000, widest: int = 512) -> dict[str, Any]:
    """Table 2: the norm of a uniform random matrix, and the c0 of Lemma 3.

    K is only a scale, so the rows for both values of K share their draws. δ0 = log(2/(1 − q)) / 4n is a formula and is
    not measured. Rows with a side longer than `widest` are left out.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = [(shape, both) for shape, both in PRINTED_TABLE2.items() if max(shape) <= widest]
    cells: list[Cell] = []
    for done, ((n1, n2), both) in enumerate(rows, 1):
        scale = 1 / math.sqrt(max(n1, n2))
        batches = draw_matrices(lambda *s: torch.rand(*s, generator=generator) * 2 - 1, runs, n1, n2)
        unit_norms = torch.cat([spectral_norms(scale * batch) for batch in batches])
        for K, name, printed in ((1.0, "1", both[0]), (math.sqrt(3), "√3", both[1])):
            norms, where = K * unit_norms, {"n1": n1, "n2": n2, "K": name}
            mean, std = float(norms.mean()), float(norms.std())
            setting: dict[str, Any] = {**where, "quantity": "‖B‖"}
            cells.append(make_cell(f"{n1}×{n2}", "uniform", setting, mean, std, runs, *printed[:2]))
            for q, paper in zip(QUANTILES, printed[2:], strict=True):
                delta0 = round(math.log(2 / (1 - q)) / (4 * max(n1, n2)), 3)
                setting = {**where, "quantity": "c0", "q": q, "delta0": delta0}
                cells.append(make_cell(f"{n1}×{n2}", "uniform", setting, float(norms.quantile(q)), None, runs, paper))
        if progress:
            progress(done, len(rows))
    return {"title": f"Constants of Lemma 3, {runs} matrices", "paper": f"{PAPER}, Table 2", "cells": cells}


def table3(seed: int = 0, progress: Progress | None = None, *, runs: int = 500, widest: int = 512) -> dict[str, Any]:
    """Table 3: the constant of Latała's inequality (Lemma 4).

    The expectations of w² and w⁴ are means over the matrices, entry by entry, as in the paper. The maximum over rows is
    therefore slightly above the true one. Rows with d above `widest` are left out.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = [(key, printed) for key, printed in PRINTED_TABLE3.items() if key[2] <= widest]
    cells: list[Cell] = []
    for done, ((law, alpha, d), printed) in enumerate(rows, 1):
        measured = measure_lemma4(draw_table3_matrices(law, alpha, d, runs, generator), d)
        sparsity = 0.0 if alpha is None else 1 - math.exp(-math.floor(d ** (2 - alpha)) / d**2)
        for name, paper in zip(LEMMA4_TERMS, printed, strict=True):
            setting = {"d": d, "alpha": alpha, "quantity": name}
            method = "random" if alpha else "none"
            cells.append(make_cell(law, method, setting, *measured[name], runs, paper, sparsity=sparsity))
        if progress:
            progress(done, len(rows))
    notes = (
        "The rows with α are said to align with (19), where A is what ⌊d^(2−2α)⌋ draws remove. They hold what is kept "
        "after ⌊d^(2−α)⌋ draws: with replacement a share exp(−d^−α) of the entries is left, whose root is the row norm "
        "(0.617 at d = 32, α = 0.01, where the removed part has 0.787)."
    )
    return {
        "title": f"The constant of Lemma 4, {runs} matrices",
        "paper": f"{PAPER}, Table 3",
        "notes": notes,
        "cells": cells,
    }


def draw_matrices(draw: Callable[..., Tensor], runs: int, rows: int, columns: int) -> Iterator[Tensor]:
    """Yield `runs` random matrices in float64, in batches that fit into memory."""
    batch_size = max(1, CHUNK_ENTRIES // (rows * columns))
    for start in range(0, runs, batch_size):
        yield draw(min(batch_size, runs - start), rows, columns).double()


def draw_table3_matrices(
    law: str, alpha: float | None, d: int, runs: int, generator: torch.Generator
) -> Iterator[Tensor]:
    """Yield batches of the matrices behind one row of Table 3; with an α, ⌊d^(2−α)⌋ drawn entries are set to zero."""

    def draw(*shape: int) -> Tensor:
        if law.startswith("U"):
            return (torch.rand(*shape, generator=generator) * 2 - 1) * math.sqrt(3 / d)
        return torch.randn(*shape, generator=generator) * math.sqrt((3 if "3/d" in law else 1) / d)

    for batch in draw_matrices(draw, runs, d, d):
        if alpha is not None:
            positions = torch.randint(d * d, (len(batch), math.floor(d ** (2 - alpha))), generator=generator)
            batch.flatten(1).scatter_(1, positions, 0.0)
        yield batch


def spectral_norms(batch: Tensor) -> Tensor:
    """Return ‖A‖₂ of each matrix, from the eigenvalues of the smaller Gram matrix."""
    gram = batch @ batch.mT if batch.shape[1] <= batch.shape[2] else batch.mT @ batch
    return torch.linalg.eigvalsh(gram)[:, -1].sqrt()


def measure_lemma4(batches: Iterable[Tensor], d: int) -> dict[str, tuple[float, float]]:
    """Return the three terms of Lemma 4, E‖A‖ and their ratio C, each with the standard deviation of one matrix."""
    count, fourths, norms = 0, [], []
    sums = {axis: torch.zeros(2, d, dtype=torch.float64) for axis in (1, 2)}
    for batch in batches:
        count += len(batch)
        squares = batch**2
        for axis, total in sums.items():
            along = squares.sum(3 - axis)
            total += torch.stack((along.sum(0), (along**2).sum(0)))
        fourths.append((squares**2).sum((1, 2)))
        norms.append(spectral_norms(batch))
    measured: dict[str, tuple[float, float]] = {}
    for name, total in (("rows", sums[1]), ("columns", sums[2])):
        mean, square = (total / count)[:, int(total[0].argmax())].tolist()
        measured[name] = math.sqrt(mean), math.sqrt(max(0.0, square - mean**2)) / (2 * math.sqrt(mean))
    fourth, norm = torch.cat(fourths), torch.cat(norms)
    mean = float(fourth.mean())
    measured["fourth"] = mean**0.25, float(fourth.std()) / (4 * mean**0.75)
    measured["norm"] = float(norm.mean()), float(norm.std())
    right_side = sum(measured[name][0] for name in LEMMA4_TERMS[:3])
    ratio = measured["norm"][0] / right_side
    spread = math.hypot(measured["norm"][1], *(ratio * measured[name][1] for name in LEMMA4_TERMS[:3])) / right_side
    return measured | {"C": (ratio, spread)}
