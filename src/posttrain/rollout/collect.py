"""From prompts to rollouts, with the exact tokens the engine drew."""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.protocols import Engine
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
