"""Line charts as SVG text: accuracy over sparsity, and curves over linear or logarithmic axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

Point = tuple[float, float]

WIDTH, HEIGHT = 720, 440
LEFT, RIGHT, TOP, BOTTOM = 64, 570, 106, 378  # edges of the plotting area; labels are placed to its right
INK, MUTED, GRID = "#1f2933", "#5f6b76", "#e4e8ec"
# The colors of Okabe and Ito, which color-blind readers can distinguish, with one marker each for print in gray.
COLORS = ("#D55E00", "#009E73", "#CC79A7", "#0072B2", "#E69F00", "#56B4E9")
MARKERS = (
    "M0-4.5a4.5 4.5 0 1 1 0 9a4.5 4.5 0 1 1 0-9z",
    "M-4-4h8v8h-8z",
    "M0-5.2l5 8.7h-10z",
    "M0-5.4l5.4 5.4l-5.4 5.4l-5.4-5.4z",
)
LABEL_GAP = 17  # minimum distance between two labels, in pixels
SPARSITY_PADDING = 0.06  # share of the width left free beside the first and the last sparsity
LABEL_AT_END = 120  # a curve that ends this many pixels before the right edge is labelled at its last point
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Axis:
    """A scale that maps values to pixels along one side of the plotting area."""

    start: float  # pixel of `low`
    length: float  # in pixels, negative for an axis that points up
    low: float  # limits, after the transform
    high: float
    ticks: Sequence[float]  # values, before the transform
    transform: Callable[[float], float] = float

    def position(self, value: float) -> float:
        """Return the pixel of a value; the middle of the axis where its limits coincide."""
        span = self.high - self.low
        share = (self.transform(value) - self.low) / span if span else 0.5
        return self.start + share * self.length


def line_chart(
    series: Mapping[str, Sequence[Point]],
    *,
    title: str,
    x_label: str,
    y_label: str,
    subtitle: str = "",
    dashed: Sequence[str] = (),
    log_axes: tuple[bool, bool] = (True, True),
    max_grid_lines: int = 12,
) -> str:
    """Return an SVG chart with one labelled curve per series.

    `log_axes` says whether the x axis and the y axis are logarithmic, `dashed` names the series drawn with a dashed
    line, and `max_grid_lines` limits the number of grid lines along each axis. Empty series are left out.
    """
    series = {name: sorted(points) for name, points in series.items() if points}
    points = [point for curve in series.values() for point in curve]
    x_axis = choose_axis([x for x, _ in points], log_axes[0], max_grid_lines, LEFT, RIGHT - LEFT)
    y_axis = choose_axis([y for _, y in points], log_axes[1], max_grid_lines, BOTTOM, TOP - BOTTOM)
    parts = [*heading(title, subtitle), *horizontal_grid(y_axis, LEFT - 8, format_tick)]
    for value in x_axis.ticks:
        x = x_axis.position(value)
        parts += [line(x, TOP, x, BOTTOM, GRID), text(x, BOTTOM + 20, format_tick(value), 12, MUTED, anchor="middle")]
    parts += axis_labels(x_label, y_label)
    ends: dict[str, tuple[float, float, str]] = {}
    for index, (name, curve) in enumerate(series.items()):
        color = COLORS[index % len(COLORS)]
        pixels = [(x_axis.position(x), y_axis.position(y)) for x, y in curve]
        dash = ' stroke-dasharray="6 5"' if name in dashed else ""
        parts.append(polyline(pixels, color, f'stroke-width="2.2"{dash}'))
        ends[name] = (*pixels[-1], color)
    return document(title, [*parts, *curve_labels(ends)])


def sparsity_chart(
    series: Mapping[str, Sequence[Point]],
    *,
    title: str,
    subtitle: str = "",
    reference: tuple[str, float] | None = None,
) -> str:
    """Return an SVG chart of accuracy in per cent over sparsity in [0, 1), one labelled curve per series.

    `reference` is the name and accuracy of a dashed horizontal line. The remaining share of weights, 1 − sparsity, is
    on a logarithmic scale, so that sparsities of 95 % and 98 % are well separated.
    """
    sparsities = sorted({x for curve in series.values() for x, _ in curve})
    accuracies = [y for curve in series.values() for _, y in curve] + ([reference[1]] if reference else [])
    low, high, unit = accuracy_scale(min(accuracies), max(accuracies))
    padding = SPARSITY_PADDING * (RIGHT - LEFT)
    first, last = (negative_log_density(x) for x in (sparsities[0], sparsities[-1]))
    length = RIGHT - LEFT - 2 * padding
    x_axis = Axis(LEFT + padding, length, first, last, sparsities, negative_log_density)
    y_axis = Axis(BOTTOM, TOP - BOTTOM, low, high, grid_values(low, high, unit))
    parts = [*heading(title, subtitle), *horizontal_grid(y_axis, LEFT - 10, "{:g}".format)]
    parts += [text(x_axis.position(x), BOTTOM + 22, f"{100 * x:g} %", 12, MUTED, anchor="middle") for x in x_axis.ticks]
    parts += axis_labels("sparsity: the share of weights pruned", "accuracy, %")
    ends: dict[str, tuple[float, float, str, float]] = {}
    if reference:
        name, accuracy = reference
        y = y_axis.position(accuracy)
        parts.append(line(LEFT, y, RIGHT, y, INK, 1.5, dash="6 5"))
        ends[name] = (RIGHT, y, INK, accuracy)
    for index, (name, curve) in enumerate(series.items()):
        color, marker = COLORS[index % len(COLORS)], MARKERS[index % len(MARKERS)]
        pixels = [(x_axis.position(x), y_axis.position(y)) for x, y in sorted(curve)]
        parts.append(polyline(pixels, color, 'stroke-width="2.5" stroke-linejoin="round"'))
        parts += [
            f'<path d="{marker}" transform="translate({x:.1f} {y:.1f})" fill="{color}" stroke="#fff"/>'
            for x, y in pixels
        ]
        ends[name] = (*pixels[-1], color, sorted(curve)[-1][1])
    return document(title, [*parts, *value_labels(ends)])


# ---- axes


def negative_log_density(sparsity: float) -> float:
    """Return −ln(1 − sparsity)."""
    return -math.log(1 - sparsity)


def accuracy_scale(low: float, high: float) -> tuple[float, float, float]:
    """Return round limits around two accuracies and the distance between grid lines, of which there are at most 8."""
    unit = next(u for u in (0.5, 1.0, 2.0, 5.0, 10.0, 20.0) if (high - low) / u <= 6 or u == 20)
    bottom, top = math.floor(low / unit) * unit, math.ceil(high / unit) * unit
    return bottom, top if top > bottom else bottom + unit, unit


def grid_values(low: float, high: float, unit: float) -> list[float]:
    """Return the values from `low` to `high` that are `unit` apart."""
    return [low + k * unit for k in range(round((high - low) / unit) + 1)]


def choose_axis(values: Sequence[float], log: bool, max_grid_lines: int, start: float, length: float) -> Axis:
    """Return an axis with round limits around the values; on a logarithmic axis the limits are powers of ten."""
    if log:
        first, last = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
        last = max(last, first + 1)
        step = -(-(last - first) // max_grid_lines)
        return Axis(start, length, first, last, [10.0**k for k in range(first, last + 1, step)], math.log10)
    low, high = float(min(values)), float(max(values))
    unit = 10 ** math.floor(math.log10((high - low) or 1))
    unit = next(u for u in (unit / 5, unit / 2, unit, 2 * unit) if (high - low) / u <= max_grid_lines)
    low, high = math.floor(low / unit) * unit, math.ceil(high / unit) * unit
    high = high if high > low else low + unit
    return Axis(start, length, low, high, grid_values(low, high, unit))


def format_tick(value: float) -> str:
    """Return a short text for a tick: "1", "100", "10⁶", "0.05"."""
    power = round(math.log10(value)) if value > 0 else 0
    if value > 0 and abs(power) > 3 and math.isclose(value, 10.0**power):
        return "10" + str(power).translate(SUPERSCRIPTS)
    return f"{value:g}"


# ---- labels


def value_labels(ends: Mapping[str, tuple[float, float, str, float]]) -> list[str]:
    """Return the names and last values of curves, right of the plotting area and connected with the curves' ends.

    An end is the x and y of the last point, the color and the value.
    """
    parts = []
    order = sorted(ends, key=lambda name: ends[name][1])
    rows = spread_labels([ends[name][1] for name in order], LABEL_GAP, TOP, BOTTOM)
    for name, row in zip(order, rows, strict=True):
        x, y, color, value = ends[name]
        if x < RIGHT:
            parts.append(line(x + 7, y, RIGHT + 6, row, color, 1, opacity=0.45))
        parts.append(text(RIGHT + 12, row + 4, f"{name}  {value:.1f}", 13, color, weight=600))
    return parts


def curve_labels(ends: Mapping[str, tuple[float, float, str]]) -> list[str]:
    """Return the names of curves: right of the plotting area, or at the last point of a curve that ends early.

    An end is the x and y of the last point and the color.
    """
    parts = []
    late = sorted((name for name in ends if ends[name][0] > RIGHT - LABEL_AT_END), key=lambda name: ends[name][1])
    rows = spread_labels([ends[name][1] for name in late], LABEL_GAP, TOP, BOTTOM)
    for name, (x, y, color) in ends.items():
        if name in late:
            row = rows[late.index(name)]
            parts.append(line(x + 2, y, RIGHT + 6, row, color, 1, opacity=0.45))
            x, y = RIGHT + 2, row
        parts.append(text(x + 8, y + 4, name, 12, color, weight=600))
    return parts


def spread_labels(positions: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Return rising positions moved by as little as makes them `gap` apart, within [low, high] where they fit."""
    moved = list(positions)
    for i in range(len(moved)):  # down from the top
        moved[i] = max(moved[i], moved[i - 1] + gap if i else low)
    for i in reversed(range(len(moved))):  # and back up from the bottom
        moved[i] = min(moved[i], moved[i + 1] - gap if i + 1 < len(moved) else high)
    return moved


