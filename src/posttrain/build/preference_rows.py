"""What the stages ``reward`` and ``dpo`` learn from: preferences as rows of tokens."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from posttrain.algorithms.losses import DIRECT_LOSSES
from posttrain.algorithms.pieces import needed
from posttrain.build.questions import of_ranked
from posttrain.build.rendered_prompts import tell_left_out
from posttrain.build.setup import Setup, make_policy
from posttrain.config import Resolved
from posttrain.config.defaults import TEST_SHARE
from posttrain.config.preference_rules import direct_options
from posttrain.data.preference_sets import Labelled, Ranked, read_labelled, read_preferences
from posttrain.data.prompt_splits import check_apart, split_by_prompt
from posttrain.data.template import Template
from posttrain.models.cache import context_length
from posttrain.models.load import Policy
from posttrain.pipelines.reward_model import RankedTokens
from posttrain.types import Prompt

PAIRS, TEST_PAIRS = "pairs.jsonl", "test_pairs.jsonl"
Compared = Sequence[Ranked | Labelled]


def backbone_of(recipe: Resolved, policy: Policy, *, device: str) -> Policy:
    """The model that gets the head: the policy, or another that the section names."""
    named = recipe.reward.backbone
    return policy if named == "policy" else make_policy(recipe, named, device=device)


def direct_loss(recipe: Resolved) -> functools.partial[Tensor]:
    """The loss of the stage dpo, with its options."""
    options = {name: getattr(recipe.dpo, name) for name in direct_options(recipe.dpo)}
    return functools.partial(DIRECT_LOSSES[recipe.dpo.loss], **options)


def read_split(
    recipe: Resolved, stage: Literal["reward", "dpo"], *, template: Template, prefer: Path = Path()
) -> tuple[Compared, Compared]:
    """The preferences to learn from, and those held out; ``prefer`` is that stage's folder.

    Which prompts are the same, the template says that writes them. A loss that compares no pairs
    gets single completions with labels.
    """
    section = recipe.reward if stage == "reward" else recipe.dpo
    labelled = stage == "dpo" and "baseline" in needed(direct_loss(recipe))
    reader: Any = read_labelled if labelled else read_preferences
    columns = section.columns

    def read(data: str | Path, key: str = "data") -> Any:
        own = isinstance(data, Path)  # of the stage prefer, as it writes them
        return reader(data, columns={} if own else columns, name=f"{stage}.{key}")

    def key(ranked: Ranked | Labelled) -> str:
        return template.question(of_ranked(ranked))

    own = section.data == "prefer"
    train = read(prefer / PAIRS if own else section.data)
    if section.test_data is not None:
        test = read(section.test_data, "test_data")
        template.prepare([of_ranked(ranked) for ranked in (*train, *test)])
        check_apart(train, test, where=f"{stage}.test_data", key=key)
        return train, test
    if own and not section.test_share and (prefer / TEST_PAIRS).exists():
        return train, read(prefer / TEST_PAIRS)
    share = section.test_share or TEST_SHARE
    template.prepare([of_ranked(ranked) for ranked in train])
    return split_by_prompt(train, test_share=share, seed=recipe.run.seed, key=key)


def reward_rows(
    recipe: Resolved, policy: Policy, *, template: Template, prefer: Path = Path()
) -> tuple[list[RankedTokens], list[RankedTokens]]:
    """Both parts of the preferences as tokens; what does not fit the context is left out, loudly.

    ``policy`` is the backbone of the reward model.
    """
    parts = read_split(recipe, "reward", template=template, prefer=prefer)
    return _rows(parts, "reward", recipe=recipe, policy=policy, template=template)


def direct_rows(
    setup: Setup, *, prefer: Path = Path()
) -> tuple[list[RankedTokens], list[RankedTokens]]:
    """The same for the policy itself; a loss that goes by labels needs both of them."""
    recipe, template = setup.recipe, setup.template
    parts = read_split(recipe, "dpo", template=template, prefer=prefer)
    train, test = _rows(parts, "dpo", recipe=recipe, policy=setup.policy, template=template)
    if len({row.desirable for row in train}) == 1 and train[0].desirable is not None:
        raise ValueError(
            f"dpo.data: of {len(train):,} completions to learn from all have the label "
            f"{str(train[0].desirable).lower()}, and the loss {recipe.dpo.loss} sets desirable "
            "ones apart from others; give both"
        )
    return train, test


def _rows(
    parts: tuple[Compared, Compared],
    stage: Literal["reward", "dpo"],
    *,
    recipe: Resolved,
    policy: Policy,
    template: Template,
) -> tuple[list[RankedTokens], list[RankedTokens]]:
    section, limit = getattr(recipe, stage), context_length(policy.model)
    held_out = f"{stage}.data" if section.test_data is None else f"{stage}.test_data"
    names = ((f"{stage}.data", "sets"), (held_out, "held-out sets"))
    own, margins = section.data == "prefer", stage == "reward" and recipe.reward.margins
    found: list[list[RankedTokens]] = []
    for sets, (option, rows) in zip(parts, names, strict=True):
        tokens = _tokens(sets, policy, template=template, own=own, margins=margins)
        kept = [row for row in tokens if limit is None or max(map(len, row.rows)) <= limit]
        tell_left_out(len(kept), len(sets), option=option, rows=rows, limit=limit)
        found.append(kept)
    train, test = found
    return train, test


def _tokens(
    sets: Compared, policy: Policy, *, template: Template, own: bool, margins: bool
) -> list[RankedTokens]:
    limit, end = context_length(policy.model), policy.end_tokens[0]
    found: list[RankedTokens] = []
    template.prepare([of_ranked(ranked) for ranked in sets])
    for number, ranked in enumerate(sets):
        question = Prompt(id=f"set-{number}", text=ranked.prompt, messages=ranked.messages)
        prompt = template.render(question).tokens
        completions = [
            template.encode_completion(text, end, sampled=own, ended=ended)
            for text, ended in zip(ranked.completions, ranked.ended, strict=True)
        ]
        rows = [(*prompt, *completion) for completion in completions]
        rows = [row[:-1] if len(row) - 1 == limit else row for row in rows]  # all but the end fits
        found.append(
            RankedTokens(
                rows=rows,
                lengths=[len(completion) for completion in completions],
                start=len(prompt),
                margin=ranked.margin if isinstance(ranked, Ranked) and margins else 0.0,
                desirable=ranked.desirable if isinstance(ranked, Labelled) else None,
            )
        )
    return found
