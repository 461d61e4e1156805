"""Preferences held out: no prompt on both sides, whether they are split or come in two files."""

import math

import pytest

from posttrain.data.preference_sets import Ranked
from posttrain.data.prompt_splits import check_apart, split_by_prompt


def ranked(*completions, prompt="p"):
    return Ranked(prompt=prompt, completions=completions)


def chat(*contents, role="user"):
    messages = tuple({"role": role, "content": content} for content in contents)
    return Ranked(prompt="", messages=messages, completions=("a", "b"))


def many():
    """Prompts "0" to "19", of which number n has 1 + n mod 3 sets, and a chat that reads "0"."""
    texts = [ranked("a", f"b{i}", prompt=str(n)) for i in range(3) for n in range(20) if i <= n % 3]
    chat = ({"role": "user", "content": "0"},)
    return [*texts, *(Ranked(prompt="", messages=chat, completions=("a", c)) for c in "bc")]


@pytest.mark.parametrize(("share", "num_test"), [(0.22, 5), (1 / 3, 7), (0.001, 1), (0.999, 20)])
def test_no_prompt_stands_in_both_parts(share, num_test):
    """21 prompts: the share of them, rounded, and at least one on each side."""
    sets, splits = many(), set()
    for seed in range(5):
        train, test = split_by_prompt(sets, test_share=share, seed=seed)
        prompts = [{(s.prompt, str(s.messages)) for s in part} for part in (train, test)]
        assert not prompts[0] & prompts[1]
        assert (len(prompts[0]), len(prompts[1])) == (21 - num_test, num_test)
        # Every set is in one part, and each part keeps the order.
        order = [sets.index(one) for one in train], [sets.index(one) for one in test]
        assert sorted(order[0] + order[1]) == list(range(len(sets)))
        assert (sorted(order[0]), sorted(order[1])) == order
        assert split_by_prompt(sets, test_share=share, seed=seed) == (train, test)
        splits.add(tuple(order[1]))
    assert len(splits) > 1


def test_faults_of_a_split():
    for share in (0.0, 1.0, -0.1, 2, math.nan):
        with pytest.raises(ValueError, match="test_share: must be above 0 and below 1"):
            split_by_prompt(many(), test_share=share, seed=0)
    for sets in ([], [ranked("a", "b"), ranked("a", "c")]):
        with pytest.raises(ValueError, match=r"at least 2 different prompts, .*; add"):
            split_by_prompt(sets, test_share=0.5, seed=0)


def test_prompts_that_differ_in_white_space_stay_together():
    sets = [ranked("a", "b", prompt=text) for n in range(9) for text in (f"{n}?", f" {n}?\n")]
    train, test = split_by_prompt(sets, test_share=0.3, seed=0)
    assert (len(train), len(test)) == (12, 6)
    check_apart(train, test, where="data")


def test_a_test_prompt_that_is_a_train_prompt_is_named():
    """The first of them, how many, of how many prompts; white space around them aside."""
    train = [ranked("a", "b", prompt=text) for text in ("1?", "2?", "3?")]
    test = [ranked("c", "d", prompt=text) for text in ("9?", " 3?\n", "3?", "1?", "1?", "8?")]
    message = r"^data: 2 of 4 test prompts are also train prompts, the first is ' 3\?\\n'; remove"
    with pytest.raises(ValueError, match=message):
        check_apart(train, test, where="data")
    check_apart(train, [test[0], test[-1]], where="data")


def test_chats_are_compared_message_by_message():
    train = [chat("1?", "2?"), ranked("a", "b", prompt="3?")]
    check_apart(train, [chat("2?"), chat("1?2?"), chat("3?"), chat("1?", "2?", "3?")], where="data")
    with pytest.raises(ValueError, match=r"1 of 1 test prompts .*the first is '2\? '"):
        check_apart(train, [chat("1?", "2? ")], where="data")
