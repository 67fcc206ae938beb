"""Write the tables and drawings of docs/theory.md from the records of the scripts that measure its figures.

python benchmarks/pages/theory_page.py
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from certificate_tables import format_certified_pruning, format_depth_looseness, format_predictions
from page_helpers import (
    DOCS,
    RESULTS,
    fill_page,
    format_command,
    format_table,
    machine_name,
    read_record,
    write_page,
)

from pomona.lab.tables.chart import line_chart
from pomona.theory import bounds, qian_tables

PAGE, DRAWINGS = DOCS / "theory.md", DOCS / "theory"
RECORD = RESULTS / "qian.json"
LOOSENESS_RECORDS = RESULTS / "theory-cpu.json", RESULTS / "theory-h200.json"
CERTIFICATE_RECORD = RESULTS / "certificates.json"
SHOWN_ALPHA = {"magnitude": 0.2, "random": 0.2, "kernels": 0.4}  # the α of bound_looseness.py that the page shows
FORMS = ("found", "certificate", "sharp", "corrected", "printed")

VGG_LAYERS = (1, 2, 3, 5, 8, 13, 14, 15, 16)  # in Figure 2: one of each width, and the last layers

TABLE1_NOTE = """{notes} Here they are at most {K1:.1f} and {K2:.0f}, which are the constants K1 and K2 of the theorem
for this network. A single width cannot show that they do not grow with d. The paper has about 580,000 rows and an
accuracy of about 80 %."""

FIGURE2_NOTE = """The paper shows the VGG16 that PyTorch offers, trained on ImageNet, whose weights cannot be had
here. Figure 2 above shows another network: a VGG-16 for images of 32 × 32, with batch norm. {notes} That is a short
training, and the weights still have nearly the law that they were drawn from: a Gaussian in the convolutions (layers
1 to 13), a uniform one in the linear layers. The figure says nothing about the weights at the end of a
long training."""

TABLE3_NOTE = """The paper says that the rows with α follow (19), where A is what ⌊d^(2−2α)⌋ draws remove. The printed
values are those of the entries that are kept after ⌊d^(2−α)⌋ draws. With replacement, a share exp(−d^−α) of the entries
is left, and the root of this share is the norm of a row ({kept:.3f} at d = 32, α = 0.01; the removed part has
{removed:.3f})."""

Cells = Sequence[dict[str, Any]]


def group_cells(cells: Cells, *keys: str) -> Iterable[tuple[tuple[Any, ...], dict[Any, dict[str, Any]]]]:
    """Yield adjacent cells that agree in the settings `keys`, as a dict from (quantity, q) to the cell."""

    def settings(cell: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(cell["setting"].get(key, cell.get(key)) for key in keys)

    for values, group in itertools.groupby(cells, settings):
        yield values, {(c["setting"]["quantity"], c["setting"].get("q")): c for c in group}


def format_cell(cell: dict[str, Any], digits: int = 3) -> str:
    """Return our mean, with the paper's in brackets."""
    return f"{cell['mean']:.{digits}f} ({cell['paper']:.{digits}f})"


def describe_largest_deviation(cells: Cells) -> str:
    """Return a clause about the mean that is farthest from the paper's."""
    deviations = [a for a in map(qian_tables.standard_errors_off, cells) if a is not None]
    return f"Of {len(deviations)} means, the largest deviation is {max(deviations):.1f} standard errors"


def format_table1(result: dict[str, Any]) -> str:
    """Return Table 1: mean and variance of trained weights, layer by layer."""
    rows = []
    for (layer,), found in group_cells(result["cells"], "layer"):
        mean, variance = (found[name, None] for name in ("mean", "variance"))
        scaled = [f"{found[name, None]['mean']:.2f}" if (name, None) in found else "" for name in ("d E w²", "d² E w⁴")]
        rows.append([str(layer), format_cell(mean, 4), format_cell(variance, 4), *scaled])
    K1, K2 = (
        max(cell["mean"] for cell in result["cells"] if cell["setting"]["quantity"] == quantity)
        for quantity in ("d E w²", "d² E w⁴")
    )
    table = format_table(["layer", "mean", "variance", "d E w²", "d² E w⁴"], rows)
    return table + "\n\n" + wrap(TABLE1_NOTE.format(notes=result["notes"], K1=K1, K2=K2))


def format_table2(result: dict[str, Any]) -> str:
    """Return Table 2: norms of random matrices and their quantiles."""
    rows = []
    for (n1, n2, K), found in group_cells(result["cells"], "n1", "n2", "K"):
        norm = found["‖B‖", None]
        rows.append([f"{n1} × {n2}", K, format_cell(norm), f"{norm['std']:.3f} ({norm['paper_std']:.3f})"])
        rows[-1] += [format_cell(found["c0", q]) for q in qian_tables.QUANTILES]
    heads = ["n1 × n2", "K", "E‖B‖", "std", *(f"c0, q = {100 * q:g} %" for q in qian_tables.QUANTILES)]
    note = "The c0 are quantiles. The last ones rest on a single matrix."
    return format_table(heads, rows) + f"\n\n{describe_largest_deviation(result['cells'])}. {note}"


def format_table3(result: dict[str, Any]) -> str:
    """Return Table 3: the three terms of Latała's inequality, the norm and the constant C."""
    rows = []
    for (law, alpha, d), found in group_cells(result["cells"], "model", "alpha", "d"):
        terms = (format_cell(found[term, None]) for term in qian_tables.LEMMA4_TERMS)
        rows.append([str(d), law, "" if alpha is None else f"{alpha:g}", *terms])
    heads = ["d", "law", "α", "rows", "columns", "fourth moments", "E‖A‖", "C"]
    d, alpha = 32, 0.01
    kept = math.sqrt(1 - bounds.distinct(math.floor(d ** (2 - alpha)), d**2))
    note = TABLE3_NOTE.format(kept=kept, removed=math.sqrt(1 - kept**2))
    return format_table(heads, rows) + "\n\n" + wrap(f"{describe_largest_deviation(result['cells'])}. {note}")


