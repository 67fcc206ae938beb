"""Write the tables of docs/balanced.md from the records in results/.

python benchmarks/pages/balanced_page.py
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby, product
from operator import itemgetter
from typing import Any

from page_helpers import (
    DOCS,
    NOT_MEASURED,
    fill_page,
    format_sources,
    format_table,
    read_records,
    read_rows,
    write_page,
)
from results_page import compare_with_paper, format_trained_rows, load_run_store

PAGE = DOCS / "balanced.md"
RECORDS = "balanced-*.json"
UNSTRUCTURED_RECORDS = "unstructured-*.json"
STRUCTURED_RECORDS = "structured-*.json"
STRUCTURED_SIDES = ("dense", "unstructured", "blocks 4×4", "blocks 8×8", "blocks 16×16", "blocks 1×16", "2:4")
NETWORK_RECORDS = "sparse-networks-*.json"
QUANTIZED_RECORDS = "quantized-h200*.json"
GPU_RECORDS = "kernels-h200*.json"
GPU_SIDES = ("CSR", "2:4", "balanced", "unstructured", "compress, balanced", "compress, unstructured")
QUANTIZED_SIDES = ("dense", "dense int4", "dense int8", "balanced float16", "balanced int8", "balanced int4")
SIDES = ("dense", "CSR", "block-sparse", "2:4", "balanced")
# Names of timings in the records of balanced_kernels.py.
DENSE_FUSED, CHANNELS_LAST = "dense, fused", ", channels last"


def format_matrices() -> str:
    """Return the table of all products, for every matrix and batch."""
    rows = []
    for bench in (record["bench"] for record in read_records(RECORDS)):
        for case, group in groupby(bench["rows"], itemgetter("rows", "columns", "batch", "state")):
            sides = {row["side"].split()[0]: row for row in group if row["seconds"] is not None}
            balanced, seconds = sides["balanced"], {side: row["seconds"] for side, row in sides.items()}
            times = [f"{1e6 * seconds[side]:,.1f}" if side in seconds else "" for side in SIDES]
            gains = [f"{seconds[side] / balanced['seconds']:.2f}×" if side in seconds else "" for side in SIDES[:2]]
            what = f"{bench['device']}, {bench['dtype']}", f"{case[0]}×{case[1]}", str(case[2]), case[3]
            rows.append([*what, *times, *gains, f"{100 * balanced['limit']:.0f} %"])
    heads = ["machine", "matrix", "batch", "caches", *SIDES, "speed-up over dense", "over CSR", "share of the limit"]
    return format_table(heads, rows)


def format_unstructured() -> str:
    """Return the table of unstructured products, for every matrix, sparsity, batch and state of the caches."""
    rows = []
    heads = ("dense", "CSR", "DeepSparse", "balanced", "unstructured", "unstructured, float16")
    for record in read_records(UNSTRUCTURED_RECORDS):
        for case, group in groupby(record["timings"], itemgetter("rows", "columns", "sparsity", "batch", "state")):
            seconds = {row["side"]: row["seconds"] for row in group}
            times = [format_microseconds(seconds[side]) if side in seconds else "" for side in heads]
            gains = [f"{seconds[side] / seconds['unstructured']:.2f}×" if side in seconds else "" for side in heads[:3]]
            what = f"{case[0]}×{case[1]}", f"{100 * case[2]:.0f} %", str(case[3]), case[4]
            rows.append([record["device"], *what, *times, *gains])
    speed_ups = "speed-up over dense", "over CSR", "over DeepSparse"
    return format_table(["machine", "matrix", "zeros", "batch", "caches", *heads, *speed_ups], rows)


def format_structured() -> str:
    """Return the table of matrices with a structure: dense blocks, and 2:4."""
    rows = []
    for record in read_records(STRUCTURED_RECORDS):
        for case, group in groupby(record["timings"], itemgetter("rows", "columns", "sparsity", "batch", "state")):
            seconds = {row["side"]: row["seconds"] for row in group}
            what = f"{case[0]}×{case[1]}", f"{100 * case[2]:.0f} %", str(case[3]), case[4]
            times = [format_microseconds(seconds[side]) if side in seconds else "" for side in STRUCTURED_SIDES]
            rows.append([record["device"], *what, *times])
    return format_table(["machine", "matrix", "zeros", "batch", "caches", *STRUCTURED_SIDES], rows)


def format_unstructured_targets() -> str:
    """Return the table of the targets of unstructured products, for 4096² with 90 % zeros and warm caches."""
    rows = []
    for record in read_records(UNSTRUCTURED_RECORDS):
        for answer in record["targets"]:
            met = "met" if answer["reached"] >= answer["target"] else "missed"
            case = record["device"], str(answer["batch"]), answer["peer"]
            rows.append([*case, f"{answer['target']:g}×", f"{answer['reached']:.2f}×", met])
    return format_table(["machine", "batch", "compared with", "target", "reached", ""], rows)


def format_gpu_kernels() -> str:
    """Return the table of products on a GPU: speed-ups over the dense product with cold and with warm caches."""
    rows = []
    for record in read_records(GPU_RECORDS):
        for case, group in groupby(record["timings"], itemgetter("rows", "columns", "sparsity", "batch")):
            found = {(row["side"], row["state"]): row for row in group}
            dense = " / ".join(format_microseconds(found["dense", state]["seconds"]) for state in ("cold", "warm"))
            what = f"{case[0]}×{case[1]}", f"{100 * case[2]:.0f} %", str(case[3]), dense
            rows.append([*what, *(format_speedups(found, side) for side in GPU_SIDES)])
    return format_table(["matrix", "zeros", "batch", "dense, µs", *GPU_SIDES], rows)


def format_speedups(found: Mapping[tuple[str, str], Mapping[str, Any]], side: str) -> str:
    """Return the speed-ups of a side with cold and with warm caches, marked where its output is inaccurate."""
    cells = []
    for state in ("cold", "warm"):
        row = found.get((side, state), {"speedup": None})
        cells.append("" if row["speedup"] is None else f"{row['speedup']:.2f}×{'!' * bool(row['note'])}")
    return " / ".join(cells) if any(cells) else ""


def format_gpu_targets() -> str:
    """Return the table of the targets of the kernels on a GPU."""
    rows = []
    for record in read_records(GPU_RECORDS):
        for answer in record["targets"]:
            met = "met" if answer["reached"] >= answer["asked"] else "missed"
            rows.append([answer["target"], f"{answer['asked']}×", f"{answer['reached']:.2f}×", met])
    return format_table(["target on an H200, cold, over dense", "asked", "reached", ""], rows)


def format_networks() -> str:
    """Return the table of whole networks beside other inference engines."""
    rows = []
    heads = ("PyTorch", "torch.compile", "ONNX Runtime", "OpenVINO", "DeepSparse", "pm.compress")
    for record in read_records(NETWORK_RECORDS):
        for case, group in groupby(record["timings"], itemgetter("network", "mask", "batch", "state")):
            seconds = {row["side"]: row["seconds"] for row in group}
            times = [format_microseconds(seconds[side]) if side in seconds else "" for side in heads]
            fastest = min(seconds[side] for side in heads[:-1] if side in seconds)
            rows.append([record["device"], *map(str, case), *times, f"{fastest / seconds['pm.compress']:.2f}×"])
    return format_table(["machine", "network", "mask", "batch", "caches", *heads, "over the fastest other"], rows)


def format_quantized() -> str:
    """Return the table of products with codes of few bits on a GPU, for every matrix, batch and state of the caches."""
    rows = []
    for record in read_records(QUANTIZED_RECORDS):
        for case, group in groupby(record["timings"], itemgetter("rows", "columns", "batch", "state")):
            seconds = {row["side"]: row["seconds"] for row in group if row["seconds"] is not None}
            times = [format_microseconds(seconds[side]) if side in seconds else "" for side in QUANTIZED_SIDES]
            ours = seconds[QUANTIZED_SIDES[-1]]
            gains = [f"{seconds[side] / ours:.2f}×" if side in seconds else "" for side in QUANTIZED_SIDES[:3]]
            rows.append([record["device"], f"{case[0]}×{case[1]}", str(case[2]), case[3], *times, *gains])
    gains = [f"balanced int4 over {side}" for side in QUANTIZED_SIDES[:3]]
    return format_table(["machine", "matrix", "batch", "caches", *QUANTIZED_SIDES, *gains], rows)


def format_memory() -> str:
    """Return the memory bandwidth of each machine, which sets the limit."""
    benches = (record["bench"] for record in read_records(RECORDS))
    return "\n".join(f"- {bench['device']}: {bench['bandwidth'] / 1e9:,.1f} GB/s" for bench in benches) or NOT_MEASURED


def format_targets() -> str:
    """Return the table of targets and what was reached."""
    rows = []
    for record, row in read_rows(RECORDS, "targets"):
        met = "met" if row["reached"] >= row["target"] else "missed"
        case = record["bench"]["device"], f"{row['size']}×{row['size']}", str(row["batch"]), row["peer"]
        rows.append([*case, f"{row['target']:g}×", f"{row['reached']:.2f}×", met])
    return format_table(["machine", "matrix", "batch", "compared with", "target", "reached", ""], rows)


def format_workloads(timings: Mapping[str, str]) -> str:
    """Return the table of the paper's networks at batch 1.

    `timings` names the times of a record, "seconds", "cold" or "called", and describes each. The channels-last layout
    of an image network has a second row.
    """
    ways = {"dense": "dense", DENSE_FUSED: DENSE_FUSED, "plain": "dense by linear layers"}
    ways |= {way: way for way in ("all packed", "compressed")}
    rows = []
    for record in read_records(RECORDS):
        machine = record["bench"]["device"]
        for (name, found), (key, kind) in product(record["workloads"].items(), timings.items()):
            times = {way: format_microseconds(seconds) for way, seconds in found.get(key, {}).items()}
            prefix = "" if key == "seconds" else f"{key}_"
            if times:
                ratios = (found.get(ratio) for ratio in (f"{prefix}ratio", f"{prefix}fused_ratio", "paper_ratio"))
                shown = ["" if ratio is None else f"{ratio:.2f}×" for ratio in ratios]  # old records lack a fused one
                rows.append([machine, name, kind, *(times.get(way, "") for way in ways), *shown])
            if any(way.endswith(CHANNELS_LAST) for way in times):
                shown = [times.get(f"{way}{CHANNELS_LAST}", "") for way in ways]
                rows.append([machine, f"{name}{CHANNELS_LAST}", kind, *shown, "", "", ""])
    speed_ups = "speed-up over dense", "over fused", "in the paper"
    return format_table(["machine", "network", "time", *(f"{way}, µs" for way in ways.values()), *speed_ups], rows)


def format_microseconds(seconds: float) -> str:
    """Return a time in microseconds, with a decimal below 100 µs."""
    return f"{1e6 * seconds:,.{0 if seconds >= 1e-4 else 1}f}"


def render() -> str:
    """Return the text of the page with its tables filled in."""
    store = load_run_store()
    names = ("lstm", "sensitivity")
    trained = {name: format_trained_rows(compare_with_paper(f"balanced-{name}", store)) for name in names}
    measured = {
        "matrices": format_matrices(),
        "unstructured": format_unstructured(),
        "structured": format_structured(),
        "unstructured targets": format_unstructured_targets(),
        "gpu": format_gpu_kernels(),
        "gpu-targets": format_gpu_targets(),
        "networks": format_networks(),
        "quantized": format_quantized(),
        "memory": format_memory(),
        "targets": format_targets(),
        "workloads": format_workloads({"seconds": "warm", "cold": "cold"}),
        "called": format_workloads({"called": "called"}),
    }
    patterns = RECORDS, UNSTRUCTURED_RECORDS, STRUCTURED_RECORDS, NETWORK_RECORDS, GPU_RECORDS, QUANTIZED_RECORDS
    sources = [record for pattern in patterns for record in read_records(pattern)]
    return fill_page(PAGE, {**trained, **measured, "sources": format_sources(sources)})


if __name__ == "__main__":
    write_page(PAGE, render())
