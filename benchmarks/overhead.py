"""What pruning costs: the step with DPF over the dense step, on the same loop, in one run.

    python benchmarks/overhead.py [--json FILE] [--quick]

Dense and pruned models take turns, sixteen steps at a time (one mask update of DPF in each turn),
and the medians of their turns are compared. On CPU one thread is used. Then the exact selection of
a global mask over 25.6 million weights against torch's own ways (benchmarks/selection.py).
Targets: DPF ≤ 1.03× dense on an NVIDIA H200, ≤ 1.10× on CPU; selection never slower than the
quickest of topk, kthvalue and sort.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import record
import selection
import torch
from recording import recorded
from torch import nn

import pomona as pm

EVERY = 16  # DPF's period: each turn holds exactly one mask update


def loop(model: nn.Module, x: torch.Tensor, y: torch.Tensor, prune: bool, turns: int) -> Callable[[], None]:
    """A plain training loop on one batch; each call is one turn of sixteen steps."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
    if prune:
        # Long enough that the mask never comes to rest while it is measured.
        pm.DPF(sparsity=0.9, every=EVERY).attach(model, optimizer, total_steps=4 * turns * EVERY)

    def turn() -> None:
        for _ in range(EVERY):
            with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
                loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return turn


def captured(model: nn.Module, x: torch.Tensor, y: torch.Tensor, prune: bool, turns: int) -> Callable[[], None]:
    """The same step in a CUDA graph, with `tick` after each replay."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
    pruner = pm.DPF(sparsity=0.9, every=EVERY)
    if prune:
        pruner.attach(model, optimizer, total_steps=4 * turns * EVERY)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    replay = recorded(step, optimizer)

    def turn() -> None:
        for _ in range(EVERY):
            replay()
            if prune:
                pruner.tick()

    return turn


def measure(make: Callable[..., Callable[[], None]], name: str, batch: int, size: int, turns: int, device: str) -> dict:
    """Seconds a step of the dense and the pruned loop, taking turns."""
    x = torch.randn(batch, 3, size, size, device=device)
    y = torch.randint(0, 10, (batch,), device=device)
    loops = {}
    for prune in (False, True):
        torch.manual_seed(0)
        model = pm.models.build(name, num_classes=10).to(device)
        if device == "cuda":
            model = model.to(memory_format=torch.channels_last)
        loops[prune] = make(model, x, y, prune, turns)
    times: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(turns + 1):
        for prune in (False, True) if turn % 2 else (True, False):
            synchronize(device)
            start = time.perf_counter()
            loops[prune]()
            synchronize(device)
            if turn:  # the first one warms up
                times[prune].append((time.perf_counter() - start) / EVERY)
    dense, pruned = (statistics.median(times[prune]) for prune in (False, True))
    # Each turn's own ratio, so that a slow spell of the machine touches both sides.
    ratios = [b / a for a, b in zip(times[False], times[True], strict=True)]
    return {
        "model": name,
        "loop": make.__name__,
        "batch": batch,
        "dense_ms": dense * 1e3,
        "dpf_ms": pruned * 1e3,
        "ratio": statistics.median(ratios),
        "turns": turns,
    }


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--quick", action="store_true", help="few turns, to see that it runs")
    options = parser.parse_args()
    rows = []
    if torch.cuda.is_available():
        turns = 3 if options.quick else 40
        rows.append(measure(loop, "resnet20", 128, 32, turns, "cuda"))
        rows.append(measure(captured, "resnet20", 128, 32, turns, "cuda"))
        rows.append(measure(loop, "resnet50", 64, 224, max(turns // 4, 3), "cuda"))
    else:
        torch.set_num_threads(1)
        rows.append(measure(loop, "resnet20", 32, 32, 2 if options.quick else 7, "cpu"))
    print(f"{'model':10} {'loop':10} {'batch':>6} {'dense ms':>10} {'DPF ms':>10} {'ratio':>7}")
    for row in rows:
        print(
            f"{row['model']:10} {row['loop']:10} {row['batch']:6d} {row['dense_ms']:10.3f} {row['dpf_ms']:10.3f} "
            f"{row['ratio']:7.3f}"
        )
    picks = selection.run(quick=options.quick)
    record.write(options.json, steps=rows, selection=picks)


if __name__ == "__main__":
    main()
