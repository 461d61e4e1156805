"""Whole episodes of the environments that come with the library, with rewards by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import pytest
from played_episodes import END, encode, replies, score

from posttrain.envs import make_env
from posttrain.envs.alphabet_sort import AlphabetSort
from posttrain.envs.calculator import evaluated
from posttrain.envs.env_pool import EnvPool
from posttrain.envs.python import SHOWN
from posttrain.envs.wordle import WORDS, judged
from posttrain.registry import Spec
from posttrain.rollout.collect import collect_scored
from posttrain.rollout.engines.scripted import ScriptedEngine, code_points
from posttrain.rollout.environment import Environment
from posttrain.sandbox.choice import available
from posttrain.types import Prompt, Rollout, Sampling, Score

SANDBOX = "none" if available()[0].why_not else "bubblewrap"


class LastSays42:
    """Rewards that look for 42 in the policy's last turn."""

    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [Score(value=float("42" in rollout.answer)) for rollout in rollouts]


def collected(
    spec: Spec,
    script: Callable[[Prompt, int], str],
    *,
    num_samples: int,
    seed: int = 0,
    workers: int = 0,
    max_turns: int = 0,
    **columns: Any,
) -> list[Rollout]:
    """The rollouts of a prompt; each is checked to have the tokens that were said, and no other."""

    def render(prompt: Prompt) -> Prompt:
        return Prompt(id=prompt.id, text=prompt.text, tokens=tuple(code_points(prompt.text)))

    environment = Environment(
        pool=EnvPool(make_env(spec), workers=workers),
        encode=encode,
        render=render,
        max_turns=max_turns,
    )
    try:
        found = collect_scored(
            [Prompt(id="0", text="Go.", tokens=tuple(code_points("Go.")), columns=columns)],
            Sampling(max_new_tokens=100_000),
            engine=ScriptedEngine(script),
            scorer=LastSays42(),
            num_samples=num_samples,
            seed=seed,
            env=environment,
        )
    finally:
        environment.close()
    for rollout in found.rollouts:
        texts = [turn.text + END * turn.sampled for turn in rollout.turns]
        assert rollout.tokens == tuple(code_points("".join(texts)))
        assert rollout.mask == tuple(
            turn.sampled for turn, text in zip(rollout.turns, texts, strict=True) for _ in text
        )
    return list(found.rollouts)


def played(spec: Spec, *says: str, **given: Any) -> Rollout:
    """The rollout of a policy that says these in turn, all of them."""
    left = iter(says)
    [rollout] = collected(spec, lambda prompt, sample: next(left), num_samples=1, **given)
    assert next(left, None) is None
    return rollout


def call(name: str, **arguments: Any) -> str:
    return f"<tool>{json.dumps({'name': name, 'arguments': arguments})}</tool>"


def results(rollout: Rollout) -> list[str]:
    """What the tools said, one call in each turn."""
    whole = [text.strip() for text in replies(rollout)]
    return [text.removeprefix("<tool_result>").removesuffix("</tool_result>") for text in whole]


def errors(rollout: Rollout) -> list[str]:
    return [json.loads(text)["error"] for text in results(rollout)]


def counts(rollout: Rollout) -> list[float]:
    names = ("tool_calls", "tool_errors", "wrong_calls", "malformed_calls")
    return [score(rollout).parts[f"env/{name}"] for name in names]


# The calculator.


@pytest.mark.parametrize("workers", [0, 1])
def test_a_calculation_over_several_turns(workers: int) -> None:
    """The recipe's rewards score the last turn, which calls no tool."""
    says = (
        f"First {call('calculate', expression='(3 + 4) * 2')}",
        call("calculate", expression="14 * 3"),
        "So it is 42.",
    )
    rollout = played("calculator", *says, workers=workers)
    assert results(rollout) == ["14", "42"]
    assert score(rollout).value == 1.0
    assert counts(rollout) == [2, 0, 0, 0]
    assert score(played("calculator", "It is 41.")).value == 0.0


def test_two_calls_in_a_turn_are_answered_in_order() -> None:
    said = call("calculate", expression="1/8") + call("calculate", expression="10**20")
    rollout = played("calculator", said, "42")
    assert replies(rollout) == [
        "\n<tool_result>0.125</tool_result>\n<tool_result>100000000000000000000</tool_result>\n"
    ]


