"""Parts of figures in the format of plotly.js, and the chart that joins them: pure data, drawn by the page's script.

Colors are written as "@0", "@1", …; the page replaces them by those of its light or dark palette. Text that comes from
a user goes through `escape_text`, since plotly.js reads some HTML in texts, and reaches a hover template only as data.
"""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Figure = dict[str, Any]

PALETTE_SIZE = 8  # colors of the page's palettes
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")


@dataclass(frozen=True)
class Chart:
    """A chart of the page: a figure, or several among which the reader chooses."""

    name: str  # part of the element's id
    title: str
    caption: str
    choices: Mapping[str, Figure] = field(default_factory=dict)  # label → figure
    choice_title: str = ""  # what the labels are, such as "Network"
    wide: bool = False  # whether it takes the whole width of the page

    @property
    def has_points(self) -> bool:
        """Whether any figure shows anything."""
        return any(figure["data"] for figure in self.choices.values())


def line_trace(x: Sequence[float], y: Sequence[float], name: str, color: int, hover: str, **options: Any) -> Figure:
    """Return a curve; `hover` is the text of a point, in which %{x} and %{y} are its coordinates.

    The name of the run or group, in `meta`, is the heading of the hover text.
    """
    line = {"color": color_of(color), "width": 1.6} | options.pop("line", {})
    return {
        "type": "scatter",
        "mode": "lines" if len(y) > 1 else "markers",
        **compact_x(x),
        "y": compact(y),
        "name": escape_text(name),
        "meta": escape_text(options.pop("label", name)),
        "line": line,
        "marker": {"color": color_of(color), "size": 6},
        "hovertemplate": f"<b>%{{meta}}</b><br>{hover}<extra></extra>",
        **options,
    }


def layout(x_title: str, y_title: str, **options: Any) -> Figure:
    """Return a layout with the titles of its axes; `xaxis` and `yaxis` among the options add to them."""
    axes = {
        key: {"title": {"text": title}} | options.pop(key, {})
        for key, title in (("xaxis", x_title), ("yaxis", y_title))
    }
    return {**axes, **options}


def color_of(index: int) -> str:
    """Return the reference to a color of the page's palette; indices beyond its end start again."""
    return f"@{index % PALETTE_SIZE}"


def number_names(names: Iterable[str]) -> dict[str, int]:
    """Return a number for each different name, in the order of the first appearances."""
    return {name: index for index, name in enumerate(dict.fromkeys(names))}


def compact(values: Iterable[float | None]) -> list[float | None]:
    """Return numbers with five significant digits, which make a page small; None for what is not finite."""
    return [None if v is None or not math.isfinite(v) else float(f"{v:.5g}") for v in values]


def compact_x(x: Sequence[float]) -> Figure:
    """Return the x coordinates of a trace: first value and distance where they are equally spaced by an integer."""
    distances = {b - a for a, b in itertools.pairwise(x)}
    if len(distances) == 1 and all(float(value).is_integer() for value in (x[0], *distances)):
        return {"x0": x[0], "dx": x[1] - x[0]}
    return {"x": compact(x)}


def escape_text(text: str) -> str:
    """Return text that plotly.js and HTML show as it is."""
    return html.escape(text, quote=True)
