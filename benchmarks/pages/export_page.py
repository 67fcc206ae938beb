"""Write the tables of docs/export.md from the record of export_matrix.py.

python benchmarks/pages/export_page.py
"""

from __future__ import annotations

from typing import Any

from page_helpers import DOCS, NOT_MEASURED, fill_page, format_sources, format_table, read_records, write_page

PAGE = DOCS / "export.md"
RECORD = "export-matrix.json"

Cell = dict[str, Any]


def read_cells() -> list[Cell]:
    """Return the cells of the record, none where there is no record."""
    return [cell for record in read_records(RECORD) for cell in record["cells"]]


def speed_up(cell: Cell) -> float:
    """Return how many times faster the file is than the network."""
    return float(cell["latency"]["before"] / cell["latency"]["after"])


def format_matrix(cells: list[Cell]) -> str:
    """Return the table of all formats and networks: times smaller and times as fast, or "refused"."""
    networks = list(dict.fromkeys(cell["network"] for cell in cells))
    found = {(cell["format"], cell["network"]): cell for cell in cells}
    rows = []
    for name in dict.fromkeys(cell["format"] for cell in cells):
        shown = [
            "refused" if "refused" in cell else f"{cell['ratio']:.1f}× / {speed_up(cell):.1f}×"
            for cell in (found[name, network] for network in networks)
        ]
        rows.append([f"`{name}`" if "," not in name else name, *shown])
    return format_table(["format", *networks], rows)


def format_refusals(cells: list[Cell]) -> str:
    """Return the sentence of each refusal."""
    refused = [f"- {cell['network']}, `{cell['format']}`: {cell['refused']}" for cell in cells if "refused" in cell]
    return "\n".join(refused) or ("No network was refused." if cells else NOT_MEASURED)


def format_details(cells: list[Cell]) -> str:
    """Return the table of bytes, latency and difference of every file."""
    rows = []
    for cell in cells:
        if "refused" in cell:
            continue
        times = cell["latency"]
        packed = "" if cell["packed"] is None else str(cell["packed"])
        rows.append(
            [
                cell["network"],
                cell["format"],
                cell["pattern"],
                f"{cell['state_bytes']:,}",
                f"{cell['bytes']:,}",
                packed,
                f"{1000 * times['before']:.3g}",
                f"{1000 * times['after']:.3g}",
                f"{cell['difference']:.0e}",
            ]
        )
    heads = ["network", "format", "pattern", "state, bytes", "file, bytes", "packed weights", "before, ms", "after, ms"]
    return format_table([*heads, "difference"], rows)


def render() -> str:
    """Return the text of the page with its tables filled in."""
    cells = read_cells()
    parts = {
        "matrix": format_matrix(cells) if cells else NOT_MEASURED,
        "refusals": format_refusals(cells),
        "details": format_details(cells),
        "sources": format_sources(read_records(RECORD)),
    }
    return fill_page(PAGE, parts)


if __name__ == "__main__":
    write_page(PAGE, render())
