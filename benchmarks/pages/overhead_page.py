"""Write docs/overhead.md from the records in results/.

python benchmarks/pages/overhead_page.py
"""

from __future__ import annotations

from typing import Any

from page_helpers import DOCS, format_sources, format_table, machine_name, read_records, read_rows, write_page

PAGE = DOCS / "overhead.md"
STEP_RECORDS, SHRINK_RECORDS, EPOCH_RECORDS = "overhead-*.json", "shrink-*.json", "lab-*.json"
PEERS = ("topk", "kthvalue", "sort")

INTRODUCTION = """# The cost of pruning

This page shows what pruning costs while a network trains, and what the removal of filters gains afterwards. To measure
the overhead on your own machine, time the same steps with and without a pruner:

```python
import time

import torch
from torch import nn

import pomona as pm


def seconds_per_step(prune, steps=32):
    torch.manual_seed(0)
    model = pm.models.build("resnet20", num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if prune:
        pm.DPF(sparsity=0.9).attach(model, optimizer, total_steps=4 * steps)
    x, y = torch.randn(4, 3, 32, 32), torch.randint(0, 10, (4,))
    start = time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return (time.perf_counter() - start) / steps


dense, pruned = seconds_per_step(prune=False), seconds_per_step(prune=True)
print(f"dense {1e3 * dense:.1f} ms, DPF {1e3 * pruned:.1f} ms")
```

`python benchmarks/measure/step_overhead.py`, `shrunk_resnet20.py` and `cifar_epoch.py` measure the figures below.
`python benchmarks/pages/overhead_page.py` writes this page from their records in `results/`.
"""

STEPS = """
## A training step with a pruner compared with a dense step

The dense and the pruned loops run alternately in one process, sixteen steps at a time. Sixteen steps contain exactly
one mask update. The ratio is the median, over these turns, of the pruned time over the dense time. *loop* is plain
eager PyTorch, *captured* is a CUDA graph with `pruner.tick()`. *mlp* has 6.3 million weights in three layers,
*transformer* four layers of width 256 on 32 tokens: they have few multiplications for each weight, most of all at batch
4, so that each pass over the weights counts. The targets are 1.03 on an H200, and on a CPU 1.10 for ResNet-20 and 1.15
for the others at batch 64.

"""

SELECTION = """
## Exact selection of a global mask

Milliseconds to make a mask that keeps the largest entries: the median of interleaved repeats, on one CPU thread or on
the GPU alone. Each alternative makes its mask too, and all masks are checked in the same run. Only Pomona breaks ties
by position.

"""

SHRINK = """
## Removal of filters

ResNet-20 with 40 % of its filters pruned, masked against shrunk, on one CPU thread. In the first three rows the weights
are random. They differ in how the filters are chosen:

- *alone* ranks the filters of each layer separately.
- *global* ranks all filters together.
- *agreed* ranks the filters of each layer separately, but the filters that feed one channel of the residual stream have
  the same norm, so that these channels can be removed too.
- *own* is a network that was trained with DPF on filters.

The columns for batch 1 and 32 show how many times faster the shrunk network is.

"""

EPOCHS = """
## An epoch of CIFAR-10 in the laboratory

ResNet-20 at batch 128 in bf16, seconds per epoch of one run. *eager* is a plain PyTorch loop on one fixed batch,
without data loading. The other rows are complete runs with data and augmentation. Concurrent runs share one GPU. A
single run of DPF starts with the compilation of kernels, and a record of few epochs includes part of that time.

"""


def format_steps() -> str:
    """Return the table of training steps."""
    heads = ["machine", "model", "loop", "batch", "method", "dense, ms", "pruned, ms", "ratio"]
    return format_table(heads, (format_step(record, row) for record, row in read_rows(STEP_RECORDS, "steps")))


def format_step(record: dict[str, Any], row: dict[str, Any]) -> list[str]:
    """Return the cells of one loop on one machine."""
    pruned = row["pruned_ms"] if "pruned_ms" in row else row["dpf_ms"]  # older records have only DPF
    times = f"{row['dense_ms']:.2f}", f"{pruned:.2f}", f"{row['ratio']:.3f}"
    return [machine_name(record), row["model"], row["loop"], str(row["batch"]), row.get("method", "dpf"), *times]


def format_selections() -> str:
    """Return the table of mask selections."""
    heads = ["device", "case", "Pomona", *PEERS, "fastest alternative / Pomona"]
    return format_table(heads, (format_selection(record, row) for record, row in read_rows(STEP_RECORDS, "selection")))


def format_selection(record: dict[str, Any], row: dict[str, Any]) -> list[str]:
    """Return the cells of one case on one device."""
    peers = {name: row[name] for name in PEERS if name in row}
    cells = [f"{peers[name]:.2f}" if name in peers else "" for name in PEERS]
    gain = f"{min(peers.values()) / row['pomona']:.1f}×"
    return [machine_name(record, row["device"]), row["case"], f"{row['pomona']:.2f}", *cells, gain]


def format_shrinking() -> str:
    """Return the table of shrunk networks."""
    batches = ["batch 1", "batch 32"]
    heads = ["filters chosen", "parameters", "million MACs", "largest difference", *batches]
    rows = []
    for _, row in read_rows(SHRINK_RECORDS, "shrink"):
        params, macs = ([row[kind][when] for when in ("before", "after")] for kind in ("params", "macs"))
        sizes = " → ".join(f"{n:,}" for n in params), " → ".join(f"{n / 1e6:.1f}" for n in macs)
        ratios = [f"{row[batch]['ratio']:.2f}×" for batch in batches]
        rows.append([row["way"], *sizes, f"{row['difference']:.1e}", *ratios])
    return format_table(heads, rows)


def format_epochs() -> str:
    """Return the table of epochs."""
    heads = ["machine", "loop", "method", "concurrent runs", "s / epoch and run", "speed-up over eager"]
    rows = []
    for record, row in read_rows(EPOCH_RECORDS, "rows"):
        seconds, eager = row["seconds_per_epoch"], record["rows"][0]["seconds_per_epoch"]
        case = row["loop"], row["method"], str(row["runs"])
        rows.append([machine_name(record), *case, f"{seconds:.3f}", f"{eager / seconds:.1f}×"])
    return format_table(heads, rows)


def render() -> str:
    """Return the text of the page."""
    sections = STEPS + format_steps(), SELECTION + format_selections(), SHRINK + format_shrinking()
    records = [record for pattern in (STEP_RECORDS, SHRINK_RECORDS, EPOCH_RECORDS) for record in read_records(pattern)]
    sources = "\n## Sources\n\nThe paths of the scripts are those at the commit.\n\n" + format_sources(records) + "\n"
    return "\n".join([INTRODUCTION.rstrip("\n"), *sections, EPOCHS + format_epochs(), sources])


if __name__ == "__main__":
    write_page(PAGE, render())
