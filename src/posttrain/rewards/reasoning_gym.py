"""The scorers of reasoning-gym's own datasets (https://github.com/open-thought/reasoning-gym)."""

from __future__ import annotations

from typing import Protocol

from posttrain.rewards.declared import declare
from posttrain.rewards.extraction import Extract, extract_answer


class ScoredEntry(Protocol):
    """A problem that knows how to score an answer, as the task ``reasoning_gym`` makes it."""

    def score_answer(self, answer: str) -> float:
        """What the dataset's own scorer gives the answer, 0 to 1."""
        ...


@declare(checks_answer=True)
def reasoning_gym_score(completion: str, entry: ScoredEntry, *, extract: Extract = "tag") -> float:
    """What the dataset's own scorer gives the extracted answer, 0 to 1.

    No answer scores 0: some of those scorers give it a hundredth.
    """
    answer = extract_answer(completion, extract)
    return 0.0 if answer is None else entry.score_answer(answer)
