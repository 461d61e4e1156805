"""The stage ``sft``: demonstrations as tokens, then supervised training on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from posttrain.build.guards import make_guard
from posttrain.build.learners import make_learner
from posttrain.build.parts import Parts, filled, tell_left_out
from posttrain.build.stages import Context, logged
from posttrain.config import Recipe, SftSection
from posttrain.data.sources import read_demonstrations
from posttrain.models.cache import context_length
from posttrain.models.load import Policy
from posttrain.pipelines import supervised
from posttrain.protocols import Task
from posttrain.tasks import demonstrations
from posttrain.track.progress import phase
from posttrain.types import Prompt


def sft_rows(recipe: Recipe, policy: Policy, *, parts: Parts) -> list[supervised.Row]:
    """The demonstrations as tokens, with True where the completion is."""
    section = filled(recipe.sft)
    rows = _demonstrations(section, parts.task, seed=recipe.run.seed)
    end = policy.end_tokens[0]
    template = parts.template
    tokens: list[supervised.Row] = []
    for number, row in enumerate(rows):
        if "messages" in row:
            tokens.append(template.render_conversation(row["messages"]))
            continue
        prompt = template.render(Prompt(id=f"demonstration-{number}", text=row["prompt"])).tokens
        completion = template.encode_completion(row["completion"], end)
        chosen = (False,) * len(prompt) + (True,) * len(completion)
        tokens.append(((*prompt, *completion), chosen))
    return tokens


def fitting(rows: Sequence[supervised.Row], policy: Policy) -> list[supervised.Row]:
    """The rows that fit into the model's context; the others are left out, loudly."""
    limit = context_length(policy.model)
    kept = [row for row in rows if limit is None or len(row[0]) <= limit]
    tell_left_out(len(kept), len(rows), option="sft.data", rows="demonstrations", limit=limit)
    return kept


def _demonstrations(section: SftSection, task: Task | None, *, seed: int) -> list[dict[str, Any]]:
    if section.data == "task":
        if task is None:
            raise ValueError('sft.data: "task" needs a task; name one, or give a JSONL file')
        wrong, count = section.wrong_share, section.num_demonstrations
        return list(demonstrations(task, num=count, wrong_share=wrong, seed=seed))
    return read_demonstrations(section.data)[: section.num_demonstrations]


def sft_steps(recipe: Recipe, num_rows: int) -> int:
    """Optimiser steps of the SFT stage."""
    section = filled(recipe.sft)
    return supervised.num_steps(num_rows, section.batch_size, epochs=section.epochs)


def run_sft(context: Context, rows: Sequence[supervised.Row]) -> None:
    """Supervised fine-tuning."""
    recipe, policy = context.recipe, context.policy
    section = filled(recipe.sft)
    learner = make_learner(
        recipe,
        policy,
        section=section,
        device=context.parts.device,
        total_steps=sft_steps(recipe, len(rows)),
    )
    context.keeper.restore(learner)
    guard = make_guard(section, context.folder.path, decode=context.parts.template.decode)
    with context.keeper.stepping():
        supervised.train(
            rows,
            learner,
            epochs=section.epochs,
            batch_size=section.batch_size,
            pad_token=policy.pad_token,
            seed=recipe.run.seed,
            on_step=logged(context, learner, every=section.save_every),
            start=context.keeper.step,
            guard=context.keeper.keep(guard),
        )
    with phase("saving the model"):
        learner.save(context.folder.model)
