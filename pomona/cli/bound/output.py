"""Output of the `pomona bound` commands: values, tables, JSON and charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pomona.errors import PomonaError, require

from ..output import facts_table, print_json, print_status, print_table

Series = dict[str, list[tuple[float, float]]]  # the points of each line of a chart


def print_values(values: Mapping[str, Any], as_json: bool) -> None:
    """Print names and values, as JSON or as a table."""
    if as_json:
        print_json(dict(values))
    else:
        print_table(facts_table({key: f"{v:.6g}" if isinstance(v, float) else v for key, v in values.items()}))


def print_result(value: Any, table: Any, as_json: bool) -> None:
    """Print a value as JSON, or the table that shows it."""
    if as_json:
        print_json(value)
    else:
        print_table(table)


def write_chart(
    file: Path,
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    title: str,
    x_label: str,
    y_label: str,
    subtitle: str = "",
    dashed: Sequence[str] = (),
    log_axes: tuple[bool, bool] = (True, True),
) -> None:
    """Write a chart of the series as SVG; `log_axes` says which axes are logarithmic.

    Raise PomonaError where there is no point to draw, or the file cannot be written.
    """
    from pomona.lab.tables.chart import line_chart

    require(any(series.values()), "there is nothing to draw: the bound is vacuous everywhere.")
    chart = line_chart(
        series, title=title, x_label=x_label, y_label=y_label, subtitle=subtitle, dashed=dashed, log_axes=log_axes
    )
    try:
        file.write_text(chart)
    except OSError as error:
        raise PomonaError(f"'{file}' cannot be written: {error.strerror}.") from error
    print_status(f"chart written to {file}")
