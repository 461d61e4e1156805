"""The pages say what the code does."""

import re
from pathlib import Path

from posttrain.report import plot
from posttrain.runs import SCHEMA
from posttrain.track import TRACKERS, shown

DOCS = Path(__file__).parents[2] / "docs"


def test_every_metric_that_is_shown_is_explained() -> None:
    explained = set(re.findall(r"^\| `([a-z_]+/[a-z_]+)`", (DOCS / "metrics.md").read_text(), re.M))
    on_screen = {name for row in (*shown.RL, *shown.SFT) for name in row.metrics}
    in_picture = {panel.metric for place in (*plot.RL, *plot.SFT) for panel in place}
    assert on_screen | in_picture <= explained


def test_every_column_of_a_rollout_and_every_tracker_is_explained() -> None:
    text = (DOCS / "runs.md").read_text()
    columns = [
        name
        for row in re.findall(r"^\| (`.*?) \| [a-z]", text, re.M)
        for name in re.findall(r"`(\w+)`", row)
    ]
    assert columns[: len(SCHEMA.names)] == SCHEMA.names
    assert [name for name in TRACKERS if f"| `{name}` |" not in text] == []
