"""Write the table of speed and size of README.md, and its picture docs/cifar10.svg, from the records in results/.

python benchmarks/pages/readme_page.py
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from accuracy_chart import Mark, draw_accuracies
from page_helpers import (
    DOCS,
    ROOT,
    Record,
    fill_page,
    format_table,
    machine_name,
    read_records,
    read_rows,
    write_page,
)
from results_page import compare_with_paper, load_run_store

PAGE, PICTURE = ROOT / "README.md", DOCS / "cifar10.svg"
PAPER, ONE_PASS, DISTILLED = "the paper", "Pomona: pm.DPF", "Pomona, with a dense teacher"
WEIGHTS, FILTERS = "weights", "filters"
LABELS = {"ResNet-20": WEIGHTS, "ResNet-20, filters": FILTERS}  # of the tables' parts
MATRIX, BATCH = 4096, 1  # the product in the table


def read_marks() -> tuple[list[Mark], Record]:
    """Return the accuracies of the picture, and the cell of dense training."""
    store = load_run_store()
    one_pass = compare_with_paper("dpf-onepass", store)["cells"]
    distilled = compare_with_paper("dpf-distilled", store)["cells"]
    marks = []
    for cell in one_pass:
        if cell["column"] == "DPF default, cosine" and cell["label"] in LABELS and cell["runs"]:
            group = LABELS[cell["label"]]
            marks.append(Mark(PAPER, group, cell["row"], cell["paper"], cell["paper_std"]))
            marks.append(Mark(ONE_PASS, group, cell["row"], cell["mean"], cell["std"]))
            taught = (c for c in distilled if c["column"] == "DPF, distilled" and c["row"] == cell["row"] and c["runs"])
            if group == WEIGHTS:
                marks += [Mark(DISTILLED, group, c["row"], c["mean"], c["std"]) for c in taught]
    return marks, next(cell for cell in one_pass if cell["column"] == "dense, cosine" and cell["runs"])


def draw_picture() -> str:
    """Return the picture of accuracies on CIFAR-10."""
    marks, dense = read_marks()
    return draw_accuracies(
        marks,
        title="ResNet-20 on CIFAR-10, pruned by DPF",
        subtitle="top-1 accuracy in %, mean and standard deviation over seeds",
        notes={WEIGHTS: "share of weights pruned", FILTERS: "share of filters pruned"},
        reference=("dense, Pomona", dense["mean"]),
    )


def measured_rows() -> Iterator[list[str]]:
    """Yield the rows of the table: what was measured, the machine, both times, their ratio, and both sizes."""
    packed = read_records("balanced-*.json")
    yield from (format_product(record) for record in packed)
    yield from (format_network(name, record) for name in ("LSTM 2×1500", "VGG-16") for record in packed)
    networks = read_records("sparse-networks-*.json")
    yield from (format_any_mask(name, record) for name in ("ResNet-50", "ResNet-20") for record in networks)
    shrunk = read_rows("shrink-*.json", "shrink")
    yield from (format_shrunk(record, row) for record, row in shrunk if row["way"] == "own")
    yield from (row for record in read_records("lab-*.json") for row in format_epochs(record))


def format_product(record: Record) -> list[str]:
    """Return the row of a product with a balanced matrix, with cold caches."""
    bench = record["bench"]
    sides = select_sides(bench["rows"], rows=MATRIX, batch=BATCH, state="cold")
    dense, packed = sides["dense"], sides["balanced"]
    what = f"{MATRIX}×{MATRIX} matrix times a vector, {100 * bench['sparsity']:.0f} % balanced, {bench['dtype']}"
    sizes = format_megabytes(dense["nbytes"], packed["nbytes"])
    return [what, machine_name(record), *compare_times(dense["seconds"], packed["seconds"]), sizes]


def format_network(name: str, record: Record) -> list[str]:
    """Return the row of a network that `pm.compress` packed, at batch 1, with cold caches if the record has them.

    The fastest way to run the packed network is compared with the fastest way to run the dense one.
    """
    found = record["workloads"][name]
    times, caches = (found["cold"], "") if "cold" in found else (found["seconds"], ", warm caches")
    dense, packed = (
        min(seconds for way, seconds in times.items() if way.startswith(ways))
        for ways in (("dense", "plain"), "compressed")
    )
    layers = found["layers"]
    whole = all(layer["packed"] for layer in layers)
    sizes = format_megabytes(*(sum(layer["bytes"][i] for layer in layers) for i in (0, 1))) if whole else ""
    sparsity = f", {100 * layers[0]['sparsity']:.0f} % balanced" if whole else ""
    what = f"{name} after `pm.compress`, batch 1{sparsity}{caches}"
    return [what, machine_name(record), *compare_times(dense, packed), sizes]


def format_any_mask(name: str, record: Record) -> list[str]:
    """Return the row of a network without a pattern at batch 1 with cold caches, beside the fastest other engine."""
    network = name.lower().replace("-", "")
    sides = select_sides(record["timings"], network=network, mask="unstructured", batch=1, state="cold")
    packed = sides.pop("pm.compress")
    fastest = min(sides.values(), key=lambda row: row["seconds"])
    what = f"{name} after `pm.compress`, batch 1, 90 % pruned without a pattern, beside {fastest['side']}"
    return [what, machine_name(record), *compare_times(fastest["seconds"], packed["seconds"]), ""]


def format_shrunk(record: Record, row: Record) -> list[str]:
    """Return the row of a trained network whose filters `pm.shrink` removed."""
    seconds = (row["batch 1"][key] / 1e3 for key in ("before_ms", "after_ms"))
    sizes = "{before:,} → {after:,} parameters".format(**row["params"])
    what = "ResNet-20, 40 % of the filters removed by `pm.shrink`, batch 1"
    return [what, machine_name(record), *compare_times(*seconds), sizes]


def format_epochs(record: Record) -> Iterator[list[str]]:
    """Yield the rows of an epoch of training with DPF: one run, and several at once."""
    eager = next(row["seconds_per_epoch"] for row in record["rows"] if row["loop"] == "eager")
    for row in record["rows"]:
        if row["method"] == "dpf":
            how = f", {row['runs']} runs at once" if row["runs"] > 1 else ""
            what = f"an epoch of CIFAR-10 while pruning ResNet-20, beside dense training in eager PyTorch{how}"
            yield [what, machine_name(record), *compare_times(eager, row["seconds_per_epoch"]), ""]


def select_sides(timings: list[Record], **chosen: Any) -> dict[str, Record]:
    """Return the timings that have the chosen values, by side."""
    return {row["side"]: row for row in timings if all(row[key] == value for key, value in chosen.items())}


def compare_times(dense: float, sparse: float) -> list[str]:
    """Return two times and how many times faster the second one is."""
    return [format_seconds(dense), format_seconds(sparse), f"{dense / sparse:.1f}×"]


def format_seconds(seconds: float) -> str:
    """Return a time with three significant digits."""
    unit, factor = next((u, f) for u, f in (("s", 1), ("ms", 1e3), ("µs", 1e6)) if seconds * f >= 0.1 or u == "µs")
    return f"{seconds * factor:#.3g}".rstrip(".") + f" {unit}"


def format_megabytes(before: int, after: int) -> str:
    """Return two sizes in megabytes."""
    return f"{before / 1e6:.1f} → {after / 1e6:.1f} MB"


def render() -> str:
    """Return the text of the page with its table filled in."""
    heads = ["", "machine", "dense", "Pomona", "faster", "size"]
    return fill_page(PAGE, {"speed": format_table(heads, measured_rows())})


if __name__ == "__main__":
    write_page(PAGE, render())
    write_page(PICTURE, draw_picture())
