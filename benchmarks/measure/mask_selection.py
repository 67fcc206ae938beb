"""Time exact mask selection against torch.topk, torch.kthvalue and a full sort.

    python benchmarks/measure/mask_selection.py [--json PATH] [--quick]

Each alternative makes its mask too. Repeats are interleaved and medians printed. In the same run every mask is checked:
Pomona's entry by entry against that of the stable sort, the others by their counts and lowest scores, because they may
break ties in any way.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from record_file import write_record
from torch import Tensor

from pomona.patterns.selection import select_largest, select_largest_per_row

SIZES = (25_600_000, 270_000)
SPARSITIES = (0.5, 0.9, 0.99)
ROWS = ((6_400_000, 4, 2), (800_000, 32, 3))  # 2:4, and balanced blocks of 32 at 90 %
REPEATS = 21
MAX_SECONDS = 1.5  # a method that has used this time in total is not repeated again

SelectionMethod = Callable[[Tensor, int], Tensor]


def mask_from_indices(scores: Tensor, indices: Tensor) -> Tensor:
    """Return a mask of the shape of `scores` that keeps the entries at `indices`."""
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, indices, True)


def topk(scores: Tensor, keep: int) -> Tensor:
    """Select with torch.topk."""
    return mask_from_indices(scores, scores.topk(keep, sorted=False).indices)


def kthvalue(scores: Tensor, keep: int) -> Tensor:
    """Select with torch.kthvalue as a threshold, which keeps all ties."""
    return scores >= scores.kthvalue(scores.shape[-1] - keep + 1, keepdim=True).values


def sort(scores: Tensor, keep: int) -> Tensor:
    """Select with a stable sort."""
    return mask_from_indices(scores, scores.sort(descending=True, stable=True).indices[..., :keep])


WHOLE: dict[str, SelectionMethod] = {
    "pomona": lambda scores, keep: select_largest([scores], keep)[0],
    "topk": topk,
    "kthvalue": kthvalue,
    "sort": sort,
}
BY_ROW: dict[str, SelectionMethod] = {"pomona": select_largest_per_row, "topk": topk, "sort": sort}


def time_selection(method: SelectionMethod, scores: Tensor, keep: int) -> float:
    """Return the seconds of one selection, on a GPU those of the device."""
    if not scores.is_cuda:
        start = time.perf_counter()
        method(scores, keep)
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(4_000_000)  # all kernels are queued in these milliseconds, so only the device's time counts
    begin.record()
    method(scores, keep)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000


def validate_masks(methods: dict[str, SelectionMethod], scores: Tensor, keep: int) -> None:
    """Raise SystemExit at a wrong mask. kthvalue keeps all ties, so it may keep more entries."""
    expected = sort(scores, keep)
    lowest = torch.where(expected, scores, torch.inf).amin(-1)
    for name, method in methods.items():
        mask = method(scores, keep)
        extra = mask.sum(-1) - keep
        right = torch.equal(torch.where(mask, scores, torch.inf).amin(-1), lowest)
        right &= bool((extra >= 0).all()) if name == "kthvalue" else not extra.any()
        if not right or (name == "pomona" and not torch.equal(mask, expected)):
            raise SystemExit(f"the mask of {name} is wrong")


def measure_case(case: str, methods: dict[str, SelectionMethod], scores: Tensor, keep: int) -> dict[str, str | float]:
    """Return the median milliseconds of each method. The validation compiles and warms up everything."""
    validate_masks(methods, scores, keep)
    times: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(REPEATS):
        for name, method in methods.items():
            if sum(times[name]) < MAX_SECONDS:
                times[name].append(time_selection(method, scores, keep))
    medians = {name: 1000 * statistics.median(taken) for name, taken in times.items()}
    return {"device": scores.device.type, "case": case, **medians}


def compare_on_device(device: str, quick: bool = False) -> list[dict[str, str | float]]:
    """Return the times of all cases on one device."""
    generator = torch.Generator().manual_seed(0)
    results = []
    for size in SIZES[1:] if quick else SIZES:
        scores = torch.randn(size, generator=generator).abs_().to(device)
        for sparsity in SPARSITIES:
            keep = size - round(sparsity * size)
            results.append(measure_case(f"{size:,} at {sparsity:.0%}", WHOLE, scores, keep))
    for rows, columns, keep in () if quick else ROWS:
        scores = torch.randn(rows, columns, generator=generator).abs_().to(device)
        results.append(measure_case(f"{rows:,} × {columns}, {keep} kept", BY_ROW, scores, keep))
    return results


def compare_on_all_devices(quick: bool = False) -> list[dict[str, str | float]]:
    """Compare on one CPU thread and on the GPU, if there is one, print the table and return its rows."""
    torch.set_num_threads(1)
    results = compare_on_device("cpu", quick) + (compare_on_device("cuda", quick) if torch.cuda.is_available() else [])
    print(f"{'':6}{'selection, median ms':28}" + "".join(f"{name:>10}" for name in WHOLE) + "  fastest other / pomona")
    for result in results:
        taken = {name: float(result[name]) for name in WHOLE if name in result}
        gain = min(value for name, value in taken.items() if name != "pomona") / taken["pomona"]
        cells = "".join(f"{taken[name]:10.3f}" if name in taken else f"{'':10}" for name in WHOLE)
        print(f"{result['device']:6}{result['case']:28}{cells}{gain:23.1f}×")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--quick", action="store_true", help="the small sizes only, to see that the script runs")
    options = parser.parse_args()
    write_record(options.json, selection=compare_on_all_devices(options.quick))


if __name__ == "__main__":
    main()
