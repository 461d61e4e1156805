"""Sort numbers: ``sort: 3 1 2`` → ``1 2 3``. The smallest task worth learning."""

from __future__ import annotations

from posttrain.tasks.splits import sample_splits, shuffled, sizes, told_fewer
from posttrain.tasks.task import PromptTask
from posttrain.types import Prompt


def sort_task(
    *,
    length: int = 5,
    maximum: int = 9,
    num_train: int | None = None,
    num_test: int | None = None,
    seed: int = 0,
) -> PromptTask:
    """Lists of ``length`` numbers from 0 to ``maximum``, to be written in rising order.

    All orders of the same numbers stand in the same split, so no test answer was a train answer.
    The reward is all or nothing; ``{"sort": {"credit": "positions"}}`` gives partial credit.
    """
    if length < 2 or maximum < 1:
        raise ValueError(
            "task 'sort': length must be at least 2 and maximum at least 1, "
            f"got {length}, {maximum}"
        )
    size = (maximum + 1) ** length
    order = shuffled(size, seed=seed, num_needed=sum(sizes(num_train, num_test)))
    train, test = sample_splits(
        (_numbers(index, length=length, maximum=maximum) for index in order),
        identity=lambda numbers: f"sort {sorted(numbers)}",
        num_train=num_train,
        num_test=num_test,
        kind="task 'sort'",
        fix="raise length or maximum",
    )
    return PromptTask(
        name="sort",
        rewards={"sort": 1.0},
        train=tuple(_prompt(f"train-{i}", numbers) for i, numbers in enumerate(train)),
        test=tuple(_prompt(f"test-{i}", numbers) for i, numbers in enumerate(test)),
        solve=lambda prompt: prompt.columns["answer"],
        accuracy="sort",
        told=told_fewer("task 'sort'", (len(train), len(test)), asked=(num_train, num_test)),
    )


def _numbers(index: int, *, length: int, maximum: int) -> list[int]:
    """The digits of ``index`` to the base ``maximum + 1``: every list is one index."""
    numbers = []
    for _ in range(length):
        index, number = divmod(index, maximum + 1)
        numbers.append(number)
    return numbers


def _prompt(name: str, numbers: list[int]) -> Prompt:
    return Prompt(
        id=name,
        text=f"sort: {' '.join(map(str, numbers))}\n",
        columns={"numbers": numbers, "answer": " ".join(map(str, sorted(numbers)))},
    )
