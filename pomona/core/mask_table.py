"""Masks as a table: what each layer keeps."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table
from torch import Tensor


def mask_table(title: str, masks: Mapping[str, Tensor]) -> Table:
    """Return one row for each mask, with the weights that it keeps. The host reads the masks."""
    counts = {name: (mask.numel(), int(mask.sum())) for name, mask in masks.items()}
    total = tuple(map(sum, zip(*counts.values(), strict=True)))
    table = Table("layer", "shape", title=title, show_footer=True)
    table.columns[0].footer = "total"
    for heading, footer in zip(("weights", "kept", "density"), density_cells(*total), strict=True):
        table.add_column(heading, footer=footer, justify="right", no_wrap=True)
    for name, count in counts.items():
        table.add_row(name, "×".join(map(str, masks[name].shape)), *density_cells(*count))
    return table


def density_cells(weights: int, kept: int) -> tuple[str, str, str]:
    """Return the number of weights, how many are kept, and the fraction of them, as text."""
    return f"{weights:,}", f"{kept:,}", f"{kept / weights:.2%}"
