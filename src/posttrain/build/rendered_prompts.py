"""The prompts of a task in the tokens of a policy, and what its context leaves no room for."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

from posttrain.build.setup import Setup
from posttrain.data.template import PromptTooLong, Template
from posttrain.data.tool_formats import describe_tools
from posttrain.models.cache import context_length
from posttrain.models.load import Policy
from posttrain.protocols import Split
from posttrain.types import Prompt

SHORTEST = 50  # prompts that are tried for room, by their text


def render_prompts(
    prompts: Sequence[Prompt], template: Template, *, policy: Policy, max_new_tokens: int
) -> tuple[list[Prompt], int]:
    """The prompts with their tokens, without those that leave no room to answer, and how many.

    Their text stays as the task gave it: that is what rewards, rollouts and samples show.
    """
    limit = context_length(policy.model)
    room = None if limit is None else limit - max_new_tokens
    if room is not None and room < 1:
        raise PromptTooLong(
            f"max_new_tokens: {max_new_tokens} leaves no room for a prompt in the model's context "
            f"of {limit} tokens; lower it"
        )
    rendered: list[Prompt] = []
    template.prepare(prompts)
    for prompt in prompts:
        tokens = template.render(prompt).tokens
        if room is None or len(tokens) <= room:
            rendered.append(replace(prompt, tokens=tokens))
    if prompts and not rendered:
        raise PromptTooLong(
            f"prompts: all {len(prompts)} are longer than {room} tokens, the context of {limit} "
            f"less max_new_tokens = {max_new_tokens}; lower max_new_tokens or shorten the prompts"
        )
    return rendered, len(prompts) - len(rendered)


def check_room(setup: Setup) -> None:
    """Raise where a stage to come asks for completions that leave no prompt any room.

    Now, and not after the stages before it: the shortest prompts are tried, by their text.
    """
    splits: dict[str, Split] = {"prefer": "train", "rl": "train", "eval": "test"}
    for stage, asked in splits.items():
        if stage not in setup.recipe.stages or setup.task is None:
            continue
        prompts = sorted(setup.task.prompts(asked), key=_num_characters)[:SHORTEST]
        limit = getattr(setup.recipe, stage).max_new_tokens
        try:
            render_prompts(prompts, setup.template, policy=setup.policy, max_new_tokens=limit)
        except PromptTooLong as error:
            context = context_length(setup.policy.model) or limit
            tools = _num_tool_tokens(setup.template)
            of_tools = f"; about {tools:,} tokens of each describe the environment's tools"
            even_short = (
                f"max_new_tokens: {limit} leaves no room even for the shortest {asked} prompts, "
                f"which are longer than {context - limit} tokens, the model's context of {context} "
                f"less that{of_tools * bool(tools)}; {make_room(setup, limit)}"
            )
            raise PromptTooLong(f"{stage}.{error if limit >= context else even_short}") from None
        except ValueError as error:
            raise ValueError(f"{stage}.{error}") from None


def _num_tool_tokens(template: Template) -> int:
    """How much of every prompt the tools of an environment are, as plain text."""
    return len(template.control.encode(describe_tools(template.tools))) if template.tools else 0


def make_room(setup: Setup, max_new_tokens: int) -> str:
    """What to do where prompts are too long; to answer less helps where that takes much room."""
    context = context_length(setup.policy.model) or 0
    tools = _num_tool_tokens(setup.template)
    ways = "shorten the prompts" + " or what describes the tools" * bool(tools)
    lower = f"lower max_new_tokens = {max_new_tokens}, or " * (8 * max_new_tokens > context)
    more = "take a model with a longer context"
    if setup.recipe.model.name == "tiny":
        size = 2 * max(context, tools)
        more = f"give the tiny model more: model.options = {{ max_positions = {size} }}"
    return f"{lower}{ways}, or {more}"


def _num_characters(prompt: Prompt) -> int:
    return len(prompt.text) + sum(len(message["content"]) for message in prompt.messages)


def tell_left_out(
    kept: int,
    total: int,
    *,
    option: str,
    rows: str,
    limit: int | None,
    what: str = "the model's context",
) -> None:
    """Raise where no row of an option fits; warn of those too long. ``what`` is what limits."""
    if total and not kept:
        longer = "take a model with a longer one" if what != "sft.max_length" else "raise it"
        raise ValueError(
            f"{option}: none of the {total} {rows} fits {what} of {limit} tokens; "
            f"shorten them, or {longer}"
        )
    if kept < total:
        warnings.warn(
            f"{total - kept} of {total} {rows} are longer than {what} of {limit} "
            "tokens and are left out",
            stacklevel=3,
        )


def rendered_prompts(
    setup: Setup, split: Split, *, max_new_tokens: int, limit: int | None = None
) -> list[Prompt]:
    """The prompts of a split with their tokens; what was left out is said, not hidden."""
    if setup.task is None:
        raise ValueError("task: this stage needs prompts; name a task in [task]")
    prompts, num_dropped = render_prompts(
        setup.task.prompts(split)[:limit],
        setup.template,
        policy=setup.policy,
        max_new_tokens=max_new_tokens,
    )
    if num_dropped:
        warnings.warn(
            f"{num_dropped} of {num_dropped + len(prompts)} {split} prompts leave no room for "
            f"{max_new_tokens} new tokens in the model's context and are left out",
            stacklevel=3,
        )
    return prompts
