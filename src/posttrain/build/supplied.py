"""Parts of a run that are handed over as Python objects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from posttrain.protocols import Engine, Task
from posttrain.rewards.scorer import RewardScorer
from posttrain.runs import config_digest
from posttrain.runs.function_digest import function_digest


@dataclass(frozen=True, kw_only=True)
class Supplied:
    """Parts handed over as Python objects instead of by name."""

    task: Task | None = None
    rewards: RewardScorer | None = None
    engine: Engine | None = None

    def names(self) -> set[Any]:
        """Which they are."""
        given = {"task": self.task, "rewards": self.rewards, "engine": self.engine}
        return {name for name, part in given.items() if part is not None}

    def config(self) -> dict[str, Any]:
        """What the run folder remembers of them, so that another reward is another run."""
        known: dict[str, Any] = {}
        if self.task is not None:
            prompts = [*self.task.prompts("train"), *self.task.prompts("test")]
            known["task"] = config_digest(repr(prompts))
        if self.rewards is not None:
            known["rewards"] = {
                reward.name: {
                    "weight": reward.weight,
                    "function_and_what_it_uses": function_digest(reward.function),
                }
                for reward in self.rewards.rewards
            }
        if self.engine is not None:
            known["engine"] = type(self.engine).__name__
        return {"supplied": known} if known else {}
