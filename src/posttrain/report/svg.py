"""The curves of a stage as small SVG pictures, in the colours of the page they stand in.

Every element carries colours of its own too, for a picture that is taken out of the page.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence

from posttrain.report.panels import MARKERS_UP_TO, TICKS, DrawnPanel
from posttrain.runs.metrics_file import Record
from posttrain.track.printable import printable

WIDTH, HEIGHT = 320, 150
LEFT, RIGHT, TOP, BOTTOM = 50, 8, 8, 20
MAX_POINTS = 400  # more points than a picture of this width can show
_TEXT = 'font-size="10" fill="#767676"'
_CURVES = {
    "curve": 'fill="none" stroke="#2563b0" stroke-width="1.8"',
    "raw": 'fill="none" stroke="#2563b0" stroke-width="0.8" opacity="0.35"',
    "held-out": 'fill="none" stroke="#b45309" stroke-width="1.8"',
}


def draw_panel(drawn: DrawnPanel, records: Sequence[Record]) -> str:
    """A ``<figure>`` of one panel; ``records`` are those of the stage, one a step."""
    panel, curve, held_out = drawn
    ticks = _ticks([*curve.values, *(held_out.values if held_out else [])], percent=panel.percent)
    low, high = ticks[0], ticks[-1]
    first, last = records[0]["step"], max(records[-1]["step"], records[0]["step"] + 1)

    def place(step: float, value: float) -> tuple[float, float]:
        x = LEFT + (step - first) / (last - first) * (WIDTH - LEFT - RIGHT)
        y = TOP + (high - value) / (high - low) * (HEIGHT - TOP - BOTTOM)
        return round(x, 1), round(y, 1)

    def line(kind: str, points: Iterable[tuple[float, float]]) -> str:
        points = [place(*point) for point in points]
        # Thinned from the end, so that the last point stays.
        points = points[:: -math.ceil(len(points) / MAX_POINTS)][::-1]
        pairs = " ".join(f"{x},{y}" for x, y in points)
        dots = points if kind == "curve" and len(points) <= MARKERS_UP_TO else []
        return f'<polyline class="{kind}" {_CURVES[kind]} points="{pairs}"/>' + "".join(
            f'<circle class="point" fill="#2563b0" cx="{x}" cy="{y}" r="2.2"/>' for x, y in dots
        )

    parts = []
    for tick in ticks:
        _, y = place(first, tick)
        grid = f'x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"'
        parts.append(f'<line class="grid" stroke="#e6e6e6" {grid}/>')
        label = f"{tick:.0%}" if panel.percent else f"{tick:g}"
        parts.append(f'<text {_TEXT} x="{LEFT - 6}" y="{y + 3.5}" text-anchor="end">{label}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    words = (f"{first:g}", "start", LEFT), (f"{last:g}", "end", WIDTH - RIGHT)
    for word, anchor, x in (*words, ("step", "middle", middle)):
        parts.append(f'<text {_TEXT} x="{x}" y="{HEIGHT - 5}" text-anchor="{anchor}">{word}</text>')
    if curve.smooth != curve.values:
        parts.append(line("raw", zip(curve.steps, curve.values, strict=True)))
    parts.append(line("curve", zip(curve.steps, curve.smooth, strict=True)))
    value = f"{curve.last:.1%}" if panel.percent else f"{curve.last:.3g}"
    over = "at the end" if curve.num == 1 else f"mean of the last {curve.num} steps"
    if held_out:
        parts.append(line("held-out", zip(held_out.steps, held_out.values, strict=True)))
        value += f", held-out {held_out.last:.3g}"
    title = html.escape(printable(panel.title, limit=80))
    return (
        f"<figure><figcaption><span>{title}</span><b>{value}</b></figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}: {value}, {over}">'
        f"{''.join(parts)}</svg></figure>"
    )


def _ticks(values: Sequence[float], *, percent: bool) -> list[float]:
    """Round numbers that hold what is drawn between them; a flat curve lies in the middle.

    >>> _ticks([0.254, 1.04], percent=False), _ticks([3.0, 3.0], percent=False)
    ([0.2, 0.4, 0.6, 0.8, 1.0, 1.2], [2.6, 2.8, 3.0, 3.2, 3.4])
    """
    from matplotlib.ticker import MaxNLocator

    if percent:
        return [0.0, 0.5, 1.0]
    low, high = min(values), max(values)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        margin = abs(high) / 8 or 1.0
        low, high = low - margin, high + margin
    return [float(f"{tick:.9g}") for tick in MaxNLocator(**TICKS).tick_values(low, high)]
