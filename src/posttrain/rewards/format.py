"""Does the completion keep to ``<think>…</think><answer>…</answer>``, a mark, or a pattern?"""

from __future__ import annotations

import functools
from typing import Any

from posttrain.rewards.extraction import Extract, extract_answer

TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def think_answer(thinking: str, answer: str) -> str:
    """A completion in the format.

    >>> think_answer("2+3=5", "5")
    '<think>2+3=5</think><answer>5</answer>'
    """
    return f"<think>{thinking}</think><answer>{answer}</answer>"


def think_answer_format(
    completion: str,
    *,
    partial: bool = False,
    opened: bool = False,
    extract: Extract | None = None,
    pattern: str = "",
) -> float:
    r"""1 for ``<think>…</think><answer>…</answer>`` and nothing around it but white space, else 0.

    Each tag occurs exactly once, and the answer is not empty. With ``partial``, each tag that
    occurs exactly once earns 0.2, and the full match the rest. ``opened`` says that the prompt
    already ends with ``<think>``, so that the completion must not begin with it.

    ``extract`` takes the place of the tags: 1 where an answer, right or wrong, stands there.

    A ``pattern`` takes the place of the tags: 1 where this regular expression, in RE2's syntax,
    matches the whole completion. RE2 takes linear time, whatever the pattern and the text.

    >>> think_answer_format("<think>2+3</think><answer>5</answer>")
    1.0
    >>> think_answer_format("<answer>5</answer>"), think_answer_format("<answer>5", partial=True)
    (0.0, 0.2)
    >>> think_answer_format("#### 5", extract="hashes"), think_answer_format("5", extract="hashes")
    (1.0, 0.0)
    >>> think_answer_format("Answer: 5", pattern=r"Answer: \d+")
    1.0
    """
    if (pattern or extract) and (partial or opened):
        raise ValueError(
            "format: extract and pattern take the place of the tags; drop partial, opened"
        )
    if pattern and extract:
        raise ValueError("format: give extract or pattern, not both")
    if extract:
        return float(extract_answer(completion, extract) is not None)
    if pattern:
        return float(_compiled(pattern).fullmatch(completion) is not None)
    text = ("<think>" if opened else "") + completion.strip()
    num_once = sum(text.count(tag) == 1 for tag in TAGS)
    if num_once == len(TAGS) and _in_order(text):
        return 1.0
    return num_once / 5 if partial else 0.0


@functools.lru_cache(maxsize=64)
def _compiled(pattern: str) -> Any:
    try:
        import re2  # Python's own engine can take exponential time on a text that a model wrote
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "format: a pattern needs RE2; pip install 'posttrain[re2]', or leave the pattern out"
        ) from error
    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(pattern, options=options)
    except re2.error as error:
        raise ValueError(
            f"pattern: {pattern!r} is not a regular expression of RE2 ({error}); it knows neither "
            "look-around nor back-references"
        ) from error


def _in_order(text: str) -> bool:
    """Whether a text with each tag once begins and ends with them, in their order."""
    end_of_thought, start_of_answer = text.index("</think>"), text.index("<answer>")
    between = text[end_of_thought + len("</think>") : start_of_answer]
    answer = text[start_of_answer + len("<answer>") : -len("</answer>")]
    return (
        text.startswith("<think>")
        and text.endswith("</answer>")
        and end_of_thought < start_of_answer
        and not between.strip()
        and bool(answer.strip())
    )
