"""Where the rollouts of the stage rl come from, and what happens to them on their way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from posttrain.build.sampler import make_sampling
from posttrain.build.scoring import check_invalid
from posttrain.build.setup import Setup, choose_compile
from posttrain.config.piece_facts import wants_greedy
from posttrain.protocols import Engine
from posttrain.rollout.collect import PromptCycle, RolloutSource
from posttrain.rollout.kept_replies import KeptReplies
from posttrain.track.progress import phase
from posttrain.types import Collected, Prompt


def make_source(
    setup: Setup,
    engine: Engine,
    *,
    prompts: Sequence[Prompt],
    replies: KeptReplies | None = None,
) -> RolloutSource:
    """Prompts in, groups of scored rollouts out."""
    section, seed = setup.recipe.rl, setup.recipe.run.seed
    return RolloutSource(
        engine,
        setup.graded,
        prompts=PromptCycle(prompts, seed=seed),
        sampling=make_sampling(section),
        prompts_per_step=section.prompts_per_step,
        group_size=section.group_size,
        seed=seed,
        max_resamples=section.max_resamples if section.dynamic_sampling else 0,
        greedy=wants_greedy(section),
        env=setup.env,
        replies=replies,
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
