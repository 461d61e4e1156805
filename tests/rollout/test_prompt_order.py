"""In which order prompts are asked: by weight, by pass rate, and the same after a restart."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from posttrain.rollout.prompt_order import Curriculum, MixedPrompts, PromptCycle, PromptOrder
from posttrain.types import Prompt, Rollout, Score, Turn


def prompts(count: int, name: str = "p") -> list[Prompt]:
    return [Prompt(id=f"{name}{n}", text=f"{n} ") for n in range(count)]


def group(prompt: Prompt, rights: Sequence[bool | None]) -> list[Rollout]:
    """Rollouts that are right, wrong or broken."""
    turn = Turn(tokens=(1,), logprobs=(0.0,), text="", version=0)
    states = {True: Score(value=1.0), False: Score(value=0.0)}
    broken = Score(value=0.0, state="invalid", reason="broken")
    return [
        Rollout(prompt=prompt, turns=(turn,), group=0, score=broken if r is None else states[r])
        for r in rights
    ]


def passed(rollout: Rollout) -> bool:
    return rollout.score is not None and rollout.score.value == 1.0


def curriculum(count: int, **changes: Any) -> Curriculum:
    options = {"low": 0.2, "high": 0.8, "outside": 0.1, "seed": 0, "passed": passed}
    return Curriculum(prompts(count), **(options | changes))


def asked(order: PromptOrder, steps: int, *, size: int = 4) -> list[str]:
    """The ids of some steps, where prompt n is answered rightly n times of nine."""
    found: list[str] = []
    for _ in range(steps):
        taken = order.take(size)
        found += [prompt.id for prompt in taken]
        counts = [int(prompt.id[1:]) for prompt in taken]
        order.observe(
            [group(p, [n < c for n in range(9)]) for p, c in zip(taken, counts, strict=True)]
        )
    return found


def test_prompts_in_the_band_are_drawn_in_the_proportion_of_the_weights() -> None:
    """Prompts 0 and 1 of nine in ten are outside (rates 0, 1/9), and so are 8 and 9 (8/9, 1).

    One at a time, once all rates are known: weights 6 × 1 and 4 × 0.1, so that a prompt inside is
    drawn with probability 1 / 6.4 = 0.156, one outside with 0.1 / 6.4 = 0.0156.
    """
    order = curriculum(10)
    asked(order, 60, size=10)  # all are known
    assert order.rates == pytest.approx({n: min(n, 9) / 9 for n in range(10)})
    counts = Counter(asked(order, 4000, size=1))
    shares = [counts[f"p{n}"] / 4000 for n in range(10)]
    assert shares[2:8] == pytest.approx([1 / 6.4] * 6, abs=0.03)
    assert [shares[n] for n in (0, 1, 8, 9)] == pytest.approx([0.1 / 6.4] * 4, abs=0.01)


def test_rates_follow_the_policy_and_broken_scores_do_not_count() -> None:
    order = curriculum(1)
    for rights, rate in (
        ((True, False), 0.5),
        ((True, True), 0.75),  # halfway from 0.5 to 1
        ((None, None), 0.75),
        ((None, False), 0.375),
    ):
        (prompt,) = order.take(1)
        order.observe([group(prompt, rights)])
        assert order.rates == {0: rate}


def test_a_batch_repeats_no_prompt_until_all_were_asked() -> None:
    drawn = [prompt.id for prompt in curriculum(5).take(12)]
    assert [len(set(drawn[begin : begin + 5])) for begin in (0, 5)] == [5, 5]


def test_a_mixture_keeps_its_proportion_at_every_moment() -> None:
    parts = {name: PromptCycle(prompts(5, name), seed=0) for name in "abc"}
    order = MixedPrompts(parts, {"a": 5.0, "b": 3.0, "c": 2.0})
    names = [prompt.id[0] for _ in range(25) for prompt in order.take(4)]
    for length in range(1, 101):
        counts = Counter(names[:length])
        for name, share in {"a": 0.5, "b": 0.3, "c": 0.2}.items():
            assert abs(counts[name] - share * length) < 1, (name, length)
    seen = Counter(prompt.id for prompt in order.take(100))
    assert max(seen.values()) - min(seen[f"a{n}"] for n in range(5)) <= 1  # each part in turn


def mixed() -> MixedPrompts:
    inner = Curriculum(prompts(10), low=0.2, high=0.8, outside=0.1, seed=1, passed=passed)
    return MixedPrompts(
        {"p": inner, "q": PromptCycle(prompts(10, "q"), seed=2)}, {"p": 2.0, "q": 1.0}
    )


@pytest.mark.parametrize(
    "make", [lambda: PromptCycle(prompts(10), seed=0), lambda: curriculum(10), mixed]
)
@pytest.mark.parametrize("cut", [1, 3, 7])
def test_it_goes_on_where_it_was(make: Callable[[], PromptOrder], cut: int) -> None:
    """From a state that was kept while the source had run ahead, through JSON."""
    order = make()
    asked(order, cut)
    position = order.position
    rest = asked(order, 6)  # it runs ahead before the state is written
    state = json.loads(json.dumps(order.state(position)))
    again = make()
    again.restore(position, state)
    assert again.position == position == cut * 4
    assert asked(again, 6) == rest


def test_what_was_seen_of_other_prompts_means_nothing() -> None:
    """Where the prompts were allowed to change, there may even be fewer of them."""
    order = curriculum(10)
    asked(order, 5)
    other = curriculum(3)
    other.restore(20, json.loads(json.dumps(order.state(20))))
    assert (other.position, other.rates) == (20, {})
    assert len(other.take(2)) == 2


def test_no_prompts() -> None:
    with pytest.raises(ValueError, match="the training split is empty"):
        curriculum(0)
