"""Tables 1 to 3 and Figures 1 and 2 of Qian & Klabjan made anew: results/qian.json, and the figures on docs/theory.md.

python benchmarks/qian.py           # draw, train, check and write (some minutes; Covertype must be there)
python benchmarks/qian.py --page    # write the page and its drawings again, from the records of this and of theory.py

Every mean of Tables 2 and 3 is checked as it is made: within four standard errors, theirs and ours together, and half
a digit of print.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pages
import record
from pages import DOCS, RESULTS, grid

from pomona.lab.tables.chart import line_chart
from pomona.theory import qian_tables

RECORD, PAGE, DRAWINGS = RESULTS / "qian.json", DOCS / "theory.md", DOCS / "theory"
MEASURED = RESULTS / "theory-cpu.json", RESULTS / "theory-h200.json"
MOST = 4.0  # standard errors
MIDDLE = {"magnitude": 0.2, "random": 0.2, "kernels": 0.4}  # the α of theory.py that are on the page
FORMS = ("found", "certificate", "sharp", "corrected", "printed")

Cells = Sequence[dict[str, Any]]


def measure(seed: int = 0) -> dict[str, Any]:
    """All five; refuses a mean that is not the document's."""
    tables = {}
    for name, make in qian_tables.TABLES.items():
        tables[name] = make(seed)
        far = [cell for cell in tables[name]["cells"] if (qian_tables.standard_errors_off(cell) or 0) > MOST]
        if far:
            raise SystemExit(f"{name}: {far[0]} is {qian_tables.standard_errors_off(far[0]):.1f} standard errors off.")
        print(f"{name}: {len(tables[name]['cells'])} cells", flush=True)
    return tables


# ---- the page


