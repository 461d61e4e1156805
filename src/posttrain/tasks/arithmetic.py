"""Arithmetic: ``17+5=`` → ``22``, plainly or with the steps in ``<think>`` before ``<answer>``."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

from posttrain.rewards.format import think_answer
from posttrain.tasks.splits import sample_splits, shuffled, sizes, told_fewer
from posttrain.tasks.task import PromptTask
from posttrain.types import Prompt

OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
}


@dataclass(frozen=True)
class Expression:
    """Numbers with an operator between each two."""

    numbers: tuple[int, ...]
    signs: tuple[str, ...]

    def __str__(self) -> str:
        pairs = zip(self.signs, self.numbers[1:], strict=True)
        return str(self.numbers[0]) + "".join(f"{sign}{number}" for sign, number in pairs)


def arithmetic_task(
    *,
    operators: str = "+-*",
    digits: int = 2,
    num_operands: int = 2,
    think: bool = False,
    num_train: int | None = None,
    num_test: int | None = None,
    seed: int = 0,
) -> PromptTask:
    """Sums, differences and products of numbers with up to ``digits`` digits.

    With ``think`` the gold answer is ``<think>…</think><answer>…</answer>``, and the format earns a
    tenth; a number counts however it is written. Expressions that differ only in the order of terms
    or factors stand in the same split: 5+17 is no test of who has seen 17+5.
    """
    if not operators or set(operators) - set(OPERATORS) or len(set(operators)) < len(operators):
        raise ValueError(
            f"task 'arithmetic': operators must be some of '+-*', each once, got {operators!r}"
        )
    if digits < 1 or num_operands < 2:
        raise ValueError(
            "task 'arithmetic': digits must be at least 1 and num_operands at least 2, "
            f"got {digits}, {num_operands}"
        )
    size = 10 ** (digits * num_operands) * len(operators) ** (num_operands - 1)
    order = shuffled(size, seed=seed, num_needed=sum(sizes(num_train, num_test)))
    train, test = sample_splits(
        (_expression(i, operators=operators, digits=digits, count=num_operands) for i in order),
        identity=canonical,
        num_train=num_train,
        num_test=num_test,
        kind="task 'arithmetic'",
        fix="raise digits or num_operands, or add operators",
    )
    rewards = {"numeric": {"weight": 0.9 if think else 1.0, "extract": "answer"}}

    def solve(prompt: Prompt) -> str:
        steps, answer = prompt.columns["steps"], prompt.columns["answer"]
        return think_answer(steps, answer) if think else str(answer)

    return PromptTask(
        name="arithmetic",
        rewards={**rewards, "format": 0.1} if think else rewards,
        train=tuple(_prompt(f"train-{i}", expression) for i, expression in enumerate(train)),
        test=tuple(_prompt(f"test-{i}", expression) for i, expression in enumerate(test)),
        solve=solve,
        accuracy={"name": "numeric", "extract": "answer"},
        told=told_fewer("task 'arithmetic'", (len(train), len(test)), asked=(num_train, num_test)),
    )


def steps(expression: Expression) -> list[str]:
    """The expression, one operation at a time, products first.

    >>> steps(Expression((3, 4, 2), ("+", "*")))
    ['4*2=8', '3+8=11']
    """
    numbers, signs = list(expression.numbers), list(expression.signs)
    done = []
    while signs:
        place = signs.index("*") if "*" in signs else 0
        left, right, sign = numbers[place], numbers[place + 1], signs.pop(place)
        result = OPERATORS[sign](left, right)
        done.append(f"{left}{sign}{right}={result}")
        numbers[place : place + 2] = [result]
    return done


def canonical(expression: Expression) -> str:
    """The expression with its terms, and the factors of each, in one fixed order.

    >>> canonical(Expression((17, 5), ("+",))) == canonical(Expression((5, 17), ("+",)))
    True
    >>> canonical(Expression((17, 5), ("-",))) == canonical(Expression((5, 17), ("-",)))
    False
    """
    terms: list[tuple[str, list[int]]] = []
    for sign, number in zip(("+", *expression.signs), expression.numbers, strict=True):
        if sign == "*":
            terms[-1][1].append(number)
        else:
            terms.append((sign, [number]))
    return f"arithmetic {sorted((sign, sorted(factors)) for sign, factors in terms)}"


def _expression(index: int, *, operators: str, digits: int, count: int) -> Expression:
    """The digits of ``index`` to mixed bases: every expression is one index."""
    numbers, signs = [], []
    for _ in range(count):
        index, number = divmod(index, 10**digits)
        numbers.append(number)
    for _ in range(count - 1):
        index, sign = divmod(index, len(operators))
        signs.append(operators[sign])
    return Expression(tuple(numbers), tuple(signs))


def _prompt(name: str, expression: Expression) -> Prompt:
    worked = steps(expression)
    answer = worked[-1].rpartition("=")[2]
    return Prompt(
        id=name, text=f"{expression}=", columns={"answer": answer, "steps": ", ".join(worked)}
    )
