"""The tables, for a terminal and for a page.

One table for each reward function, with a row for each delta and a column for each loss and KL
setting; one for what each choice changed; one for the noise of the first gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from posttrain.walkthrough.analysis import CHOICES, Row, effect, find, summary
from posttrain.walkthrough.settings import DELTAS, KL, LARGEST, LOSSES, REWARDS


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A table as text: a title, the headings, and the rows, the first cell of each its name."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def show(rows: Sequence[Row], console: Console) -> None:
    """Print the summary, then every table."""
    for line in summary(rows):
        console.print(line, highlight=False)
    for grid in grids(rows):
        console.print(f"\n{grid.title}", style="bold", highlight=False)
        console.print(_rich(grid))


def grids(rows: Sequence[Row]) -> list[Grid]:
    """All the tables of a result, in the order in which they are read."""
    rewards = [reward for reward in REWARDS if find(rows, reward=reward)]
    return [effects(rows), *[finals(rows, reward=name) for name in rewards], gradients(rows)]


def finals(rows: Sequence[Row], *, reward: str) -> Grid:
    """Final reward, mean ± spread over seeds, and the share of prompts sorted exactly."""
    columns = [
        (loss, kl) for loss in LOSSES for kl in KL if find(rows, reward=reward, loss=loss, kl=kl)
    ]
    start = find(rows, reward=reward)
    initial = start["initial_reward_mean"] if start else 0.0
    body = []
    for delta in DELTAS:
        cells = [find(rows, reward=reward, delta=delta, loss=loss, kl=kl) for loss, kl in columns]
        if any(cells):
            body.append((delta, *[_final(cell, reward) for cell in cells]))
    return Grid(
        title=f"{reward}: expected reward of the final policy (at the start {initial:.2f}, at "
        f"most {LARGEST[reward]}), ± spread over seeds"
        + ("" if reward == "exactly_sorted" else ", and how often it sorts exactly"),
        headings=("delta", *[f"{loss}\nKL {kl}" for loss, kl in columns]),
        rows=tuple(body),
    )


def effects(rows: Sequence[Row]) -> Grid:
    """What each choice changed: final reward, paired by seed, ± the standard error."""
    rewards = [reward for reward in REWARDS if find(rows, reward=reward)]
    body = []
    for choice in CHOICES:
        changes = [effect(rows, choice, reward=reward) for reward in rewards]
        if any(changes):
            body.append((choice[0], *[_change(each) for each in changes]))
    return Grid(
        title="What one choice changes in the final reward, all else and the seed being equal: "
        "mean ± standard error over seeds",
        headings=("choice", *[_heading(reward) for reward in rewards]),
        rows=tuple(body),
    )


def gradients(rows: Sequence[Row]) -> Grid:
    """Noise-to-signal ratio of the gradient at two moments, naive loss without KL."""
    rewards = [reward for reward in REWARDS if find(rows, reward=reward)]
    body = []
    for delta in DELTAS:
        found = [find(rows, delta=delta, reward=name, loss="naive", kl="off") for name in rewards]
        body.append((delta, *[_noise(row) for row in found]))
    return Grid(
        title="Gradient variance over its squared mean: at the start → after a tenth of the epochs "
        "(naive, KL off)",
        headings=("delta", *[_heading(reward) for reward in rewards]),
        rows=tuple(body),
    )


def markdown_table(grid: Grid) -> str:
    """A table as Markdown, ready for a page.

    >>> print(markdown_table(Grid(title="", headings=("delta", "a"), rows=(("x", "1\\n2"),))))
    | delta | a |
    |---|---|
    | x | 1, 2 |
    """
    headings = " | ".join(heading.replace("\n", " ") for heading in grid.headings)
    lines = [" | ".join(cell.replace("\n", ", ") for cell in row) for row in grid.rows]
    rule = "|" + "---|" * len(grid.headings)
    return "\n".join([f"| {headings} |", rule, *[f"| {line} |" for line in lines]])


def markdown(rows: Sequence[Row]) -> str:
    """Every table under its title, as Markdown."""
    return "\n\n".join(f"**{grid.title}**\n\n{markdown_table(grid)}" for grid in grids(rows))


def _final(row: Row | None, reward: str) -> str:
    if row is None:
        return ""
    text = f"{row['final_reward_mean']:.2f}±{row['final_reward_std']:.2f}"
    return text if reward == "exactly_sorted" else f"{text}\n{row['exact_sorted']:.0%}"


def _noise(row: Row | None) -> str:
    if row is None:
        return ""
    values = (row["gradient_variance"], row["gradient_variance_early"])
    return " → ".join("no signal" if value is None else f"{value:.2f}" for value in values)


def _change(change: tuple[float, float] | None) -> str:
    if change is None:
        return ""
    mean = round(change[0], 2) + 0.0  # no −0.00
    return f"{mean:+.2f} ± {change[1]:.2f}"


def _heading(reward: str) -> str:
    return reward.replace("_", "\n")


def _rich(grid: Grid) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold underline")
    for number, heading in enumerate(grid.headings):
        table.add_column(heading, justify="right" if number else "left", no_wrap=True)
    for row in grid.rows:
        table.add_row(*row)
    return table
