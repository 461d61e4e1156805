"""From prompts to rollouts, with the exact tokens the engine drew."""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from posttrain.protocols import Engine, Env, Reply, Scorer
from posttrain.rollout.environment import Conversations, Encode, over
from posttrain.types import Collected, Prompt, Rollout, Sampling, Score


def collect(
    engine: Engine,
    prompts: Sequence[Prompt],
    *,
    sampling: Sampling,
    num_samples: int,
    seed: int,
    reply: Reply | None = None,
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
    # An engine of a user's own that knows no turns still serves where no environment replies.
    replying: dict[str, Any] = {} if reply is None else {"reply": reply}
    if reply is not None and not _takes_reply(engine):
        raise ValueError(
            f"engine {type(engine).__name__}: its generate has no parameter reply, by which an "
            "environment (task.env) answers; docs/engines.md shows a whole engine"
        )
    answers = engine.generate(prompts, sampling, num_samples=num_samples, seed=seed, **replying)
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


def _takes_reply(engine: Engine) -> bool:
    parameters = inspect.signature(engine.generate).parameters.values()
    return any(each.name == "reply" or each.kind == each.VAR_KEYWORD for each in parameters)


def collect_scored(
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    engine: Engine,
    scorer: Scorer,
    num_samples: int,
    seed: int,
    greedy: bool = False,
    env: Env | None = None,
    encode: Encode | None = None,
) -> Collected:
    """Sample and score: the one way to do so, of training, evaluation, preferences and checks.

    With ``greedy`` every prompt is also answered greedily, by the same weights and as long as
    others may be, and its rollouts carry that answer with its score. All are scored in one call, so
    that graders in processes have them at once. An ``env`` answers the policy's turns, its text in
    the tokens that ``encode`` gives, and where it ends a rollout with a score, that one counts.
    """
    begun = time.perf_counter()
    asked = [(sampling, num_samples)]
    if greedy:
        asked.append((replace(sampling, temperature=0.0, top_k=0, top_p=1.0), 1))
    rollouts: list[Rollout] = []
    own: list[Score | None] = []
    for drawn, samples in asked:
        talks = None if env is None else Conversations(env, encode=encode or _no_tokens)
        found = collect(
            engine, prompts, sampling=drawn, num_samples=samples, seed=seed, reply=talks
        )
        own += [None if talks is None else talks.scores.get(n) for n in range(len(found))]
        rollouts += found
    sampled = time.perf_counter()
    graded = scorer.score(rollouts)
    scored = [
        replace(rollout, score=score if given is None else over(score, given))
        for rollout, given, score in zip(rollouts, own, graded, strict=True)
    ]
    count = len(prompts) * num_samples
    baselines = {rollout.group: rollout for rollout in scored[count:]}
    return Collected(
        rollouts=[replace(r, greedy=baselines.get(r.group)) for r in scored[:count]],
        seconds={"rollout": sampled - begun, "reward": time.perf_counter() - sampled},
    )


def _no_tokens(said: object) -> Sequence[int]:
    raise ValueError("no tokenizer for an environment that says text; give collect_scored encode=")


def by_group(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    """The rollouts of each prompt."""
    groups: dict[int, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group, []).append(rollout)
    return list(groups.values())