def grouped(cells: Cells, *keys: str) -> Iterable[tuple[tuple[Any, ...], dict[Any, dict[str, Any]]]]:
    """Neighbouring cells with the same settings, by quantity (and q)."""

    def place(cell: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(cell["setting"].get(key, cell.get(key)) for key in keys)

    for where, some in itertools.groupby(cells, place):
        yield where, {(c["setting"]["quantity"], c["setting"].get("q")): c for c in some}


def beside(cell: dict[str, Any], digits: int = 3) -> str:
    """Ours, and the document's in brackets."""
    return f"{cell['mean']:.{digits}f} ({cell['paper']:.{digits}f})"


def worst(cells: Cells) -> str:
    apart = [a for a in map(qian_tables.standard_errors_off, cells) if a is not None]
    return f"Of {len(apart)} means the farthest is {max(apart):.1f} standard errors off"


def table1(result: dict[str, Any]) -> str:
    rows = []
    for (layer,), found in grouped(result["cells"], "layer"):
        mean, variance = (found[name, None] for name in ("mean", "variance"))
        scaled = [f"{found[name, None]['mean']:.2f}" if (name, None) in found else "" for name in ("d E w²", "d² E w⁴")]
        rows.append([str(layer), beside(mean, 4), beside(variance, 4), *scaled])
    return grid(["layer", "mean", "variance", "d E w²", "d² E w⁴"], rows) + f"\n\n{result['notes']}"


def table2(result: dict[str, Any]) -> str:
    rows = []
    for (n1, n2, K), found in grouped(result["cells"], "n1", "n2", "K"):
        norm = found["‖B‖", None]
        rows.append([f"{n1} × {n2}", K, beside(norm), f"{norm['std']:.3f} ({norm['paper_std']:.3f})"])
        rows[-1] += [beside(found["c0", q]) for q in qian_tables.QUANTILES]
    heads = ["n1 × n2", "K", "E‖B‖", "std", *(f"c0, q = {100 * q:g} %" for q in qian_tables.QUANTILES)]
    return grid(heads, rows) + f"\n\n{worst(result['cells'])}; c0 are quantiles, the last ones of a single matrix."


def table3(result: dict[str, Any]) -> str:
    rows = []
    for (law, alpha, d), found in grouped(result["cells"], "model", "alpha", "d"):
        rows.append(
            [
                str(d),
                law,
                "" if alpha is None else f"{alpha:g}",
                *(beside(found[t, None]) for t in qian_tables.LEMMA4_TERMS),
            ]
        )
    heads = ["d", "law", "α", "rows", "columns", "fourth moments", "E‖A‖", "C"]
    return grid(heads, rows) + f"\n\n{worst(result['cells'])}. {result['notes']}"


def looseness(measured: dict[str, Any]) -> str:
    """What is found, certified and promised, at the least, the middle and the largest width."""
    rows = []
    for name, alpha in MIDDLE.items():
        some = [r for r in measured["theory"] if r["rule"] == name and r["alpha"] == alpha and "found" in r]
        for row in (some[0], some[len(some) // 2], some[-1]):
            said = ["vacuous" if row[form] is None else f"{row[form]:.2g}" for form in FORMS]
            rows.append([name, f"{alpha:g}", str(row["width"]), f"{row['sparsity']:.3f}", *said])
    return grid(("pruned", "α", "width", "sparsity", *FORMS), rows) + "\n\n" + starts(measured)


def starts(measured: dict[str, Any]) -> str:
    """Where the theorems begin to speak."""
    forms = FORMS[2:]
    rows = []
    for row in measured["theory"]:
        if "starts" in row:
            first = [row["starts"][form] for form in forms]
            rows.append([row["rule"], f"{row['alpha']:g}", *("never" if d is None else f"{d:,}" for d in first)])
    return "The smallest width at which a form says anything:\n\n" + grid(["pruned", "α", *forms], rows)


def speed(records: Sequence[dict[str, Any]]) -> str:
    rows = []
    for kept in records:
        one = kept["convolution"]
        threads = f", {one['threads']} threads" if one["device"] == "cpu" else ""
        where = pages.machine(kept, one["device"]) + threads
        rows.append([where, f"{1e3 * one['seconds']:.1f}", f"{one['proof_seconds']:.2f}", f"{one['error']:.0e}"])
    return grid(["machine", "estimate, ms", "proof, s", "relative error at most"], rows)


def sources(records: Sequence[dict[str, Any]]) -> str:
    return "\n".join(f"- {pages.made(kept)}, torch {kept['versions']['torch']}" for kept in records)


def page() -> str:
    """The page with its tables, from the records."""
    kept, *measured = map(pages.read, (RECORD, *MEASURED))
    tables = kept["tables"]
    parts = {
        "loose": looseness(measured[0]),
        "speed": speed(measured),
        "table1": table1(tables["qian-table1"]),
        "table2": table2(tables["qian-table2"]),
        "table3": table3(tables["qian-table3"]),
        "sources": sources([kept, *measured]),
    }
    return pages.filled(PAGE, parts)


def histograms(result: dict[str, Any], title: str) -> str:
    """The weights of each layer, as densities."""
    lines = {}
    for cell in result["cells"]:
        low, high, counts = (cell["histogram"][key] for key in ("low", "high", "counts"))
        step, total = (high - low) / len(counts), sum(counts)
        lines[f"layer {cell['setting']['layer']}"] = [
            (low + (k + 0.5) * step, count / total / step) for k, count in enumerate(counts)
        ]
    subtitle = f"{result['cells'][0]['model']}, four standard deviations to each side"
    return line_chart(
        lines, title=title, subtitle=subtitle, x_label="weight", y_label="density", log_axes=(False, False)
    )


def drawings() -> dict[str, str]:
    """The page's own, from the record."""
    tables = pages.read(RECORD)["tables"]
    return {
        "figure1.svg": histograms(tables["qian-figure1"], "Weights of a network trained on Covertype"),
        "figure2.svg": histograms(tables["qian-figure2"], "Weights of a CNN trained on digits"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--page", action="store_true", help="only write the page, from the records")
    if not parser.parse_args().page:
        record.write(RECORD, seed=0, tables=measure())
    pages.write(PAGE, page())
    for name, drawing in drawings().items():
        pages.write(DRAWINGS / name, drawing)


if __name__ == "__main__":
    main()
