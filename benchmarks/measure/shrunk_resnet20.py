"""Compare a filter-pruned ResNet-20 with its shrunk copy: equality of the outputs, size and time.

    python benchmarks/measure/shrunk_resnet20.py [--weights FILE] [--json PATH]

40 % of the filters of every layer are pruned. The filters are chosen in three ways, because the choice decides what can
be removed: a channel of the residual stream can be removed only if all layers that add to it agree.

    alone     every layer ranks its own filters, as SFP does: only the inside of the blocks gets smaller
    global    all filters are ranked together, as in DPF's paper
    agreed    every layer ranks its own filters, but the filters that feed one channel of the stream have the same norm,
              as a penalty on such groups produces it: the stream gets smaller too

Latency is the median of interleaved repeats on one CPU thread, in evaluation mode. `--weights` takes the safetensors
file of a filter-pruned ResNet-20.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from record_file import write_record
from safetensors.torch import load_file
from torch import Tensor, nn

import pomona as pm
from pomona.sparse import Shrunk, shrink
from pomona.sparse.shrink.latency import measure_median_seconds

SPARSITY, IMAGES, BATCHES = 0.4, 1000, (1, 32)
MAX_DIFFERENCE, TARGET_SPEED_UP = 1e-4, 1.3


def load_images() -> tuple[Tensor, str]:
    """Return test images of CIFAR-10 if POMONA_DATA is set, else noise of the same shape, and a description."""
    if not os.environ.get("POMONA_DATA"):
        return torch.randn(IMAGES, 3, 32, 32), "random images, since POMONA_DATA is not set"
    data = pm.data.load("cifar10")
    return next(data.batches(IMAGES, part="test").evaluate())[0], "CIFAR-10 test images"


def residual_stream(model: Any) -> list[tuple[nn.Conv2d, slice]]:
    """Return the layers that feed the residual stream, and the slice of the last stage's channels that each feeds."""
    layers = [model.stem[0], *(block.conv2 for block in model.blocks)]
    starts = {16: 24, 32: 16, 64: 0}  # shortcut A puts new channels on both sides
    return [(conv, slice(starts[len(conv.weight)], starts[len(conv.weight)] + len(conv.weight))) for conv in layers]


@torch.no_grad()
def build_pruned_network(way: str) -> nn.Module:
    """Return a pruned ResNet-20 with random weights, norms and statistics."""
    torch.manual_seed(0)
    model = pm.models.build("resnet20")
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.running_mean.normal_(0, 0.3)
            part.running_var.uniform_(0.5, 1.5)
            part.weight.normal_(1, 0.2)
            part.bias.normal_(0, 0.2)
    if way == "agreed":
        norms = torch.rand(64) + 0.5
        for conv, where in residual_stream(model):
            conv.weight.mul_((norms[where] / conv.weight.flatten(1).norm(dim=1))[:, None, None, None])
    allocation = "global" if way == "global" else "uniform"
    pruner = pm.OneShot(sparsity=SPARSITY, pattern=pm.Filter(), allocation=allocation)
    pruner.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), total_steps=1)
    pruner.finish()
    return model.eval()


def load_trained_network(path: Path) -> nn.Module:
    """Return the trained ResNet-20 of a safetensors file."""
    state = load_file(path)
    shortcut = "B" if any(".shortcut." in name for name in state) else "A"
    model = pm.models.build("resnet20", shortcut=shortcut, num_classes=len(state["head.2.weight"]))
    model.load_state_dict(state)
    return model.eval()


@torch.no_grad()
def largest_difference(model: nn.Module, shrunk: Shrunk, x: Tensor) -> float:
    """Return the largest difference of the two networks' logits over all images."""
    return max(float((model(part) - shrunk.model(part)).abs().max()) for part in x.split(250))


def measure_shrinking(way: str, model: nn.Module, x: Tensor) -> dict[str, Any]:
    """Shrink a model, compare the outputs and time both."""
    shrunk = shrink(model, x[:1])
    result: dict[str, Any] = {
        "way": way,
        "params": shrunk.params._asdict(),
        "macs": shrunk.macs._asdict(),
        "difference": largest_difference(model, shrunk, x),
    }
    for size in BATCHES:
        before, after = measure_median_seconds([model, shrunk.model], x[:size])
        result[f"batch {size}"] = {"before_ms": 1000 * before, "after_ms": 1000 * after, "ratio": before / after}
    return result


def measure_all(weights: Path | None = None) -> dict[str, Any]:
    """Measure all networks, print the table and return the results."""
    torch.set_num_threads(1)
    x, source = load_images()
    models = {way: build_pruned_network(way) for way in ("alone", "global", "agreed")}
    if weights is not None:
        models["own"] = load_trained_network(weights)
    results = [measure_shrinking(way, model, x) for way, model in models.items()]
    print(f"ResNet-20, {SPARSITY:.0%} of the filters; {len(x):,} {source}")
    print(f"{'':8}{'parameters':>22}{'million MACs':>16}{'difference':>12}", end="")
    print("".join(f"{f'ms at batch {size}':>18}{'':8}" for size in BATCHES))
    for result in results:
        params, macs = result["params"], result["macs"]
        print(f"{result['way']:8}{params['before']:>10,} → {params['after']:>9,}", end="")
        print(f"{macs['before'] / 1e6:>8.1f} → {macs['after'] / 1e6:>5.1f}{result['difference']:>12.1e}", end="")
        for size in BATCHES:
            taken = result[f"batch {size}"]
            print(f"{taken['before_ms']:>9.2f} → {taken['after_ms']:>6.2f}{taken['ratio']:>7.2f}×", end="")
        print()
    worst = max(result["difference"] for result in results)
    if worst >= MAX_DIFFERENCE:
        raise SystemExit(f"outputs differ by {worst:.1e}, {MAX_DIFFERENCE:.0e} are allowed")
    fast = [r["way"] for r in results if min(r[f"batch {size}"]["ratio"] for size in BATCHES) >= TARGET_SPEED_UP]
    print(f"at least {TARGET_SPEED_UP}× faster at every batch size: {', '.join(fast) or 'none'}")
    return {"images": source, "shrink": results}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, help="a filter-pruned ResNet-20, as model.safetensors")
    parser.add_argument("--json", type=Path, help="write the record here")
    options = parser.parse_args()
    write_record(options.json, **measure_all(options.weights))


if __name__ == "__main__":
    main()
