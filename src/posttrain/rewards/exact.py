"""Is the answer, as text, the right one?"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from posttrain.rewards.declared import declare
from posttrain.rewards.extraction import Extract, extract_answer


@declare(checks_answer=True)
def exact_answer(
    completion: str, answer: str, *, extract: Extract = "whole", ignore_case: bool = False
) -> float:
    """1 where the extracted answer equals ``answer`` up to spaces and Unicode form, else 0.

    >>> exact_answer("<answer>Paris </answer>", "Paris", extract="tag")
    1.0
    >>> exact_answer("paris", "Paris"), exact_answer("paris", "Paris", ignore_case=True)
    (0.0, 1.0)
    """
    if not isinstance(answer, str) or not answer.strip():
        raise ValueError(f"answer: expected text that is not empty, got {answer!r}")
    given = extract_answer(completion, extract)
    if given is None:
        return 0.0
    return float(_normal(given, ignore_case) == _normal(answer, ignore_case))


@declare(checks_answer=True)
def one_of_answers(completion: str, answers: Sequence[str], *, extract: Extract = "whole") -> float:
    """1 where the extracted answer is one of ``answers``, as :func:`exact_answer` compares, else 0.

    >>> one_of_answers(" 3", ["1", "3"]), one_of_answers("2", ["1", "3"])
    (1.0, 0.0)
    """
    if not answers or isinstance(answers, str):
        raise ValueError(f"answers: expected a list of texts that is not empty, got {answers!r}")
    return max(exact_answer(completion, answer, extract=extract) for answer in answers)


def _normal(text: str, ignore_case: bool) -> str:
    text = " ".join(unicodedata.normalize("NFC", text).split())
    return text.casefold() if ignore_case else text
