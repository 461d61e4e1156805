"""The commands and their options; each calls one function of the library."""

from __future__ import annotations

import io
import logging
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from posttrain import __version__
from posttrain.cli.cluster_commands import clusters
from posttrain.cli.endings import WithOverrides, harmless_mistypings, letting_out, report
from posttrain.cli.model_commands import card, merge, models, push, serve
from posttrain.cli.planning import from_trl, plan, play
from posttrain.cli.viewing import export, runs, samples, view
from posttrain.track.safe_terminal import HarmlessRecord, say


class _Commands(TyperGroup):
    """Passes on exceptions that typer would swallow; typed words are escaped in its messages."""

    def make_context(self, *given: Any, **more: Any) -> Any:
        with letting_out(), harmless_mistypings():
            return super().make_context(*given, **more)

    def invoke(self, ctx: Any) -> Any:
        with letting_out(), harmless_mistypings():
            try:
                result = super().invoke(ctx)
            except typer.Exit:
                _flush()
                raise
            _flush()
            return result


def _flush() -> None:
    """Flush stdout now, not at exit, so that a full disk is an error of this command."""
    if sys.stdout is not None:
        sys.stdout.flush()


app = typer.Typer(
    cls=_Commands,
    help="Reinforcement-learning post-training of language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(models, name="model")
app.command()(merge)
app.command()(push)
app.command()(card)
app.command()(serve)
app.add_typer(clusters, name="cluster")

SOURCE = "A run folder, a recipe, a model folder, tiny, a GGUF file or a hub id."
# Everything after the recipe is an override: --rl.steps 6, --task.digits=2.
OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}
# The recipe is the first of these words; typer, which does not parse it, shows it all the same.
RECIPE: dict[str, Any] = {"cls": WithOverrides, "context_settings": OVERRIDES}
OF_RECIPE = {**RECIPE, "options_metavar": "[OPTIONS] RECIPE.toml"}
MAY_RECIPE = {**RECIPE, "options_metavar": "[OPTIONS] [RECIPE.toml]"}
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the resolved recipe and stop.")]
AUDIT = "Check the algorithm's checklist at every RL step, and stop where it does not hold."
Audit = Annotated[bool, typer.Option("--audit", help=AUDIT)]
Check = Annotated[
    Literal["stop", "warn", "off"] | None,
    typer.Option(
        "--check", help="What a failed check before rl does: stop (as rl.check is), warn or off."
    ),
]
Allow = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-changes",
        metavar="KEY",
        help="Resume though this key has changed; may be given several times.",
    ),
]

Stop = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXT",
        help="End an answer before this text (\\n is a new line); may be given several times.",
    ),
]


def _version(asked: bool) -> None:
    if asked:
        say(f"posttrain {__version__}")
        raise typer.Exit


VERSION = typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)


@app.callback()
def _main(*, version: Annotated[bool, VERSION] = False) -> None:
    """Reinforcement-learning post-training of language models."""


@app.command(**OF_RECIPE)
def run(
    context: typer.Context,
    *,
    dry_run: DryRun = False,
    audit: Audit = False,
    check: Check = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume from the last checkpoint, if there is one.")
    ] = False,
    allow_changes: Allow = None,
) -> None:
    """Run a recipe: posttrain run RECIPE.toml [--section.key value …]."""
    from posttrain.cli.recipes import run_recipe

    resumed = list(allow_changes or []) if resume else None
    if allow_changes and not resume:
        raise ValueError("--allow-changes: has no effect without --resume")
    given = [*context.args, *(["--rl.check", check] if check else [])]
    run_recipe(given, command="run", dry_run=dry_run, audit=audit, resume=resumed)


@app.command(name="resume", **RECIPE)
def resume_command(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(help="The folder of a run that was cut short.")],
    *,
    allow_changes: Allow = None,
) -> None:
    """Resume a run exactly where it was: posttrain resume RUN [--cluster.address …]."""
    from posttrain.cli.recipes import resume_run

    resume_run(folder, context.args, allow_changes=list(allow_changes or []))


