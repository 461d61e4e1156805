"""Demonstrations for a warm-up, some of them wrong on purpose."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from posttrain.protocols import Env, Split, Task
from posttrain.rewards.scorer import RewardScorer
from posttrain.types import Prompt, Turn

_MAX_TRIES = 100

Demonstrate = Callable[[Prompt, random.Random], str | list[dict[str, str]]]


def demonstrations(
    task: Task,
    *,
    num: int | None = None,
    wrong_share: float = 0.0,
    seed: int = 0,
    split: Split = "train",
) -> list[dict[str, Any]]:
    """``num`` prompts of a split with their gold answers, a share of them answered wrongly.

    A task that brings its own ``demonstrate`` is asked for its answers instead, of every prompt as
    often as another: ``num`` may then be larger than the number of prompts. An answer of several
    turns is a row of ``messages``.

    A wrong answer is the gold answer of another prompt that the task's own rewards give less than
    full marks here. Exactly ``round(num · wrong_share)`` are wrong; the seed decides which, in
    either split by other draws. A policy warmed up on these knows how to answer and is often wrong:
    room for RL to improve.

    >>> from posttrain.tasks.sort import sort_task
    >>> task = sort_task(length=3, num_train=100, num_test=0)
    >>> demonstrations(task, num=1)
    [{'prompt': 'sort: 3 5 8\\n', 'completion': '3 5 8'}]
    """
    prompts = task.prompts(split)
    num = len(prompts) if num is None else num
    demonstrate: Demonstrate | None = getattr(task, "demonstrate", None)
    if demonstrate is not None and wrong_share:
        raise ValueError(
            f"wrong_share: task {task.name!r} shows answers of its own, good and bad ones; leave "
            "wrong_share at 0"
        )
    most = num if demonstrate is not None and prompts else len(prompts)
    if not 0 < num <= most:
        raise ValueError(
            f"num: {num} demonstrations asked, but task {task.name!r} has {len(prompts)} {split} "
            f"prompts; ask for 1 to {len(prompts)}, or raise the task's num_{split}"
        )
    if not 0 <= wrong_share <= 1:
        raise ValueError(f"wrong_share: must be from 0 to 1, got {wrong_share}")
    if any(not prompt.text for prompt in prompts):
        raise ValueError(
            f"task {task.name!r}: demonstrations need prompts of text, not of messages"
        )
    generator = random.Random(seed if split == "train" else f"{seed} {split}")
    if demonstrate is not None:
        return _shown(prompts, demonstrate, num=num, generator=generator)
    chosen = generator.sample(list(prompts), num)
    wrong = set(generator.sample(range(num), round(num * wrong_share)))
    scorer = RewardScorer(task.rewards) if wrong else None
    rows = []
    for index, prompt in enumerate(chosen):
        completion = task.gold(prompt)
        if scorer is not None and index in wrong:
            completion = _wrong(task, prompt, scorer=scorer, generator=generator)
        rows.append({"prompt": prompt.text, "completion": completion})
    return rows


def _shown(
    prompts: Sequence[Prompt], demonstrate: Demonstrate, *, num: int, generator: random.Random
) -> list[dict[str, Any]]:
    """The task's own answers: all prompts in random order, repeated until there are ``num``."""
    rows: list[dict[str, Any]] = []
    while len(rows) < num:
        for prompt in generator.sample(list(prompts), min(num - len(rows), len(prompts))):
            answer = demonstrate(prompt, generator)
            whole = not isinstance(answer, str)
            row = {"messages": answer} if whole else {"prompt": prompt.text, "completion": answer}
            rows.append(row)
    return rows


def played(
    env: Env, prompt: Prompt, *, player: Callable[[Any], str], **start: Any
) -> list[dict[str, str]]:
    """The messages of an episode of a chat: ``player`` speaks, knowing the environment's state."""
    state: Any = env.start(prompt, **start)
    messages = [{"role": "user", "content": prompt.text}]
    while True:
        messages.append({"role": "assistant", "content": player(state)})
        answer = env.reply(state, Turn(tokens=(), text=messages[-1]["content"]))
        if not isinstance(answer, str):
            return messages
        messages.append({"role": "user", "content": answer})


def _wrong(task: Task, prompt: Prompt, *, scorer: RewardScorer, generator: random.Random) -> str:
    """The gold answer of another prompt that is wrong here."""
    full = scorer.score_text(prompt, task.gold(prompt))
    for _ in range(_MAX_TRIES):
        other = task.gold(generator.choice(task.prompts("train")))
        score = scorer.score_text(prompt, other)
        if not score.ok:
            raise ValueError(f"task {task.name!r}: cannot score demonstrations: {score.reason}")
        if score.value < full.value:
            return other
    raise ValueError(
        f"task {task.name!r}: among the gold answers of other prompts, none is wrong for prompt "
        f"{prompt.id!r}; set wrong_share to 0"
    )
