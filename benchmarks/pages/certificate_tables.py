"""The tables of docs/theory.md about certificates, from the record of certified_predictions.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from page_helpers import format_table

Records = Sequence[dict[str, Any]]  # the record, or none where it was not measured yet


def format_predictions(records: Records) -> str:
    """Return the shares of predictions that are proven unchanged, before and after, beside the true ones."""
    rows = [
        [
            row["network"],
            row["region"],
            f"{row['sparsity']:.0%}",
            *(f"{row[k]:.1%}" for k in ("before", "after", "true")),
        ]
        for record in records
        for row in record["predictions"]
    ]
    return format_table(["network", "region", "sparsity", "before", "after", "not changed by the attack"], rows)


def format_depth_looseness(records: Records) -> str:
    """Return how loose the certificates of random networks are, and the certificate of a transformer."""
    rows = [
        [str(row["depth"]), row["region"], f"{row['before']:.3g}×", f"{row['after']:.3g}×"]
        for record in records
        for row in record["looseness"]
    ]
    table = format_table(["layers", "region", "before", "after"], rows)
    transformer = [
        [row["region"], f"{row['sparsity']:.0%}", *(f"{row[key]:.3g}" for key in ("intervals", "linear", "found"))]
        for record in records
        for row in record["transformer"]
    ]
    heads = ["region", "sparsity", "by intervals", "by linear forms", "found"]
    return f"{table}\n\nA transformer encoder of two blocks:\n\n{format_table(heads, transformer)}"


def format_certified_pruning(records: Records) -> str:
    """Return the sparsity that certified pruning and magnitude reach at the same budget."""
    rows = []
    for record in records:
        for row in record["pruning"]:
            shares = (
                f"{row['certified']:.1%} of {row['certifiable']:.1%}",
                f"{row['held_out']:.1%} of {row['held_out_certifiable']:.1%}",
            )
            rows.append([row["network"], f"{row['radius']:g}", row["method"], f"{row['sparsity']:.1%}", *shares])
    return format_table(["network", "radius", "pruned by", "sparsity", "certified", "certified, held out"], rows)
