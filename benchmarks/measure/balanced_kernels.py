"""Time products with balanced sparse matrices against dense, CSR, 2:4 and block-sparse products.

    python benchmarks/measure/balanced_kernels.py [--json FILE] [--quick] [--device cpu|cuda]

The three networks of Yao et al. (2019) are timed in the same run. Matrices are 90 % sparse, 3 kept of 32 (90.6 %), and
the other formats keep the same count. Outputs are checked against float64.

On a CPU one thread is used, and every time is given twice: *warm*, each side right after itself, and *cold*, after all
caches were emptied. On a GPU times are those of the device, with its caches emptied. Networks are timed warm and cold;
on a GPU also as they are called, including the host, and image networks also in the channels-last layout.

*dense* is the network as PyTorch runs it, and the base of all ratios. *dense, fused* has no packed layer either, but
its convolutions do their bias and ReLU in one cuDNN kernel where that is faster, like the convolutions that `compress`
leaves dense.

Targets on a CPU (float32, 4096²): batch 1 ≥ 6× dense and ≥ 4× CSR, batch 64 ≥ 5× and ≥ 3×. On an H200 (float16):
batch 1 ≥ 4× cuBLAS at 8192² and ≥ 5× at 16384², ≥ 3× cuSPARSE at both; at 16384² ≥ 3× at batch 8 and 16, and
≥ 1.5× at batch 64. Networks: VGG-16 ≥ 1.31×, the 2×1500 LSTM at 80 % ≥ 3× (the paper has 1.31× and 2.45×).
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from record_file import write_record
from rich.console import Console
from torch import Tensor, nn

from pomona.lab.kernels.benchmark import Benchmark, benchmark_matrices, benchmark_threads, prune_balanced
from pomona.lab.kernels.implementations import BALANCED
from pomona.patterns import Balanced
from pomona.sparse import Compression, compress
from pomona.sparse.compression_report import DENSE_FUSED
from pomona.sparse.layers import PackedLSTM
from pomona.sparse.surgery import fuse_relus
from pomona.sparse.timing import make_cache_flusher, median_seconds

# The sparsities of VGG-16's layers in the paper, conv1_1 to conv5_3 and fc6 to fc8, in per cent.
VGG_SPARSITY = (34, 68, 65, 71, 45, 79, 88, 86, 91, 88, 86, 90, 95, 93, 93, 75)
# Microseconds in the paper, dense and balanced, on its GPU.
PAPER = {"VGG-16": (6814.1, 5213.0), "LSTM 2×1500": (294.1, 120.2), "BiLSTM 1024": (117.9, 83.9)}
CHANNELS_LAST = ", channels last"  # suffix of the name of a timing in the record
# Rows (= columns), batch, the other format, and the smallest ratio of times that meets the target.
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


class RecurrentLayers(nn.Module):
    """The LSTM layers of a language model, for one token at a time."""

    def __init__(self, size: int, layers: int, bidirectional: bool) -> None:
        super().__init__()
        self.lstm = nn.LSTM(size, size, layers, batch_first=True, bidirectional=bidirectional)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


def build_vgg16() -> nn.Sequential:
    """Return VGG-16 for images of 224×224."""
    layers: list[nn.Module] = []
    channels = 3
    for width in (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()] if width else [nn.MaxPool2d(2)]
        channels = width or channels
    layers += [nn.Flatten(), nn.Linear(25088, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1000)]
    return nn.Sequential(*layers)


@torch.no_grad()
def build_pruned_vgg16(block: int) -> nn.Sequential:
    """Return VGG-16 with the sparsity of the paper in each layer."""
    model = build_vgg16()
    weights = [m.weight for m in model if isinstance(m, (nn.Conv2d, nn.Linear))]
    for weight, percent in zip(weights, VGG_SPARSITY, strict=True):
        mask = Balanced(block=block, pad=True).select_masks([weight.abs()], percent / 100)[0]
        weight.copy_(torch.where(mask, weight, 0))
    return model


def build_networks(quick: bool) -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    """Return the three networks of the paper, pruned as in the paper, and the shape of one sample for each."""
    if quick:
        small = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3))
        vgg: tuple[nn.Module, tuple[int, ...]] = (prune_balanced(small, 0.9, 32), (3, 32, 32))
    else:
        vgg = (build_pruned_vgg16(32), (3, 224, 224))
    hidden, width = (150, 128) if quick else (1500, 1024)
    return {
        "VGG-16": vgg,
        "LSTM 2×1500": (prune_balanced(RecurrentLayers(hidden, 2, False), 0.8, 25), (1, hidden)),
        "BiLSTM 1024": (prune_balanced(RecurrentLayers(width, 1, True), 0.875, 32), (1, width)),
    }


def use_linear_layers(model: nn.Module) -> nn.Module:
    """Return a dense copy of a model in which linear layers compute the LSTM.

    On a CPU, torch's LSTM rearranges its weights at every call, so it is not the best dense baseline.
    """
    model = copy.deepcopy(model)
    if isinstance(model, RecurrentLayers):
        model.lstm = PackedLSTM(model.lstm, {})  # nothing is packed  # type: ignore[assignment]
    return model


@torch.inference_mode()
def time_network(
    model: nn.Module, shape: tuple[int, ...], device: str, patience: float
) -> tuple[dict[str, Compression], dict[str, dict[str, float]]]:
    """Return the compression report of each layout of a network at batch 1, and the seconds of each version of it.

    The versions are dense, dense by linear layers, all packed, and compressed, each with warm and cold caches. On a GPU
    there are also fused versions and the channels-last layout, and plain calls are timed besides the device.
    """
    place, kind = torch.device(device), torch.float16 if device == "cuda" else torch.float32
    model = model.to(place, kind).eval()
    x = torch.randn(1, *shape, device=place, dtype=kind)
    with benchmark_threads(1, place):
        small, full = compress(model, x, patience=patience), compress(model, x, policy="all", patience=0)
        sides = {"dense": model, "plain": use_linear_layers(model), "all packed": full, "compressed": small}
        sides |= fuse_dense(model, small.compression)
        calls, reports = {name: partial(side, x) for name, side in sides.items()}, {"": small.compression}
        if x.is_cuda and x.ndim == 4:
            x, model = (it.to(memory_format=torch.channels_last) for it in (x, copy.deepcopy(model)))
            small = compress(model, x, patience=patience)
            sides = {"dense": model, "compressed": small, **fuse_dense(model, small.compression)}
            calls |= {f"{name}{CHANNELS_LAST}": partial(side, x) for name, side in sides.items()}
            reports[CHANNELS_LAST] = small.compression
        race = partial(median_seconds, list(calls.values()), place, patience=patience)
        times = {"seconds": race(), "cold": race(before=make_cache_flusher(place))}
        if x.is_cuda:
            times["called"] = race(include_host=True)
    return reports, {way: dict(zip(calls, medians, strict=True)) for way, medians in times.items()}


def fuse_dense(model: nn.Module, report: Compression) -> dict[str, nn.Module]:
    """Return the dense network with a fused ReLU in the convolutions that gain by it, or {} if none does."""
    names = [layer.name for layer in report.layers if layer.saved]
    return {DENSE_FUSED: fuse_relus(copy.deepcopy(model), names)} if names else {}


def speed_up(times: dict[str, float], over: tuple[str, ...] = ("dense", "plain")) -> float | None:
    """Return the fastest time of the versions `over` divided by the fastest compressed time, over all layouts.

    Return None if no version of `over` was timed.
    """
    versions = {name: name.removesuffix(CHANNELS_LAST) for name in times}
    others = [times[name] for name, version in versions.items() if version in over]
    compressed = [times[name] for name, version in versions.items() if version == "compressed"]
    return min(others) / min(compressed) if others else None


def compare_with_targets(result: Benchmark, device: str) -> list[dict[str, Any]]:
    """Return the targets that this run can answer, and what was reached: with warm caches on a CPU, cold on a GPU."""
    state = "warm" if device == "cpu" else "cold"
    answers = []
    for size, batch, peer, least in TARGETS[device]:
        ours, theirs = (result.seconds(size, size, batch, state, side) for side in (BALANCED, peer))
        if ours is not None and theirs is not None:
            reached = theirs / ours
            answers.append({"size": size, "batch": batch, "peer": peer, "target": least, "reached": reached})
    return answers


def measure_all(device: str, quick: bool) -> dict[str, Any]:
    """Measure matrices and networks, print the results and return them."""
    sizes: Sequence[int] = (256, 512) if quick else (1024, 4096) if device == "cpu" else (4096, 8192, 16384)
    batches = (1, 8, 64) if device == "cpu" else (1, 8, 16, 64)
    patience = 0.2 if quick else 3.0 if device == "cpu" else 0.3  # seconds; sides on a GPU take microseconds
    console = Console(width=140)
    result = benchmark_matrices([(n, n) for n in sizes], batches, device=device, patience=patience)
    console.print(result)
    for answer in (answers := compare_with_targets(result, device)):
        met = "met" if answer["reached"] >= answer["target"] else "MISSED"
        print(
            f"{answer['size']}², batch {answer['batch']}: {answer['reached']:.2f}× {answer['peer']}, "
            f"target {answer['target']}×: {met}"
        )
    with torch.device(device):
        networks = build_networks(quick)
    whole = {}
    for name, (model, shape) in networks.items():
        reports, times = time_network(model, shape, device, 0.2 if quick else 5.0 if device == "cpu" else 0.6)
        paper = PAPER[name][0] / PAPER[name][1]
        found = {layout: report.facts() for layout, report in reports.items()}
        whole[name] = {**found.pop(""), "layouts": found, **times, "paper_ratio": paper}
        for report in reports.values():
            console.print(report)
        for way, taken in times.items():
            key = "" if way == "seconds" else f"{way}_"
            ratio, other = speed_up(taken), speed_up(taken, (DENSE_FUSED,))
            whole[name] |= {f"{key}ratio": ratio, f"{key}fused_ratio": other}
            each = "; ".join(f"{side} {1e6 * seconds:,.1f}" for side, seconds in taken.items())
            context = {"cold": ", with cold caches", "called": ", as called, including the host"}.get(way, "")
            context = context or f"; the paper {paper:.2f}×"
            more = "" if other is None else f", {other:.2f}× the dense network with fused ReLUs"
            print(f"{name}: {ratio:.2f}× the best dense{more} ({each} µs){context}")
    return {"bench": result.facts(), "targets": answers, "workloads": whole, "paper_us": PAPER}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--quick", action="store_true", help="small matrices and networks, to see that the script runs")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    write_record(options.json, **measure_all(options.device, options.quick))


if __name__ == "__main__":
    main()
