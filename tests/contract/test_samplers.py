"""What every sampler keeps: each prompt in its group, each rollout scored, each seed repeatable."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from rollout.cases import END, ragged, spell
from small_model import small_model

from posttrain.envs import ScriptedEnv
from posttrain.protocols import Sampler
from posttrain.rollout.collect import collect_scored
from posttrain.rollout.engines import NativeEngine, ScriptedEngine, TransformersEngine
from posttrain.types import Rollout, Sampling, Score

PROMPTS = ragged(3, 5, 1)
SAMPLING = Sampling(max_new_tokens=4)


class Lengths:
    """The score is the number of the policy's tokens; every third is broken."""

    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [
            Score(value=0.0, state="invalid", reason="every third")
            if number % 3 == 2
            else Score(value=float(sum(rollout.mask)))
            for number, rollout in enumerate(rollouts)
        ]


def native() -> Any:
    return NativeEngine(small_model(), end_tokens=(END,), decode=spell)


ENGINES: dict[str, Any] = {
    "native": native,
    "transformers": lambda: TransformersEngine(small_model(), end_tokens=(END,), decode=spell),
    "scripted": lambda: ScriptedEngine(lambda prompt, sample: f"{sample}"),
}
SAMPLERS: dict[str, Any] = {
    **{name: (make, {}) for name, make in ENGINES.items()},
    "greedy": (native, {"greedy": True}),
    "two turns": (
        native,
        {"env": ScriptedEnv(replies=[[5, 6]]), "encode": list},
    ),
}


@pytest.fixture(params=SAMPLERS)
def sampler(request: pytest.FixtureRequest) -> Sampler:
    make, options = SAMPLERS[request.param]
    return partial(collect_scored, engine=make(), scorer=Lengths(), **options)


def test_every_prompt_has_its_rollouts_together_in_its_own_group(sampler: Sampler) -> None:
    found = sampler(PROMPTS, SAMPLING, num_samples=3, seed=1)
    assert [rollout.group for rollout in found.rollouts] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert all(rollout.prompt is PROMPTS[rollout.group] for rollout in found.rollouts)
    for rollout in found.rollouts:
        assert len(rollout.tokens) == len(rollout.mask) == len(rollout.logprobs)
        assert rollout.turns[0].sampled
        assert rollout.turns[-1].sampled


def test_every_rollout_has_its_own_score_and_broken_ones_stay_broken(sampler: Sampler) -> None:
    found = sampler(PROMPTS, SAMPLING, num_samples=3, seed=1)
    for number, rollout in enumerate(found.rollouts):
        assert rollout.score is not None
        if number % 3 == 2:
            assert (rollout.score.state, rollout.score.reason) == ("invalid", "every third")
        else:
            assert rollout.score.value == sum(rollout.mask)


def test_a_seed_repeats_and_the_work_is_timed(sampler: Sampler) -> None:
    first, again = (sampler(PROMPTS, SAMPLING, num_samples=2, seed=4) for _ in range(2))
    assert first.rollouts == again.rollouts
    assert first.seconds.keys() == {"rollout", "reward"}
    assert min(first.seconds.values()) >= 0


def test_nothing_is_asked_nothing_is_answered(sampler: Sampler) -> None:
    assert sampler([], SAMPLING, num_samples=2, seed=0).rollouts == []
