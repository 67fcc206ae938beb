"""Exact mask selection against torch.topk, torch.kthvalue and a full sort, from one run.

Each peer makes its mask too. Repeats are interleaved and medians printed. In the same run every mask is
checked: ours against the stable sort's, entry by entry; the others', to which ties leave a choice, by
their counts and lowest scores.

    python benchmarks/selection.py [--json PATH]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import record
import torch
from torch import Tensor

from pomona.patterns.selection import select_largest, select_largest_per_row

SIZES = (25_600_000, 270_000)
SPARSITIES = (0.5, 0.9, 0.99)
ROWS = ((6_400_000, 4, 2), (800_000, 32, 3))  # 2:4, and balanced blocks of 32 at 90 %
REPEATS, PATIENCE = 21, 1.5  # a method that has taken this many seconds gets no more turns

Method = Callable[[Tensor, int], Tensor]


def scatter(scores: Tensor, indices: Tensor) -> Tensor:
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, indices, True)


def topk(scores: Tensor, keep: int) -> Tensor:
    return scatter(scores, scores.topk(keep, sorted=False).indices)


def kthvalue(scores: Tensor, keep: int) -> Tensor:
    return scores >= scores.kthvalue(scores.shape[-1] - keep + 1, keepdim=True).values


def sort(scores: Tensor, keep: int) -> Tensor:
    return scatter(scores, scores.sort(descending=True, stable=True).indices[..., :keep])


WHOLE: dict[str, Method] = {
    "pomona": lambda scores, keep: select_largest([scores], keep)[0],
    "topk": topk,
    "kthvalue": kthvalue,
    "sort": sort,
}
BY_ROW: dict[str, Method] = {"pomona": select_largest_per_row, "topk": topk, "sort": sort}


def seconds(method: Method, scores: Tensor, keep: int) -> float:
    if not scores.is_cuda:
        start = time.perf_counter()
        method(scores, keep)
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(4_000_000)  # some milliseconds in which all launches are queued: the device's time counts
    begin.record()
    method(scores, keep)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000


def check(methods: dict[str, Method], scores: Tensor, keep: int) -> None:
    """Refuse a wrong mask. kthvalue keeps all ties, so it alone may keep more."""
    expected = sort(scores, keep)
    lowest = torch.where(expected, scores, torch.inf).amin(-1)
    for name, method in methods.items():
        mask = method(scores, keep)
        extra = mask.sum(-1) - keep
        right = torch.equal(torch.where(mask, scores, torch.inf).amin(-1), lowest)
        right &= bool((extra >= 0).all()) if name == "kthvalue" else not extra.any()
        if not right or (name == "pomona" and not torch.equal(mask, expected)):
            raise SystemExit(f"the mask of {name} is wrong")


def measure(case: str, methods: dict[str, Method], scores: Tensor, keep: int) -> dict[str, str | float]:
    """Median milliseconds of each method; the check before has compiled and warmed everything."""
    check(methods, scores, keep)
    times: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(REPEATS):
        for name, method in methods.items():
            if sum(times[name]) < PATIENCE:
                times[name].append(seconds(method, scores, keep))
    medians = {name: 1000 * statistics.median(taken) for name, taken in times.items()}
    return {"device": scores.device.type, "case": case, **medians}


def compare(device: str, quick: bool = False) -> list[dict[str, str | float]]:
    generator = torch.Generator().manual_seed(0)
    results = []
    for size in SIZES[1:] if quick else SIZES:
        scores = torch.randn(size, generator=generator).abs_().to(device)
        for sparsity in SPARSITIES:
            keep = size - round(sparsity * size)
            results.append(measure(f"{size:,} at {sparsity:.0%}", WHOLE, scores, keep))
    for rows, columns, keep in () if quick else ROWS:
        scores = torch.randn(rows, columns, generator=generator).abs_().to(device)
        results.append(measure(f"{rows:,} × {columns}, {keep} kept", BY_ROW, scores, keep))
    return results


def run(quick: bool = False) -> list[dict[str, str | float]]:
    """Compare on every device there is, on one CPU thread, and print the table."""
    torch.set_num_threads(1)
    results = compare("cpu", quick) + (compare("cuda", quick) if torch.cuda.is_available() else [])
    print(f"{'':6}{'selection, median ms':28}" + "".join(f"{name:>10}" for name in WHOLE) + "  quickest peer / pomona")
    for result in results:
        taken = {name: float(result[name]) for name in WHOLE if name in result}
        gain = min(value for name, value in taken.items() if name != "pomona") / taken["pomona"]
        cells = "".join(f"{taken[name]:10.3f}" if name in taken else f"{'':10}" for name in WHOLE)
        print(f"{result['device']:6}{result['case']:28}{cells}{gain:23.1f}×")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description="Exact mask selection against its peers.")
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--quick", action="store_true", help="the small sizes only, to see that it runs")
    options = parser.parse_args()
    record.write(options.json, selection=run(options.quick))


if __name__ == "__main__":
    main()
