"""The curves of a stage as small SVG pictures, drawn in the colours of the page they stand in."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from posttrain.runs.metrics import Record
from posttrain.runs.plot import Panel, curve_points, panels_of, smoothed

WIDTH, HEIGHT = 320, 150
LEFT, RIGHT, TOP, BOTTOM = 44, 8, 8, 20
MAX_POINTS = 400  # more than a picture of this width can show
_MARKERS_UP_TO = 25


def draw_panels(records: Sequence[Record]) -> list[str]:
    """A ``<figure>`` for each panel that the stage has numbers for; ``records`` one a step."""
    return [_figure(panel, records) for panel in panels_of(records)]


def _figure(panel: Panel, records: Sequence[Record]) -> str:
    steps, values = curve_points(records, panel.metric)
    smooth = smoothed(values)
    last = f"{smooth[-1]:.1%}" if panel.percent else f"{smooth[-1]:.3g}"
    low, high = (0.0, 1.0) if panel.percent else _range(values)
    across = (records[0]["step"], max(records[-1]["step"], records[0]["step"] + 1))

    def place(step: float, value: float) -> tuple[float, float]:
        x = LEFT + (step - across[0]) / (across[1] - across[0]) * (WIDTH - LEFT - RIGHT)
        y = TOP + (high - value) / (high - low) * (HEIGHT - TOP - BOTTOM)
        return round(x, 1), round(y, 1)

    parts = []
    for tick in (low, (low + high) / 2, high):
        _, y = place(across[0], tick)
        label = f"{tick:.0%}" if panel.percent else f"{tick:.3g}"
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 3.5}" text-anchor="end">{label}</text>')
    for step, anchor, x in ((across[0], "start", LEFT), (across[1], "end", WIDTH - RIGHT)):
        parts.append(f'<text x="{x}" y="{HEIGHT - 5}" text-anchor="{anchor}">{step:g}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 5}" text-anchor="middle">step</text>')
    if smooth != values:
        parts.append(_line("raw", [place(*p) for p in _thinned(steps, values)]))
    points = [place(*p) for p in _thinned(steps, smooth)]
    parts.append(_line("curve", points))
    if len(points) <= _MARKERS_UP_TO:
        parts += [f'<circle class="point" cx="{x}" cy="{y}" r="2.2"/>' for x, y in points]
    title = html.escape(panel.title)
    return (
        f"<figure><figcaption><span>{title}</span><b>{last}</b></figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}: {last} at the end">'
        f"{''.join(parts)}</svg></figure>"
    )


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Bounds that hold the values, also where they are all one."""
    low, high = min(values), max(values)
    room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return low - room, high + room


def _thinned(steps: Sequence[float], values: Sequence[float]) -> list[tuple[float, float]]:
    """At most ``MAX_POINTS`` of the points, the last one among them."""
    every = math.ceil(len(steps) / MAX_POINTS)
    points = list(zip(steps, values, strict=True))
    return points[::-every][::-1]


def _line(kind: str, points: Sequence[tuple[float, float]]) -> str:
    return f'<polyline class="{kind}" points="{" ".join(f"{x},{y}" for x, y in points)}"/>'
