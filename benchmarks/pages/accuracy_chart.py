"""A chart of accuracies as SVG text: groups of categories side by side, one marker for each series, with deviations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from pomona.lab.tables.chart import (
    COLORS,
    GRID,
    INK,
    MARKERS,
    MUTED,
    Axis,
    accuracy_scale,
    document,
    grid_values,
    line,
    text,
)

WIDTH, HEIGHT = 760, 430
LEFT, RIGHT, TOP, BOTTOM = 64, 736, 128, 344  # edges of the plotting area
GROUP_GAP = 28  # pixels between two groups
SERIES_GAP = 46  # pixels between the markers of one category at most
LABEL_ROOM = 0.2  # points of accuracy left free below and above all marks
CAP = 5  # half the width of the ends of a deviation
HALO = 'paint-order="stroke" stroke="#ffffff" stroke-width="4"'  # keeps a value legible on a line
SERIES_COLORS = (MUTED, COLORS[0], COLORS[3])  # what is compared with is gray


@dataclass(frozen=True)
class Mark:
    """One accuracy: the series and category it belongs to, and its deviation where there are several runs."""

    series: str
    group: str
    category: str
    mean: float
    deviation: float | None = None


def draw_accuracies(
    marks: Sequence[Mark], *, title: str, subtitle: str, notes: Mapping[str, str], reference: tuple[str, float]
) -> str:
    """Return an SVG chart of marks; `notes` explains each group below it, `reference` is a dashed line."""
    series = list(dict.fromkeys(mark.series for mark in marks))
    groups = {group: list(dict.fromkeys(m.category for m in marks if m.group == group)) for group in notes}
    ends = [m.mean + sign * (m.deviation or 0) for m in marks for sign in (-1, 1)]
    low, high, unit = accuracy_scale(min(ends) - LABEL_ROOM, max(*ends, reference[1]) + LABEL_ROOM)
    axis = Axis(BOTTOM, TOP - BOTTOM, low, high, grid_values(low, high, unit))
    parts = [text(24, 34, title, 19, INK, weight=600), text(24, 58, subtitle, 13, MUTED), *draw_legend(series)]
    for value in axis.ticks:
        y = axis.position(value)
        parts += [line(LEFT, y, RIGHT, y, GRID), text(LEFT - 10, y + 4, f"{value:g}", 12, MUTED, anchor="end")]
    y = axis.position(reference[1])
    parts += [line(LEFT, y, RIGHT, y, INK, 1.3, dash="6 5")]
    parts += [text(RIGHT, y - 6, f"{reference[0]}  {reference[1]:.2f}", 12, INK, anchor="end", weight=600)]
    places, step = place_categories(groups)
    for group, categories in groups.items():
        first, last = places[group, categories[0]], places[group, categories[-1]]
        parts.append(text((first + last) / 2, BOTTOM + 46, notes[group], 12.5, MUTED, anchor="middle"))
        parts.append(line(first - step / 2 + 6, BOTTOM, last + step / 2 - 6, BOTTOM, MUTED))
    for (group, category), x in places.items():
        parts.append(text(x, BOTTOM + 22, category, 13, INK, anchor="middle", weight=600))
        own = [mark for mark in marks if (mark.group, mark.category) == (group, category)]
        gap = min(SERIES_GAP, step / len(own))
        for index, mark in enumerate(own):
            parts += draw_mark(mark, x + (index - (len(own) - 1) / 2) * gap, axis, series.index(mark.series))
    return document(title, parts, WIDTH, HEIGHT)


def place_categories(groups: Mapping[str, Sequence[str]]) -> tuple[dict[tuple[str, str], float], float]:
    """Return the pixel of each category's middle, and the pixels that each may use."""
    sizes = [len(categories) for categories in groups.values()]
    step = (RIGHT - LEFT - GROUP_GAP * len(sizes)) / sum(sizes)
    before = [0, *accumulate(sizes)]
    found = {}
    for index, (group, categories) in enumerate(groups.items()):
        for place, category in enumerate(categories):
            found[group, category] = LEFT + GROUP_GAP * (index + 0.5) + step * (before[index] + place + 0.5)
    return found, step


def draw_mark(mark: Mark, x: float, axis: Axis, series: int) -> list[str]:
    """Return a marker with its value (below it for the first series), and a line as long as two deviations."""
    y, color, parts = axis.position(mark.mean), SERIES_COLORS[series], []
    top = bottom = y
    if mark.deviation:
        top, bottom = axis.position(mark.mean + mark.deviation), axis.position(mark.mean - mark.deviation)
        ends = [line(x - CAP, end, x + CAP, end, color, 1.5) for end in (top, bottom)]
        parts += [line(x, top, x, bottom, color, 1.5), *ends]
    parts.append(f'<path d="{MARKERS[series]}" transform="translate({x:.1f} {y:.1f})" fill="{color}" stroke="#fff"/>')
    label = text(x, top - 9 if series else bottom + 17, f"{mark.mean:.2f}", 11.5, color, anchor="middle", weight=600)
    return [*parts, label.replace("<text ", f"<text {HALO} ", 1)]


def draw_legend(series: Sequence[str]) -> list[str]:
    """Return a marker and a name for each series, in one row."""
    parts, x = [], 32.0
    for index, name in enumerate(series):
        color = SERIES_COLORS[index]
        parts.append(f'<path d="{MARKERS[index]}" transform="translate({x:.1f} 88)" fill="{color}"/>')
        parts.append(text(x + 12, 92, name, 13, color, weight=600))
        x += 44 + 7.8 * len(name)
    return parts
