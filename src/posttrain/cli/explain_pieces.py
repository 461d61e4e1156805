"""``posttrain explain gae``: a piece by name; and the part of the page that lists them."""

from __future__ import annotations

import inspect
import re

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from posttrain.algorithms.pieces import needed, smallest_group
from posttrain.algorithms.table import ALGORITHMS, Algorithm, PieceKind, piece_table, real_piece
from posttrain.config.data_stages import WrittenDpo

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


OWN_PIECES = """\
## Pieces of your own

Functions in a file beside the recipe. An advantage and an averaging take the batch and return it
with a field added, `[B, T]`; a loss takes the log-probs of the policy now, and returns one term for
each token. Parameters after the `*` are options: a recipe sets them, a default makes them optional.

```python
from posttrain.types import Batch, Terms

def halved(batch: Batch, *, scale: float = 0.5) -> Batch:  # rl.advantage = "my_pieces:halved"
    advantages = scale * batch.need("rewards")[:, None] * batch.active  # 0 outside of completions
    return batch.replace(advantages=advantages)

def plain(logprobs, batch: Batch) -> Terms:  # rl.loss = "my_pieces:plain"
    return Terms(loss=-batch.need("advantages") * logprobs * batch.active)

def by_token(batch: Batch) -> Batch:  # rl.weights = "my_pieces:by_token"; Σ weights · loss counts
    return batch.replace(weights=batch.active / batch.active.sum().clamp_min(1))

batch = by_token(halved(Batch.from_rewards([1.0, 0.0])))
loss = plain(batch.need("advantages") - 1.0, batch).loss  # [B, T], not a mean
```"""


# How the page introduces each table but that of the advantages.
HEADINGS: dict[PieceKind, tuple[str, str]] = {
    "policy loss": ("Policy losses", "`rl.loss` names one: a term for every token."),
    "value loss": ("Value losses", "`rl.critic.loss` names one, where there is a critic."),
    "averaging": ("Averaging", "`rl.weights` names one: what each token counts."),
    "correction": ("Corrections", "`rl.correction` names one: π_old over the engine's own."),
    "preference loss": (
        "Preference losses",
        "`dpo.loss` names one, of pairs or of labelled completions ([dpo](dpo.md)).",
    ),
}


BESIDE_TABLE = ("correction", "preference loss")
"""Kinds that no algorithm has: how a run samples decides, or another stage."""


def explain_piece(console: Console, name: str, *, kind: PieceKind) -> None:
    """Print what a piece does, its options, what it asks for, and who has it."""
    console.print(Text.assemble((name, "bold"), f"  {kind}\n"))
    for paragraph in docstring_paragraphs(name, kind):
        console.print(Padding(paragraph, (0, 0, 1, 4)))
    table = Table(box=None, show_header=False, padding=(0, 2))
    for label, value in _rows(name, kind).items():
        table.add_row(Text(label, "dim"), value)
    console.print(table)


def docstring_paragraphs(name: str, kind: PieceKind = "advantage") -> list[str]:
    """The docstring of a piece for readers: its paragraphs, without example and markup.

    >>> docstring_paragraphs("return")
    ['The return itself: A = R (REINFORCE; Williams, 1992). Shapes: rewards [B] → [B, T].']
    """
    text = (inspect.getdoc(real_piece(name, kind)) or "").partition("\n>>> ")[0]
    plain = re.sub(r":func:`(\w+)`", r"\1", text).replace("``", "")
    return [" ".join(paragraph.split()) for paragraph in plain.split("\n\n") if paragraph.strip()]


def pieces_page() -> list[str]:
    """The lines of docs/algorithms.md on plain tensors, on one's own pieces and on every piece."""
    lines = ["", PLAIN_TENSORS, "", OWN_PIECES, "", "## Advantages", ""]
    lines += [
        "`rl.advantage` names one, with options: `--rl.advantage.deviation population`. Where one",
        'divides by a standard deviation, `deviation` is `"population"` (squares over n) or',
        '`"sample"` (over n − 1). One of your own is `"my_module:my_advantage"`; `@piece` of',
        "`posttrain.algorithms` lets it declare what the last two columns say.",
        "",
        *_listed("advantage", ("completions compared", "also takes")),
    ]
    for kind, (heading, text) in HEADINGS.items():
        columns = () if kind in BESIDE_TABLE else ("algorithms",)
        lines += ["", f"## {heading}", "", text, "", *_listed(kind, columns)]
    return lines


def _listed(kind: PieceKind, columns: tuple[str, ...]) -> list[str]:
    """A table of pieces in Markdown."""
    headings = ("name", "what it is", *columns)
    lines = ["| " + " | ".join(headings) + " |", "|---" * len(headings) + "|"]
    for name in piece_table(kind):
        first = docstring_paragraphs(name, kind)[0].partition(" Shapes:")[0].replace("|", "\\|")
        rows = _rows(name, kind)
        known = f"`{name}({rows['options']})`" if "options" in rows else f"`{name}`"
        lines.append("| " + " | ".join((known, first, *(rows[key] for key in columns))) + " |")
    return lines


def _rows(name: str, kind: PieceKind) -> dict[str, str]:
    function = real_piece(name, kind)
    parameters = inspect.signature(function).parameters.values()
    known = [each for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY]
    if kind == "preference loss":  # the others are tensors
        known = [each for each in known if each.name in WrittenDpo.model_fields]
    defaults = {each.name: each.default for each in known}
    missing = inspect.Parameter.empty
    given = ", ".join(f"{n}={'…' if value is missing else value}" for n, value in defaults.items())
    rows = {"options": given} if known else {}
    if kind == "advantage":
        least = smallest_group(function)
        rows["completions compared"] = "none" if least == 1 else f"{least} or more"
    if kind in ("advantage", "preference loss"):
        rows["also takes"] = ", ".join(sorted(needed(function))) or "nothing"
    if kind not in BESIDE_TABLE:
        users = [row for row, made in ALGORITHMS.items() if _has(made, kind) == name]
        rows["algorithms"] = ", ".join(users) or "none"
    return rows


def _has(made: Algorithm, kind: PieceKind) -> str:
    """The name of the piece of a kind that an algorithm has."""
    pieces = {
        "advantage": made.advantage,
        "policy loss": made.loss,
        "value loss": made.value_loss or {},
        "averaging": made.weights,
    }
    return str(pieces[kind].get("name", ""))
