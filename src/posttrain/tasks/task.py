"""A task as a table of prompts: what every task here is made of."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.protocols import Split
from posttrain.registry import Spec
from posttrain.types import Prompt, columns_text
from posttrain.types.text import shortened


@dataclass(kw_only=True)
class PromptTask:
    """Prompts of two splits that share none, default rewards, and a way to the gold answers.

    A task that has more to show than gold answers, say answers of many qualities, brings its own
    ``demonstrate``: a function of a prompt and a source of random numbers, which returns an answer,
    or the messages of a whole conversation that begins with the prompt. One whose prompts have
    right answers says in ``accuracy`` which reward checks them, by name or as a table of a name and
    options. ``told`` is how the rows of a file were understood, for the user to read;
    ``weights`` are those of a mixture, by what the column ``task`` of its prompts says. ``alike``
    says which prompts differ in their columns alone: only an environment makes them two.

    >>> task = PromptTask(
    ...     name="capitals",
    ...     rewards={"exact": 1.0},
    ...     train=(Prompt(id="train-0", text="France?", columns={"answer": "Paris"}),),
    ...     test=(Prompt(id="test-0", text="Italy?", columns={"answer": "Rome"}),),
    ...     solve=lambda prompt: prompt.columns["answer"],
    ... )
    >>> [task.gold(prompt) for prompt in task.prompts("test")]
    ['Rome']
    """

    name: str
    rewards: Mapping[str, float | Mapping[str, Any]]
    train: tuple[Prompt, ...]
    test: tuple[Prompt, ...]
    solve: Callable[[Prompt], str]
    demonstrate: Callable[[Prompt, random.Random], str | list[dict[str, str]]] | None = None
    accuracy: Spec | None = None
    told: str = ""
    weights: Mapping[str, float] = field(default_factory=dict)
    alike: str = ""

    def __post_init__(self) -> None:
        everything = (*self.train, *self.test)
        if len({prompt.id for prompt in everything}) < len(everything):
            raise ValueError(f"task {self.name!r}: two prompts have the same id; make them unique")
        for prompt in everything:
            if not prompt.text.strip() and not prompt.messages:
                raise ValueError(f"task {self.name!r}: prompt {prompt.id!r} is empty; remove it")
        asked = {identity(prompt): prompt.id for prompt in self.train}
        played = {episode(prompt): prompt.id for prompt in self.train}
        alike = [prompt for prompt in self.test if identity(prompt) in asked]
        same = [prompt for prompt in alike if episode(prompt) in played]
        for prompt in (same or alike)[:1]:
            known = played.get(episode(prompt)) or asked[identity(prompt)]
            both = (
                f"task {self.name!r}: test prompt {prompt.id!r} is also train prompt {known!r} "
                f"({shortened(prompt.shown, 60)!r}), the first of {len(same or alike)} such of "
                f"{len(self.test)}; remove them from one, or the test measures memory"
            )
            if same:
                raise ValueError(both)
            self.alike = self.alike or both

    def prompts(self, split: Split) -> Sequence[Prompt]:
        """The prompts of a split, in a fixed order."""
        if split not in ("train", "test"):
            raise ValueError(f"split: expected 'train' or 'test', got {split!r}")
        return self.train if split == "train" else self.test

    def gold(self, prompt: Prompt) -> str:
        """A completion that deserves full marks."""
        return self.solve(prompt)


def identity(prompt: Prompt) -> str:
    """What makes two prompts the same: their text or messages, character by character.

    >>> identity(Prompt(id="a", text="1+1=")) == identity(Prompt(id="b", text="1+1="))
    True
    """
    if prompt.messages:
        return json.dumps([dict(message) for message in prompt.messages], sort_keys=True)
    return json.dumps(prompt.text)


def episode(prompt: Prompt) -> str:
    """What makes two episodes of an environment the same, which reads the columns too.

    >>> one, other = (Prompt(id="", text="Guess.", columns={"target": n}) for n in (3, 5))
    >>> identity(one) == identity(other), episode(one) == episode(other)
    (True, False)
    """
    return f"{identity(prompt)} {columns_text(prompt)}"


def check_told_apart(task: object) -> None:
    """Refuse prompts that differ in their columns alone, where no environment reads these."""
    if alike := getattr(task, "alike", ""):
        raise ValueError(alike)
