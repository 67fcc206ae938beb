"""Write the tables of docs/harm.md and its picture docs/harm.svg from the record of harm_matrix.py.

python benchmarks/pages/harm_page.py
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from heat_map import Label, draw_heat_map
from page_helpers import (
    DOCS,
    NOT_MEASURED,
    fill_page,
    format_sources,
    format_table,
    read_records,
    write_page,
)

PAGE, PICTURE = DOCS / "harm.md", DOCS / "harm.svg"
RECORD = "harm-matrix.json"
PATTERN_LABELS = {"balanced": "balanced, 64", "nm": "2:4", "block": "block, 4×4"}
DENSE, OWN_PATTERN = "dense", {"srigl": "constant fan-in"}
VERDICTS = {
    "fine": "within 15 points of the reference, or better",
    "harmed": "more than 15 points below the reference",
    "chance": "below 20 %",
    "refused": "refused with a sentence",
    "crashed": "an error that is no refusal",
}

Cell = dict[str, Any]


def read_cells() -> list[Cell]:
    """Return the cells of the record, none where there is no record."""
    return [cell for record in read_records(RECORD) for cell in record["cells"]]


def pattern_label(cell: Cell) -> str:
    """Return the name of a cell's pattern on the page."""
    if cell["method"] == DENSE:
        return ""
    return OWN_PATTERN.get(cell["method"], PATTERN_LABELS.get(cell["pattern"], cell["pattern"]))


def sparsity_label(cell: Cell) -> str:
    """Return a cell's sparsity in per cent."""
    return f"{100 * cell['sparsity']:g} %"


def draw_matrix(cells: Sequence[Cell]) -> str:
    """Return the picture: a row for each method and pattern, a column for each network and sparsity.

    Of several seeds the lowest accuracy is shown. The accuracy of dense training is repeated at every sparsity.
    """
    sparsities = list(dict.fromkeys(sparsity_label(cell) for cell in cells if cell["method"] != DENSE))
    sparsities.sort(key=lambda label: float(label.split()[0]))
    rows: list[Label] = list(dict.fromkeys((cell["method"], pattern_label(cell)) for cell in cells))
    columns: list[Label] = [(name, s) for name in dict.fromkeys(c["network"] for c in cells) for s in sparsities]
    values: dict[tuple[Label, Label], float | None] = {}
    for cell in cells:
        for sparsity in sparsities if cell["method"] == DENSE else [sparsity_label(cell)]:
            place = (cell["method"], pattern_label(cell)), (cell["network"], sparsity)
            found, before = cell.get("accuracy"), values.get(place)
            values[place] = found if before is None else before if found is None else min(found, before)
    subtitle = "accuracy on test digits after a short training, by method and pattern, network and sparsity"
    return draw_heat_map(rows, columns, values, title="Methods × patterns × networks", subtitle=subtitle)


def format_verdicts(cells: Sequence[Cell]) -> str:
    """Return how many cells have each verdict."""
    counts = Counter(cell["verdict"] for cell in cells)
    return format_table(["cells", "", ""], [[f"{counts[v]:,}", v, text] for v, text in VERDICTS.items() if cells])


def format_networks(records: Iterable[dict[str, Any]]) -> str:
    """Return the networks and the accuracy of dense training."""
    rows = []
    for record in records:
        for name, description in record["settings"]["networks"].items():
            dense = [c["accuracy"] for c in record["cells"] if (c["method"], c["network"]) == (DENSE, name)]
            rows.append([name, description, " / ".join(f"{accuracy:.1f}" for accuracy in dense)])
    return format_table(["network", "", "dense, %"], rows)


def format_harmed(cells: Sequence[Cell]) -> str:
    """Return the cells that were harmed or ended at chance, or crashed, with what is known of their masks."""
    rows = []
    for cell in cells:
        if cell["verdict"] not in ("harmed", "chance", "crashed"):
            continue
        what = [cell["method"], pattern_label(cell), cell["network"], sparsity_label(cell), str(cell["seed"])]
        if cell["verdict"] == "crashed":
            rows.append([*what, "", "", "", "", cell["message"]])
            continue
        reference = f"{cell['reference']:.1f}" if "reference" in cell else ""
        layers = f"{100 * cell['least_density']:.2g} % of {cell['thinnest_layer']}" if "least_density" in cell else ""
        latent = f"{cell['largest_latent']:.3g}" if "largest_latent" in cell else ""
        verdict = f"{cell['verdict']}, warned" if "warnings" in cell else cell["verdict"]
        rows.append([*what, f"{cell['accuracy']:.1f}", reference, layers, latent, verdict])
    heads = ["method", "pattern", "network", "sparsity", "seed", "accuracy, %", "reference, %", "thinnest layer keeps"]
    return format_table([*heads, "largest latent", ""], rows) if rows or not cells else "None."


def format_refusals(cells: Sequence[Cell]) -> str:
    """Return the sentences of refusals, and where each was given."""
    places: dict[tuple[str, str, str], list[str]] = {}
    for cell in cells:
        if cell["verdict"] == "refused":
            key = cell["method"], pattern_label(cell), cell["message"]
            places.setdefault(key, []).append(f"{cell['network']} {sparsity_label(cell)}")
    networks = {cell["network"] for cell in cells}
    rows = []
    for (method, pattern, sentence), where in places.items():
        where = list(dict.fromkeys(where))
        names = {place.split()[0] for place in where}
        shown = "all" if names == networks else ", ".join(where)
        rows.append([method, pattern, shown, sentence.replace("|", "\\|")])
    return format_table(["method", "pattern", "where", "the sentence"], rows) if rows or not cells else "None."


def format_picture(cells: Sequence[Cell]) -> str:
    """Return the link to the picture, where there is a record to draw."""
    alt = "Accuracy of every method and pattern on six networks at three sparsities"
    return f"![{alt}]({PICTURE.name})" if cells else NOT_MEASURED


def render() -> str:
    """Return the text of the page with its tables filled in."""
    records, cells = read_records(RECORD), read_cells()
    parts = {
        "picture": format_picture(cells),
        "verdicts": format_verdicts(cells),
        "networks": format_networks(records),
        "harmed": format_harmed(cells),
        "refusals": format_refusals(cells),
        "sources": format_sources(records),
    }
    return fill_page(PAGE, parts)


if __name__ == "__main__":
    write_page(PAGE, render())
    if cells := read_cells():
        write_page(PICTURE, draw_matrix(cells))
