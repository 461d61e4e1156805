"""The options of ``posttrain plan`` and ``posttrain play``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def plan(
    context: typer.Context,
    *,
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
    """How fast a cluster would be that is not there yet: posttrain plan RECIPE.toml --learners 8.

    The costs of sampling and learning are measured here, or taken from a run; the queues of the
    cluster are simulated with them.
    """
    from posttrain.cli.cluster_plan import plan_recipe

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
    seed: Annotated[int, typer.Option(min=0, help="Of the first; the next has the next.")] = 0,
    human: Annotated[
        Literal["policy", "env"] | None, typer.Option(help="In whose place you type.")
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
