"""A heat map as SVG text: rows and columns in labelled groups, a color for each value, hatched cells without one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby, pairwise

from pomona.lab.tables.chart import GRID, INK, MUTED, document, line, text

Label = tuple[str, str]  # the group, and the row or column within it

CELL_WIDTH, CELL_HEIGHT = 32, 15
LEFT, TOP, RIGHT, BOTTOM = 220, 118, 24, 52  # margins around the cells
GROUP_GAP = 5  # pixels between two groups of rows or columns
# From the highest value to the lowest: light to dark, so that low values stand out, also in gray.
COLORS = ((100.0, (232, 243, 238)), (80.0, (255, 224, 150)), (50.0, (230, 126, 34)), (20.0, (150, 30, 20)))
LOWEST_COLOR = (45, 0, 40)  # below the last of COLORS
HATCH = (
    '<defs><pattern id="hatch" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    f'<rect width="5" height="5" fill="#f4f5f7"/><line x1="0" y1="0" x2="0" y2="5" stroke="{GRID}" stroke-width="3"/>'
    "</pattern></defs>"
)


def draw_heat_map(
    rows: Sequence[Label],
    columns: Sequence[Label],
    values: Mapping[tuple[Label, Label], float | None],
    *,
    title: str,
    subtitle: str = "",
) -> str:
    """Return an SVG heat map of values from 0 to 100.

    A cell whose value is None is hatched, and one that `values` does not have is empty. Rows and columns of one group
    must stand together.
    """
    x, y = place_labels(columns, CELL_WIDTH), place_labels(rows, CELL_HEIGHT)
    width, height = LEFT + x[-1] + CELL_WIDTH + RIGHT, TOP + y[-1] + CELL_HEIGHT + BOTTOM
    parts = [HATCH, text(16, 34, title, 19, INK, weight=600), text(16, 58, subtitle, 13, MUTED)]
    for group, first, last in find_groups(columns):
        middle = LEFT + (x[first] + x[last] + CELL_WIDTH) / 2
        parts.append(text(middle, TOP - 24, group, 12, INK, anchor="middle", weight=600))
    for group, first, _ in find_groups(rows):
        parts.append(text(16, TOP + y[first] + 11, group, 12, INK, weight=600))
        if first:
            edge = TOP + y[first] - GROUP_GAP / 2
            parts.append(line(16, edge, width - RIGHT, edge, GRID))
    for (_, name), left in zip(columns, x, strict=True):
        parts.append(text(LEFT + left + CELL_WIDTH / 2, TOP - 8, name, 11, MUTED, anchor="middle"))
    for row, down in zip(rows, y, strict=True):
        parts.append(text(LEFT - 8, TOP + down + 11, row[1], 11, MUTED, anchor="end"))
        for column, left in zip(columns, x, strict=True):
            if (row, column) in values:
                parts += draw_cell(LEFT + left, TOP + down, values[row, column])
    return document(title, [*parts, *draw_legend(height - 22)], width, height)


def find_groups(labels: Sequence[Label]) -> list[tuple[str, int, int]]:
    """Return each group of adjacent labels with the positions of its first and last member."""
    spans = [list(members) for _, members in groupby(range(len(labels)), lambda index: labels[index][0])]
    return [(labels[span[0]][0], span[0], span[-1]) for span in spans]


def place_labels(labels: Sequence[Label], size: float) -> list[float]:
    """Return the pixels at which rows or columns begin, with a gap before each further group."""
    gaps = {first for _, first, _ in find_groups(labels)} - {0}
    return list(accumulate(size * (index > 0) + GROUP_GAP * (index in gaps) for index in range(len(labels))))


def draw_cell(x: float, y: float, value: float | None) -> list[str]:
    """Return a colored cell with its value, or a hatched one where there is none."""
    fill = "url(#hatch)" if value is None else color_of(value)
    box = f'<rect x="{x:.1f}" y="{y:.1f}" width="{CELL_WIDTH - 1}" height="{CELL_HEIGHT - 1}" fill="{fill}"/>'
    if value is None:
        return [box]
    ink = "#ffffff" if value < 50 else INK
    return [box, text(x + CELL_WIDTH / 2, y + 10.5, f"{value:.0f}", 9.5, ink, anchor="middle")]


def color_of(value: float) -> str:
    """Return the color of a value from 0 to 100."""
    if value < COLORS[-1][0]:
        return "#{:02x}{:02x}{:02x}".format(*LOWEST_COLOR)
    high, low = next(pair for pair in pairwise(COLORS) if value >= pair[1][0])
    share = min((value - low[0]) / (high[0] - low[0]), 1.0)
    mixed = (round(share * a + (1 - share) * b) for a, b in zip(high[1], low[1], strict=True))
    return "#{:02x}{:02x}{:02x}".format(*mixed)


def draw_legend(y: float) -> list[str]:
    """Return a sample of the colors, and a hatched cell with its meaning."""
    parts = [text(16, y + 11, "accuracy, %", 11, MUTED)]
    for index, value in enumerate((10.0, 20.0, 35.0, 50.0, 65.0, 80.0, 90.0, 100.0)):
        parts += draw_cell(96 + index * CELL_WIDTH, y, value)
    end = 96 + 8 * CELL_WIDTH + 16
    return [*parts, *draw_cell(end, y, None), text(end + CELL_WIDTH + 6, y + 11, "refused", 11, MUTED)]
