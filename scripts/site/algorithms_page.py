"""``docs/algorithms.md``, made from the table of algorithms and its pieces."""

from __future__ import annotations

from posttrain.algorithms.choices import GRADIENTS
from posttrain.algorithms.table import ALGORITHMS, Piece, pieces
from posttrain.cli.explain import ABOUT_KL
from posttrain.cli.explain_pieces import pieces_page


def algorithms_page() -> str:
    """All of it as Markdown, for docs/algorithms.md."""
    lines = [
        "# Algorithms",
        "",
        "Every algorithm is a row of one table: an advantage, a policy loss, an averaging and",
        "defaults. `posttrain explain grpo` prints a row, `posttrain explain grpo ppo` the",
        "difference of two; in a recipe `rl.algorithm` names one, and any piece can be replaced",
        "(`--rl.loss.clip_high 0.28`). This page is printed from the table; each row has a page.",
        "",
        "| name | advantage | policy loss | averaging | KL to reference |",
        "|---|---|---|---|---|",
    ]
    for name, row in ALGORITHMS.items():
        made = [_with_given(piece) for piece in (row.advantage, row.loss, row.weights)]
        cells = " | ".join(f"`{cell}`" for cell in (*made, pieces(name)["KL to reference"]))
        lines.append(f"| [{name}](algorithms/{name}.md) | {cells} |")
    lines += pieces_page()
    lines += ["", "## kl", "", ABOUT_KL, ""]
    lines += ["| estimator | direction | k, plain | ρ·k, weighted |", "|---|---|---|---|"]
    for (estimator, direction), gradients in GRADIENTS.items():
        lines.append(f"| {estimator} | {direction} | `{gradients[0]}` | `{gradients[1]}` |")
    return "\n".join(lines) + "\n"


def _with_given(piece: Piece) -> str:
    """A piece with the options that the row sets; its own defaults stand in the tables below."""
    given = ", ".join(f"{key}={value}" for key, value in piece.items() if key != "name")
    return f"{piece['name']} ({given})" if given else str(piece["name"])  # a line may end there
