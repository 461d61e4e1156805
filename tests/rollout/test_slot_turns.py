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

from posttrain.fast import slot_turns
from posttrain.rollout.engines import NativeEngine
from posttrain.types import Rollout, Sampling, Turn

PROMPTS = ragged(4, 9, 1, 9)
SHORT = Sampling(max_new_tokens=5, temperature=1.3)
ENDS = (END, 7, 11)


def engine(model: Any, **options: Any) -> NativeEngine:
    return NativeEngine(model, **{"end_tokens": ENDS, "decode": spell, "rounds": False, **options})


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


def test_a_sequence_that_goes_on_reads_only_what_is_new() -> None:
    """The token drawn last and the reply, behind what is in the cache."""
    model, read = build("llama"), []
    one = engine(model, end_tokens=())
    reply = Turn(tokens=(2, 5, 9), text="")

    def twice(rollout: Rollout, number: int) -> Turn | None:
        return None if len(rollout.turns) > 3 else reply

    def note(_: Any, __: Any, inputs: dict[str, Any]) -> None:
        if inputs["input_ids"].shape[1] > 1:
            read.append(tuple(inputs["input_ids"].shape))

    one.generate(PROMPTS[1:2], SHORT, num_samples=1, seed=0)
    model.get_decoder().register_forward_pre_hook(note, with_kwargs=True)
    one.generate(PROMPTS[1:2], SHORT, num_samples=2, seed=0, reply=twice)
    assert read == [(1, 9)] + [(1, 1 + 3)] * 4  # the prompt once; two replies of two sequences


def test_others_go_on_while_one_waits_for_its_reply() -> None:
    """With fewer slots than sequences too: its slot is theirs, and it is read again."""
    model = build("llama")
    for most in (None, 1, 2):
        late: Future[Turn | None] = Future()
        left = [2 * len(PROMPTS) - 1]

        def reply(
            rollout: Rollout, number: int, late: Any = late, left: Any = left
        ) -> Turn | Future[Turn | None] | None:
            if number == 0 and len(rollout.turns) == 1:
                return late
            if len(rollout.turns) == 1:
                return Turn(tokens=(2, number % 7), text="")
            left[0] -= 1
            if not left[0]:  # were it waited for, this would never be asked
                late.set_result(Turn(tokens=(2, 0), text=""))
            return None

        found = engine(model, max_sequences=most).generate(
            PROMPTS, SHORT, num_samples=2, seed=0, reply=reply
        )
        rounds = engine(model, slots=False).generate(
            PROMPTS,
            SHORT,
            num_samples=2,
            seed=0,
            reply=lambda r, n: Turn(tokens=(2, n % 7), text="") if len(r.turns) < 2 else None,
        )
        assert drawn(found) == drawn(rounds)


def test_fewer_slots_where_longer_ones_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences that lose their slot when others grow draw the same."""
    model = build("llama")
    long = Turn(tokens=(2, 5, 9) * 6, text="")

    def twice(rollout: Rollout, number: int) -> Turn | None:
        return None if len(rollout.turns) > 3 else long

    asked = {"num_samples": 3, "seed": 0, "reply": twice}
    expected = engine(model, slots=False).generate(PROMPTS, SHORT, **asked)
    one = engine(model)
    monkeypatch.setattr(slot_turns, "memory_budget", lambda device: 0)
    assert drawn(one.generate(PROMPTS, SHORT, **asked)) == drawn(expected)
    assert one._decoder.slots is not None
    assert one._decoder.slots.capacity.num_slots < 3 * len(PROMPTS)


def test_stop_strings_end_a_turn_and_what_was_drawn_behind_them_is_not_read() -> None:
    model = build("llama")
    stopped = Sampling(max_new_tokens=12, temperature=1.3, stop=("1 ", "5 2"))
    asked = {"num_samples": 5, "seed": 2, "reply": several}
    found, rounds = (
        engine(model, slots=slots, end_tokens=()).generate(PROMPTS, stopped, **asked)
        for slots in (True, False)
    )
    assert drawn(found) == drawn(rounds)
    reasons = {turn.stop_reason for g in found for r in g for turn in r.turns if turn.sampled}
    assert "stop_string" in reasons


def test_an_environment_computes_as_if_there_were_no_engine() -> None:
    model, seen = build("llama", dtype=torch.float32), []

    def reply(rollout: Rollout, number: int) -> None:
        seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))

    one = engine(model, compute=torch.bfloat16)
    one.generate(PROMPTS, SHORT, num_samples=1, seed=0, reply=reply)
    assert seen == [(True, False)] * len(PROMPTS)
