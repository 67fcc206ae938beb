"""Curves over logarithmic axes as SVG text: how bounds grow and fall."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

from .line_chart import (
    BOTTOM,
    COLOURS,
    GRID,
    HEIGHT,
    INK,
    LABEL_GAP,
    LEFT,
    MUTED,
    RIGHT,
    TOP,
    WIDTH,
    Point,
    line,
    spread,
    text,
)

EARLY = 120  # how far before the right edge a line must end to be labelled there


def curves(
    lines: Mapping[str, Sequence[Point]],
    *,
    title: str,
    across: str,
    up: str,
    subtitle: str = "",
    dashed: Sequence[str] = (),
    log: tuple[bool, bool] = (True, True),
    most: int = 12,
) -> str:
    """One line for each series, labelled at its end. Axes are logarithmic (`log`: across, up); `most` grid lines."""
    lines = {name: sorted(points) for name, points in lines.items() if points}
    points = [point for series in lines.values() for point in series]
    sides = [axis([p[k] for p in points], log[k], most) for k in (0, 1)]

    def place(x: float, y: float) -> tuple[float, float]:
        (a, b, _), (c, d, _) = sides
        u, v = (math.log10(value) if on else value for value, on in zip((x, y), log, strict=True))
        return LEFT + (u - a) / (b - a) * (RIGHT - LEFT), BOTTOM - (v - c) / (d - c) * (BOTTOM - TOP)

    parts = [text(LEFT - 40, 34, title, 19, INK, weight=600), text(LEFT - 40, 58, subtitle, 13, MUTED)]
    corner = (10 ** sides[0][0] if log[0] else sides[0][0], 10 ** sides[1][0] if log[1] else sides[1][0])
    for value in sides[1][2]:
        y = place(corner[0], value)[1]
        parts += [line(LEFT, y, RIGHT, y, GRID), text(LEFT - 8, y + 4, short(value), 12, MUTED, anchor="end")]
    for value in sides[0][2]:
        x = place(value, corner[1])[0]
        parts += [line(x, TOP, x, BOTTOM, GRID), text(x, BOTTOM + 20, short(value), 12, MUTED, anchor="middle")]
    parts += [
        text((LEFT + RIGHT) / 2, BOTTOM + 46, across, 13, MUTED, anchor="middle"),
        text(LEFT - 40, TOP - 14, up, 12, MUTED),
    ]
    ends: dict[str, tuple[float, float, str]] = {}
    for k, (name, series) in enumerate(lines.items()):
        colour = COLOURS[k % len(COLOURS)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in series))
        dash = ' stroke-dasharray="6 5"' if name in dashed else ""
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.2"{dash}/>')
        ends[name] = (*place(*series[-1]), colour)
    # A name stands at the right edge, pushed apart from its neighbours; that of a line that ends early, at its end.
    late = sorted((name for name in ends if ends[name][0] > RIGHT - EARLY), key=lambda name: ends[name][1])
    rows = spread([ends[name][1] for name in late], LABEL_GAP, TOP, BOTTOM)
    for name, (x, tip, colour) in ends.items():
        if name in late:
            y = rows[late.index(name)]
            parts.append(line(x + 2, tip, RIGHT + 6, y, colour, 1, opacity=0.45))
            x, tip = RIGHT + 2, y
        parts.append(text(x + 8, tip + 4, name, 12, colour, weight=600))
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">\n'
        f"<title>{escape(title)}</title>\n"
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


def axis(values: Sequence[float], log: bool, most: int) -> tuple[float, float, list[float]]:
    """Limits (of the logarithms, where they are taken) and the values that get a line."""
    if log:
        first, last = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
        last = max(last, first + 1)
        return first, last, [10.0**k for k in range(first, last + 1, -(-(last - first) // most))]
    low, high = float(min(values)), float(max(values))
    unit = 10 ** math.floor(math.log10((high - low) or 1))
    unit = next(u for u in (unit / 5, unit / 2, unit, 2 * unit) if (high - low) / u <= most)
    low, high = math.floor(low / unit) * unit, math.ceil(high / unit) * unit
    high = high if high > low else low + unit
    return low, high, [low + k * unit for k in range(round((high - low) / unit) + 1)]


def short(value: float) -> str:
    """1, 100, 10⁶; 0.05."""
    power = round(math.log10(value)) if value > 0 else 0
    if value > 0 and abs(power) > 3 and math.isclose(value, 10.0**power):
        return "10" + str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{value:g}"
