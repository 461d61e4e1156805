"""From prompts to rollouts, with the exact tokens the engine drew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from posttrain.protocols import Engine, Scorer
from posttrain.types import Prompt, Rollout, Sampling


def collect(
    engine: Engine, prompts: Sequence[Prompt], *, sampling: Sampling, num_samples: int, seed: int
) -> list[Rollout]:
    """``num_samples`` unscored rollouts of each prompt; a group is a prompt's place in the list.

    The rollouts of a prompt stand together, in the order of the prompts.

    >>> from posttrain.rollout.engines.scripted import ScriptedEngine
    >>> engine = ScriptedEngine({"2+3=": ["5", "6"]})
    >>> prompts = [Prompt(id="train-0", text="2+3=")]
    >>> rollouts = collect(engine, prompts, sampling=Sampling(), num_samples=2, seed=0)
    >>> [(rollout.group, rollout.completion.text) for rollout in rollouts]
    [(0, '5'), (0, '6')]
    """
    answers = engine.generate(prompts, sampling, num_samples=num_samples, seed=seed)
    counts = [len(completions) for completions in answers]
    if counts != [num_samples] * len(prompts):
        raise ValueError(
            f"engine {type(engine).__name__}: asked for {num_samples} completions of each of "
            f"{len(prompts)} prompts, got {counts}; an engine answers every prompt, in order"
        )
    return [
        Rollout(prompt=prompt, completion=completion, group=group)
        for group, (prompt, completions) in enumerate(zip(prompts, answers, strict=True))
        for completion in completions
    ]


def collect_greedy(
    engine: Engine, prompts: Sequence[Prompt], *, sampling: Sampling, seed: int
) -> list[Rollout]:
    """The greedy completion of each prompt, unscored: as long as others may be, but not drawn."""
    greedy = replace(sampling, temperature=0.0, top_k=0, top_p=1.0)
    return collect(engine, prompts, sampling=greedy, num_samples=1, seed=seed)


def scored_groups(
    scorer: Scorer, rollouts: Sequence[Rollout], *, greedy: Sequence[Rollout] = ()
) -> list[list[Rollout]]:
    """The rollouts with their scores, by group; each with the greedy one of its group, if any.

    All are scored in one call, so that graders in processes have them at once.
    """
    scores = scorer.score([*rollouts, *greedy])
    scored = [
        replace(rollout, score=score)
        for rollout, score in zip([*rollouts, *greedy], scores, strict=True)
    ]
    baselines = {rollout.group: rollout for rollout in scored[len(rollouts) :]}
    groups: dict[int, list[Rollout]] = {}
    for rollout in scored[: len(rollouts)]:
        own = replace(rollout, greedy=baselines.get(rollout.group))
        groups.setdefault(rollout.group, []).append(own)
    return list(groups.values())
