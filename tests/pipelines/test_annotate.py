"""Preferences from scores: who wins, what gives no preference, and an annotator who errs."""

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from posttrain.pipelines.annotate import Annotated, annotate
from posttrain.types import Prompt, Rollout, Score, Turn

ASKED = Prompt(id="0", text="2+3=", tokens=(5, 6))


def answers(*pairs: tuple[str, float | None], prompt: Prompt = ASKED) -> list[Rollout]:
    """Completions of one prompt with their scores; None is a broken grader that left a 99."""
    return [
        Rollout(
            prompt=prompt,
            turns=(Turn(tokens=(), logprobs=(), text=text, stop_reason="stop", version=0),),
            group=0,
            score=Score(value=99.0, state="crashed") if score is None else Score(value=score),
        )
        for text, score in pairs
    ]


def annotated(
    rollouts: Sequence[Rollout], *, error_rate: float = 0.0, ranked: bool = False, seed: int = 0
) -> Annotated:
    return annotate(rollouts, error_rate=error_rate, ranked=ranked, generator=random.Random(seed))


def orders(found: Annotated) -> list[tuple[str, ...]]:
    return [ranked.completions for ranked in found.sets]


def test_the_higher_score_wins_wherever_it_stands() -> None:
    """First with second, third with fourth; the fifth has no one to be compared with."""
    found = annotated(answers(("a", 1.0), ("b", 0.5), ("c", -2.0), ("d", -1.0), ("e", 9.0)))
    assert orders(found) == [("a", "b"), ("d", "c")]
    assert (found.ties, found.errors) == (0, 0)
    assert all(ranked.prompt == "2+3=" and ranked.margin == 0 for ranked in found.sets)


def test_a_chat_is_kept_as_messages() -> None:
    """The prompt of the preference is what the policy was asked, in the form it was asked."""
    messages = ({"role": "user", "content": "2+3="},)
    chat = replace(ASKED, text="<|user|>2+3=", messages=messages)
    (ranked,) = annotated(answers(("5", 1.0), ("6", 0.0), prompt=chat)).sets
    assert (ranked.prompt, ranked.messages) == ("", messages)


@pytest.mark.parametrize("error_rate", [0.0, 1.0])
@pytest.mark.parametrize(
    "pair",
    [
        (("5", 0.5), ("6", 0.5)),
        (("5", 1.0), ("5", 0.0)),
        (("5", 1.0), (" 5\n", 0.0)),
        (("", 1.0), ("5", 0.0)),
        (("5", 1.0), (" \n", 0.0)),
        (("5", None), ("6", 0.0)),
        (("5", 0.0), ("6", None)),
    ],
    ids=["scores", "texts", "white space", "empty", "blank", "broken first", "broken second"],
)
def test_what_gives_no_preference(
    pair: tuple[tuple[str, float | None], ...], error_rate: float
) -> None:
    """Equal scores, equal or empty texts, broken scores: a tie, and never an error."""
    for ranked in (False, True):
        found = annotated(answers(*pair), error_rate=error_rate, ranked=ranked)
        assert (list(found.sets), found.ties, found.errors) == ([], 1, 0)


def test_a_broken_score_leaves_its_partner_to_the_next() -> None:
    """The completions that can be compared are, and what is missing is counted."""
    found = annotated(answers(("a", 1.0), ("b", None), ("c", 2.0), ("d", 0.0)))
    assert orders(found) == [("c", "a")]
    assert (found.ties, found.broken) == (1, 1)


def test_an_unscored_completion_gives_no_preference() -> None:
    first, second = answers(("a", 1.0), ("b", 0.0))
    assert orders(annotated([replace(first, score=None), second])) == []


@pytest.mark.parametrize(("error_rate", "expected"), [(0.0, ("a", "b")), (1.0, ("b", "a"))])
def test_an_annotator_who_never_or_always_errs(
    error_rate: float, expected: tuple[str, ...]
) -> None:
    """At rate 1 every comparison goes the wrong way, and every one is counted."""
    pairs = answers(*[("a", 1.0), ("b", 0.0)] * 200)
    found = annotated(pairs, error_rate=error_rate)
    assert orders(found) == [expected] * 200
    assert found.errors == 200 * error_rate


