"""Does the completion keep to ``<think>…</think><answer>…</answer>``?"""

from __future__ import annotations

TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def think_answer(thinking: str, answer: str) -> str:
    """A completion in the format.

    >>> think_answer("2+3=5", "5")
    '<think>2+3=5</think><answer>5</answer>'
    """
    return f"<think>{thinking}</think><answer>{answer}</answer>"


def think_answer_format(completion: str, *, partial: bool = False, opened: bool = False) -> float:
    """1 for ``<think>…</think><answer>…</answer>`` and nothing around it but white space, else 0.

    Each tag occurs exactly once, and the answer is not empty. With ``partial``, each tag that
    occurs exactly once earns 0.2, and the full match the rest. ``opened`` says that the prompt
    already ends with ``<think>``, so that the completion must not begin with it.

    >>> think_answer_format("<think>2+3</think><answer>5</answer>")
    1.0
    >>> think_answer_format("<answer>5</answer>"), think_answer_format("<answer>5", partial=True)
    (0.0, 0.2)
    """
    text = ("<think>" if opened else "") + completion.strip()
    num_once = sum(text.count(tag) == 1 for tag in TAGS)
    if num_once == len(TAGS) and _in_order(text):
        return 1.0
    return num_once / 5 if partial else 0.0


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
