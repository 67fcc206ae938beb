"""Write docs/overhead.md from the records in results/, so that no figure on it is typed by hand.

python benchmarks/page.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "overhead.md"

HEAD = """# What pruning costs

This page is written by `python benchmarks/page.py` from the records in `results/`.
"""

STEPS = """
## A step with DPF over a dense step

Both loops take turns in one run, sixteen steps at a time, which is one mask update of DPF in each turn; the
ratio is the median over the turns of pruned over dense. *loop* is plain eager PyTorch, *captured* a CUDA graph
with `pruner.tick()`. The targets are 1.03 on an H200 and 1.10 on a CPU.

| machine | model | loop | batch | dense, ms | DPF, ms | ratio |
|---|---|---|---|---|---|---|
"""

SELECTION = """
## Exact selection of a global mask

Milliseconds to make a mask that keeps the largest entries, the median of interleaved repeats on one CPU thread
or on the GPU alone; each peer makes its mask too, and all masks are checked in the same run. Only ours breaks
ties by position.

| device | case | Pomona | topk | kthvalue | sort | quickest peer / Pomona |
|---|---|---|---|---|---|---|
"""

SHRINK = """
## Removing filters for good

ResNet-20 with 40 % of its filters pruned, masked against shrunk, on one CPU thread; *own* is a network that
was trained with DPF on filters.

| filters chosen | parameters | million MACs | largest difference | batch 1 | batch 32 |
|---|---|---|---|---|---|
"""

LAB = """
## An epoch of CIFAR-10 in the laboratory

ResNet-20 at batch 128 in bf16, seconds for an epoch of one run. *eager* is a plain PyTorch loop on one fixed batch,
with no data loading; the others are whole runs with data and augmentation. Packed runs share one GPU. A single run
of DPF begins with kernels being made, which a record of few epochs has in it.

| machine | loop | method | runs at once | s / epoch and run | against eager |
|---|---|---|---|---|---|
"""

PEERS = ("topk", "kthvalue", "sort")


def read(pattern: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((ROOT / "results").glob(pattern))]


def machine(record: dict[str, Any]) -> str:
    gpus = record["machine"]["gpus"]
    return gpus[0]["name"] if gpus else record["machine"]["cpu"]


def steps(record: dict[str, Any]) -> list[str]:
    return [
        f"| {machine(record)} | {row['model']} | {row['loop']} | {row['batch']} | {row['dense_ms']:.2f} "
        f"| {row['dpf_ms']:.2f} | {row['ratio']:.3f} |"
        for row in record["steps"]
    ]


def selection(record: dict[str, Any]) -> list[str]:
    lines = []
    for row in record["selection"]:
        peers = {name: row[name] for name in PEERS if name in row}
        cells = " | ".join(f"{peers[name]:.2f}" if name in peers else "" for name in PEERS)
        where = record["machine"]["cpu"] if row["device"] == "cpu" else machine(record)
        lines.append(
            f"| {where} | {row['case']} | {row['pomona']:.2f} | {cells} | {min(peers.values()) / row['pomona']:.1f}× |"
        )
    return lines


def shrunk(record: dict[str, Any]) -> list[str]:
    lines = []
    for row in record["shrink"]:
        ratios = " | ".join(f"{row[batch]['ratio']:.2f}×" for batch in ("batch 1", "batch 32"))
        lines.append(
            f"| {row['way']} | {row['params']['before']:,} → {row['params']['after']:,} "
            f"| {row['macs']['before'] / 1e6:.1f} → {row['macs']['after'] / 1e6:.1f} "
            f"| {row['difference']:.1e} | {ratios} |"
        )
    return lines


def lab(record: dict[str, Any]) -> list[str]:
    plain = record["rows"][0]["seconds_per_epoch"]
    return [
        f"| {machine(record)} | {row['loop']} | {row['method']} | {row['runs']} | {row['seconds_per_epoch']:.3f} "
        f"| {plain / row['seconds_per_epoch']:.1f}× |"
        for row in record["rows"]
    ]


def source(record: dict[str, Any]) -> str:
    return f"- {machine(record)}, torch {record['versions']['torch']}: `{record['command']}` at {record['commit']}"


def main() -> None:
    overhead, removal, labs = read("overhead-*.json"), read("shrink-*.json"), read("lab-*.json")
    parts = [HEAD, STEPS + "\n".join(line for r in overhead for line in steps(r))]
    parts.append(SELECTION + "\n".join(line for r in overhead for line in selection(r)))
    parts.append(SHRINK + "\n".join(line for r in removal for line in shrunk(r)))
    parts.append(LAB + "\n".join(line for r in labs for line in lab(r)))
    parts.append("\n## Sources\n\n" + "\n".join(source(r) for r in overhead + removal + labs) + "\n")
    PAGE.write_text("\n".join(parts))


if __name__ == "__main__":
    main()
