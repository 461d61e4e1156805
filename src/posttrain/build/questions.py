"""Which question a row asks: two are the same where the model would read the same, or was asked so.

Prompts of a task, demonstrations and preferences are compared as the chat template writes them,
and by what the user says: another system message does not make another question.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from posttrain.config import Resolved
from posttrain.data.preference_sets import Labelled, Ranked, read_compared
from posttrain.data.sources import read_demonstrations
from posttrain.data.template import Template, words
from posttrain.protocols import Task
from posttrain.tasks.task import identity
from posttrain.types import Prompt, columns_text


def spellings(prompt: Prompt) -> list[str]:
    """How a question may be written down: what the user says, and a chat as rollouts keep it."""
    chat = [f"{turn['role']}: {turn['content']}" for turn in prompt.messages]
    asked = " ".join(turn["content"] for turn in prompt.messages if turn["role"] == "user")
    return [text for text in map(words, (prompt.text, asked, "\n".join(chat))) if text]


def episodes(prompts: Sequence[Prompt]) -> list[set[str]]:
    """What each prompt asks in an environment, which reads its columns too, in text."""
    return [{f"{text} {columns_text(prompt)}" for text in spellings(prompt)} for prompt in prompts]


def alone(prompts: Sequence[Prompt], among: Sequence[Prompt]) -> list[Prompt]:
    """Those prompts that no other one there differs from in its columns only.

    Where an environment reads the columns, only the text of these says which episode is meant.
    """
    times = Counter(map(identity, among))
    return [prompt for prompt in prompts if times[identity(prompt)] < 2]


def questions(prompts: Sequence[Prompt], template: Template | None = None) -> list[set[str]]:
    """What each prompt asks, in every way that it can be written; without a template, in text."""
    found = [set(spellings(prompt)) for prompt in prompts]
    if template is not None:
        template.prepare(prompts)
        for prompt, ways in zip(prompts, found, strict=True):
            ways.update({template.question(prompt)} - {""})
    return found


def answered(row: Mapping[str, Any]) -> Iterator[Prompt]:
    """The prompts that a demonstration answers: of a chat, what stands before each answer.

    What was said last is a question of its own: its answer is shown, whatever came before. A text
    without a prompt stands for itself.
    """
    if "messages" not in row:
        yield Prompt(id="", text=str(row.get("prompt") or row["text"]))
        return
    messages = tuple(row["messages"])
    for place, message in enumerate(messages):
        if message["role"] == "assistant" and place:
            yield Prompt(id="", text="", messages=messages[:place])
            if place > 1 and messages[place - 1]["role"] == "user":
                yield Prompt(id="", text="", messages=messages[place - 1 : place])


def first_question(row: Mapping[str, Any]) -> Prompt:
    """What a demonstration is asked first."""
    return next(answered(row), Prompt(id="", text=""))


def of_ranked(ranked: Ranked | Labelled) -> Prompt:
    """The prompt of a preference."""
    return Prompt(id="", text=ranked.prompt, messages=ranked.messages)


def demonstrated(
    path: str, most: int | None, *, columns: Mapping[str, str] | None = None
) -> list[Prompt]:
    """The questions that the demonstrations of a file answer, of the first so many."""
    with warnings.catch_warnings():  # they are given when the stage reads them
        warnings.simplefilter("ignore")
        rows = read_demonstrations(path, columns=columns, limit=most)
    return [prompt for row in rows for prompt in answered(row)]


def learned(recipe: Resolved, stage: str) -> list[Prompt]:
    """The questions of the file that a stage learns from; none without one."""
    if stage == "sft" and recipe.sft.data != "task":
        sft = recipe.sft
        return demonstrated(sft.data, sft.num_demonstrations, columns=sft.columns)
    section: Any = getattr(recipe, stage)
    own = section.data in ("task", "prefer")
    return [] if own else preferred(section.data, columns=section.columns)


def preferred(path: str, *, columns: Mapping[str, str] | None = None) -> list[Prompt]:
    """The questions whose answers a file of preferences or labels compares."""
    with warnings.catch_warnings():  # they are given when the stage reads them
        warnings.simplefilter("ignore")
        return [of_ranked(row) for row in read_compared(path, columns=columns)]


def among(
    prompts: Sequence[Prompt], asked: Sequence[Prompt], *, template: Template | None = None
) -> list[Prompt]:
    """Those prompts that ask what is asked there too.

    With a template, also where it is written differently and read the same by the model.
    """
    seen = {text for ways in questions(asked, template) for text in ways}
    found = zip(prompts, questions(prompts, template) if seen else (), strict=False)
    return [prompt for prompt, ways in found if not seen.isdisjoint(ways)]


def shared_prompts(recipe: Resolved, task: Task | None, *, template: Template | None = None) -> int:
    """How many of the prompts that rl asks are answered in the demonstrations of sft."""
    if task is None or not {"sft", "rl"} <= set(recipe.stages):
        return 0
    prompts = task.prompts("train")
    if recipe.sft.data == "task":
        return min(recipe.sft.num_demonstrations or len(prompts), len(prompts))
    return len(among(prompts, learned(recipe, "sft"), template=template))
