"""The plot of a run: the error over its steps on a logarithmic axis, as one SVG file of its own."""

import math
from collections.abc import Mapping, Sequence

from k3jax.compare.svg import escape

_WIDTH, _HEIGHT = 720, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 40, 46
_COLOURS = ("#2f63c0", "#0f8276", "#c8641b")


def loss_plot(series: Mapping[str, Sequence[float]], marks: Mapping[str, float], title: str) -> str:
    """`series` by name, one value a step, as lines; `marks` by name as dashed levels. Values must be positive."""
    values = [value for line in series.values() for value in line] + list(marks.values())
    shown = [value for value in values if math.isfinite(value) and value > 0]
    low, high = (min(shown), max(shown)) if shown else (0.1, 1.0)
    low, high = low / 1.1, high * 1.1
    steps = max((len(line) for line in series.values()), default=1)

    def x(step: int) -> float:
        return _LEFT + step / max(steps - 1, 1) * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        share = (math.log(min(max(value, low), high)) - math.log(low)) / (math.log(high) - math.log(low))
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    parts = [_text(_LEFT, 22, title, "start", 15)]
    for tick in _ticks(low, high):
        parts.append(f'<line {_across(y(tick))} stroke="#e3e1da"/>')
        parts.append(_text(_LEFT - 8, y(tick) + 4, f"{tick:g}", "end"))
    for number, (name, line) in enumerate(series.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        points = " ".join(f"{x(i):.1f},{y(v):.1f}" for i, v in enumerate(line) if math.isfinite(v) and v > 0)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        parts.append(_text(_WIDTH - _RIGHT, _TOP + 14 + 16 * number, name, "end", 12, colour))
    for name, level in marks.items():
        parts.append(f'<line {_across(y(level))} stroke="#1d1f23" stroke-dasharray="5 4"/>')
        parts.append(_text(_LEFT + 6, y(level) - 5, f"{name} {level:.3f}", "start"))
    for at, label, anchor in ((_LEFT, "step 1", "start"), (_WIDTH - _RIGHT, str(steps), "end")):
        parts.append(_text(at, _HEIGHT - 16, label, anchor))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{escape(title)}" font-family="system-ui, sans-serif">'
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>{"".join(parts)}</svg>\n'
    )


def _across(y: float) -> str:
    return f'x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"'


def _ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten within the axis."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [tick for power in powers for digit in (1, 2, 5) if low <= (tick := digit * 10.0**power) <= high]


def _text(x: int | float, y: int | float, text: str, anchor: str, size: int = 12, colour: str = "#62666e") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}">{escape(text)}</text>'
    )