def test_wrong_calculations_are_told_and_the_episode_goes_on() -> None:
    says = [
        "<tool>calculate(1)</tool>",
        call("compute", expression="1"),
        call("calculate", expr="1"),
        call("calculate", expression=1),
        call("calculate", expression="1/0"),
        call("calculate", expression="__import__('os')"),
        call("calculate", expression="9**9**9"),
        call("calculate", expression="1e999"),
        call("calculate", expression="10**-400"),
        call("calculate", expression="(" * 201),
        call("calculate", expression="\ud800"),
    ]
    rollout = played("calculator", *says, "42")
    told = [
        "malformed call: no JSON",
        "unknown tool 'compute'",
        "unknown argument 'expr'",
        "argument 'expression' must be a string",
        "division by zero",
        "Call is not arithmetic",
        "too large",
        "too large",
        "too close to 0",
        "more than 200 characters",
        "malformed call: no JSON",
    ]
    found = errors(rollout)
    assert [text[: len(start)] for text, start in zip(found, told, strict=True)] == told
    assert score(rollout).value == 1.0
    assert counts(rollout) == [9, 6, 3, 2]


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("0.1 + 0.2", Fraction(3, 10)),
        ("1/3*3", 1),
        ("-2^2", -4),
        ("2^3^2", 512),
        ("1,200,000 ÷ 3", 400_000),
        ("$1,000 × [2 − 0.5]", 1500),
        ("7 // 2 + 7 % 2", 4),
        ("2 ** -2", Fraction(1, 4)),
    ],
)
def test_arithmetic_is_exact(expression: str, value: Fraction) -> None:
    assert evaluated(expression) == value


# Python.

PYTHON = {"name": "python", "sandbox": SANDBOX}


@pytest.mark.parametrize("workers", [0, 1])
def test_names_stay_from_call_to_call(workers: int) -> None:
    """What was printed by earlier calls is not heard again, however it was printed."""
    cells = [
        "import os\nos.write(1, b'loud\\n')\nprint('seen')\na = 20",
        "def twice(x):\n    return 2 * x",
        "a += 1",
        "a, twice(a)",
    ]
    rollout = played(PYTHON, *(call("python", code=cell) for cell in cells), "42", workers=workers)
    assert results(rollout) == ["loud\nseen", "(no output)", "(no output)", "(21, 42)"]
    assert score(rollout).value == 1.0
    assert counts(rollout) == [4, 0, 0, 0]


def test_an_error_of_the_code_is_told_and_names_before_it_are_there() -> None:
    cells = ["x = 6\ny = x / 0", "x * 7", "def f(:", "[1].nothing", "input()"]
    rollout = played(PYTHON, *(call("python", code=cell) for cell in cells), "42")
    raised, value, syntax, attribute, nothing = results(rollout)
    assert raised.startswith("Traceback (most recent call last):\n")
    assert 'File "<cell 1>", line 2, in <module>' in raised
    assert raised.endswith("ZeroDivisionError: division by zero")
    assert value == "42"
    assert syntax.endswith("SyntaxError: invalid syntax")
    assert "has no attribute 'nothing'" in attribute
    assert nothing.endswith("EOFError: EOF when reading a line")
    assert score(rollout).value == 1.0  # an error of the code breaks nothing


