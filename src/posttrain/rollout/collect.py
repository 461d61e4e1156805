"""From prompts to rollouts, with the exact tokens the engine drew."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from posttrain.protocols import Engine, Scorer
from posttrain.types import Collected, Prompt, Rollout, Sampling


def collect(
    engine: Engine, prompts: Sequence[Prompt], *, sampling: Sampling, num_samples: int, seed: int
) -> list[Rollout]:
    """``num_samples`` unscored rollouts of each prompt; a group is a prompt's place in the list.

    The rollouts of a prompt stand together, in the order of the prompts.

    >>> from posttrain.rollout.engines.scripted import ScriptedEngine
    >>> engine = ScriptedEngine({"2+3=": ["5", "6"]})
    >>> prompts = [Prompt(id="train-0", text="2+3=")]
    >>> rollouts = collect(engine, prompts, sampling=Sampling(), num_samples=2, seed=0)
    >>> [(rollout.group, rollout.text) for rollout in rollouts]
    [(0, '5'), (0, '6')]
    """
    answers = engine.generate(prompts, sampling, num_samples=num_samples, seed=seed)
    counts = [len(rollouts) for rollouts in answers]
    if counts != [num_samples] * len(prompts):
        raise ValueError(
            f"engine {type(engine).__name__}: asked for {num_samples} completions of each of "
            f"{len(prompts)} prompts, got {counts}; an engine answers every prompt, in order"
        )
    return [
        replace(rollout, prompt=prompt, group=group)
        for group, (prompt, rollouts) in enumerate(zip(prompts, answers, strict=True))
        for rollout in rollouts
    ]


def collect_scored(
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    engine: Engine,
    scorer: Scorer,
    num_samples: int,
    seed: int,
    greedy: bool = False,
) -> Collected:
    """Sample and score: the one way to do so, of training, evaluation, preferences and checks.

    With ``greedy`` every prompt is also answered greedily, by the same weights and as long as
    others may be, and its rollouts carry that answer with its score. All are scored in one call, so
    that graders in processes have them at once.
    """
    begun = time.perf_counter()
    rollouts = collect(engine, prompts, sampling=sampling, num_samples=num_samples, seed=seed)
    answers: list[Rollout] = []
    if greedy:
        plain = replace(sampling, temperature=0.0, top_k=0, top_p=1.0)
        answers = collect(engine, prompts, sampling=plain, num_samples=1, seed=seed)
    sampled = time.perf_counter()
    scores = scorer.score([*rollouts, *answers])
    scored = [
        replace(rollout, score=score)
        for rollout, score in zip([*rollouts, *answers], scores, strict=True)
    ]
    baselines = {rollout.group: rollout for rollout in scored[len(rollouts) :]}
    return Collected(
        rollouts=[replace(r, greedy=baselines.get(r.group)) for r in scored[: len(rollouts)]],
        seconds={"rollout": sampled - begun, "reward": time.perf_counter() - sampled},
    )


def by_group(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    """The rollouts of each prompt."""
    groups: dict[int, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group, []).append(rollout)
    return list(groups.values())
