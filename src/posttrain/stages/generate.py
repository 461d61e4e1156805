"""What a model answers to a prompt, with the settings of the run or the recipe it comes from."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from posttrain.build.model_source import Source, over
from posttrain.build.sampler import make_engine, until_done
from posttrain.build.setup import (
    choose_device,
    make_environment,
    make_policy,
    make_template,
)
from posttrain.envs import make_env
from posttrain.models.cache import context_length
from posttrain.rollout.collect import collect
from posttrain.rollout.environment import talking
from posttrain.runs.finished import check_model
from posttrain.stages.eval import DEFAULT_TOKENS
from posttrain.track.progress import phase, showing
from posttrain.types import Prompt, Rollout, Sampling


@showing()
def generate_from(
    source: Source,
    prompt: str,
    *,
    overrides: Sequence[str] = (),
    num_samples: int,
    seed: int,
    chat: bool | str | None,
    max_new_tokens: int | None,
    stop: Sequence[str] | None = None,
    **drawing: Any,
) -> list[Rollout]:
    """The same from settings that are known, with overrides as on the command line.

    Where the run has an environment, it replies, and an answer has the score that it gave.
    """
    if not isinstance(prompt, str):
        raise ValueError(f"prompt: expected one prompt as text, got {prompt!r}")
    # Without a chat nobody hears a system message.
    changes = {"chat": chat, "system": "" if chat is False else None}
    recipe = source.recipe(over(source.values, model=changes, **stopping(stop)), overrides)
    check_model(recipe.model.name)
    device = choose_device(recipe)
    policy = make_policy(recipe, recipe.model.name, device=device)
    named = (recipe.task or {}).get("env")
    env = None if named is None else make_env(named)
    template = make_template(recipe, policy, env=env)
    engine = make_engine("native", policy, template=template, compute=recipe.model.compute)
    question = template.render(Prompt(id="prompt", text=prompt))
    limit = context_length(policy.model)
    known = [section.max_new_tokens for section in (recipe.eval, recipe.rl) if section is not None]
    longest = next((number for number in known if number is not None), DEFAULT_TOKENS)
    room = longest if limit is None else max(1, limit - len(question.tokens))
    tokens = min(longest, room) if max_new_tokens is None else max_new_tokens
    ends = tuple(recipe.rl.stop) if recipe.rl is not None else ()
    sampling = Sampling(max_new_tokens=tokens, stop=ends, **drawing)
    environment = make_environment(recipe, env, template=template, policy=policy)
    talks = talking(environment)
    with until_done(engine), phase("sampling", total=num_samples, unit="answers"):
        try:
            answers = collect(
                engine,
                [question],
                sampling=sampling,
                num_samples=num_samples,
                seed=seed,
                reply=talks,
            )
        finally:
            if environment is not None:
                environment.close()
    if talks is None:
        return answers
    broken = next((score.reason for score in talks.scores.values() if not score.ok), "")
    if broken:
        warnings.warn(
            f"task.env: {broken}; a prompt given here has no columns of a row", stacklevel=3
        )
    return [replace(answer, score=talks.scores.get(n)) for n, answer in enumerate(answers)]


def transcript(rollout: Rollout) -> str:
    """All that was said after the prompt; the lines of an environment begin with "> "."""
    parts = []
    for turn in rollout.turns:
        said = turn.text or f"({len(turn.tokens)} tokens)"
        quoted = "\n".join(f"> {line}" for line in said.splitlines())
        parts.append(turn.text if turn.sampled else quoted)
    return "\n".join(parts)


def stopping(stop: Sequence[str] | None) -> dict[str, Any]:
    """Stop strings in their section, which a model alone does not have."""
    return {} if stop is None else {"rl": {"stop": stop}}
