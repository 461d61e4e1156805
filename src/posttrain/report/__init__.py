"""Results of runs: the facts of a run, read once, and the modules that draw them.

``facts`` reads a run folder; ``plot`` draws pictures, ``terminal`` tables; the page is
:mod:`posttrain.viewer`.
"""

from posttrain.report.facts import RunFacts
from posttrain.report.held_out import HeldOut, held_out
from posttrain.report.overview import compare, find_runs, overview
from posttrain.report.plot import plot_curves
from posttrain.report.terminal import (
    render_comparison,
    render_evaluation,
    render_runs,
    render_summary,
)

__all__ = [
    "RunFacts",
    "HeldOut",
    "compare",
    "find_runs",
    "held_out",
    "overview",
    "plot_curves",
    "render_comparison",
    "render_evaluation",
    "render_runs",
    "render_summary",
]
