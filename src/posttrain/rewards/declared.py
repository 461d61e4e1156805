"""What a reward declares: whether it checks the answer, and its largest score."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def declare(
    *,
    checks_answer: bool | None = None,
    maximum: float | None = None,
    longest_call: Callable[..., float] | None = None,
    check_options: Callable[..., None] | None = None,
    check_ready: Callable[..., None] | None = None,
) -> Callable[[Function], Function]:
    """Mark a reward function with ``checks_answer`` and ``maximum``, which may also be set plainly.

    A reward checks the answer where full marks mean that it is right: it defines the accuracy.
    Full marks are 1 unless a ``maximum`` is declared, and no score may be above it. What is not
    given stays as it was declared before. ``longest_call`` is for a reward that has a time limit of
    its own, and scores 0 what exceeds it: given the reward's options, it says how many seconds one
    call may take, and the grading pool waits for at least as long.

    ``check_options`` and ``check_ready`` are called with the options of the reward, and raise
    ``ValueError``: the first when a recipe is read, where an option makes no sense, the second
    before anything is trained, where what the reward needs (a server, say) is not there.

    >>> @declare(maximum=10)
    ... def out_of_ten(completion: str, answer: str) -> float:
    ...     return 10.0 if completion == answer else 2.0
    >>> out_of_ten.maximum
    10
    """

    given = {name: value for name, value in locals().items() if value is not None}

    def mark(function: Function) -> Function:
        for name, value in given.items():
            setattr(function, name, value)
        return function

    return mark


def called(check: str, function: Any, *, kind: str, chosen: Mapping[str, Any]) -> None:
    """Call what a reward has declared as ``check`` with its options; errors begin with ``kind``."""
    given = getattr(function, check, None)
    if given is None:
        return
    try:
        given(**chosen)
    except ValueError as error:
        raise ValueError(f"{kind}: {error}") from None
