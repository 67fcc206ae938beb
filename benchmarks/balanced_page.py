"""Write the tables of docs/balanced.md from the records in results/, so that no figure in them is typed by hand.

python benchmarks/balanced_page.py
"""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter

from balanced import DENSE_FUSED, LAST
from pages import DOCS, MISSING, filled, grid, records, rows, sources, write

from results import begun, compare, store

PAGE = DOCS / "balanced.md"
RECORDS = "balanced-*.json"
SIDES = ("dense", "CSR", "block-sparse", "2:4", "balanced")


def matrices() -> str:
    """Every side for every matrix and batch."""
    made = []
    for bench in (record["bench"] for record in records(RECORDS)):
        for case, some in groupby(bench["rows"], itemgetter("rows", "columns", "batch", "state")):
            sides = {row["side"].split()[0]: row for row in some if row["seconds"] is not None}
            ours, found = sides["balanced"], {side: row["seconds"] for side, row in sides.items()}
            times = [f"{1e6 * found[side]:,.1f}" if side in found else "" for side in SIDES]
            gains = [f"{found[side] / ours['seconds']:.2f}×" if side in found else "" for side in SIDES[:2]]
            what = f"{bench['device']}, {bench['dtype']}", f"{case[0]}×{case[1]}", str(case[2]), case[3]
            made.append([*what, *times, *gains, f"{100 * ours['limit']:.0f} %"])
    return grid(["machine", "matrix", "batch", "caches", *SIDES, "over dense", "over CSR", "of the limit"], made)


def memory() -> str:
    """How fast it is read, which makes the limit."""
    benches = (record["bench"] for record in records(RECORDS))
    return "\n".join(f"- {bench['device']}: {bench['bandwidth'] / 1e9:,.1f} GB/s" for bench in benches) or MISSING


def targets() -> str:
    """What was asked for, and what was reached."""
    made = []
    for record, row in rows(RECORDS, "targets"):
        met = "met" if row["reached"] >= row["target"] else "missed"
        case = record["bench"]["device"], f"{row['size']}×{row['size']}", str(row["batch"]), row["peer"]
        made.append([*case, f"{row['target']:g}×", f"{row['reached']:.2f}×", met])
    return grid(["machine", "matrix", "batch", "over", "target", "reached", ""], made)


def workloads(key: str = "seconds", prefix: str = "") -> str:
    """The paper's networks at batch 1, the device's times or others; images with their channels last in a row below."""
    ways = {"dense": "dense", DENSE_FUSED: DENSE_FUSED, "plain": "dense by linear layers"}
    ways |= {way: way for way in ("all packed", "compressed")}
    made = []
    for record in records(RECORDS):
        for name, found in record["workloads"].items():
            times = {way: micro(seconds) for way, seconds in found.get(key, {}).items()}
            if times:
                ratios = (found.get(ratio) for ratio in (f"{prefix}ratio", f"{prefix}fused_ratio", "paper_ratio"))
                told = ["" if ratio is None else f"{ratio:.2f}×" for ratio in ratios]  # older records have no fused one
                made.append([record["bench"]["device"], name, *(times.get(way, "") for way in ways), *told])
            if any(way.endswith(LAST) for way in times):
                told = [times.get(f"{way}{LAST}", "") for way in ways]
                made.append([record["bench"]["device"], f"{name}{LAST}", *told, "", "", ""])
    head = ["machine", "network", *(f"{way}, µs" for way in ways.values()), "faster", "than fused", "in the paper"]
    return grid(head, made)


def micro(seconds: float) -> str:
    """Microseconds, with as many digits as mean something."""
    return f"{1e6 * seconds:,.{0 if seconds >= 1e-4 else 1}f}"


def page() -> str:
    """The page with its tables."""
    kept = store()
    trained = {key: begun(compare(f"balanced-{key}", kept)) for key in ("lstm", "sensitivity")}
    measured = {"matrices": matrices(), "memory": memory(), "targets": targets(), "workloads": workloads()}
    measured["called"] = workloads("called", "called_")
    return filled(PAGE, {**trained, **measured, "sources": sources(records(RECORDS))})


if __name__ == "__main__":
    write(PAGE, page())
