"""A line chart as SVG text, small enough to read and good enough to print: accuracy over sparsity."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

Point = tuple[float, float]  # sparsity in [0, 1), accuracy in per cent

WIDTH, HEIGHT = 720, 440
LEFT, RIGHT, TOP, BOTTOM = 64, 570, 106, 378  # of the frame; labels stand to its right
INK, MUTED, GRID = "#1f2933", "#5f6b76", "#e4e8ec"
# Okabe and Ito's colours, which the colour-blind can tell apart, and a marker each for print in grey.
COLOURS = ("#D55E00", "#009E73", "#CC79A7", "#0072B2", "#E69F00", "#56B4E9")
MARKERS = (
    "M0-4.5a4.5 4.5 0 1 1 0 9a4.5 4.5 0 1 1 0-9z",
    "M-4-4h8v8h-8z",
    "M0-5.2l5 8.7h-10z",
    "M0-5.4l5.4 5.4l-5.4 5.4l-5.4-5.4z",
)
LABEL_GAP = 17  # the least distance between two labels


def chart(
    curves: Mapping[str, Sequence[Point]], *, title: str, subtitle: str = "", level: tuple[str, float] | None = None
) -> str:
    """One line for each curve, labelled at its end; `level` is a dashed line across.

    What is left, 1 − sparsity, is on a logarithmic scale, so that 95 and 98 % stand apart.
    """
    ticks = sorted({x for curve in curves.values() for x, _ in curve})
    values = [y for curve in curves.values() for _, y in curve] + ([level[1]] if level else [])
    low, high, unit = scale(min(values), max(values))
    depth = [-math.log(1 - x) for x in ticks]
    pad = 0.06 * (RIGHT - LEFT)

    def across(x: float) -> float:
        span = depth[-1] - depth[0]
        share = (-math.log(1 - x) - depth[0]) / span if span else 0.5
        return LEFT + pad + share * (RIGHT - LEFT - 2 * pad)

    def up(y: float) -> float:
        return BOTTOM - (y - low) / (high - low) * (BOTTOM - TOP)

    parts = [text(LEFT - 40, 34, title, 19, INK, weight=600), text(LEFT - 40, 58, subtitle, 13, MUTED)]
    for k in range(round((high - low) / unit) + 1):
        y = low + k * unit
        parts.append(line(LEFT, up(y), RIGHT, up(y), GRID))
        parts.append(text(LEFT - 10, up(y) + 4, f"{y:g}", 12, MUTED, anchor="end"))
    parts += [text(across(x), BOTTOM + 22, f"{100 * x:g} %", 12, MUTED, anchor="middle") for x in ticks]
    parts.append(
        text((LEFT + RIGHT) / 2, BOTTOM + 46, "sparsity: the share of weights pruned", 13, MUTED, anchor="middle")
    )
    parts.append(text(LEFT - 40, TOP - 14, "accuracy, %", 12, MUTED))

    ends: dict[str, tuple[float, float, str, float]] = {}
    if level:
        parts.append(line(LEFT, up(level[1]), RIGHT, up(level[1]), INK, 1.5, dash="6 5"))
        ends[level[0]] = (RIGHT, up(level[1]), INK, level[1])
    for k, (name, curve) in enumerate(curves.items()):
        colour, marker = COLOURS[k % len(COLOURS)], MARKERS[k % len(MARKERS)]
        points = [(across(x), up(y)) for x, y in sorted(curve)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.5" stroke-linejoin="round"/>'
        )
        parts += [
            f'<path d="{marker}" transform="translate({x:.1f} {y:.1f})" fill="{colour}" stroke="#fff"/>'
            for x, y in points
        ]
        ends[name] = (*points[-1], colour, sorted(curve)[-1][1])
    parts += labels(ends)
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">\n'
        f"<title>{escape(title)}</title>\n"
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


def labels(ends: Mapping[str, tuple[float, float, str, float]]) -> list[str]:
    """The names and last values right of the frame, pushed apart, each tied to the end of its line."""
    parts = []
    order = sorted(ends, key=lambda name: ends[name][1])
    for name, y in zip(order, spread([ends[name][1] for name in order], LABEL_GAP, TOP, BOTTOM), strict=True):
        x, tip, colour, value = ends[name]
        if x < RIGHT:
            parts.append(line(x + 7, tip, RIGHT + 6, y, colour, 1, opacity=0.45))
        parts.append(text(RIGHT + 12, y + 4, f"{name}  {value:.1f}", 13, colour, weight=600))
    return parts


def spread(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places in rising order moved as little as it takes to stand `gap` apart, within [low, high] where they fit."""
    moved = list(places)
    for i in range(len(moved)):  # down from the top
        moved[i] = max(moved[i], moved[i - 1] + gap if i else low)
    for i in reversed(range(len(moved))):  # and back up from the bottom
        moved[i] = min(moved[i], moved[i + 1] - gap if i + 1 < len(moved) else high)
    return moved


def scale(low: float, high: float) -> tuple[float, float, float]:
    """Round limits around the values, and the distance between grid lines: at most eight of them."""
    unit = next(u for u in (0.5, 1.0, 2.0, 5.0, 10.0, 20.0) if (high - low) / u <= 6 or u == 20)
    bottom, top = math.floor(low / unit) * unit, math.ceil(high / unit) * unit
    return bottom, top if top > bottom else bottom + unit, unit


def text(x: float, y: float, words: str, size: float, fill: str, anchor: str = "start", weight: int = 400) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" font-weight="{weight}" fill="{fill}" '
        f'text-anchor="{anchor}" xml:space="preserve">{escape(words)}</text>'
    )


def line(
    x1: float, y1: float, x2: float, y2: float, stroke: str, width: float = 1, dash: str = "", opacity: float = 1
) -> str:
    extra = f' stroke-dasharray="{dash}"' if dash else ""
    extra += f' opacity="{opacity:g}"' if opacity < 1 else ""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}" '
        f'stroke-width="{width:g}"{extra}/>'
    )
