"""The rewards of generated puzzles: countdown, melodies, and the datasets of reasoning-gym."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Protocol

from posttrain.rewards.declared import declare
from posttrain.rewards.expressions import evaluate
from posttrain.rewards.extraction import Extract, extract_answer

COMFORTABLE = 10  # notes after which a melody is too long
PRICE_OF_EXTRA = 2


@declare(checks_answer=True)
def countdown_expression(
    completion: str, puzzle: Mapping[str, Any], *, extract: Extract = "whole"
) -> float:
    """1 where an expression equals the target and uses each given number at most once, else 0.

    ``puzzle`` is ``{"numbers": [25, 3, 7], "target": 46}``. The expression is computed exactly.

    >>> puzzle = {"numbers": [25, 3, 7, 2], "target": 154}
    >>> countdown_expression("(25 - 3) * 7", puzzle), countdown_expression("22 * 7", puzzle)
    (1.0, 0.0)
    """
    numbers, target = puzzle["numbers"], puzzle["target"]
    text = extract_answer(completion, extract)
    result = None if text is None else evaluate(text)
    if result is None:
        return 0.0
    value, used = result
    return float(value == target and Counter(used) <= Counter(numbers))


def melody_score(completion: str, opening: str) -> float:
    """What a listener thinks of the melody that follows an opening: from −1 to 1.

    Of the first ten notes, each that also stands in the opening counts +1 and each other one −1, as
    does a note that repeats the one before it; every note after the tenth costs 2, whichever it is;
    the sum is divided by ten, and is never less than −1. Every character is a note, so text that is
    no melody is a row of wrong notes.

    Up to ten notes, longer melodies of the same care are better; then the score falls steeply. Who
    only ever heard short melodies that move learns the first, and nothing of the rest.

    >>> melody_score("cegb", "cegb"), melody_score("cegbcegbce", "cegb")
    (0.4, 1.0)
    >>> melody_score("cad", "cegb"), melody_score("cegb" * 4, "cegb")  # 1 − 2; 10 − 2 · 6
    (-0.1, -0.2)
    >>> melody_score("cccc", "cegb")  # stuck: 1 − 3
    -0.2
    """
    if not opening:
        raise ValueError("opening: empty; give the column the notes that the prompt shows")
    heard = completion[:COMFORTABLE]
    num_liked = sum(
        note in opening and note != before for before, note in zip(" " + heard, heard, strict=False)
    )
    num_extra = len(completion) - len(heard)
    points = num_liked - (len(heard) - num_liked) - PRICE_OF_EXTRA * num_extra
    return max(-1.0, points / COMFORTABLE)


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
