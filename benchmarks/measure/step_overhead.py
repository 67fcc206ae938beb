"""Time a training step with DPF against a dense step on the same loop, and the exact selection of a global mask.

    python benchmarks/measure/step_overhead.py [--json FILE] [--quick]

The dense and the pruned model take turns of sixteen steps, which contain exactly one mask update of DPF. The medians of
their turns are compared. On a CPU one thread is used. Then the exact selection of a global mask over 25.6 million
weights is timed against the functions of torch (mask_selection.py).

Targets: DPF ≤ 1.03× dense on an NVIDIA H200, ≤ 1.10× on a CPU; selection never slower than the fastest of topk,
kthvalue and sort.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

import mask_selection
import torch
from cuda_graph import capture_step
from interleaved_timing import time_in_turns
from record_file import write_record
from torch import nn

import pomona as pm

EVERY = 16  # DPF's period: each turn contains exactly one mask update


def loop(model: nn.Module, x: torch.Tensor, y: torch.Tensor, prune: bool, turns: int) -> Callable[[], None]:
    """Return a function that runs one turn of a plain training loop on one batch."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
    if prune:
        # Four times the steps that are measured, so that DPF still updates its mask in the last of them.
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
    """Return a function that runs one turn of a step captured in a CUDA graph, with `tick` after each replay."""
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

    replay = capture_step(step, optimizer)

    def turn() -> None:
        for _ in range(EVERY):
            replay()
            if prune:
                pruner.tick()

    return turn


def compare_steps(
    make_loop: Callable[..., Callable[[], None]], name: str, batch: int, size: int, turns: int, device: str
) -> dict:
    """Time the dense and the pruned loop in turns, and return their medians and the median of their ratios."""
    x = torch.randn(batch, 3, size, size, device=device)
    y = torch.randint(0, 10, (batch,), device=device)
    loops = {}
    for prune in (False, True):
        torch.manual_seed(0)
        model = pm.models.build(name, num_classes=10).to(device)
        if device == "cuda":
            model = model.to(memory_format=torch.channels_last)
        loops[prune] = make_loop(model, x, y, prune, turns)
    times = time_in_turns(loops, turns, EVERY, device)
    dense, pruned = (statistics.median(times[prune]) for prune in (False, True))
    # The ratio is taken turn by turn, so that a slow phase of the machine affects both sides.
    ratios = [b / a for a, b in zip(times[False], times[True], strict=True)]
    return {
        "model": name,
        "loop": make_loop.__name__,
        "batch": batch,
        "dense_ms": dense * 1e3,
        "dpf_ms": pruned * 1e3,
        "ratio": statistics.median(ratios),
        "turns": turns,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--quick", action="store_true", help="few turns, to see that the script runs")
    options = parser.parse_args()
    rows = []
    if torch.cuda.is_available():
        turns = 3 if options.quick else 40
        rows.append(compare_steps(loop, "resnet20", 128, 32, turns, "cuda"))
        rows.append(compare_steps(captured, "resnet20", 128, 32, turns, "cuda"))
        rows.append(compare_steps(loop, "resnet50", 64, 224, max(turns // 4, 3), "cuda"))
    else:
        torch.set_num_threads(1)
        rows.append(compare_steps(loop, "resnet20", 32, 32, 2 if options.quick else 7, "cpu"))
    print(f"{'model':10} {'loop':10} {'batch':>6} {'dense ms':>10} {'DPF ms':>10} {'ratio':>7}")
    for row in rows:
        print(
            f"{row['model']:10} {row['loop']:10} {row['batch']:6d} {row['dense_ms']:10.3f} {row['dpf_ms']:10.3f} "
            f"{row['ratio']:7.3f}"
        )
    write_record(options.json, steps=rows, selection=mask_selection.compare_on_all_devices(quick=options.quick))


if __name__ == "__main__":
    main()
