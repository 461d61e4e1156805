"""The curves of a stage as small SVG pictures, in the colours of the page they stand in.

Every element carries colours of its own too, for a picture that is taken out of the page.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from posttrain.runs.metrics import Record
from posttrain.runs.plot import Panel, curve_points, last_value, panels_of, smoothed
from posttrain.track.text import printable

WIDTH, HEIGHT = 320, 150
LEFT, RIGHT, TOP, BOTTOM = 50, 8, 8, 20
MAX_POINTS = 400  # more than a picture of this width can show
_MARKERS_UP_TO = 25
_TEXT = 'font-size="10" fill="#767676"'
_GRID = 'class="grid" stroke="#e6e6e6"'
_CURVES = {
    "curve": 'class="curve" fill="none" stroke="#2563b0" stroke-width="1.8"',
    "raw": 'class="raw" fill="none" stroke="#2563b0" stroke-width="0.8" opacity="0.35"',
    "held-out": 'class="held-out" fill="none" stroke="#b45309" stroke-width="1.8"',
}


def draw_panels(records: Sequence[Record], *, accuracy_by: str = "") -> list[str]:
    """A ``<figure>`` for each panel that the stage has numbers for; ``records`` one a step."""
    return [_figure(panel, records) for panel in panels_of(records, accuracy_by=accuracy_by)]


def _figure(panel: Panel, records: Sequence[Record]) -> str:
    steps, values = curve_points(records, panel.metric)
    smooth = smoothed(values)
    value, num = last_value(records, panel.metric)
    last = f"{value:.1%}" if panel.percent else f"{value:.3g}"
    over = "at the end" if num == 1 else f"mean of the last {num} steps"
    besides = curve_points(records, panel.held_out) if panel.held_out else ([], [])
    drawn = [*values, *besides[1]]
    ticks = [0.0, 0.5, 1.0] if panel.percent else nice_ticks(min(drawn), max(drawn))
    low, high = ticks[0], ticks[-1]
    across = (records[0]["step"], max(records[-1]["step"], records[0]["step"] + 1))

    def place(step: float, value: float) -> tuple[float, float]:
        x = LEFT + (step - across[0]) / (across[1] - across[0]) * (WIDTH - LEFT - RIGHT)
        y = TOP + (high - value) / (high - low) * (HEIGHT - TOP - BOTTOM)
        return round(x, 1), round(y, 1)

    parts = []
    for tick in ticks:
        _, y = place(across[0], tick)
        label = f"{tick:.0%}" if panel.percent else f"{tick:.3g}"
        parts.append(f'<line {_GRID} x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text {_TEXT} x="{LEFT - 6}" y="{y + 3.5}" text-anchor="end">{label}</text>')
    for step, anchor, x in ((across[0], "start", LEFT), (across[1], "end", WIDTH - RIGHT)):
        parts.append(
            f'<text {_TEXT} x="{x}" y="{HEIGHT - 5}" text-anchor="{anchor}">{step:g}</text>'
        )
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text {_TEXT} x="{middle}" y="{HEIGHT - 5}" text-anchor="middle">step</text>')
    if smooth != values:
        parts.append(_line("raw", [place(*p) for p in _thinned(steps, values)]))
    points = [place(*p) for p in _thinned(steps, smooth)]
    parts.append(_line("curve", points))
    if len(points) <= _MARKERS_UP_TO:
        parts += [
            f'<circle class="point" fill="#2563b0" cx="{x}" cy="{y}" r="2.2"/>' for x, y in points
        ]
    if besides[0]:
        parts.append(_line("held-out", [place(*p) for p in _thinned(*besides)]))
        last += f", held-out {besides[1][-1]:.3g}"
    title = html.escape(printable(panel.title, limit=80))
    return (
        f"<figure><figcaption><span>{title}</span><b>{last}</b></figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}: {last}, {over}">'
        f"{''.join(parts)}</svg></figure>"
    )


def nice_ticks(low: float, high: float) -> list[float]:
    """Two to six round numbers that hold what is drawn between them.

    >>> nice_ticks(0.254, 1.04)
    [0.2, 0.4, 0.6, 0.8, 1.0, 1.2]
    >>> nice_ticks(3.0, 3.0)
    [2.6, 2.8, 3.0, 3.2, 3.4]
    """
    width = high - low
    if width <= 1e-9 * max(abs(low), abs(high)):  # one value, or none that could be told apart
        room = abs(high) / 8 or 1.0
        low, high, width = low - room, high + room, 2 * room
    power = 10.0 ** math.floor(math.log10(width))
    distance = next(
        f * power for f in (0.2, 0.25, 0.5, 1, 2, 2.5, 5, 10) if width / (f * power) <= 4
    )
    first, last = math.floor(low / distance), math.ceil(high / distance)
    return [float(f"{number * distance:.9g}") for number in range(first, last + 1)]


def _thinned(steps: Sequence[float], values: Sequence[float]) -> list[tuple[float, float]]:
    """At most ``MAX_POINTS`` of the points, the last one among them."""
    every = math.ceil(len(steps) / MAX_POINTS)
    points = list(zip(steps, values, strict=True))
    return points[::-every][::-1]


def _line(kind: str, points: Sequence[tuple[float, float]]) -> str:
    return f'<polyline {_CURVES[kind]} points="{" ".join(f"{x},{y}" for x, y in points)}"/>'
