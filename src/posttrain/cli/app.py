"""The commands and their options; each calls one function of the library."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Reinforcement-learning post-training of language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _main() -> None:
    """Reinforcement-learning post-training of language models."""


@app.command()
def explain(
    names: Annotated[
        list[str] | None, typer.Argument(help="None lists all, one explains it, two compare.")
    ] = None,
) -> None:
    """Print the table of algorithms, one of them with its equation, or what sets two apart."""
    from posttrain.cli.explain import explain as show

    show(names or [])


@app.command()
def walkthrough(
    *,
    out: Annotated[Path, typer.Option(help="Folder for the table, picture and log.")] = Path(
        "runs/walkthrough"
    ),
    quick: Annotated[bool, typer.Option("--quick", help="A small part of the grid.")] = False,
    seeds: Annotated[int | None, typer.Option(min=2, help="Seeds for each configuration.")] = None,
    as_published: Annotated[
        bool, typer.Option("--as-published", help="Rerun the lecture's own three runs.")
    ] = False,
) -> None:
    """Learn to sort three numbers: every advantage and loss of the lecture, side by side."""
    from posttrain import walkthrough as experiment

    if as_published:
        experiment.run_as_published(out=out)
    else:
        experiment.run(out=out, quick=quick, seeds=seeds)


def main() -> None:
    """Run the command line; a ``ValueError`` is a user's mistake and prints as one line."""
    try:
        app()
    except ValueError as error:
        typer.secho(f"posttrain: {error}", fg=typer.colors.RED, err=True)
        sys.exit(2)
