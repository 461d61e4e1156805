"""The options of ``posttrain runs``, ``view``, ``samples`` and ``export``: to look at runs."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Group
from rich.padding import Padding
from rich.text import Text

from posttrain.cli.endings import needing_web_server
from posttrain.track.printable import harmless
from posttrain.track.safe_terminal import Terminal, say, say_json
from posttrain.track.shown import number

Order = Literal["step", "reward", "advantage", "length"]
State = Literal["ok", "broken", "invalid", "timeout", "crashed"]
BROKEN = "How its score is; broken is any of invalid, timeout and crashed."
Stop = Literal["stop", "length", "stop_string", "max_turns", "max_tokens"]


def runs(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(help="A folder of runs (runs/ by default); two runs or more are compared."),
    ] = None,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the runs of a folder, or compare runs: posttrain runs [FOLDER], posttrain runs A B."""
    from posttrain.report import compare, find_runs, overview, render_comparison, render_runs

    asked = folders or [Path("runs")]
    paths = list(dict.fromkeys(path for folder in asked for path in find_runs(folder)))
    named = len(asked) > 1 and all((path / "run.json").exists() for path in asked)
    rows = [overview(path) for path in paths]
    differing = compare(paths) if named else {}
    if as_json:
        found = {"runs": [asdict(row) for row in rows]} | ({"config": differing} if named else {})
        say_json(found)
        return
    console = Terminal()
    if not rows:
        console.print(Text(f"{asked[0]}: holds no runs; posttrain run RECIPE.toml makes one"))
        return
    if named:
        console.print(render_comparison(rows, differing))
    else:
        console.print(render_runs(rows, names=_names(paths, asked), width=console.width))


def _names(paths: Sequence[Path], folders: Sequence[Path]) -> list[str]:
    """Names of runs: their paths relative to the folder that was searched."""
    if len(folders) > 1 or paths[0] == folders[0]:
        return [str(path) for path in paths]
    return [str(path.relative_to(folders[0])) for path in paths]


def view(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Runs, or folders of runs (runs/ by default).")
    ] = None,
    *,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = 0,
    static: Annotated[
        Path | None, typer.Option("--static", metavar="OUT", help="Write one HTML file, and stop.")
    ] = None,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open the page in the browser.")
    ] = True,
) -> None:
    """Look at runs in the browser: curves, groups, tokens, arithmetic; live while they train.

    The page is on this machine alone (127.0.0.1), and its address has a token.
    """
    folders = list(runs or []) or [Path("runs")]
    if static is not None:
        from posttrain.viewer.static_page import write_page

        write_page(folders, static)
        say(f"{static}: written")
        return
    with needing_web_server("view", ", or write the page as one file: --static OUT.html"):
        from posttrain.viewer.server import serve

    def tell(text: str) -> None:
        say(text)
        if text.startswith("http://127.0.0.1:"):
            say("Ctrl-C ends it; whoever has this address can read these runs.", style="dim")
            if browser and sys.stdout.isatty():
                typer.launch(text)

    serve(folders, port=port, say=tell)


def samples(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    *,
    step: Annotated[int | None, typer.Option(min=0, help="Of this step only.")] = None,
    first_step: Annotated[int | None, typer.Option(help="From this step on.")] = None,
    last_step: Annotated[int | None, typer.Option(help="Up to this step.")] = None,
    min_reward: Annotated[float | None, typer.Option(help="With this reward or more.")] = None,
    max_reward: Annotated[float | None, typer.Option(help="With this reward or less.")] = None,
    group: Annotated[int | None, typer.Option(help="Of this group of its step.")] = None,
    state: Annotated[State | None, typer.Option(help=BROKEN)] = None,
    stop_reason: Annotated[Stop | None, typer.Option(help="How it ended.")] = None,
    prompt_id: Annotated[str | None, typer.Option(help="Of this prompt.")] = None,
    text: Annotated[str | None, typer.Option(help="With this text, in prompt or answer.")] = None,
    sort: Annotated[Order, typer.Option(help="Order.")] = "step",
    descending: Annotated[bool, typer.Option("--descending", help="The highest first.")] = False,
    offset: Annotated[int, typer.Option(min=0, help="Skip this many.")] = 0,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Rollouts per page.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Page through the rollouts of a run, by the filters of posttrain view."""
    from posttrain.runs import Filter, Rollouts, RunFolder

    where = Filter(
        first_step=step if step is not None else first_step,
        last_step=step if step is not None else last_step,
        min_reward=min_reward,
        max_reward=max_reward,
        group=group,
        state=state,
        stop_reason=stop_reason,
        prompt_id=prompt_id,
        text=text,
    )
    stage = RunFolder(run).stage("rl")
    if not stage.rollouts.is_dir():
        raise ValueError(f"{run}: has no rollouts; they come with the stage rl")
    store, console = Rollouts(stage.rollouts), Terminal()
    while True:
        page = store.page(where, sort=sort, descending=descending, offset=offset, limit=limit)
        if as_json:
            say_json({"rollouts": page.rows, "offset": page.offset, "total": page.total})
            return
        for row in page.rows:
            console.print(_rollout(row))
        last = offset + len(page.rows)
        say(f"{offset + 1 if page.rows else 0:,} to {last:,} of {page.total:,} rollouts")
        if last >= page.total or not page.rows:
            return
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            say(f"the next: --offset {last}")
            return
        if input("Enter: the next page; q: end ").strip().lower().startswith("q"):
            return
        offset = last


def export(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    *,
    out: Annotated[
        Path | None, typer.Option(help="The HTML file; by default RUN/report.html.")
    ] = None,
) -> None:
    """Write a run as one page, as view --static does, and its metrics as CSV beside it."""
    from posttrain.runs import RunFolder
    from posttrain.viewer.static_page import export as write

    for path in write(RunFolder(run), out):
        say(f"{path}: written")


def _rollout(row: Mapping[str, Any]) -> Group:
    """A rollout as lines: what it earned, what was asked, what was said."""
    from posttrain.report.episode_text import exchange

    earned = "broken" if row["state"] != "ok" else number({"": row["reward"]})
    gained = "" if row["advantage"] is None else f"  advantage {row['advantage']:+.3g}"
    named = row["parts"].items() if len(row["parts"]) > 1 else ()
    parts = "".join(f"  {name} {value:.3g}" for name, value in named)
    head = f"step {row['step']}, group {row['group']}, sample {row['sample']}"
    tail = f"{gained}{parts}  {row['stop_reason']}, {row['length']} tokens"
    lines = [Text.assemble((head, "bold"), (f"  reward {earned}", "cyan"), (harmless(tail), "dim"))]
    if row["state"] != "ok":
        lines.append(Text(harmless(row["reason"] or row["state"]), style="yellow"))
    lines.append(Text(harmless(row["prompt"]), style="dim"))
    if row["turns"]:
        for who, said, reward in exchange(row["turns"]):
            mark = f"{who}{f', earned {reward}' if reward else ''}: " if who else ""
            lines.append(Text(f"{mark}{harmless(said)}"))
    else:
        lines.append(Text(harmless(row["completion"])))
    return Group(lines[0], *(Padding(line, (0, 0, 0, 2)) for line in lines[1:]), Text())
