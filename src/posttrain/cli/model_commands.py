"""The commands about model folders."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from posttrain.track.safe_terminal import say

models = typer.Typer(help="Model folders.", no_args_is_help=True)


def merge(
    adapter: Annotated[str, typer.Argument(help="A folder with an adapter.")],
    folder: Annotated[Path, typer.Argument(help="The model folder to write.")],
) -> None:
    """Add an adapter to its base, and write an ordinary Hugging Face folder."""
    from posttrain.cli.loading import loading

    with loading():
        from posttrain.build.model_source import merge_adapter

    merge_adapter(adapter, folder)
    _say_written(folder)


@models.command(name="import")
def import_model(
    file: Annotated[Path, typer.Argument(help="A GGUF file.")],
    folder: Annotated[Path, typer.Argument(help="The model folder to write.")],
) -> None:
    """Turn a GGUF file into an ordinary Hugging Face folder."""
    from posttrain.cli.loading import loading

    with loading():
        from posttrain.build.model_source import import_gguf

    import_gguf(file, folder)
    _say_written(folder)


@models.command(name="export")
def export_model(
    folder: Annotated[str, typer.Argument(help="A model folder, or a run.")],
    file: Annotated[Path, typer.Argument(help="The GGUF file to write.")],
    kind: Annotated[str, typer.Option("--type", help="f32, f16 or q8_0.")] = "f16",
) -> None:
    """Write a model of Llama's or Qwen's shape as a GGUF file, for llama.cpp."""
    from posttrain.cli.loading import loading

    with loading():
        from posttrain.build.model_source import export_gguf

    export_gguf(folder, file, kind=kind)
    say(f"{file}: written, {file.stat().st_size / 1e6:,.1f} MB")


def _say_written(folder: Path) -> None:
    from posttrain.track.printable import command_line

    command = command_line("posttrain", "generate", folder, "What is 2 + 2?")
    say(f"{folder}: written; to try it: {command}")
