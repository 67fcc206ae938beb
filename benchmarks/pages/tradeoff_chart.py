"""A chart of what a form costs and how good it is as SVG text: costs on a logarithmic axis, curves with markers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pomona.lab.tables.chart import (
    BOTTOM,
    COLORS,
    GRID,
    INK,
    LEFT,
    MARKERS,
    MUTED,
    RIGHT,
    TOP,
    Axis,
    axis_labels,
    choose_axis,
    document,
    heading,
    horizontal_grid,
    line,
    polyline,
    text,
)

LAYOUTS = ("dense", "balanced", "unstructured")  # each with a marker of its own
COLOR_OF = {"fp32": INK, "fp16": COLORS[3], "int8": COLORS[1], "int4": COLORS[0]}
STEPS = (1, 2, 5)  # of a logarithmic axis, within a power of ten
LEGEND_GAP = 20  # pixels between two lines of the legend
PADDING = 0.04  # share of the width left free beside the first and the last mark


@dataclass(frozen=True)
class Mark:
    """One form: its layout and type of values, its cost, what was measured, and a short label."""

    layout: str
    values: str
    cost: float
    measured: float
    label: str = ""


def draw_tradeoff(
    marks: Sequence[Mark], *, title: str, subtitle: str, cost: str, measured: str, units: Mapping[float, str]
) -> str:
    """Return an SVG chart of marks; `units` are the texts of factors, such as {1e6: "MB"}, by which costs are shown."""
    costs, values = [mark.cost for mark in marks], [mark.measured for mark in marks]
    low, high = math.log10(min(costs)), math.log10(max(costs))
    room = PADDING * max(high - low, 0.1)
    ticks = [tick for tick in round_values(min(costs), max(costs)) if low - room <= math.log10(tick) <= high + room]
    x_axis = Axis(LEFT, RIGHT - LEFT, low - room, high + room, ticks, math.log10)
    y_axis = choose_axis(values, False, 8, BOTTOM, TOP - BOTTOM)
    parts = [*heading(title, subtitle), *horizontal_grid(y_axis, LEFT - 8, "{:g}".format)]
    for tick in ticks:
        x = x_axis.position(tick)
        parts += [line(x, TOP, x, BOTTOM, GRID), text(x, BOTTOM + 20, scale_text(tick, units), 12, MUTED, "middle")]
    parts += axis_labels(cost, measured)
    curves: dict[tuple[str, str], list[Mark]] = {}
    for mark in marks:
        curves.setdefault((mark.layout, mark.values if mark.layout != LAYOUTS[0] else ""), []).append(mark)
    for (layout, kind), curve in curves.items():
        pixels = [(x_axis.position(m.cost), y_axis.position(m.measured)) for m in sorted(curve, key=lambda m: m.cost)]
        dash = ' stroke-dasharray="5 4"' if layout == LAYOUTS[2] else ""
        parts.append(polyline(pixels, COLOR_OF[kind] if kind else MUTED, f'stroke-width="1.6" opacity="0.6"{dash}'))
    for mark in marks:
        x, y = x_axis.position(mark.cost), y_axis.position(mark.measured)
        parts.append(draw_marker(x, y, mark.layout, COLOR_OF[mark.values]))
        parts.append(text(x + 7, y - 6, mark.label, 10.5, COLOR_OF[mark.values]))
    return document(title, [*parts, *draw_legend(list(curves))])


def round_values(low: float, high: float) -> list[float]:
    """Return the values 1, 2 and 5 times powers of ten around two costs."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [step * 10.0**power for power in powers for step in STEPS]


def scale_text(value: float, units: Mapping[float, str]) -> str:
    """Return a value in the largest unit of which it has at least one."""
    factor = max((unit for unit in units if value >= unit * (1 - 1e-9)), default=min(units))
    return f"{value / factor:g} {units[factor]}"


def draw_marker(x: float, y: float, layout: str, color: str) -> str:
    """Return the marker of a layout."""
    path = MARKERS[LAYOUTS.index(layout)]
    return f'<path d="{path}" transform="translate({x:.1f} {y:.1f})" fill="{color}" stroke="#fff"/>'


def draw_legend(curves: Sequence[tuple[str, str]]) -> list[str]:
    """Return a line for each curve, right of the plotting area, and for each type of values of the dense one."""
    lines = [(layout, kind, f"{layout}, {kind}") for layout, kind in curves if kind]
    lines = [*((LAYOUTS[0], kind, f"{LAYOUTS[0]}, {kind}") for kind in COLOR_OF), *lines]
    parts = []
    for index, (layout, kind, name) in enumerate(lines):
        y = TOP + 6 + LEGEND_GAP * index
        parts += [draw_marker(RIGHT + 16, y, layout, COLOR_OF[kind]), text(RIGHT + 26, y + 4, name, 11.5, INK)]
    return parts
