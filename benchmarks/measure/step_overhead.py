"""Time a training step with a pruner against a dense step on the same loop, and the exact selection of a global mask.

    python benchmarks/measure/step_overhead.py [--json FILE] [--quick]

The dense and the pruned models take turns of sixteen steps, which contain exactly one mask update. The medians of their
turns are compared. On a CPU one thread is used, and besides ResNet-20 there are an MLP of 6.3 million weights and a
small transformer: they have few multiplications for each weight, so that a pass over the weights costs them most. Then
the exact selection of a global mask over 25.6 million weights is timed against the functions of torch
(mask_selection.py).

Targets: DPF ≤ 1.03× dense on an NVIDIA H200, ≤ 1.10× for ResNet-20 and ≤ 1.15× for the others at batch 64 on a CPU;
selection never slower than the fastest of topk, kthvalue and sort.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import mask_selection
import torch
from cuda_graph import capture_step
from interleaved_timing import time_in_turns
from record_file import write_record
from torch import nn

import pomona as pm

EVERY = 16  # steps between mask updates: each turn contains exactly one
METHODS: dict[str, Callable[[], pm.Pruner]] = {
    "dpf": lambda: pm.DPF(sparsity=0.9, every=EVERY),
    "incremental": lambda: pm.Incremental(sparsity=0.9, every=EVERY),
    "rigl": lambda: pm.RigL(sparsity=0.9, every=EVERY),
}
Loop = Callable[[], None]


class Transformer(nn.Module):
    """Four encoder layers of width 256 on 32 vectors, whose mean is classified."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(256, 4, dim_feedforward=1024, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x).mean(1))


def make_mlp() -> nn.Module:
    """Return a network of 6.3 million weights in fully connected layers."""
    widths = (784, 2048, 2048, 256)
    hidden = [layer for pair in itertools.pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(widths[-1], 10))


# Each model with the shape of an input.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "resnet20": (lambda: pm.models.build("resnet20", num_classes=10), (3, 32, 32)),
    "resnet50": (lambda: pm.models.build("resnet50", num_classes=10), (3, 224, 224)),
    "mlp": (make_mlp, (784,)),
    "transformer": (Transformer, (32, 256)),
}


def attach(method: str | None, model: nn.Module, optimizer: torch.optim.Optimizer, turns: int) -> pm.Pruner | None:
    """Attach a pruner, for four times the steps that are measured, so that masks are updated in the last of them."""
    if method is None:
        return None
    return METHODS[method]().attach(model, optimizer, total_steps=4 * turns * EVERY)


def loop(model: nn.Module, x: torch.Tensor, y: torch.Tensor, method: str | None, turns: int) -> Loop:
    """Return a function that runs one turn of a plain training loop on one batch."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
    attach(method, model, optimizer, turns)

    def turn() -> None:
        for _ in range(EVERY):
            with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
                loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return turn


def captured(model: nn.Module, x: torch.Tensor, y: torch.Tensor, method: str | None, turns: int) -> Loop:
    """Return a function that runs one turn of a step captured in a CUDA graph, with `tick` after each replay."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
    pruner = attach(method, model, optimizer, turns)

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
            if pruner is not None:
                pruner.tick()

    return turn


def compare_steps(
    make_loop: Callable[..., Loop], name: str, batch: int, turns: int, device: str, methods: Sequence[str] = ("dpf",)
) -> list[dict]:
    """Time the dense and the pruned loops in turns; return their medians and the medians of their ratios."""
    make_model, shape = MODELS[name]
    x = torch.randn(batch, *shape, device=device)
    y = torch.randint(0, 10, (batch,), device=device)
    loops = {}
    for method in (None, *methods):
        torch.manual_seed(0)
        model = make_model().to(device)
        if device == "cuda":
            model = model.to(memory_format=torch.channels_last)
        loops[method] = make_loop(model, x, y, method, turns)
    times = time_in_turns(loops, turns, EVERY, device)
    return [
        {
            "model": name,
            "loop": make_loop.__name__,
            "batch": batch,
            "method": method,
            "dense_ms": statistics.median(times[None]) * 1e3,
            "pruned_ms": statistics.median(times[method]) * 1e3,
            # The ratio is taken turn by turn, so that a slow phase of the machine affects both sides.
            "ratio": statistics.median([b / a for a, b in zip(times[None], times[method], strict=True)]),
            "turns": turns,
        }
        for method in methods
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--quick", action="store_true", help="few turns, to see that the script runs")
    options = parser.parse_args()
    rows = []
    if torch.cuda.is_available():
        turns = 3 if options.quick else 40
        rows += compare_steps(loop, "resnet20", 128, turns, "cuda")
        rows += compare_steps(captured, "resnet20", 128, turns, "cuda")
        rows += compare_steps(loop, "resnet50", 64, max(turns // 4, 3), "cuda")
    else:
        torch.set_num_threads(1)
        turns = 2 if options.quick else 7
        for name, batch in [("resnet20", 32), *itertools.product(["mlp", "transformer"], [4, 64])]:
            rows += compare_steps(loop, name, batch, turns, "cpu", tuple(METHODS))
    print(f"{'model':12} {'loop':10} {'batch':>6} {'method':12} {'dense ms':>10} {'pruned ms':>10} {'ratio':>7}")
    for row in rows:
        print(
            f"{row['model']:12} {row['loop']:10} {row['batch']:6d} {row['method']:12} {row['dense_ms']:10.3f} "
            f"{row['pruned_ms']:10.3f} {row['ratio']:7.3f}"
        )
    write_record(options.json, steps=rows, selection=mask_selection.compare_on_all_devices(quick=options.quick))


if __name__ == "__main__":
    main()
