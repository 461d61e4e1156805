"""How often data is gone through: passes over the prompts, and prompts that sft has shown."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.build.questions import demonstrated, questions
from posttrain.config import Resolved, RlSection
from posttrain.data.template import Template
from posttrain.protocols import Task


@dataclass(frozen=True, kw_only=True)
class Passes:
    """The prompts that rl asks, and how often it asks each."""

    num_prompts: int
    prompts_per_step: int
    steps: int

    @property
    def count(self) -> float:
        """Passes over all prompts; dynamic sampling makes more of them."""
        return self.steps * self.prompts_per_step / self.num_prompts

    @property
    def repeats(self) -> bool:
        """Whether a single batch asks a prompt more than once."""
        return self.prompts_per_step > self.num_prompts

    def __str__(self) -> str:
        how = f"{self.steps:,} steps × {self.prompts_per_step:,} prompts ÷ {self.num_prompts:,}"
        return f"{self.count:,.1f} over the prompts ({how})"


def passes(rl: RlSection, num_prompts: int) -> Passes | None:
    """The passes of a stage; None without prompts."""
    if not num_prompts:
        return None
    return Passes(num_prompts=num_prompts, prompts_per_step=rl.prompts_per_step, steps=rl.steps)


def shared_prompts(recipe: Resolved, task: Task | None, *, template: Template | None = None) -> int:
    """How many of the prompts that rl asks are answered in the demonstrations of sft."""
    if task is None or not {"sft", "rl"} <= set(recipe.stages):
        return 0
    section = recipe.sft
    prompts = task.prompts("train")
    if section.data == "task":
        return min(section.num_demonstrations or len(prompts), len(prompts))
    rows = demonstrated(section.data, section.num_demonstrations)
    shown = {text for ways in questions(rows, template) for text in ways}
    return sum(not shown.isdisjoint(ways) for ways in questions(prompts, template))