# ---- SVG elements


def heading(title: str, subtitle: str) -> list[str]:
    """Return the title and subtitle above the plotting area."""
    return [text(LEFT - 40, 34, title, 19, INK, weight=600), text(LEFT - 40, 58, subtitle, 13, MUTED)]


def horizontal_grid(axis: Axis, label_x: float, format_value: Callable[[float], str]) -> list[str]:
    """Return a grid line and a label that ends at `label_x` for every tick of the y axis."""
    parts = []
    for value in axis.ticks:
        y = axis.position(value)
        parts += [line(LEFT, y, RIGHT, y, GRID), text(label_x, y + 4, format_value(value), 12, MUTED, anchor="end")]
    return parts


def axis_labels(x_label: str, y_label: str) -> list[str]:
    """Return the names of the axes."""
    return [
        text((LEFT + RIGHT) / 2, BOTTOM + 46, x_label, 13, MUTED, anchor="middle"),
        text(LEFT - 40, TOP - 14, y_label, 12, MUTED),
    ]


def polyline(pixels: Sequence[Point], color: str, style: str) -> str:
    """Return a curve through points given in pixels; `style` holds further attributes."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in pixels)
    return f'<polyline points="{path}" fill="none" stroke="{color}" {style}/>'


def text(x: float, y: float, content: str, size: float, fill: str, anchor: str = "start", weight: int = 400) -> str:
    """Return a text element."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" font-weight="{weight}" fill="{fill}" '
        f'text-anchor="{anchor}" xml:space="preserve">{escape(content)}</text>'
    )


def line(
    x1: float, y1: float, x2: float, y2: float, stroke: str, width: float = 1, dash: str = "", opacity: float = 1
) -> str:
    """Return a straight line."""
    extra = f' stroke-dasharray="{dash}"' if dash else ""
    extra += f' opacity="{opacity:g}"' if opacity < 1 else ""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}" '
        f'stroke-width="{width:g}"{extra}/>'
    )


def document(title: str, parts: Sequence[str], width: float = WIDTH, height: float = HEIGHT) -> str:
    """Return a whole SVG document with these elements."""
    body, size = "\n".join(parts), f'width="{width:g}" height="{height:g}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" {size} '
        f'role="img" font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">\n'
        f"<title>{escape(title)}</title>\n"
        f'<rect {size} fill="#ffffff"/>\n{body}\n</svg>\n'
    )