@app.command(**OF_RECIPE)
def check(
    context: typer.Context,
    *,
    fast: Annotated[bool, typer.Option("--fast", help="Fewer rollouts, fewer checks.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Whether a run can work, before it begins: posttrain check RECIPE.toml [--section.key …]."""
    from posttrain.cli.check import check as run_check

    raise typer.Exit(run_check(context.args, fast=fast, as_json=as_json))


app.command(**{**RECIPE, "options_metavar": "[OPTIONS] MODEL|RECIPE.toml"})(plan)


ALONE: dict[Literal["sft", "prefer", "reward", "dpo"], str] = {
    "sft": "Run the SFT stage alone: posttrain sft [RECIPE.toml] [--sft.epochs 2 …].",
    "prefer": "Make preferences from a policy: "
    "posttrain prefer [RECIPE.toml] [--prefer.error_rate 0.1 …].\n\n"
    "Samples completions of the task's prompts, compares them by rewards, and writes pairs (or "
    "ranked sets) for posttrain reward.",
    "reward": "Train a reward model: posttrain reward [RECIPE.toml] [--reward.data pairs.jsonl …].",
    "dpo": "Learn from preferences without a reward model: "
    "posttrain dpo [RECIPE.toml] [--dpo.loss …].",
}


def _add_stage(stage: Literal["sft", "prefer", "reward", "dpo"]) -> None:
    @app.command(name=stage, help=ALONE[stage], **MAY_RECIPE)
    def command(context: typer.Context, *, dry_run: DryRun = False) -> None:
        from posttrain.cli.recipes import run_recipe

        run_recipe(context.args, command=stage, dry_run=dry_run)


for _stage in ALONE:
    _add_stage(_stage)


@app.command(**MAY_RECIPE)
def rl(
    context: typer.Context, *, dry_run: DryRun = False, audit: Audit = False, check: Check = None
) -> None:
    """Run the RL stage alone: posttrain rl [RECIPE.toml] [--rl.steps 6 …]."""
    from posttrain.cli.recipes import run_recipe

    given = [*context.args, *(["--rl.check", check] if check else [])]
    run_recipe(given, command="rl", dry_run=dry_run, audit=audit)


@app.command(name="eval", **RECIPE)
def evaluate(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help=SOURCE)],
    *,
    task: Annotated[
        str | None,
        typer.Option(help="A task or a file of questions, if not a run's or recipe's own."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write one JSON line per problem.")] = None,
    show: Annotated[int, typer.Option(min=0, help="Print this many of the answers.")] = 0,
    stop: Stop = None,
) -> None:
    """Accuracy on held-out problems: posttrain eval RUN, or eval MODEL --task NAME.

    --task FILE.jsonl asks all of its questions. A run, or a recipe, is evaluated as it says itself;
    --eval.problems 50 and the like override.
    """
    from posttrain.cli.eval_arguments import stopping
    from posttrain.cli.recipes import evaluate_model

    evaluate_model(model, task, overrides=[*context.args, *stopping(stop)], out=out, show=show)


@app.command(context_settings=OVERRIDES)
def grade(
    context: typer.Context,
    reward: Annotated[str, typer.Argument(help="A reward by name, or module:function.")],
    *,
    file: Annotated[Path, typer.Argument(help="JSONL: completion, and what the reward wants.")],
    out: Annotated[Path | None, typer.Option(help="Write the rows with their scores.")] = None,
    workers: Annotated[int, typer.Option(min=0, help="Processes; 0 grades in this one.")] = 2,
    seconds: Annotated[float, typer.Option(min=0.001, help="Limit for one row.")] = 10.0,
    memory_mb: Annotated[int, typer.Option(min=1, help="Memory of a worker.")] = 2048,
) -> None:
    """Try a reward on a file: posttrain grade REWARD FILE.jsonl [--extract boxed …]."""
    from posttrain.cli.grade import grade as grade_rows
    from posttrain.config import recipe_from_dict

    limits = {"workers": workers, "seconds": seconds, "memory_mb": memory_mb}
    grading = recipe_from_dict({"grading": limits}).grading
    grade_rows(reward, file, arguments=context.args, out=out, grading=grading)


@app.command(**RECIPE)
def generate(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help=SOURCE)],
    *,
    prompt: Annotated[str, typer.Argument(help="What to answer.")],
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer; else the run's, 256, or what fits.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    num_samples: Annotated[int, typer.Option(min=1, help="How many answers.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Decides every token.")] = 0,
    chat: Annotated[
        bool | None, typer.Option("--chat/--no-chat", help="Use the chat template.")
    ] = None,
    stop: Stop = None,
) -> None:
    """What a model, a run or a recipe answers to a prompt."""
    from posttrain.cli.eval_arguments import check_arguments, generated_texts, stopping

    check_arguments(context.args)
    texts = generated_texts(
        model,
        prompt,
        overrides=[*context.args, *stopping(stop)],
        num_samples=num_samples,
        seed=seed,
        chat=chat,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
    )
    for text in texts:
        say(text)


app.command(**RECIPE)(play)
app.command(name="from-trl")(from_trl)


for _command in (runs, view, samples, export):
    app.command()(_command)


@app.command()
def explain(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="None lists all, one explains it, two compare; kl: gradients of a KL in the loss."
        ),
    ] = None,
) -> None:
    """Print the table of algorithms, one of them with its equation, or what sets two apart."""
    from posttrain.cli.explain import explain as show

    show(names or [])


@app.command(name="reproduce")
def reproduce_result(
    name: Annotated[
        str | None, typer.Argument(help="A published result, or FILE.json; none lists them.")
    ] = None,
    *,
    seed: Annotated[
        int | None, typer.Option(min=0, help="By default the first that was not published.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The run folder.")] = None,
    model: Annotated[
        str | None, typer.Option(help="The same model under another name, or elsewhere.")
    ] = None,
) -> None:
    """Run a published result again: exit code 0 inside of its interval, 1 outside, 2 refused."""
    from posttrain.cli.reproduce import list_results, reproduce

    if name is None:
        list_results()
    else:
        raise typer.Exit(reproduce(name, seed=seed, out=out, model=model))


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
    from posttrain.runs.files import check_writable

    check_writable(out / "log.txt")
    if as_published:
        experiment.run_as_published(out=out)
    else:
        experiment.run(out=out, quick=quick, seeds=seeds)


def _show_warning(message: Warning | str, *place: object, **options: object) -> None:
    """Print a warning as one line, without its place in the source."""
    say(f"! {message}", style="yellow", error=True)


def _here() -> str:
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        text = "the current folder was deleted or moved; cd to one that is there"
        raise ValueError(text) from None


def main() -> None:
    """Run the command line; a user's mistake prints as a message, never as a traceback."""
    for stream in (sys.stdout, sys.stderr):  # a model may write what the terminal cannot encode
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    warnings.showwarning = _show_warning
    logging.setLogRecordFactory(HarmlessRecord)
    try:
        sys.path.append(_here())  # a recipe may name "my_module:my_reward" of this folder
        app()
    except SystemExit:
        raise  # raised by typer: the command has ended, or was used wrongly
    except BaseException as error:  # noqa: BLE001 - reported, whatever it is
        sys.exit(report(error))
