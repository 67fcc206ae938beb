"""Write docs/overhead.md from the records in results/, so that no figure on it is typed by hand.

python benchmarks/page.py
"""

from __future__ import annotations

from typing import Any

from pages import DOCS, grid, machine, records, rows, sources, write

PAGE = DOCS / "overhead.md"

HEAD = """# What pruning costs

This page is written by `python benchmarks/page.py` from the records in `results/`.
"""

STEPS = """
## A step with DPF over a dense step

Both loops take turns in one run, sixteen steps at a time, which is one mask update of DPF in each turn; the
ratio is the median over the turns of pruned over dense. *loop* is plain eager PyTorch, *captured* a CUDA graph
with `pruner.tick()`. The targets are 1.03 on an H200 and 1.10 on a CPU.

"""

SELECTION = """
## Exact selection of a global mask

Milliseconds to make a mask that keeps the largest entries, the median of interleaved repeats on one CPU thread
or on the GPU alone; each peer makes its mask too, and all masks are checked in the same run. Only ours breaks
ties by position.

"""

SHRINK = """
## Removing filters for good

ResNet-20 with 40 % of its filters pruned, masked against shrunk, on one CPU thread; *own* is a network that
was trained with DPF on filters.

"""

LAB = """
## An epoch of CIFAR-10 in the laboratory

ResNet-20 at batch 128 in bf16, seconds for an epoch of one run. *eager* is a plain PyTorch loop on one fixed batch,
with no data loading; the others are whole runs with data and augmentation. Packed runs share one GPU. A single run
of DPF begins with kernels being made, which a record of few epochs has in it.

"""

PEERS = ("topk", "kthvalue", "sort")


OVERHEAD, REMOVAL, LABS = "overhead-*.json", "shrink-*.json", "lab-*.json"


def steps() -> str:
    heads = ["machine", "model", "loop", "batch", "dense, ms", "DPF, ms", "ratio"]
    return grid(heads, (step(record, row) for record, row in rows(OVERHEAD, "steps")))


def step(record: dict[str, Any], row: dict[str, Any]) -> list[str]:
    times = f"{row['dense_ms']:.2f}", f"{row['dpf_ms']:.2f}", f"{row['ratio']:.3f}"
    return [machine(record), row["model"], row["loop"], str(row["batch"]), *times]


def selection() -> str:
    heads = ["device", "case", "Pomona", *PEERS, "quickest peer / Pomona"]
    return grid(heads, (selected(record, row) for record, row in rows(OVERHEAD, "selection")))


def selected(record: dict[str, Any], row: dict[str, Any]) -> list[str]:
    peers = {name: row[name] for name in PEERS if name in row}
    cells = [f"{peers[name]:.2f}" if name in peers else "" for name in PEERS]
    faster = f"{min(peers.values()) / row['pomona']:.1f}×"
    return [machine(record, row["device"]), row["case"], f"{row['pomona']:.2f}", *cells, faster]


def shrunk() -> str:
    batches = ["batch 1", "batch 32"]
    heads = ["filters chosen", "parameters", "million MACs", "largest difference", *batches]
    made = []
    for _, row in rows(REMOVAL, "shrink"):
        params, macs = ([row[kind][when] for when in ("before", "after")] for kind in ("params", "macs"))
        sizes = " → ".join(f"{n:,}" for n in params), " → ".join(f"{n / 1e6:.1f}" for n in macs)
        ratios = [f"{row[batch]['ratio']:.2f}×" for batch in batches]
        made.append([row["way"], *sizes, f"{row['difference']:.1e}", *ratios])
    return grid(heads, made)


def lab() -> str:
    heads = ["machine", "loop", "method", "runs at once", "s / epoch and run", "against eager"]
    made = []
    for record, row in rows(LABS, "rows"):
        took, plain = row["seconds_per_epoch"], record["rows"][0]["seconds_per_epoch"]
        what = row["loop"], row["method"], str(row["runs"])
        made.append([machine(record), *what, f"{took:.3f}", f"{plain / took:.1f}×"])
    return grid(heads, made)


def page() -> str:
    """The whole page."""
    parts = [HEAD, STEPS + steps(), SELECTION + selection(), SHRINK + shrunk(), LAB + lab()]
    kept = [record for pattern in (OVERHEAD, REMOVAL, LABS) for record in records(pattern)]
    return "\n".join([*parts, f"\n## Sources\n\n{sources(kept)}\n"])


if __name__ == "__main__":
    write(PAGE, page())
