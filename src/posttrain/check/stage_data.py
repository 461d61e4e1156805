"""Checks the data of the stages: texts, leaks, demonstrations, preferences."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

from posttrain.build.learners import make_teacher
from posttrain.build.preference_rows import backbone_of, direct_rows, read_split, reward_rows
from posttrain.build.questions import alone, among, learned, spellings
from posttrain.build.setup import make_template
from posttrain.build.sft_rows import row_limit, sft_rows
from posttrain.build.trained_rows import asks_test
from posttrain.check.bench import Bench, warnings_as_verdicts
from posttrain.check.texts import find_notes, read_rows
from posttrain.check.verdicts import Verdict
from posttrain.config import DpoSection, RewardSection, SftSection
from posttrain.config.specs import OWN_STAGE
from posttrain.models.reward import check_same_tokens, load_reward, reward_from_policy
from posttrain.track.printable import printable

Read = TypeVar("Read")


def _readable(bench: Bench, read: Callable[[], Read]) -> Read | None:
    """The result of ``read``; None in a check where it raises, which other lines report."""
    try:
        return read()
    except (OSError, ValueError):
        if bench.moment == "start":
            raise
        return None


def find_leaks(bench: Bench) -> Iterator[Verdict]:
    """Whether demonstrations or preferences of a file hold problems that the run is measured by."""
    test = bench.task.prompts("test")
    every = (*bench.task.prompts("train"), *test)
    told = alone(test, among=every) if bench.played else test
    template = bench.template if bench.has("setup") else None
    rows_of = {"sft": "demonstrations", "reward": "preferences", "dpo": "preferences"}
    for stage, rows in rows_of.items():
        if stage not in bench.stages:
            continue
        asked = _readable(bench, partial(learned, bench.recipe, stage))
        if found := among(told, asked or (), template=template):
            shown = printable(spellings(found[0])[0], limit=60)
            yield Verdict(
                "fail" if asks_test(bench.recipe) else "warn",
                f"{len(found)} of {len(test)} held-out problems are in {stage}.data (the first: "
                f"{shown!r})",
                "remove them there, or the test measures memory",
                f"{rows} of test",
            )


def read_texts(bench: Bench) -> Iterator[Verdict]:
    """What the tokenizer makes of the data: special tokens, characters, the messages of chats."""
    task = bench.setup.task
    if bench.setup.env is not None:
        bench.template.try_replies()
    rows = _readable(bench, lambda: read_rows(bench.recipe, task, stages=bench.stages))
    if rows is None:
        return
    notes = find_notes(rows, bench.template)
    yield from notes
    told = {note.name for note in notes}
    if "special tokens" not in told:
        yield Verdict("pass", "none in the data", name="special tokens")
    if "characters" not in told:
        yield Verdict("pass", "the tokenizer has all of the data's", name="characters")


def read_demonstrations(bench: Bench) -> Iterator[Verdict]:
    """The demonstrations of the sft stage can be read, and fit into the model's context."""
    rows = sft_rows(bench.setup).train
    limit = row_limit(bench.policy, bench.sft)
    lengths = [len(tokens) for tokens, _ in rows]
    long = sum(limit is not None and length > limit for length in lengths)
    yield Verdict(
        "fail" if long == len(rows) else "warn" if long else "pass",
        f"{len(rows):,}, the longest has {max(lengths, default=0)} tokens"
        + (f"; {long} are over the limit of {limit} and left out" if long else ""),
        "shorten the long ones" if long else "give some",
    )
    yield from _warm_up(bench.sft, len(rows) - long, stage="sft")


def read_preferences(bench: Bench) -> Iterator[Verdict]:
    """Preferences in files can be read, fit the context, and share no prompt across splits."""
    recipe = bench.recipe
    bench.backbone = backbone_of(recipe, bench.policy, device="cpu")
    template = make_template(recipe, bench.backbone)
    read: Callable[[], Any]
    if bench.moment == "start":  # the stage itself encodes the rows later
        read = partial(read_split, recipe, "reward", template=template)
    else:
        read = partial(reward_rows, recipe, bench.backbone, template=template)
    yield from _read_compared(bench, bench.reward, stage="reward", read=read)


def read_direct(bench: Bench) -> Iterator[Verdict]:
    """The same of the stage dpo, which learns from them without a reward model."""
    yield from _read_compared(bench, bench.dpo, stage="dpo", read=partial(direct_rows, bench.setup))


def _read_compared(
    bench: Bench, section: RewardSection | DpoSection, *, stage: str, read: Callable[[], Any]
) -> Iterator[Verdict]:
    if section.data == "prefer":
        return
    if bench.moment == "start":  # the stage itself warns later
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read()
        return
    with warnings_as_verdicts() as verdicts:
        train, test = read()
    longest = max(len(row) for ranked in (*train, *test) for row in ranked.rows)
    yield Verdict(
        "pass",
        f"{len(train):,} to learn from, {len(test):,} held out, the longest has {longest} tokens",
    )
    yield from _warm_up(section, len(train), stage=stage)
    yield from verdicts


def _warm_up(
    section: SftSection | RewardSection | DpoSection, num_rows: int, *, stage: str
) -> Iterator[Verdict]:
    total = section.steps or section.epochs * -(-num_rows // section.batch_size)
    if section.warmup_steps > total:
        yield Verdict(
            "warn",
            f"{section.warmup_steps}, but {stage} takes {total} optimiser steps: the learning rate "
            "is not reached",
            f"set it to less than {total}",
            f"{stage}.warmup_steps",
        )


def load_teacher(bench: Bench) -> None:
    """The teacher means by every token what the policy means, before any stage is run."""
    if "rl" in bench.recipe.stages and bench.recipe.stages[0] != "rl":  # else its trial loads it
        make_teacher(bench.recipe, bench.policy, device="cpu")


def load_critic(bench: Bench) -> None:
    """The reward model that the critic starts from reads the tokens that the policy writes."""
    recipe, policy, kind = bench.recipe, bench.policy, "rl.critic.source"
    critic = recipe.rl.critic if "rl" in recipe.stages else None
    if critic is None or critic.source == "policy":
        return
    if critic.source != OWN_STAGE:
        reward = load_reward(critic.source)
        check_same_tokens(reward, policy, kind=kind)
        _ = reward.head  # the property raises where the head is not one linear layer
    elif bench.has("backbone") and bench.backbone is not policy:
        check_same_tokens(reward_from_policy(bench.backbone, seed=0), policy, kind=kind)
