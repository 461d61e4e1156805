"""Countdown: reach a target with the given numbers, each used at most once."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from posttrain.rewards.format import think_answer
from posttrain.tasks.splits import sample_splits, told_fewer
from posttrain.tasks.task import PromptTask
from posttrain.types import Prompt

_MAX_FRUITLESS_DRAWS = 20_000  # draws without a new puzzle after which no further one is expected


@dataclass(frozen=True)
class Puzzle:
    """Numbers, a target, and one way to it."""

    numbers: tuple[int, ...]
    target: int
    expression: str
    steps: str


def countdown_task(
    *,
    num_numbers: int = 3,
    maximum: int = 20,
    maximum_target: int = 100,
    think: bool = False,
    num_train: int | None = None,
    num_test: int | None = None,
    seed: int = 0,
) -> PromptTask:
    """Puzzles with ``num_numbers`` numbers from 1 to ``maximum``, all solvable, most in many ways.

    Any expression over ``+ - * /`` and parentheses that uses each given number at most once and
    equals the target is right, whatever is written around it. With ``think`` the gold answer is
    ``<think>…</think><answer>…</answer>``, and the format earns a tenth. The same numbers in
    another order with the same target are the same puzzle, and stand in the same split.
    """
    if num_numbers < 2 or maximum < 1 or maximum_target < 1:
        raise ValueError(
            "task 'countdown': num_numbers must be at least 2, maximum and maximum_target at least "
            f"1, got {num_numbers}, {maximum}, {maximum_target}"
        )
    stream = _puzzles(seed, num_numbers=num_numbers, maximum=maximum, maximum_target=maximum_target)
    train, test = sample_splits(
        stream,
        identity=canonical,
        num_train=num_train,
        num_test=num_test,
        kind="task 'countdown'",
        fix="raise num_numbers, maximum or maximum_target",
    )
    rewards = {"countdown": {"weight": 0.9 if think else 1.0, "extract": "expression"}}

    def solve(prompt: Prompt) -> str:
        steps, answer = prompt.columns["steps"], prompt.columns["expression"]
        return think_answer(steps, answer) if think else str(answer)

    return PromptTask(
        name="countdown",
        rewards={**rewards, "format": 0.1} if think else rewards,
        train=tuple(_prompt(f"train-{i}", puzzle, think=think) for i, puzzle in enumerate(train)),
        test=tuple(_prompt(f"test-{i}", puzzle, think=think) for i, puzzle in enumerate(test)),
        solve=solve,
        accuracy={"name": "countdown", "extract": "expression"},
        told=told_fewer("task 'countdown'", (len(train), len(test)), asked=(num_train, num_test)),
    )


def canonical(puzzle: Puzzle) -> str:
    """What makes two puzzles the same: their numbers in any order, and the target."""
    return f"countdown {sorted(puzzle.numbers)} {puzzle.target}"


def _puzzles(seed: int, *, num_numbers: int, maximum: int, maximum_target: int) -> Iterator[Puzzle]:
    generator = random.Random(seed)
    seen: set[str] = set()
    num_fruitless = 0
    while num_fruitless < _MAX_FRUITLESS_DRAWS:
        num_fruitless += 1
        numbers = tuple(generator.randint(1, maximum) for _ in range(num_numbers))
        puzzle = _combine(numbers, generator)
        identity = canonical(puzzle)
        in_range = 1 <= puzzle.target <= maximum_target
        if in_range and puzzle.target not in numbers and identity not in seen:
            seen.add(identity)
            num_fruitless = 0
            yield puzzle


def _combine(numbers: tuple[int, ...], generator: random.Random) -> Puzzle:
    """Join two values at a time, at random, until one is left: that is the target."""
    values = [(number, str(number)) for number in numbers]
    steps = []
    while len(values) > 1:
        generator.shuffle(values)
        (left, left_text), (right, right_text) = values.pop(), values.pop()
        signs = ["+", "*", "-"]
        if right and left % right == 0:  # only evenly: every value stays a whole number
            signs.append("/")
        sign = generator.choice(signs)
        value = {"+": left + right, "*": left * right, "-": left - right}.get(sign)
        value = left // right if value is None else value
        steps.append(f"{_bracketed(left)}{sign}{_bracketed(right)}={value}")
        values.append((value, f"({left_text}{sign}{right_text})"))
    value, text = values[0]
    return Puzzle(numbers, value, text[1:-1], ", ".join(steps))


def _bracketed(number: int) -> str:
    return f"({number})" if number < 0 else str(number)


def _prompt(name: str, puzzle: Puzzle, *, think: bool) -> Prompt:
    numbers = ", ".join(map(str, puzzle.numbers))
    where = "Think in <think> </think>, then write the expression in <answer> </answer>."
    text = (
        f"Make {puzzle.target} from {numbers}: use each number at most once, with + - * / and "
        f"parentheses. {where if think else 'Write only the expression.'}\n"
    )
    columns = {
        "puzzle": {"numbers": list(puzzle.numbers), "target": puzzle.target},
        "expression": puzzle.expression,
        "steps": puzzle.steps,
    }
    return Prompt(id=name, text=text, columns=columns)
