"""The commands about model folders."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from posttrain.cli.endings import needing_web_server
from posttrain.config.paths import check_given
from posttrain.model_paths import check_run, gguf_file
from posttrain.track.printable import command_line
from posttrain.track.progress import loading
from posttrain.track.safe_terminal import say

models = typer.Typer(help="Model folders.", no_args_is_help=True)


def merge(
    adapter: Annotated[str, typer.Argument(help="A folder with an adapter.")],
    folder: Annotated[Path, typer.Argument(help="The model folder to write.")],
) -> None:
    """Add an adapter to its base, and write an ordinary Hugging Face folder."""
    check_given(adapter)
    with loading():
        from posttrain.build.model_source import merge_adapter

    merge_adapter(adapter, folder)
    _say_written(folder)


@models.command(name="import")
def import_model(
    file: Annotated[str, typer.Argument(help="A GGUF file, or an installed package with one.")],
    folder: Annotated[Path, typer.Argument(help="The model folder to write.")],
) -> None:
    """Turn a GGUF file into an ordinary Hugging Face folder."""
    path = gguf_file(file)
    check_given(str(path))
    with loading():
        from posttrain.build.model_source import import_gguf

    import_gguf(path, folder)
    _say_written(folder)


@models.command(name="export")
def export_model(
    folder: Annotated[str, typer.Argument(help="A model folder, or a run.")],
    file: Annotated[Path, typer.Argument(help="The GGUF file to write.")],
    *,
    kind: Annotated[str, typer.Option("--type", help="f32, f16 or q8_0.")] = "f16",
) -> None:
    """Write a model of Llama's or Qwen's shape as a GGUF file, for llama.cpp."""
    check_given(folder)
    with loading():
        from posttrain.build.model_source import export_gguf

    export_gguf(folder, file, kind=kind)
    say(f"{file}: written, {file.stat().st_size / 1e6:,.1f} MB")


RUN = Annotated[Path, typer.Argument(help="The folder of a finished run.")]
BASE = Annotated[str, typer.Option(help="The base model on the hub, where the run does not know.")]
LICENSE = Annotated[str, typer.Option(help="The licence of the card's metadata.")]


def card(
    run: RUN,
    file: Annotated[Path | None, typer.Argument(help="Where to write it; else printed.")] = None,
    *,
    repo: Annotated[str, typer.Option(help="The repository that it describes.")] = "ORG/NAME",
    base_model: BASE = "",
    license: LICENSE = "",
) -> None:
    """Write the model card of a run: data, recipe, results, seeds, how to load it."""
    check_run(run)
    with loading():
        from posttrain.runs import write_text
        from posttrain.stages.whole.publish import prepare_publication

    made = prepare_publication(run, repo, base_model=base_model, license=license)
    if file is None:
        say(made.card)
        return
    write_text(file, made.card)
    say(f"{file}: written")


def push(
    run: RUN,
    repo: Annotated[str, typer.Argument(help="ORG/NAME on the hub.")],
    *,
    private: Annotated[bool, typer.Option("--private", help="For those with access.")] = False,
    update: Annotated[bool, typer.Option("--update", help="A commit to one there is.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show it, upload nothing.")] = False,
    base_model: BASE = "",
    license: LICENSE = "",
) -> None:
    """Upload the model of a run to the hub, with a card written from the run."""
    check_run(run)
    with loading():
        from posttrain.stages.whole.publish import prepare_publication, upload

    ready = prepare_publication(run, repo, base_model=base_model, license=license)
    say("\n".join(ready.told()))
    if dry_run:
        say(f"\n{ready.card}\nnothing was uploaded")
        return
    say(f"uploaded: {upload(ready.upload, private=private, update=update)}")


def serve(
    model: Annotated[str, typer.Argument(help="A run, a recipe, a model folder or a hub id.")],
    *,
    host: Annotated[str, typer.Option(help="127.0.0.1: this machine only.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = 8000,
    api_key: Annotated[
        str, typer.Option(envvar="POSTTRAIN_API_KEY", help="Who asks must send this key.")
    ] = "",
    name: Annotated[str, typer.Option(help="What clients call the model.")] = "",
    device: Annotated[str | None, typer.Option(help="cpu or cuda; else what there is.")] = None,
    concurrent: Annotated[int, typer.Option(min=1, help="Requests sampled at once.")] = 4,
    queue: Annotated[int, typer.Option(min=1, help="Requests that may wait.")] = 32,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="The longest answer.")] = None,
) -> None:
    """Serve a model to clients of OpenAI: chat, completions, log-probs, streams."""
    if host not in ("127.0.0.1", "localhost", "::1") and not api_key:
        raise ValueError(f"--host {host}: others can reach it; set --api-key KEY as well")
    check_given(model)
    with loading(), needing_web_server("serve"):
        from posttrain.serving.http_server import serve as serve_http
        from posttrain.serving.service import Service
        from posttrain.stages.loaded.loaded_policy import LoadedPolicy

    policy = LoadedPolicy(model, device=device)
    called = name or Path(model).name or model
    service = Service(policy, active=concurrent, waiting=queue, max_tokens=max_tokens)

    def tell(address: str) -> None:
        say(address)
        say(f"The model is called {called!r} there; Ctrl-C ends it.", style="dim")

    try:
        serve_http(service, name=called, host=host, port=port, api_key=api_key, say=tell)
    finally:
        service.close()


def _say_written(folder: Path) -> None:
    command = command_line("posttrain", "generate", folder, "What is 2 + 2?")
    say(f"{folder}: written; to try it: {command}")
