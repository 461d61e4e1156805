"""The options of ``posttrain plan``, ``posttrain play`` and ``posttrain from-trl``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from posttrain.track.safe_terminal import say


def plan(
    context: typer.Context,
    *,
    gpu: Annotated[
        str | None,
        typer.Option(help="One machine: its GPU's memory (8GB) or name (h200); else this one's."),
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="The length of prompts.")] = 256,
    shape: Annotated[
        str | None, typer.Option(help="Sizes of a model that is not here: hidden=2048,layers=16,…")
    ] = None,
    learners: Annotated[
        int | None, typer.Option(min=1, help="Ranks that learn; else cluster.learners.")
    ] = None,
    engines: Annotated[
        int | None, typer.Option(min=0, help="Engines that sample; else cluster.engines.")
    ] = None,
    max_lag: Annotated[
        int | None, typer.Option(min=0, help="Updates to run ahead; else rl.max_lag.")
    ] = None,
    measured: Annotated[
        Path | None,
        typer.Option("--from", metavar="RUN", help="Take the costs from a run, not from a trial."),
    ] = None,
    bandwidth: Annotated[
        float, typer.Option(min=1e-6, help="GB/s of weights from the learners to each engine.")
    ] = 1.25,
    learner_bandwidth: Annotated[
        float, typer.Option(min=1e-6, help="GB/s of each learner to the others.")
    ] = 1.25,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    r"""What fits: posttrain plan MODEL|RECIPE.toml [--gpu 8GB] [--section.key value …].

    Memory and time of a step are counted from the model's configuration alone: nothing is
    downloaded or allocated. With --learners, --engines, --max-lag or --from (or a recipe that has
    a \[cluster]): how fast a cluster would be that is not there yet. The costs of sampling and
    learning are measured here, or taken from a run; the queues of the cluster are simulated.
    """
    from posttrain.cli.cluster_plan import plan_recipe, plans_cluster

    if not context.args or context.args[0].startswith("-"):
        raise ValueError(
            "plan: name the recipe first, or a model: posttrain plan RECIPE.toml --learners 8, "
            "posttrain plan llama-3.2-1b --gpu 8GB"
        )
    of_cluster = any(each is not None for each in (learners, engines, max_lag, measured))
    if gpu is not None and of_cluster:
        raise ValueError("--gpu: is about one machine; drop it, or drop what asks for a cluster")
    if gpu is not None or not (of_cluster or plans_cluster(context.args)):
        from posttrain.cli.memory_plan import plan_memory

        source, *overrides = context.args
        plan_memory(
            source, overrides, gpu=gpu, prompt_tokens=prompt_tokens, shape=shape, as_json=as_json
        )
        return
    plan_recipe(
        context.args,
        run=measured,
        as_json=as_json,
        learners=learners,
        engines=engines,
        max_lag=max_lag,
        bandwidth=1e9 * bandwidth,
        learner_bandwidth=1e9 * learner_bandwidth,
    )


def play(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="A run, a recipe, a model folder, tiny or a hub id.")
    ],
    *,
    env: Annotated[
        str | None,
        typer.Argument(help="An environment, module:Class, a recipe or a run; else MODEL's own."),
    ] = None,
    options: Annotated[
        list[str] | None,
        typer.Option("--env", metavar="KEY=VALUE", help="An option of the environment."),
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="What the episode begins with.")] = None,
    task: Annotated[
        str | None, typer.Option(help="The task of the prompt, if not a run's or recipe's.")
    ] = None,
    split: Annotated[Literal["train", "test"], typer.Option(help="Its prompts.")] = "train",
    index: Annotated[int, typer.Option(min=0, help="Which of its prompts.")] = 0,
    episodes: Annotated[int, typer.Option(min=1, help="How many, prompt after prompt.")] = 1,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the first episode; the next one adds 1.")
    ] = 0,
    human: Annotated[
        Literal["policy", "env"] | None, typer.Option(help="Whose part you play.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 1.0,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Longest turn.")] = None,
    max_turns: Annotated[int | None, typer.Option(min=1, help="Of the policy, at most.")] = None,
    chat: Annotated[
        bool | None, typer.Option("--chat/--no-chat", help="Use the chat template.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="End a turn before this text.")
    ] = None,
) -> None:
    """Watch an episode, turn by turn, or play in it: posttrain play MODEL ENV [--human policy]."""
    from posttrain.cli.playing import play_episodes

    code = play_episodes(
        model,
        env,
        options=options or [],
        overrides=context.args,
        human=human,
        episodes=episodes,
        split=split,
        index=index,
        seed=seed,
        stop=stop,
        prompt=prompt,
        task=task,
        chat=chat,
        max_new_tokens=max_new_tokens,
        max_turns=max_turns,
        temperature=temperature,
    )
    raise typer.Exit(code)


def from_trl(
    path: Annotated[Path, typer.Argument(help="A Python script, or a YAML or JSON config.")],
    *,
    trainer: Annotated[
        str | None, typer.Option(help="Of a config: GRPO, RLOO, SFT, DPO, Reward …; else guessed.")
    ] = None,
) -> None:
    """Print the recipe that does what a TRL script does, and what has no counterpart.

    The script is read, and never executed.
    """
    from posttrain.config.peers.trl_recipe import recipe_of_trl

    say(recipe_of_trl(path, trainer=trainer).rstrip())
