"""The lecture's own three runs, again, with its numbers beside ours.

The published mean rewards are those of the runs' logs (Stanford CS336, 2025, lecture 17): seed 5,
naive loss, inclusion and ordering, 100 epochs of 10 steps, 10 responses, Adam at 1e-3.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.table import Table

from posttrain.track.safe_terminal import Terminal
from posttrain.walkthrough.settings import Configuration
from posttrain.walkthrough.training import one_thread, train

SEED = 5
EPOCHS = (0, 1, 5, 10, 20, 50, 99)
PUBLISHED = {
    "rewards": (2.333, 2.5, 2.667, 2.667, 2.667, 2.667, 2.667),
    "centered": (2.333, 2.667, 2.767, 3.0, 3.333, 3.333, 3.333),
    "normalized": (2.333, 2.667, 2.767, 3.033, 3.333, 3.333, 3.333),
}


@one_thread()
def run_as_published(*, out: Path | None = None) -> list[dict[str, Any]]:
    """Rerun the three runs and print their mean rewards beside the published ones.

    The result has a row for each run, with the keys ``delta``, ``epochs``, ``mean_reward``,
    ``published`` and ``matches`` (equal in all three published decimals). With ``out``, it is
    also written there as ``as_published.json``.
    """
    rows = rerun()
    console = Terminal()
    console.print(_table(rows))
    wrong = [row["delta"] for row in rows if not row["matches"]]
    if wrong:
        console.print(f"Not equal to what was published: {', '.join(wrong)}.")
    else:
        console.print("Every number is equal to the published one.")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        text = json.dumps(rows, indent=1) + "\n"
        (out / "as_published.json").write_text(text, encoding="utf-8")
        console.print(f"Written to {out / 'as_published.json'}", soft_wrap=True)
    return rows


def rerun() -> list[dict[str, Any]]:
    """The three runs side by side, as rows."""
    configurations = [Configuration(delta=delta) for delta in PUBLISHED]
    rewards = train(configurations, seeds=[SEED]).rewards.mean((2, 3))  # [three runs, epochs]
    rows = []
    for delta, curve in zip(PUBLISHED, rewards.tolist(), strict=True):
        ours = [round(curve[epoch], 3) for epoch in EPOCHS]
        published = list(PUBLISHED[delta])
        rows.append(
            {
                "delta": delta,
                "epochs": list(EPOCHS),
                "mean_reward": ours,
                "published": published,
                "matches": ours == published,
            }
        )
    return rows


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(
        title="Mean reward of the lecture's runs by epoch: rerun, and as published",
        title_justify="left",
        title_style="bold",
        header_style="bold underline",
        box=None,
    )
    table.add_column("delta")
    table.add_column("")
    for epoch in EPOCHS:
        table.add_column(f"{epoch}", justify="right")
    for row in rows:
        for name, key in (("rerun", "mean_reward"), ("published", "published")):
            values = [f"{value:.3f}" for value in row[key]]
            table.add_row(row["delta"] if name == "rerun" else "", name, *values)
    return table
