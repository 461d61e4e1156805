"""Where the rollouts of the stage rl come from, and what happens to them on their way."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from posttrain.build.sampler import make_sampling
from posttrain.build.scoring import check_invalid
from posttrain.build.setup import Setup, choose_compile
from posttrain.config.piece_facts import wants_greedy
from posttrain.protocols import Engine
from posttrain.rollout.collect import RolloutSource
from posttrain.rollout.kept_replies import KeptReplies
from posttrain.rollout.partial import PartialSource
from posttrain.rollout.prompt_order import Curriculum, MixedPrompts, PromptCycle, PromptOrder
from posttrain.track.progress import phase
from posttrain.types import Collected, Prompt
from posttrain.types.marks import is_right


def make_source(
    setup: Setup, engine: Engine, *, prompts: Sequence[Prompt], replies: KeptReplies | None = None
) -> RolloutSource:
    """Prompts in, groups of scored rollouts out."""
    section, seed = setup.recipe.rl, setup.recipe.run.seed
    asked: dict[str, Any] = {
        "prompts": make_order(setup, prompts),
        "sampling": make_sampling(section),
        "prompts_per_step": section.prompts_per_step,
        "group_size": section.group_size,
        "seed": seed,
    }
    if section.partial > 1:
        return PartialSource(
            engine,
            setup.graded,
            partial=section.partial,
            end_tokens=setup.policy.end_tokens,
            decode=setup.template.decode,
            **asked,
        )
    return RolloutSource(
        engine,
        setup.graded,
        max_resamples=section.max_resamples if section.dynamic_sampling else 0,
        greedy=wants_greedy(section),
        env=setup.env,
        replies=replies,
        **asked,
    )


def make_order(setup: Setup, prompts: Sequence[Prompt]) -> PromptOrder:
    """The order in which they are asked: by the weights of a mixture, and by ``rl.curriculum``."""
    seed, section = setup.recipe.run.seed, setup.recipe.rl.curriculum
    if section is not None and not setup.marks.counted_rewards:
        raise ValueError(
            "rl.curriculum: needs to know how often a prompt is answered correctly, and no reward "
            "of this run has full marks; drop it, or set task.accuracy"
        )

    def order(some: Sequence[Prompt], number: int) -> PromptOrder:
        drawn = seed + number  # of each task another permutation
        if section is None:
            return PromptCycle(some, seed=drawn)
        band = {"low": section.low, "high": section.high, "outside": section.outside}
        passed = functools.partial(is_right, marks=setup.marks)
        return Curriculum(some, seed=drawn, passed=passed, **band)

    weights: Mapping[str, float] = getattr(setup.task, "weights", {})
    if not weights:
        return order(prompts, 0)
    parts = {
        name: [prompt for prompt in prompts if prompt.columns["task"] == name] for name in weights
    }
    if missing := [name for name, found in parts.items() if not found]:
        raise ValueError(f"task.tasks: {missing[0]!r} has no train prompts that fit; drop it")
    return MixedPrompts(
        {name: order(found, number) for number, (name, found) in enumerate(parts.items())}, weights
    )


def announced(batches: Iterable[Collected], setup: Setup) -> Iterator[Collected]:
    """The same rollouts; who waits for them, or for what is learned from them, reads so."""
    section = setup.recipe.rl
    # Sampling in another thread is not counted: what is waited for is a batch, not a completion.
    total = None if section.max_lag else section.prompts_per_step * section.group_size
    compiling = ", compiling the model first" if choose_compile(setup.recipe, setup.device) else ""
    doing, source, begun = f"the first rollouts{compiling}", iter(batches), False
    while True:
        with phase(doing, total=total, unit="completions", routine=begun):
            collected = next(source, None)
        if collected is None:
            return
        with phase("learning", routine=begun):
            yield collected
        doing, begun = "sampling and grading", True


def checked(source: Iterator[Collected], max_invalid: float) -> Iterator[Collected]:
    """The same rollouts; a batch with too many broken scores stops the run before it is learned."""
    for collected in source:
        check_invalid(collected.rollouts, max_invalid)
        greedy = {r.group: r.greedy for r in collected.rollouts if r.greedy is not None}
        check_invalid(list(greedy.values()), max_invalid, of=" of greedy completions")
        yield collected
