"""``posttrain explain gae``: an advantage by name; and the part of the page that lists them."""

from __future__ import annotations

import inspect
import re

from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from posttrain.algorithms.advantages import ADVANTAGES
from posttrain.algorithms.pieces import needed, smallest_group
from posttrain.algorithms.table import ALGORITHMS

PLAIN_TENSORS = """\
## From plain tensors

The mathematics needs no recipe and no model. A mask and what a piece asks for make a batch:

```python
import torch
from posttrain.algorithms import Batch, clipped, group_normalised, sequence_mean, total

mask = torch.tensor([[0, 1, 1], [0, 1, 0]])  # 1: the policy chose this token
old = torch.tensor([[0.0, -1.0, -2.0], [0.0, -1.0, 0.0]])  # its log-probs when it was sampled
rewards, groups = torch.tensor([1.0, 0.0]), torch.tensor([0, 0])
batch = Batch.from_tensors(mask, rewards=rewards, groups=groups, old_logprobs=old)
batch = sequence_mean(group_normalised(batch))  # adds advantages, and weights for averaging
loss = total(clipped(old + 0.1 * mask, batch).loss, batch)
```

`dir(posttrain.algorithms)` lists everything there is; `help(posttrain.algorithms)` is the map."""


def explain_advantage(console: Console, name: str) -> None:
    """Print what an advantage does, its options, what it asks for, and who has it."""
    console.print(f"[bold]{name}[/bold]  advantage\n")
    for paragraph in told(name):
        console.print(Padding(paragraph, (0, 0, 1, 4)), markup=False)
    table = Table(box=None, show_header=False, padding=(0, 2))
    for label, value in _rows(name).items():
        table.add_row(f"[dim]{label}[/dim]", value)
    console.print(table)


def told(name: str) -> list[str]:
    """The docstring of an advantage for readers: its paragraphs, without example and markup.

    >>> told("return")
    ['The return itself: A = R (REINFORCE; Williams, 1992). Shapes: rewards [B] → [B, T].']
    """
    text = (inspect.getdoc(ADVANTAGES[name]) or "").partition("\n>>> ")[0]
    plain = re.sub(r":func:`(\w+)`", r"\1", text).replace("``", "")
    return [" ".join(paragraph.split()) for paragraph in plain.split("\n\n") if paragraph.strip()]


def advantages_page() -> list[str]:
    """The lines of docs/algorithms.md on plain tensors and on every advantage."""
    lines = ["", PLAIN_TENSORS, "", "## Advantages", ""]
    lines += [
        "`rl.advantage` names one, with options: `--rl.advantage.deviation population`. Where one",
        'divides by a standard deviation, `deviation` is `"population"` (squares over n) or',
        '`"sample"` (over n − 1). One of your own is `"my_module:my_advantage"`; `@piece` of',
        "`posttrain.algorithms` lets it declare what the last two columns say.",
        "",
        "| name | what it is | completions compared | also takes |",
        "|---|---|---|---|",
    ]
    for name in ADVANTAGES:
        first = told(name)[0].partition(" Shapes:")[0]
        rows = _rows(name)
        known = f"`{name}({rows['options']})`" if "options" in rows else f"`{name}`"
        cells = (known, first, rows["completions compared"], rows["also takes"])
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _rows(name: str) -> dict[str, str]:
    function = ADVANTAGES[name]
    parameters = inspect.signature(function).parameters.values()
    known = [each for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY]
    given = ", ".join(f"{option.name}={_default(option)}" for option in known)
    least = smallest_group(function)
    users = [row for row, algorithm in ALGORITHMS.items() if algorithm.advantage["name"] == name]
    rows = {"options": given} if known else {}
    return rows | {
        "completions compared": "none" if least == 1 else f"{least} or more",
        "also takes": ", ".join(sorted(needed(function))) or "nothing",
        "algorithms": ", ".join(users) or "none",
    }


def _default(option: inspect.Parameter) -> str:
    return "…" if option.default is inspect.Parameter.empty else str(option.default)
