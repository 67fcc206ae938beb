"""Write the tables of docs/language-models.md: records of language_model.py, prune_large_model.py and decoding.py.

python benchmarks/pages/language_models_page.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from page_helpers import (
    DOCS,
    NOT_MEASURED,
    Record,
    fill_page,
    format_sources,
    format_table,
    machine_name,
    read_records,
    read_rows,
    write_page,
)

PAGE = DOCS / "language-models.md"
PERPLEXITY_RECORDS, LARGE_RECORDS = "language-model*.json", "large-model*.json"
DECODING_RECORDS = "decoding-*.json"
MODELS = {"gpt2": "GPT-2", "llama": "Llama"}
NAMES = {"dense": "dense", "magnitude": "magnitude", "wanda": "Wanda", "sparsegpt": "SparseGPT", "dpf": "DPF"}

Row = dict[str, Any]


def case_label(row: Row) -> str:
    """Return the heading of a case: its sparsity, or its pattern where that fixes it."""
    return f"{100 * row['sparsity']:g} %" if row["pattern"] == "unstructured" else str(row["pattern"])


def format_perplexities(means: Sequence[Row]) -> str:
    """Return a row for each method and a column for each case; the dense model has one figure for all of them."""
    cases = list(dict.fromkeys(case_label(row) for row in means if row["method"] != "dense"))
    found = {(row["method"], case_label(row)): f"{row['mean']:.2f} ± {row['std']:.2f}" for row in means}
    rows = []
    for method in NAMES:
        if method == "dense":
            cells = [text for (name, _), text in found.items() if name == "dense"] * len(cases)
        else:
            cells = [found[method, case] for case in cases if (method, case) in found]
        if cells:
            rows.append([NAMES[method], *cells])
    return format_table(["", *cases], rows)


def format_large_models() -> str:
    """Return a row for each model that was pruned: its size, its calibration text, and what it took."""
    rows = [
        [
            f"{NAMES[row['method']]}, {machine_name(record, record['device'])}",
            f"{row['parameters'] / 1e9:.2f} billion in {row['blocks']} blocks, {row['model_bytes'] / 1e9:.1f} GB",
            f"{row['windows']} × {row['tokens']}",
            f"{row['seconds']:.0f} s",
            f"{row['seconds_per_block']:.1f} s",
            f"{row['peak_bytes'] / 1e9:.1f} GB",
        ]
        for record, row in read_rows(LARGE_RECORDS, "rows")
    ]
    return format_table(["", "parameters", "tokens", "time", "a block", "peak memory"], rows)


def format_decoding(records: Sequence[Record]) -> str:
    """Return a table for each decoder and machine: a row for each format, and the speed at each batch size."""
    parts = []
    for record in records:
        for model, shape in record["shapes"].items():
            rows = [row for row in record["rows"] if row["model"] == model]
            threads = "" if record["device"] == "cuda" else f", {record['threads']} thread"
            title = (
                f"**{MODELS[model]}, {shape['layers']} blocks, {shape['width']:,} wide**, "
                f"{machine_name(record, record['device'])}{threads}:"
            )
            parts.append(f"{title}\n\n{format_speeds(rows)}")
    return "\n\n".join(parts) or NOT_MEASURED


def format_speeds(rows: Sequence[Row]) -> str:
    """Return a row for each format: the bytes of the blocks, and tokens per second at each batch size."""
    batches = sorted({row["batch"] for row in rows})
    found = {(row["format"], row["batch"]): row for row in rows}
    lines = []
    for name in dict.fromkeys(row["format"] for row in rows):
        of_format = [found[name, batch] for batch in batches]
        speeds = [f"{row['tokens_per_second']:,.0f} ({row['speedup']:.2f}×)" for row in of_format]
        lines.append([name, of_format[0]["dtype"], f"{of_format[0]['weight_bytes'] / 1e6:,.0f} MB", *speeds])
    heads = [f"tokens/s, batch {batch}" for batch in batches]
    return format_table(["weights", "activations", "bytes", *heads], lines)


def render() -> str:
    """Return the page with its tables filled in."""
    measured = read_records(PERPLEXITY_RECORDS)
    means = [row for record in measured for row in record["means"]]
    decoding = read_records(DECODING_RECORDS)
    parts = {
        "perplexity": format_perplexities(means),
        "memory": format_large_models(),
        "decoding": format_decoding(decoding),
        "sources": format_sources([*measured, *read_records(LARGE_RECORDS), *decoding]),
    }
    return fill_page(PAGE, parts)


if __name__ == "__main__":
    write_page(PAGE, render())
