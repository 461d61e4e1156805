"""Guess a number: ``Guess a number from 3 to 17: `` and then, by the answers, again and again."""

from __future__ import annotations

import random

from posttrain.envs.guess_number import Guessing, GuessNumber
from posttrain.tasks.demonstrations import played
from posttrain.tasks.splits import sample_splits, shuffled, sizes, told_fewer
from posttrain.tasks.task import PromptTask
from posttrain.types import Prompt


def guess_number_task(
    *,
    maximum: int = 100,
    smallest: int = 10,
    template: str = "Guess a number from {low} to {high}: ",
    num_train: int | None = None,
    num_test: int | None = None,
    seed: int = 0,
) -> PromptTask:
    """Ranges of at least ``smallest`` numbers between 1 and ``maximum``, and a number in each.

    It is played with the environment of the same name. All numbers of a range stand in the same
    split, so no test range was ever played in training. The gold answer is the number itself.
    Demonstrations, for a policy that chats, are games whose guesses are random numbers of the
    range: they are written well, and pay no heed to the answers.
    """
    if not 2 <= smallest <= maximum:
        raise ValueError(
            f"task 'guess_number': smallest must be from 2 to maximum, got {smallest}, {maximum}"
        )
    if "{low}" not in template or "{high}" not in template:
        raise ValueError(f"task 'guess_number': template lacks {{low}} or {{high}}: {template!r}")
    ranges = [
        (low, high)
        for low in range(1, maximum + 1)
        for high in range(low + smallest - 1, maximum + 1)
    ]
    problems = [(low, high, n) for low, high in ranges for n in range(low, high + 1)]
    order = shuffled(len(problems), seed=seed, num_needed=sum(sizes(num_train, num_test)))
    train, test = sample_splits(
        (problems[index] for index in order),
        identity=lambda problem: f"guess_number {problem[0]} {problem[1]}",
        num_train=num_train,
        num_test=num_test,
        kind="task 'guess_number'",
        fix="raise maximum",
    )

    def prompts(split: str, chosen: list[tuple[int, int, int]]) -> tuple[Prompt, ...]:
        return tuple(
            Prompt(
                id=f"{split}-{number}",
                text=template.replace("{low}", str(low)).replace("{high}", str(high)),
                columns={"low": low, "high": high, "secret": secret, "answer": str(secret)},
            )
            for number, (low, high, secret) in enumerate(chosen)
        )

    return PromptTask(
        name="guess_number",
        rewards={"exact": 1.0},
        train=prompts("train", train),
        test=prompts("test", test),
        solve=lambda prompt: prompt.columns["answer"],
        demonstrate=_random_game,
        accuracy="exact",
        told=told_fewer(
            "task 'guess_number'", (len(train), len(test)), asked=(num_train, num_test)
        ),
    )


def _random_game(prompt: Prompt, generator: random.Random) -> list[dict[str, str]]:
    def guess(state: Guessing) -> str:
        return str(generator.randint(state.low, state.high))

    return played(GuessNumber(), prompt, player=guess)
