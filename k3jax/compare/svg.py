"""Small SVG plots as strings, coloured by the page's CSS classes (`c0` ... `c3`), readable at a phone's width.

Whatever text comes in is escaped here.
"""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

Number = int | float
WIDTH = 440
_LEFT, _RIGHT = 78, 16
_MARKERS = 4


@dataclass(frozen=True)
class Point:
    """One dot: `value` on a logarithmic axis, in lane `series` of its row, with text for whoever points at it."""

    series: int
    value: float
    ok: bool
    title: str


@dataclass(frozen=True)
class Row:
    """A labelled row of a dot plot, with the limits of its series as ticks."""

    label: str
    points: tuple[Point, ...]
    limits: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class BarFrame:
    """What bar plots side by side share: the value at the top, the names of the axes, a dashed line across."""

    label: str
    axis: str
    largest: float
    line: float | None = None


def escape(text: object) -> str:
    """`text` for HTML or SVG, attributes too."""
    return html.escape(str(text), quote=True)


def log_dots(rows: Sequence[Row], *, smallest: float, largest: float, label: str) -> str:
    """Dots on a log axis, a row a stage, a lane a series; a tick where each limit is. Zeros sit on the left edge."""
    low, high = math.floor(math.log10(smallest)), math.ceil(math.log10(largest))
    lanes = max((point.series for row in rows for point in row.points), default=0) + 1
    row_height = 12 + 10 * lanes
    bottom = 8 + row_height * len(rows)

    def x(value: float) -> float:
        power = low if value <= 0 else high if math.isinf(value) or math.isnan(value) else math.log10(value)
        return _LEFT + (min(max(power, low), high) - low) / (high - low) * (WIDTH - _LEFT - _RIGHT)

    parts = []
    for power in range(low, high + 1, max(1, (high - low) // 5)):
        at = x(10.0**power)
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="4" y2="{bottom}"/>')
        parts.append(_text(at, bottom + 16, "≤ " * (power == low) + _power(power), "middle"))
    for index, row in enumerate(rows):
        top = 8 + index * row_height
        parts.append(_text(_LEFT - 10, top + row_height / 2 + 1, row.label, "end", "name"))
        for series, limit in row.limits:
            y = top + 6 + 10 * series
            parts.append(f'<line class="limit" x1="{x(limit):.1f}" x2="{x(limit):.1f}" y1="{y - 5}" y2="{y + 5}"/>')
        for point in row.points:
            y = top + 6 + 10 * point.series
            shape = _marker(point.series, x(point.value), y)
            ring = "" if point.ok else f'<circle class="bad" cx="{x(point.value):.1f}" cy="{y}" r="7"/>'
            parts.append(f'<g class="c{point.series}"><title>{escape(point.title)}</title>{shape}{ring}</g>')
    return _figure("".join(parts), bottom + 24, label)


def bars(values: Sequence[float], titles: Sequence[str], frame: BarFrame, *, series: int, name: str) -> str:
    """A bar a value from zero, NaN as a gap, infinity as a full red one."""
    height, top = 90, 22
    largest = frame.largest or 1.0
    step = (WIDTH - _LEFT - _RIGHT) / max(len(values), 1)
    gap = 1.0 if step >= 4 else 0.0

    def y(value: float) -> float:
        return top + height * (1 - min(value / largest, 1.0))

    parts = [_text(_LEFT - 10, top + 5, _short(largest), "end"), _text(_LEFT - 10, top + height + 2, "0", "end")]
    parts.append(_text(WIDTH - _RIGHT, 11, name, "end"))
    for index, (value, title) in enumerate(zip(values, titles, strict=True)):
        if math.isnan(value) or value == 0:
            continue
        shape = "broken" if math.isinf(value) else f"c{series}"
        parts.append(
            f'<rect class="{shape}" x="{_LEFT + index * step:.2f}" y="{y(value):.2f}" '
            f'width="{step - gap:.2f}" height="{top + height - y(value):.2f}"><title>{escape(title)}</title></rect>'
        )
    ends = f'x1="{_LEFT}" x2="{WIDTH - _RIGHT}"'
    if frame.line is not None and frame.line <= largest:
        parts.append(f'<line class="limit dash" {ends} y1="{y(frame.line):.1f}" y2="{y(frame.line):.1f}"/>')
    parts.append(f'<line class="axis" {ends} y1="{top + height}" y2="{top + height}"/>')
    below = top + height + 16
    parts.append(_text(_LEFT, below, "0", "start") + _text(WIDTH - _RIGHT, below, str(len(values) - 1), "end"))
    parts.append(_text((_LEFT + WIDTH - _RIGHT) / 2, below, frame.axis, "middle"))
    return _figure("".join(parts), below + 6, f"{frame.label}, {name}")


def steps(counts: Sequence[Sequence[int]], *, first_power: int, label: str) -> str:
    """Histograms over powers of two as one outline a series, each scaled by the largest count of all."""
    height, top = 120, 10
    bins = max((len(series) for series in counts), default=1)
    largest = max((count for series in counts for count in series), default=0) or 1
    width = (WIDTH - _LEFT - _RIGHT) / bins
    parts = [_text(_LEFT - 10, top + 5, f"{largest:,}", "end"), _text(_LEFT - 10, top + height + 2, "0", "end")]
    for index, series in enumerate(counts):
        path = f"M{_LEFT} {top + height}"
        for bin_index, count in enumerate(series):
            path += f"V{top + height * (1 - count / largest):.1f}H{_LEFT + (bin_index + 1) * width:.1f}"
        parts.append(f'<path class="outline c{index}" d="{path}V{top + height}"/>')
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{top + height}" y2="{top + height}"/>')
    for bin_index in range(0, bins, 6):
        at = _LEFT + bin_index * width
        parts.append(f'<line class="axis" x1="{at:.1f}" x2="{at:.1f}" y1="{top + height}" y2="{top + height + 4}"/>')
        parts.append(_text(at, top + height + 18, _power(first_power + bin_index, base=2), "middle"))
    return _figure("".join(parts), top + height + 25, label)


def legend_marker(series: int) -> str:
    """A series' marker, to stand in running text."""
    return f'<svg class="key c{series}" viewBox="0 0 12 12" aria-hidden="true">{_marker(series, 6, 6)}</svg>'


def _marker(series: int, x: Number, y: Number) -> str:
    """Shapes differ as well as colours: circle, square, triangle, diamond."""
    kind = series % _MARKERS
    if kind == 0:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"/>'
    if kind == 1:
        return f'<rect x="{x - 3.5:.1f}" y="{y - 3.5:.1f}" width="7" height="7"/>'
    corners = ((0, -4.5), (4.5, 3.5), (-4.5, 3.5)) if kind == 2 else ((0, -5), (5, 0), (0, 5), (-5, 0))
    return f'<polygon points="{" ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners)}"/>'


def _text(x: Number, y: Number, text: str, anchor: str, kind: str = "tick") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _power(power: int, base: int = 10) -> str:
    return f"{base}{str(power).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))}"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 and value == round(value) else f"{value:.1e}"


def _figure(content: str, height: Number, label: str) -> str:
    return (
        f'<svg class="plot" viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(label)}">{content}</svg>'
    )
