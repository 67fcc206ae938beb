"""Write the tables of docs/iterand.md from the records in results/, so that no figure in them is typed by hand.

python benchmarks/iterand_page.py
"""

from __future__ import annotations

from pages import DOCS, filled, grid, machine, records, rows, sources, write

from results import begun, compare, store

PAGE = DOCS / "iterand.md"
RECORDS = "iterand-*.json"
TICKETS = {  # the method, and what is stored of a kept weight
    "edge_popup": ("edge-popup", "nothing"),
    "iterand sc": ("IteRand, SC", "whether its sign changed"),
    "iterand ku": ("IteRand, KU", "the number of its last re-draw"),
}
NOTES = {  # on records, by the commit that made them
    "5993473a2704": "This record timed the selection with the launches of its six kernels in it; the benchmark now "
    "times it inside a graph, as it runs, and was not run again.",
}


def redraws() -> str:
    """A re-draw beside the paper's."""
    made = []
    for record, row in rows(RECORDS, "redraws"):
        times = f"{row['ms']:.2f}", f"{row['paper_ms']:.2f}", f"{row['paper_ms'] / row['ms']:.0f}×"
        made.append([machine(record), row["model"], f"{row['weights']:,}", *times])
    return grid(["machine", "network", "weights", "a re-draw, ms", "the paper's, ms", "faster"], made)


def steps() -> str:
    """A step of edge-popup, and what of it is the selection."""
    made, notes = [], {}
    for record, row in rows(RECORDS, "steps"):
        times = [f"{row[key]:.2f}" for key in ("dense_ms", "edge_popup_ms", "ratio", "selection_ms")]
        made.append([machine(record), row["model"], str(row["batch"]), *times, f"{100 * row['selection_share']:.1f} %"])
        notes[record["commit"]] = NOTES.get(record["commit"], "")
    heads = ["machine", "network", "batch", "dense, ms", "edge-popup, ms", "ratio", "selection, ms", "of the step"]
    return "\n\n".join([grid(heads, made), *filter(None, notes.values())])


def tickets() -> str:
    """Tickets of drawn networks, then of trained ones."""
    made = []
    for key in ("tickets", "trained"):
        for _, row in rows(RECORDS, key):
            network = f"{row['model']}, ρ = {row['rho']:g}, trained" if key == "trained" else "resnet18, drawn"
            sizes = f"{row['state_bytes']:,}", f"{row['bytes']:,}", f"1/{row['ratio']:.1f}"
            made.append([network, *TICKETS[row["ticket"]], *sizes])
    return grid(
        ["network", "method", "stored of a kept weight", "float32 state, bytes", "ticket, bytes", "of the state"], made
    )


def page() -> str:
    """The page with its tables."""
    kept = store()
    trained = {key: begun(compare(f"iterand-{key}", kept)) for key in ("table3", "table10", "options")}
    measured = {"redraws": redraws(), "steps": steps(), "tickets": tickets()}
    made = sources(record for record in records(RECORDS) if "commit" in record)
    return filled(PAGE, {**trained, **measured, "sources": made})


if __name__ == "__main__":
    write(PAGE, page())
