"""Balanced sparsity against its peers, and the paper's three workloads, in one run.

    python benchmarks/balanced.py [--json FILE] [--quick] [--device cpu|cuda]

Matrices are 90 % sparse, 3 kept of 32 (90.6 %), and peers keep the same count; outputs are checked against
float64. On a CPU one thread is used and every time is given twice: *warm*, each side right after itself, and
*cold*, after all caches were emptied. On a GPU times are those of the device, with its caches emptied; networks are
timed as they are called, too, with what the host does, and those for images with their channels last, too. *dense* is
the network as PyTorch runs it, and what ratios are over; *dense, fused* has nothing packed either, but convolutions
that do their bias and ReLU in one kernel of cuDNN's where that is faster, as those do that `compress` leaves dense.
Targets on a CPU (float32, 4096²): batch 1 ≥ 6× dense and ≥ 4× CSR, batch 64 ≥ 5× and ≥ 3×. On an H200 (float16):
batch 1 ≥ 4× cuBLAS at 8192² and ≥ 5× at 16384², ≥ 3× cuSPARSE at both; at 16384² ≥ 3× at batch 8 and 16, and
≥ 1.5× at batch 64. Workloads: VGG-16 ≥ 1.31×, the 2×1500 LSTM at 80 % ≥ 3× (the paper has 1.31× and 2.45×).
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import record
import torch
from rich.console import Console
from torch import Tensor, nn

from pomona.lab.kernels.benchmark import Benchmark, benchmark_matrices, benchmark_threads, prune_balanced
from pomona.lab.kernels.implementations import BALANCED
from pomona.patterns import Balanced
from pomona.sparse import Compression, compress
from pomona.sparse.compress import FUSED, fuse
from pomona.sparse.layers import PackedLSTM
from pomona.sparse.timing import race

# The paper's sparsities of VGG-16's layers, conv1_1 to conv5_3 and fc6 to fc8, and its microseconds, dense and
# balanced, on its GPU.
VGG_SPARSITY = (34, 68, 65, 71, 45, 79, 88, 86, 91, 88, 86, 90, 95, 93, 93, 75)
PAPER = {"VGG-16": (6814.1, 5213.0), "LSTM 2×1500": (294.1, 120.2), "BiLSTM 1024": (117.9, 83.9)}
LAST = ", channels last"  # another layout of images
# rows = columns, batch, state, peer, at least so many times faster
TARGETS = {
    "cpu": [(4096, 1, "dense", 6), (4096, 1, "CSR", 4), (4096, 64, "dense", 5), (4096, 64, "CSR", 3)],
    "cuda": [
        (8192, 1, "dense", 4),
        (16384, 1, "dense", 5),
        (8192, 1, "CSR", 3),
        (16384, 1, "CSR", 3),
        (16384, 8, "dense", 3),
        (16384, 16, "dense", 3),
        (16384, 64, "dense", 1.5),
    ],
}


class Step(nn.Module):
    """The recurrent layers of a language model for one token at a time."""

    def __init__(self, size: int, layers: int, bidirectional: bool) -> None:
        super().__init__()
        self.lstm = nn.LSTM(size, size, layers, batch_first=True, bidirectional=bidirectional)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


def vgg16() -> nn.Sequential:
    """The network for images of 224×224."""
    layers: list[nn.Module] = []
    channels = 3
    for width in (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()] if width else [nn.MaxPool2d(2)]
        channels = width or channels
    layers += [nn.Flatten(), nn.Linear(25088, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1000)]
    return nn.Sequential(*layers)


@torch.no_grad()
def pruned_vgg16(block: int) -> nn.Sequential:
    """With the paper's sparsity in each layer."""
    model = vgg16()
    weights = [m.weight for m in model if isinstance(m, (nn.Conv2d, nn.Linear))]
    for weight, percent in zip(weights, VGG_SPARSITY, strict=True):
        mask = Balanced(block=block, pad=True).select_masks([weight.abs()], percent / 100)[0]
        weight.copy_(torch.where(mask, weight, 0))
    return model


def networks(quick: bool) -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    """The three networks of the paper, pruned as there, and the shape of one sample."""
    if quick:
        small = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3))
        vgg: tuple[nn.Module, tuple[int, ...]] = (prune_balanced(small, 0.9, 32), (3, 32, 32))
    else:
        vgg = (pruned_vgg16(32), (3, 224, 224))
    hidden, width = (150, 128) if quick else (1500, 1024)
    return {
        "VGG-16": vgg,
        "LSTM 2×1500": (prune_balanced(Step(hidden, 2, False), 0.8, 25), (1, hidden)),
        "BiLSTM 1024": (prune_balanced(Step(width, 1, True), 0.875, 32), (1, width)),
    }


def plain(model: nn.Module) -> nn.Module:
    """Dense without torch's own LSTM, which rearranges its weights at every call on a CPU: linear layers do it."""
    model = copy.deepcopy(model)
    if isinstance(model, Step):
        model.lstm = PackedLSTM(model.lstm, {})  # nothing is packed  # type: ignore[assignment]
    return model


