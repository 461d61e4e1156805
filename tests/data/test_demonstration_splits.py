"""Held-out demonstrations: whole prompts, never more than asked for, the same ones every time."""

from typing import Any

import pytest

from posttrain.data.prompt_splits import asked, check_apart, hold_out


def row(prompt: str, completion: str = "yes") -> dict[str, Any]:
    return {"prompt": prompt, "completion": completion}


def chat(*contents: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[n % 2], "content": c} for n, c in enumerate(contents)]}


@pytest.mark.parametrize("seed", range(5))
def test_no_prompt_stands_on_both_sides(seed: int) -> None:
    """Three rows a prompt: of 10 asked for, 9 are held out; both sides keep their order."""
    rows = [row(f"{n % 20}?", str(n)) for n in range(60)]
    train, test = hold_out(rows, 10, seed=seed)
    assert (len(train), len(test)) == (51, 9)
    assert not {r["prompt"] for r in train} & {r["prompt"] for r in test}
    for part in (train, test):
        numbers = [int(r["completion"]) for r in part]
        assert numbers == sorted(numbers)
    assert hold_out(rows, 10, seed=seed) == (train, test)


def test_the_seed_decides_which() -> None:
    rows = [row(f"{n}?") for n in range(100)]
    assert hold_out(rows, 5, seed=0)[1] != hold_out(rows, 5, seed=1)[1]


@pytest.mark.parametrize("seed", range(10))
def test_a_frequent_prompt_is_never_held_out(seed: int) -> None:
    """50 of 60 rows ask the same: whatever the draw, they are learned from."""
    rows = [row("often?", str(n)) for n in range(50)] + [row(f"{n}?") for n in range(10)]
    train, test = hold_out(rows, 3, seed=seed)
    assert len(test) == 3
    assert sum(r["prompt"] == "often?" for r in train) == 50


def test_something_is_left_to_learn_from() -> None:
    train, test = hold_out([row("a"), row("b")], 2, seed=0)
    assert (len(train), len(test)) == (1, 1)
    assert hold_out([row("a"), row("a")], 1, seed=0)[1] == []


def test_what_makes_two_prompts_the_same() -> None:
    """White space around it does not, nor how it is written; what was answered does not either."""
    assert asked(row("a?")) == asked(row(" a?\n", "no")) == asked(chat("a?", "yes"))
    assert asked(chat("a?", "yes", "b?", "no")) == asked(chat("a?", "no"))
    assert asked(row("a?")) != asked(row("b?"))
    system = {"messages": [{"role": "system", "content": "s"}, *chat("a?", "yes")["messages"]]}
    assert asked(system) != asked(row("a?"))


def test_a_held_out_prompt_that_is_learned_is_refused() -> None:
    train = [row("a?"), row("b?")]
    check_apart(train, [row("c?")], where="sft.test_data")
    with pytest.raises(
        ValueError, match=r"^sft\.test_data: 2 of 3 test prompts are also train prompts, .*'b\?'"
    ):
        check_apart(
            train, [row("b?"), row("b?", "no"), chat("a?", "x"), row("c?")], where="sft.test_data"
        )
