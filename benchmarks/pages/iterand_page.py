"""Write the tables of docs/iterand.md from the records in results/.

python benchmarks/pages/iterand_page.py
"""

from __future__ import annotations

from page_helpers import (
    DOCS,
    fill_page,
    format_sources,
    format_table,
    machine_name,
    read_records,
    read_rows,
    write_page,
)
from results_page import compare_with_paper, format_trained_rows, load_run_store

PAGE = DOCS / "iterand.md"
RECORDS = "iterand-*.json"
TICKETS = {  # the method, and what is stored of a kept weight
    "edge_popup": ("edge-popup", "nothing"),
    "iterand sc": ("IteRand, SC", "whether its sign changed"),
    "iterand ku": ("IteRand, KU", "the number of its last re-draw"),
}
NOTES = {  # on records, by the commit that made them
    "5993473a2704": "In this record the time of the selection includes the launches of its six kernels. The benchmark "
    "now times the selection inside a graph, as it runs in training, and was not run again.",
}


def format_redraws() -> str:
    """Return the table of re-draws, with the paper's times."""
    rows = []
    for record, row in read_rows(RECORDS, "redraws"):
        times = f"{row['ms']:.2f}", f"{row['paper_ms']:.2f}", f"{row['paper_ms'] / row['ms']:.0f}×"
        rows.append([machine_name(record), row["model"], f"{row['weights']:,}", *times])
    return format_table(["machine", "network", "weights", "one re-draw, ms", "in the paper, ms", "speed-up"], rows)


def format_steps() -> str:
    """Return the table of training steps with edge-popup, and the share of the mask selection."""
    rows, notes = [], {}
    for record, row in read_rows(RECORDS, "steps"):
        times = [f"{row[key]:.2f}" for key in ("dense_ms", "edge_popup_ms", "ratio", "selection_ms")]
        share = f"{100 * row['selection_share']:.1f} %"
        rows.append([machine_name(record), row["model"], str(row["batch"]), *times, share])
        notes[record["commit"]] = NOTES.get(record["commit"], "")
    heads = [
        "machine",
        "network",
        "batch",
        "dense, ms",
        "edge-popup, ms",
        "ratio",
        "selection, ms",
        "share of the step",
    ]
    return "\n\n".join([format_table(heads, rows), *filter(None, notes.values())])


def format_tickets() -> str:
    """Return the table of ticket sizes: networks with simulated re-draws first, then trained networks."""
    rows = []
    for key in ("tickets", "trained"):
        for _, row in read_rows(RECORDS, key):
            network = f"{row['model']}, ρ = {row['rho']:g}, trained" if key == "trained" else "resnet18, simulated"
            sizes = f"{row['state_bytes']:,}", f"{row['bytes']:,}", f"1/{row['ratio']:.1f}"
            rows.append([network, *TICKETS[row["ticket"]], *sizes])
    return format_table(
        ["network", "method", "stored per kept weight", "float32 state, bytes", "ticket, bytes", "ticket / state"], rows
    )


def render() -> str:
    """Return the text of the page with its tables filled in."""
    store = load_run_store()
    names = ("table3", "table10", "options")
    trained = {name: format_trained_rows(compare_with_paper(f"iterand-{name}", store)) for name in names}
    measured = {"redraws": format_redraws(), "steps": format_steps(), "tickets": format_tickets()}
    sources = format_sources(record for record in read_records(RECORDS) if "commit" in record)
    return fill_page(PAGE, {**trained, **measured, "sources": sources})


if __name__ == "__main__":
    write_page(PAGE, render())