@torch.inference_mode()
def workload(
    model: nn.Module, shape: tuple[int, ...], device: str, patience: float
) -> tuple[dict[str, Compression], dict[str, dict[str, float]]]:
    """One network at batch 1: what became of its layers, and seconds dense, dense by linear layers, and packed.

    On a GPU convolutions do their ReLU in one kernel, too, images have their channels last, too, and what plain calls
    take is told besides.
    """
    place, kind = torch.device(device), torch.float16 if device == "cuda" else torch.float32
    model = model.to(place, kind).eval()
    x = torch.randn(1, *shape, device=place, dtype=kind)
    with benchmark_threads(1, place):
        small, full = compress(model, x, patience=patience), compress(model, x, keep="all", patience=0)
        sides = {"dense": model, "plain": plain(model), "all packed": full, "compressed": small}
        sides |= fused(model, small.compression)
        calls, reports = {name: partial(side, x) for name, side in sides.items()}, {"": small.compression}
        if x.is_cuda and x.ndim == 4:
            x, model = (it.to(memory_format=torch.channels_last) for it in (x, copy.deepcopy(model)))
            small = compress(model, x, patience=patience)
            sides = {"dense": model, "compressed": small, **fused(model, small.compression)}
            calls |= {f"{name}{LAST}": partial(side, x) for name, side in sides.items()}
            reports[LAST] = small.compression
        ways = {"seconds": False, "called": True} if x.is_cuda else {"seconds": False}
        races = [race(list(calls.values()), place, patience=patience, called=called) for called in ways.values()]
    return reports, {way: dict(zip(calls, times, strict=True)) for way, times in zip(ways, races, strict=True)}


def fused(model: nn.Module, report: Compression) -> dict[str, nn.Module]:
    """Dense, with the convolutions that gain by it doing their ReLU; nothing where there are none."""
    names = [layer.name for layer in report.layers if layer.saved]
    return {FUSED: fuse(copy.deepcopy(model), names)} if names else {}


def gain(times: dict[str, float], over: tuple[str, ...] = ("dense", "plain")) -> float | None:
    """How many times faster the fastest compressed way is than the fastest of others, in any layout."""
    ways = {way: way.removesuffix(LAST) for way in times}
    theirs = [times[way] for way, kind in ways.items() if kind in over]
    return min(theirs) / min(times[way] for way, kind in ways.items() if kind == "compressed") if theirs else None


def verdicts(result: Benchmark, device: str) -> list[dict[str, Any]]:
    """Every target that this run can answer, with what was reached: on a CPU warm, on a GPU cold."""
    state = "warm" if device == "cpu" else "cold"
    answers = []
    for size, batch, peer, least in TARGETS[device]:
        ours, theirs = (result.seconds(size, size, batch, state, side) for side in (BALANCED, peer))
        if ours is not None and theirs is not None:
            reached = theirs / ours
            answers.append({"size": size, "batch": batch, "peer": peer, "target": least, "reached": reached})
    return answers


def run(device: str, quick: bool) -> dict[str, Any]:
    """Measure everything and print it."""
    sizes: Sequence[int] = (256, 512) if quick else (1024, 4096) if device == "cpu" else (4096, 8192, 16384)
    batches = (1, 8, 64) if device == "cpu" else (1, 8, 16, 64)
    patience = 0.2 if quick else 3.0 if device == "cpu" else 0.3  # seconds; sides on a GPU take microseconds
    console = Console(width=140)
    result = benchmark_matrices([(n, n) for n in sizes], batches, device=device, patience=patience)
    console.print(result)
    for answer in (answers := verdicts(result, device)):
        met = "met" if answer["reached"] >= answer["target"] else "MISSED"
        print(
            f"{answer['size']}², batch {answer['batch']}: {answer['reached']:.2f}× {answer['peer']}, "
            f"target {answer['target']}×: {met}"
        )
    with torch.device(device):
        nets = networks(quick)
    whole = {}
    for name, (model, shape) in nets.items():
        reports, times = workload(model, shape, device, 0.2 if quick else 5.0 if device == "cpu" else 0.6)
        paper = PAPER[name][0] / PAPER[name][1]
        found = {layout: report.facts() for layout, report in reports.items()}
        whole[name] = {**found.pop(""), "layouts": found, **times, "paper_ratio": paper}
        for report in reports.values():
            console.print(report)
        for way, taken in times.items():
            key = "" if way == "seconds" else f"{way}_"
            ratio, other = gain(taken), gain(taken, (FUSED,))
            whole[name] |= {f"{key}ratio": ratio, f"{key}fused_ratio": other}
            each = "; ".join(f"{side} {1e6 * seconds:,.1f}" for side, seconds in taken.items())
            told = f"; the paper {paper:.2f}×" if way == "seconds" else ", as called, with the host's time"
            more = "" if other is None else f", {other:.2f}× with its ReLUs in one kernel"
            print(f"{name}: {ratio:.2f}× the best dense{more} ({each} µs){told}")
    return {"bench": result.facts(), "targets": answers, "workloads": whole, "paper_us": PAPER}


def main() -> None:
    parser = argparse.ArgumentParser(description="Balanced sparsity against its peers.")
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--quick", action="store_true", help="small matrices and networks, to see that it runs")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    record.write(options.json, **run(options.device, options.quick))


if __name__ == "__main__":
    main()
