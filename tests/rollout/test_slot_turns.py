"""Several turns in slots: when a reply comes changes nothing in what a sequence says."""

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from models.families import build
from rollout.cases import END, drawn, ragged, spell, whole_logits

from posttrain.rollout.engines import NativeEngine
from posttrain.types import Rollout, Sampling, Turn

PROMPTS = ragged(4, 9, 1, 9)
SHORT = Sampling(max_new_tokens=5, temperature=1.3)
ENDS = (END, 7, 11)


def engine(model: Any, **options: Any) -> NativeEngine:
    return NativeEngine(model, **{"end_tokens": ENDS, "decode": spell, **options})


def several(rollout: Rollout, number: int) -> Turn | None:
    """Up to four replies of up to seven tokens; how many depends on the sequence."""
    turns = len(rollout.turns) // 2
    if turns >= number % 5:
        return None
    said = random.Random(repr((rollout.tokens, number)))
    length = said.randrange(1, 8)
    return Turn(tokens=tuple(said.randrange(23) for _ in range(length)), text="")


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as made:
        yield made


def delayed(
    pool: ThreadPoolExecutor, seed: int
) -> Callable[[Rollout, int], Turn | Future[Turn | None] | None]:
    """The same replies, some at once and some later, out of order."""
    drawn = random.Random(seed)

    def reply(rollout: Rollout, number: int) -> Turn | Future[Turn | None] | None:
        pause = drawn.choice([0.0, 0.0, 0.002, 0.02])
        if drawn.random() < 0.3:
            return several(rollout, number)

        def think() -> Turn | None:
            threading.Event().wait(pause)
            return several(rollout, number)

        return pool.submit(think)

    return reply


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "mistral", "gemma3"])
def test_the_tokens_of_the_rounds_and_the_logprobs_of_the_model(family: str) -> None:
    """A sequence that goes on in its slot reads what is new, behind what it has read."""
    model = build(family)
    rounds = engine(model, slots=False).generate(
        PROMPTS, SHORT, num_samples=5, seed=3, reply=several
    )
    for most in (None, 3):
        answers = engine(model, max_sequences=most).generate(
            PROMPTS, SHORT, num_samples=5, seed=3, reply=several
        )
        assert drawn(answers) == drawn(rounds)
        for prompt, rollouts in zip(PROMPTS, answers, strict=True):
            for rollout in rollouts:
                chosen = torch.tensor(rollout.tokens)[:, None]
                logits = whole_logits(model, prompt, rollout) / SHORT.temperature
                naive = logits.log_softmax(-1).gather(1, chosen)[:, 0]
                mask = torch.tensor(rollout.mask)
                found = torch.tensor(rollout.logprobs, dtype=torch.float64)
                torch.testing.assert_close(found[mask], naive[mask], rtol=0, atol=1e-9)


@pytest.mark.parametrize("most", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_nothing_depends_on_when_replies_come(
    pool: ThreadPoolExecutor, family: str, dtype: torch.dtype, most: int | None
) -> None:
    """Tokens and log-probs, to the bit, with enough slots and with few."""
    model = build(family, dtype=dtype)

    def later(rollout: Rollout, number: int) -> Future[Turn | None]:
        return pool.submit(several, rollout, number)

    asked = {"num_samples": 6, "seed": 3}
    expected = engine(model, max_sequences=most).generate(PROMPTS, SHORT, **asked, reply=later)
    for seed in range(3):
        one = engine(model, max_sequences=most)
        found = one.generate(PROMPTS, SHORT, **asked, reply=slow(pool, seed))
        assert found == expected


def slow(pool: ThreadPoolExecutor, seed: int) -> Callable[[Rollout, int], Future[Turn | None]]:
    """The same replies, each after a pause of its own."""
    drawn = random.Random(seed)

    def reply(rollout: Rollout, number: int) -> Future[Turn | None]:
        pause = drawn.choice([0.0, 0.001, 0.005, 0.03])

        def think() -> Turn | None:
            threading.Event().wait(pause)
            return several(rollout, number)

        return pool.submit(think)

    return reply


def test_at_once_or_later_with_a_slot_for_each(pool: ThreadPoolExecutor) -> None:
    model = build("llama", dtype=torch.float32)
    asked = {"num_samples": 6, "seed": 3}
    expected = engine(model).generate(PROMPTS, SHORT, **asked, reply=several)
    for seed in range(3):
        found = engine(model).generate(PROMPTS, SHORT, **asked, reply=delayed(pool, seed))
        assert found == expected
