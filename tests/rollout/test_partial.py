"""Partial rollouts: what a call begins, goes on with and hands out; and how parts become one."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from small_model import small_model

from posttrain.rollout.engines.native import NativeEngine
from posttrain.rollout.engines.scripted import ScriptedEngine, characters, code_points
from posttrain.rollout.partial import PartialSource
from posttrain.rollout.prompt_order import PromptCycle
from posttrain.rollout.waiting import from_plain, to_plain
from posttrain.types import Part, Prompt, Rollout, Sampling, Score, Turn

PROMPTS = [Prompt(id=str(n), text="", tokens=(5 + n, 6, 7)[: 2 + n % 2]) for n in range(4)]


class Unjudged:
    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [Score(value=0.0) for _ in rollouts]


class Counting(NativeEngine):
    """Remembers how many sequences each call had, and how many tokens they could draw."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.calls: list[tuple[int, int]] = []
        self.drawn: list[tuple[int, int]] = []

    def generate(self, prompts: Any, sampling: Sampling, **options: Any) -> Any:
        self.calls.append((len(prompts), sampling.max_new_tokens))
        self.drawn += [(options["seed"], number) for number in options["part"].numbers]
        return super().generate(prompts, sampling, **options)


def made(engine: Any, *, partial: int, **changes: Any) -> PartialSource:
    options: dict[str, Any] = {
        "end_tokens": (1,),
        "decode": str,
        "prompts": PromptCycle(PROMPTS, seed=0),
        "sampling": Sampling(max_new_tokens=6),
        "prompts_per_step": 2,
        "group_size": 3,
        "seed": 0,
    }
    return PartialSource(engine, Unjudged(), partial=partial, **{**options, **changes})


def native() -> Counting:
    return Counting(small_model(), end_tokens=(1,), decode=str)


def test_a_call_begins_a_batch_and_no_more_than_are_asked_for() -> None:
    """Six sequences a batch, none of which ends: three batches are under way in the middle."""
    engine = Counting(small_model(), end_tokens=(), decode=str)
    source = made(engine, partial=3, end_tokens=())
    batches = list(source.steps(5))
    assert engine.calls == [
        *[(6, 6), (12, 2)],  # the first batch is due at once, two are begun
        *[(6, 4), (12, 2)],
        *[(18, 2), (12, 2), (6, 2)],
    ]
    assert [batch.position for batch in batches] == [2, 4, 6, 8, 10]
    assert [len(batch.unfinished) for batch in batches] == [2, 2, 2, 1, 0]
    assert {len(r.tokens) for batch in batches for r in batch.rollouts} == {6}
    assert {r.stop_reason for batch in batches for r in batch.rollouts} == {"length"}
    assert [[r.group for r in batch.rollouts] for batch in batches] == [[0, 0, 0, 1, 1, 1]] * 5


def test_no_part_draws_the_numbers_of_another() -> None:
    """A seed for each call, and a number for each sequence that depends on no other's length.

    In the last call but one, that of a sequence is its place in the two batches under way.
    """
    ends = range(20)  # so that some end early
    engine = Counting(small_model(), end_tokens=ends, decode=str)
    batches = list(made(engine, partial=2, end_tokens=ends).steps(4))
    assert len(set(engine.drawn)) == len(engine.drawn)
    rollouts = [*batches[2].rollouts, *batches[3].rollouts]
    going_on = [n for n, r in enumerate(rollouts) if n >= 6 or len(r.tokens) > 3]
    assert going_on != list(range(len(going_on)))  # some had ended before
    last = engine.drawn[-1][0]
    before = [number for seed, number in engine.drawn if seed == last - 1]
    assert before == going_on


@pytest.mark.parametrize("done", [1, 2, 4])
def test_a_source_goes_on_from_what_was_not_finished(done: int) -> None:
    """Through a checkpoint's JSON, to the last bit."""
    whole = list(made(native(), partial=3).steps(6))
    last = whole[done - 1]
    unfinished = from_plain(to_plain(last.unfinished, PROMPTS), PROMPTS)
    assert unfinished is not None
    resumed = made(native(), partial=3)
    resumed.unfinished = tuple(unfinished)
    resumed.num_calls = last.num_calls
    begun = (*last.unfinished, last)[-1 if not unfinished else -2]
    resumed.prompts.restore(begun.position, None)
    rest = list(resumed.steps(6 - done))
    assert [b.rollouts for b in rest] == [b.rollouts for b in whole[done:]]
    assert [b.num_calls for b in rest] == [b.num_calls for b in whole[done:]]


def test_versions_survive_a_checkpoint() -> None:
    turn = Turn(tokens=(5, 6), text="", logprobs=(-1.0, -2.0), version=3, versions=(3, 4))
    rollout = Rollout(prompt=PROMPTS[0], turns=(turn,), group=0)
    batch = replace(next(made(native(), partial=2).steps(1)), rollouts=[rollout])
    ((read,),) = [each.rollouts for each in from_plain(to_plain([batch], PROMPTS), PROMPTS) or ()]
    assert read.turns == (turn,)


class Script(ScriptedEngine):
    """Goes on with a text where it was left off, whatever the prompt."""

    def __init__(self, text: str) -> None:
        super().__init__(lambda prompt, sample: "")
        self._text = text

    def generate(self, prompts: Any, sampling: Sampling, **options: Any) -> Any:
        part: Part = options["part"]
        assert len(set(part.numbers)) == len(prompts)
        found = []
        for prompt in prompts:
            said = len(prompt.tokens)
            tokens = code_points(self._text)[said : said + sampling.max_new_tokens]
            turn = Turn(
                tokens=tuple(tokens),
                logprobs=tuple(-float(token) for token in tokens),
                text=characters(tokens),
                stop_reason="length",
                version=self.version,
            )
            found.append([Rollout(prompt=prompt, turns=(turn,), group=0)])
        self.version += 1
        return found


def test_a_stop_string_may_lie_over_two_parts() -> None:
    """It ends behind the boundary: what was sampled after it goes, and the text ends before it."""
    asked = [Prompt(id="0", text="", tokens=())]
    source = made(
        Script("abxyzcdefg"),
        partial=2,
        end_tokens=(0,),
        decode=characters,
        prompts=PromptCycle(asked, seed=0),
        sampling=Sampling(max_new_tokens=8, stop=("xyz",)),
        prompts_per_step=1,
        group_size=1,
    )
    _, second = source.steps(2)
    (turn,) = second.rollouts[0].turns
    assert characters(turn.tokens) == "abxyz"
    assert (turn.text, turn.stop_reason) == ("ab", "stop_string")
    assert turn.logprobs == tuple(-float(token) for token in turn.tokens)
    assert turn.versions == (1, 1, 1, 1, 2)


def test_an_engine_that_knows_no_parts_is_told_so() -> None:
    class Plain(ScriptedEngine):
        def generate(self, prompts: Any, sampling: Any, *, num_samples: int, seed: int) -> Any:
            raise AssertionError

    with pytest.raises(ValueError, match="has no parameter part"):
        made(Plain({}), partial=2)


def test_versions_must_be_one_for_each_token() -> None:
    with pytest.raises(ValueError, match="versions: 1 for 2 tokens"):
        Turn(tokens=(5, 6), text="", logprobs=(-1.0, -2.0), versions=(3,))
