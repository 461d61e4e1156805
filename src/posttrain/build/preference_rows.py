"""What the stage ``reward`` learns from and is judged by: preferences as rows of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from posttrain.build.questions import of_ranked
from posttrain.build.rendered_prompts import tell_left_out
from posttrain.build.setup import make_policy
from posttrain.config import Resolved, RewardSection
from posttrain.config.defaults import TEST_SHARE
from posttrain.data.preference_sets import Ranked, read_preferences
from posttrain.data.prompt_splits import check_apart, split_by_prompt
from posttrain.data.template import Template
from posttrain.models.cache import context_length
from posttrain.models.load import Policy
from posttrain.pipelines.reward_model import RankedTokens
from posttrain.types import Prompt

PAIRS, TEST_PAIRS = "pairs.jsonl", "test_pairs.jsonl"


def backbone_of(recipe: Resolved, policy: Policy, *, device: str) -> Policy:
    """The model that gets the head: the policy, or another that the section names."""
    named = recipe.reward.backbone
    return policy if named == "policy" else make_policy(recipe, named, device=device)


def read_split(
    recipe: Resolved, prefer: Path = Path(), *, template: Template
) -> tuple[list[Ranked], list[Ranked]]:
    """The preferences to learn from, and those held out; ``prefer`` is that stage's folder.

    Which prompts are the same, the template says that writes them.
    """
    section = recipe.reward

    def key(ranked: Ranked) -> str:
        return template.question(of_ranked(ranked))

    own = section.data == "prefer"
    train = read_preferences(prefer / PAIRS if own else section.data)
    if section.test_data is not None:
        test = read_preferences(section.test_data)
        template.prepare([of_ranked(ranked) for ranked in (*train, *test)])
        check_apart(train, test, where="reward.test_data", key=key)
        return train, test
    if own and not section.test_share and (prefer / TEST_PAIRS).exists():
        return train, read_preferences(prefer / TEST_PAIRS)
    share = section.test_share or TEST_SHARE
    template.prepare([of_ranked(ranked) for ranked in train])
    return split_by_prompt(train, test_share=share, seed=recipe.run.seed, key=key)


def reward_rows(
    recipe: Resolved, policy: Policy, *, template: Template, prefer: Path = Path()
) -> tuple[list[RankedTokens], list[RankedTokens]]:
    """Both parts of the preferences as tokens; what does not fit the context is left out, loudly.

    ``policy`` is the backbone of the reward model.
    """
    section, limit = recipe.reward, context_length(policy.model)
    held_out = "reward.data" if section.test_data is None else "reward.test_data"
    names = (("reward.data", "sets"), (held_out, "held-out sets"))
    parts: list[list[RankedTokens]] = []
    for sets, (option, rows) in zip(
        read_split(recipe, prefer, template=template), names, strict=True
    ):
        tokens = _tokens(sets, policy, template=template, section=section)
        kept = [row for row in tokens if limit is None or max(map(len, row.rows)) <= limit]
        tell_left_out(len(kept), len(sets), option=option, rows=rows, limit=limit)
        parts.append(kept)
    train, test = parts
    return train, test


def _tokens(
    sets: Sequence[Ranked], policy: Policy, *, template: Template, section: RewardSection
) -> list[RankedTokens]:
    limit, end = context_length(policy.model), policy.end_tokens[0]
    own = section.data == "prefer"
    found: list[RankedTokens] = []
    template.prepare([of_ranked(ranked) for ranked in sets])
    for number, ranked in enumerate(sets):
        question = Prompt(id=f"set-{number}", text=ranked.prompt, messages=ranked.messages)
        prompt = template.render(question).tokens
        completions = [
            template.encode_completion(text, end, sampled=own) for text in ranked.completions
        ]
        rows = [(*prompt, *completion) for completion in completions]
        rows = [row[:-1] if len(row) - 1 == limit else row for row in rows]  # all but the end fits
        lengths = [len(completion) for completion in completions]
        margin = ranked.margin if section.margins else 0.0
        found.append(RankedTokens(rows=rows, lengths=lengths, margin=margin))
    return found