def format_figure2(result: dict[str, Any]) -> str:
    """Return what network Figure 2 shows."""
    return wrap(FIGURE2_NOTE.format(notes=result["notes"]))


def wrap(text: str) -> str:
    """Return a paragraph in lines of at most 120 characters."""
    return textwrap.fill(" ".join(text.split()), 120, break_long_words=False, break_on_hyphens=False)


def format_looseness(measured: dict[str, Any]) -> str:
    """Return the errors found, certified and promised at the smallest, the middle and the largest width."""
    rows = []
    for name, alpha in SHOWN_ALPHA.items():
        some = [r for r in measured["theory"] if r["rule"] == name and r["alpha"] == alpha and "found" in r]
        for row in (some[0], some[len(some) // 2], some[-1]):
            errors = ["vacuous" if row[form] is None else f"{row[form]:.2g}" for form in FORMS]
            rows.append([name, f"{alpha:g}", str(row["width"]), f"{row['sparsity']:.3f}", *errors])
    return format_table(("pruned", "α", "width", "sparsity", *FORMS), rows) + "\n\n" + format_smallest_widths(measured)


def format_smallest_widths(measured: dict[str, Any]) -> str:
    """Return the smallest widths at which the forms of the theorems are not vacuous."""
    forms = FORMS[2:]
    rows = []
    for row in measured["theory"]:
        if "starts" in row:
            widths = [row["starts"][form] for form in forms]
            rows.append([row["rule"], f"{row['alpha']:g}", *("never" if d is None else f"{d:,}" for d in widths)])
    return "The smallest width at which each form is not vacuous:\n\n" + format_table(["pruned", "α", *forms], rows)


def format_speed(records: Sequence[dict[str, Any]]) -> str:
    """Return the time of the norm of a large convolution."""
    rows = []
    for record in records:
        timing = record["convolution"]
        threads = f", {timing['threads']} threads" if timing["device"] == "cpu" else ""
        machine = machine_name(record, timing["device"]) + threads
        figures = f"{1e3 * timing['seconds']:.1f}", f"{timing['proof_seconds']:.2f}", f"{timing['error']:.0e}"
        rows.append([machine, *figures])
    return format_table(["machine", "estimate, ms", "proof, s", "relative error at most"], rows)


def format_record_sources(records: Sequence[dict[str, Any]]) -> str:
    """Return the commands and versions that made `records`, and the commits that trained their networks."""
    lines = []
    for record in records:
        networks = record.get("networks", {})  # with the commits that trained them, or a list without
        commits = networks.items() if isinstance(networks, dict) else []
        trained = ", ".join(f"{name} at {commit}" for name, commit in commits)
        lines.append(f"- {format_command(record)}, torch {record['versions']['torch']}")
        lines[-1] += f"; networks trained: {trained}" if trained else ""
    return "\n".join(lines)


def render() -> str:
    """Return the text of the page with its tables filled in."""
    record, *looseness = map(read_record, (RECORD, *LOOSENESS_RECORDS))
    tables = record["tables"]
    certificates = [read_record(CERTIFICATE_RECORD)] if CERTIFICATE_RECORD.is_file() else []
    parts = {
        "certified": format_certified_pruning(certificates),
        "certified-predictions": format_predictions(certificates),
        "certified-looseness": format_depth_looseness(certificates),
        "loose": format_looseness(looseness[0]),
        "speed": format_speed(looseness),
        "table1": format_table1(tables["qian-table1"]),
        "figure2": format_figure2(tables["qian-figure2"]),
        "table2": format_table2(tables["qian-table2"]),
        "table3": format_table3(tables["qian-table3"]),
        "sources": format_record_sources([record, *looseness, *certificates]),
    }
    return fill_page(PAGE, parts)


def draw_histograms(result: dict[str, Any], title: str, layers: Sequence[int] = ()) -> str:
    """Return an SVG of the densities of the weights of each layer (or of `layers`), next to a Gaussian.

    The weights are in standard deviations from their mean, so that layers of all scales can be compared.
    """
    lines = {}
    for cell in result["cells"]:
        layer, counts = cell["setting"]["layer"], cell["histogram"]["counts"]
        if layers and layer not in layers:
            continue
        low, high = ((cell["histogram"][end] - cell["mean"]) / cell["std"] for end in ("low", "high"))
        step, total = (high - low) / len(counts), sum(counts)
        points = [(low + (k + 0.5) * step, count / total / step) for k, count in enumerate(counts)]
        lines[f"layer {layer}"] = points
    lines["Gaussian"] = [(x, math.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)) for x, _ in points]
    return line_chart(
        lines,
        title=title,
        subtitle=f"{result['cells'][0]['model']}, each layer in units of its own standard deviation",
        x_label="weight, in standard deviations from the mean of its layer",
        y_label="density",
        dashed=["Gaussian"],
        log_axes=(False, False),
    )


def render_drawings() -> dict[str, str]:
    """Return the SVG drawings of Figures 1 and 2 by file name."""
    tables = read_record(RECORD)["tables"]
    return {
        "figure1.svg": draw_histograms(tables["qian-figure1"], "Weights of a network trained on Covertype"),
        "figure2.svg": draw_histograms(
            tables["qian-figure2"], "Weights of a VGG-16, trained briefly on CIFAR-10", VGG_LAYERS
        ),
    }


if __name__ == "__main__":
    write_page(PAGE, render())
    for name, drawing in render_drawings().items():
        write_page(DRAWINGS / name, drawing)
