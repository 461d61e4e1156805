"""``posttrain explain``: the table of algorithms, printed."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from posttrain.algorithms.choices import GRADIENTS
from posttrain.algorithms.table import ALGORITHMS, algorithm, difference, kinds_of, pieces
from posttrain.track.safe_terminal import Terminal

ABOUT_KL = (
    "The gradient that a KL in the loss has on average, where π is still π_old, with "
    "d = log π_ref − log π of the sampled token. `rl.kl.weighted` multiplies an estimate k by "
    "ρ = π / π_old; its gradient stays the one below when π leaves π_old, the plain one's does not."
)


def explain(names: Sequence[str]) -> None:
    """Print all algorithms, one, the difference of two, a piece, or the gradients of the KL."""
    console = Terminal()
    if len(names) > 2:
        raise ValueError("explain: give no name, one name, or two names to compare")
    if not names:
        console.print(_all())
        console.print(
            "\nposttrain explain grpo       its equation, pieces and neighbours\n"
            "posttrain explain grpo ppo   what sets two apart\n"
            "posttrain explain gae        a piece with its options: an advantage, a loss …\n"
            "posttrain explain dpo        a loss of the stage dpo: dpo, ipo, kto, orpo, simpo\n"
            "posttrain explain kl         the gradient of each KL estimator in the loss",
            style="dim",
        )
    elif names == ["kl"]:
        _divergences(console)
    elif len(names) == 1:
        _named(console, names[0])
    else:
        console.print(_compared(names[0], names[1]))


def _named(console: Console, name: str) -> None:
    """An algorithm, a piece, or all that have the name."""
    kinds = kinds_of(name)
    if name in ALGORITHMS:
        _one(console, name)
    if kinds:
        from posttrain.cli.explain_pieces import explain_piece

        for number, kind in enumerate(kinds):
            if number or name in ALGORITHMS:
                console.print()
            explain_piece(console, name, kind=kind)


def _all() -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold underline")
    for heading in ("name", "advantage", "policy loss", "averaging", "KL"):
        table.add_column(heading, overflow="fold")
    for name, row in ALGORITHMS.items():
        kl = "—" if row.kl.placement == "none" else f"{row.kl.placement} {row.kl.coefficient:g}"
        advantage = row.advantage["name"] + (" + critic" if row.critic else "")
        table.add_row(Text(name, "bold"), advantage, row.loss["name"], row.weights["name"], kl)
    return table


def _one(console: Console, name: str) -> None:
    row = algorithm(name)
    console.print(Text.assemble((name, "bold"), f"  {row.title}\n", (f"{row.reference}\n", "dim")))
    console.print(Padding(row.equation, (0, 0, 1, 4)))
    table = Table(box=None, show_header=False, padding=(0, 2))
    for piece, value in pieces(name).items():
        table.add_row(Text(piece, "dim"), value)
    console.print(table)
    if row.kl.placement == "loss":
        gradient = GRADIENTS[row.kl.estimator, "reverse"][0]  # every row has this direction
        text = f"\nThe gradient of its KL is on average {gradient}: posttrain explain kl"
        console.print(text, style="dim")
    for neighbour in row.neighbours:
        console.print(_compared(name, neighbour))


def _divergences(console: Console) -> None:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("estimator", "direction", "k, plain", "ρ·k, weighted"):
        table.add_column(heading)
    for (estimator, direction), gradients in GRADIENTS.items():
        table.add_row(estimator, direction, *gradients)
    console.print(ABOUT_KL.replace("`", ""))
    console.print(table)


def _compared(first: str, second: str) -> Table:
    differences = difference(first, second)
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("they differ in", style="dim", no_wrap=True)
    table.add_column(first, overflow="fold")
    table.add_column(second, overflow="fold")
    for piece, (one, other) in differences.items():
        # A space before the options lets a narrow terminal break the line there.
        table.add_row(piece, one.replace("(", " ("), other.replace("(", " ("))
    if not differences:
        table.add_row("nothing", "", "")
    return table