@pytest.mark.parametrize(
    ("cell", "told"),
    [
        ("a = 0\nwhile True: pass", "timeout"),
        ("a = 0\nwhile True: print('x' * 10_000)", "too much output"),
        ("a = 0\nimport os\nos._exit(0)", "the process was ended"),
        ("a = 0\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "the process was ended"),
    ],
)
def test_what_is_endless_or_ends_the_process_is_told_and_forgotten(cell: str, told: str) -> None:
    cells = ["a = 42", cell, "a"]
    rollout = played(PYTHON, *(call("python", code=each) for each in cells), "42")
    first, wrong, last = results(rollout)
    assert first == "(no output)"
    expected = f"{told}; names are as they were before this call"
    assert json.loads(wrong) == {"error": expected}
    assert last == "42"
    assert counts(rollout) == [3, 1, 0, 0]


def test_output_and_memory_and_calls_are_bounded() -> None:
    cells = ["print('a' * 100_000, 'end')", "b = bytearray(10**10)", "1"]
    spec = {**PYTHON, "max_cells": 2}
    rollout = played(spec, *(call("python", code=each) for each in cells), "42")
    long, memory, over = results(rollout)
    assert len(long) < SHOWN + 100
    assert "[96,004 characters left out]" in long
    assert long.startswith("aaa")
    assert long.endswith("a end")
    assert memory.endswith("MemoryError")
    assert json.loads(over) == {"error": "no more than 2 calls"}


@pytest.mark.skipif(SANDBOX == "none", reason="no bubblewrap here")
def test_the_sandbox_has_no_network_and_none_of_our_files() -> None:
    cells = [
        "import socket\nsocket.socket()",
        "open('/etc/passwd')",
        f"open({__file__!r})",
        "open('/usr/a', 'w')",
        "import os\ndict(os.environ)",
        "open('/tmp/a', 'w').write('x')",
    ]
    rollout = played("python", *(call("python", code=each) for each in cells), "42")
    *refused, variables, written = results(rollout)
    assert all("Error: " in text for text in refused)
    assert "posttrain" not in variables
    assert written == "1"


@pytest.mark.parametrize("sandbox", sorted({"none", SANDBOX}))
def test_the_same_code_does_the_same_again(sandbox: str) -> None:
    """The order of sets and what ``random`` draws, in every process."""
    cells = ["import random\nwords = set('abcdefghij')", "list(words), random.random()"]
    says = [*(call("python", code=each) for each in cells), "42"]
    spec = {"name": "python", "sandbox": sandbox}
    one, two = (results(played(spec, *says)) for _ in range(2))
    assert one == two


def test_wrong_calls_of_python() -> None:
    says = [call("python", source="1"), call("run", code="1"), "<tool>1 + 1</tool>"]
    rollout = played(PYTHON, *says, "42")
    assert counts(rollout) == [2, 0, 2, 1]
    assert len(errors(rollout)) == 3


# Wordle.


def test_a_game_of_wordle_that_is_won() -> None:
    """By hand: of crane, react has A in its place and three letters elsewhere: (1 + 3/2)/5."""
    spec = {"name": "wordle", "partial": 0.5}
    says = ("<guess>react</guess>", "Maybe <guess> BRAIN </guess>?", "I say <guess>crane</guess>")
    rollout = played(spec, *says, secret="crane")
    assert replies(rollout) == ["\nR E A C T\nY Y G Y X\n", "\nB R A I N\nX G G X Y\n"]
    assert [turn.reward for turn in rollout.turns if not turn.sampled] == [0.25, 0.0]
    assert rollout.earned == (0.25, 0.0, 0.75)
    assert score(rollout).value == 1.0
    assert score(rollout).parts["env/found"] == 1.0
    assert score(rollout).parts["env/guesses"] == 3.0
    assert rollout.prompt.text.startswith("Go.\n\nGuess a secret word of five letters in 6 guesses")


def test_a_game_of_wordle_that_is_lost() -> None:
    spec = {"name": "wordle", "partial": 0.5, "max_guesses": 4}
    says = ("<guess>cr4ne</guess>", "<guess>", "no idea", "react")
    rollout = played(spec, *says, secret="crane")
    asked = "\nNo guess: write a word of five letters as <guess>WORD</guess>.\n"
    assert replies(rollout) == [asked] * 3
    assert score(rollout).value == 0.25
    assert score(rollout).parts["env/found"] == 0.0
    plain = played({"name": "wordle", "max_guesses": 1}, "react", secret="crane")
    assert score(plain).value == 0.0


def test_the_marks_of_a_guess_are_right() -> None:
    """Against the definition, letter by letter, for all pairs of a list of words."""
    words = [*WORDS[::7], "eerie", "geese", "level", "mamma"]
    for secret in words:
        for guess in words:
            marks = judged(guess, secret)
            for letter in set(guess):
                places = [n for n in range(5) if guess[n] == letter]
                assert [marks[n] == "G" for n in places] == [secret[n] == letter for n in places]
                found = sum(marks[n] != "X" for n in places)
                assert found == min(len(places), secret.count(letter))
                elsewhere = "".join(marks[n] for n in places if marks[n] != "G")
                assert elsewhere == "Y" * elsewhere.count("Y") + "X" * elsewhere.count("X")


def test_a_secret_that_is_no_word_breaks_that_rollout() -> None:
    rollout = played("wordle", "crane", secret="cranes")
    assert score(rollout).state == "invalid"
    assert "secret 'cranes' is not a five-letter word" in score(rollout).reason


# Sorting names.

NAMES = [["Uma Ito", "Ada Xu"], ["Boris Sato"], ["Ada Abbott"]]


def test_names_sorted_over_turns() -> None:
    """By hand: of three lines two match in the second turn, so 2·2/6, to the power 2, a third."""
    spec = {"name": "alphabet_sort", "by": "first", "power": 2.0}
    says = (
        "Ada Xu\nUma Ito",
        "Ada Xu\nBoris Sato\nUma Ito",  # the new one is not marked
        "Ada Abbott // new\nAda Xu\nBoris Sato\nUma Ito",
    )
    rollout = played(spec, *says, names=NAMES)
    assert rollout.prompt.text == (
        "Go.\n\nSort these names by the alphabet, by first name, one in a line:\nUma Ito\nAda Xu\n"
    )
    assert [text.splitlines()[2:] for text in replies(rollout)] == [["Boris Sato"], ["Ada Abbott"]]
    assert rollout.earned == pytest.approx((1 / 3, (2 / 3) ** 2 / 3, 1 / 3))
    assert score(rollout).value == pytest.approx((1 + 4 / 9 + 1) / 3)
    assert score(rollout).parts["env/last_right"] == 1.0


def test_nothing_that_is_right_earns_nothing() -> None:
    spec = {"name": "alphabet_sort", "by": "last"}
    rollout = played(spec, "", "?\n" * 10_000, "Uma Ito // new", names=NAMES)
    assert score(rollout).value == 0.0
    assert score(rollout).parts["env/last_right"] == 0.0


def test_by_last_name_and_then_by_first() -> None:
    names = [["Ada Xu", "Uma Ito", "Ada Ito"]]
    spec = {"name": "alphabet_sort", "by": "last"}
    assert score(played(spec, "Ada Ito\nUma Ito\nAda Xu", names=names)).value == 1.0


@pytest.mark.parametrize("names", [[], [[]], "Ada", [["Ada Xu", "Ada Xu"]], [["Ada Xu"], [3]]])
def test_names_that_cannot_be_sorted_break_that_rollout(names: Any) -> None:
    assert "names must be lists of names" in score(played("alphabet_sort", "", names=names)).reason


# What the seed decides.


def sorter(prompt: Prompt, sample: int) -> str:
    """A policy that sorts by first name whatever it has read; it marks nothing."""
    known = [line for line in prompt.text.splitlines() if line.istitle() and line.count(" ") == 1]
    return "\n".join(sorted({line.strip(END) for line in known}))


def guesser(prompt: Prompt, sample: int) -> str:
    return WORDS[prompt.text.count(END)]


@pytest.mark.parametrize(
    ("spec", "policy"), [("alphabet_sort", sorter), ({"name": "wordle", "partial": 1.0}, guesser)]
)
@pytest.mark.parametrize("workers", [0, 2])
def test_the_seed_decides_every_episode(
    spec: Spec, policy: Callable[[Prompt, int], str], workers: int
) -> None:
    """The same seed plays the same, in workers too; another seed, and another sequence, differ."""
    whole = [
        collected(spec, policy, num_samples=8, seed=seed, workers=workers) for seed in (1, 1, 2)
    ]
    here = collected(spec, policy, num_samples=8, seed=1)
    assert whole[0] == whole[1] == here
    assert whole[0] != whole[2]
    assert len({rollout.tokens for rollout in whole[0]}) > 1


def test_a_limit_on_turns_keeps_what_was_earned() -> None:
    spec = {"name": "alphabet_sort", "by": "first", "power": 1.0}
    rollout = played(spec, "Ada Xu\nUma Ito", "42", names=NAMES, max_turns=2)
    assert rollout.stop_reason == "max_turns"
    assert score(rollout).value == pytest.approx(1 / 3 + 1.0)  # and the rewards' own


def test_options_that_make_no_game_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 45 names in all, got 10 turns of 9"):
        AlphabetSort(turns=10, names_per_turn=9)
    with pytest.raises(ValueError, match="max_guesses: must be at least 1"):
        make_env({"name": "wordle", "max_guesses": 0})