def test_one_in_ten_comparisons_goes_wrong() -> None:
    """Within four deviations of a binomial, and the count is that of the wrong ones."""
    number, rate = 20_000, 0.1
    found = annotated(answers(*[("a", 1.0), ("b", 0.0)] * number), error_rate=rate)
    wrong = orders(found).count(("b", "a"))
    assert wrong == found.errors
    assert abs(wrong - number * rate) < 4 * math.sqrt(number * rate * (1 - rate))


def test_a_ranking_is_best_first() -> None:
    """All in one set; of equal scores one stays, and of equal texts the one that scored best."""
    given = answers(
        ("c", 1.0), ("a", 3.0), ("", 9.0), ("b", 2.0), (" a", 0.0), ("z", None), ("b2", 2.0)
    )
    found = annotated(given, ranked=True)
    (order,) = orders(found)
    assert order in [("a", "b", "c"), ("a", "b2", "c")]
    assert (found.ties, found.errors) == (4, 0)


def test_a_ranking_of_one_is_none() -> None:
    found = annotated(answers(("a", 1.0), ("b", 1.0), ("c", None)), ranked=True, error_rate=1.0)
    assert (orders(found), found.errors) == ([], 0)


def test_errors_in_a_ranking_swap_neighbours() -> None:
    """At rate 1 they go wrong two by two; what was swapped down is not swapped on."""
    letters = [(letter, -float(place)) for place, letter in enumerate("abcde")]
    found = annotated(answers(*letters), ranked=True, error_rate=1.0)
    assert orders(found) == [("b", "a", "d", "c", "e")]
    assert found.errors == 2


def test_a_ranking_errs_at_its_rate() -> None:
    """The swaps are those that are counted; no completion moves by more than one place."""
    letters, number, rate = "abcdef", 4_000, 0.1
    generator = random.Random(3)
    found = Annotated(sets=[], ties=0, errors=0)
    given = answers(*[(letter, -float(place)) for place, letter in enumerate(letters)])
    for _ in range(number):
        found += annotate(given, error_rate=rate, ranked=True, generator=generator)
    swaps = comparisons = 0
    for order in orders(found):
        places = [letters.index(letter) for letter in order]
        assert max(abs(place - index) for index, place in enumerate(places)) <= 1
        wrong = sum(first > second for first, second in itertools.pairwise(places))
        swaps += wrong
        # A swap takes two places at once, and at the end of the set there is no next neighbour.
        comparisons += len(letters) - 1 - wrong + (places[-1] != len(letters) - 1)
    assert swaps == found.errors
    deviation = math.sqrt(comparisons * rate * (1 - rate))
    assert abs(swaps - comparisons * rate) < 4 * deviation


@pytest.mark.parametrize("ranked", [False, True])
def test_the_generator_decides(ranked: bool) -> None:
    """The same seed errs at the same places; another one, and a second call, elsewhere."""
    given = answers(*[(str(number), float(number)) for number in range(60)])
    first = annotated(given, error_rate=0.5, ranked=ranked, seed=1)
    assert first == annotated(given, error_rate=0.5, ranked=ranked, seed=1)
    assert first != annotated(given, error_rate=0.5, ranked=ranked, seed=2)
    generator = random.Random(1)
    once, twice = (
        annotate(given, error_rate=0.5, ranked=ranked, generator=generator) for _ in range(2)
    )
    assert (once, twice != once) == (first, True)


def test_findings_add_up() -> None:
    """Sets in order, counts summed."""
    one = annotated(answers(("a", 1.0), ("b", 0.0)), error_rate=1.0)
    other = annotated(answers(("c", 1.0), ("d", 0.0), ("e", 1.0), ("f", 1.0)))
    both = one + other
    assert orders(both) == [("b", "a"), ("c", "d")]
    assert (both.ties, both.errors) == (1, 1)
