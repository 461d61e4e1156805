"""What every sync keeps: behind it the engine says what the learner's weights say, as that version.

Of every engine: on the learner's own weights, and on weights of its own where it has any.
"""

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import vllm_engines
from distributed.replicas import pool_of
from models.families import build
from rollout.cases import END, drawn, largest_error, naive_logprobs, ragged, spell
from small_model import small_model

from posttrain.learn.learner import LocalLearner
from posttrain.learn.optim import adamw
from posttrain.pipelines.clock import Clock
from posttrain.protocols import Engine, Sync
from posttrain.rollout.engines import NativeEngine, ScriptedEngine, TransformersEngine
from posttrain.rollout.partial import PartialSource
from posttrain.rollout.prompt_order import PromptCycle
from posttrain.rollout.run_ahead import RunAhead
from posttrain.types import Collected, Rollout, Sampling, Score

REAL = {"native": NativeEngine, "transformers": TransformersEngine}
PROMPTS = ragged(3, 5)
SAMPLING = Sampling(max_new_tokens=6)


def learner_of(model: torch.nn.Module) -> LocalLearner:
    return LocalLearner(model, adamw(model, learning_rate=1e-3), save=lambda folder: None)


def moved(model: torch.nn.Module, by: float) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(by)


@contextlib.contextmanager
def plain(sync: Sync) -> Iterator[Sync]:
    yield sync


@contextlib.contextmanager
def timed(sync: Sync) -> Iterator[Sync]:
    yield Clock().sync(sync)


@contextlib.contextmanager
def ahead(sync: Sync) -> Iterator[Sync]:
    with RunAhead(iter([Collected(rollouts=[])] * 9), sync, max_lag=1) as running:
        next(running)
        yield running.sync


WRAPPERS = {"plain": plain, "timed": timed, "ahead": ahead}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(
    ("name", "own"), [*itertools.product(REAL, [False, True]), ("pool of two", True)]
)
def test_behind_it_the_engine_samples_from_the_learners_weights(
    name: str, own: bool, wrapper: str
) -> None:
    """As often as they change; with weights of its own, not a moment before."""
    model = small_model()
    sampled = copy.deepcopy(model) if own else model
    kind: Any = REAL.get(name, partial(pool_of, NativeEngine))
    engine = kind(sampled, end_tokens=(END,), decode=spell)
    _samples_from_the_weights(engine, model, own=own, wrapper=wrapper)


@pytest.mark.vllm
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_behind_it_a_vllm_server_samples_from_the_learners_weights(wrapper: str) -> None:
    """It computes in float32: its log-probs are as near as those sums allow."""
    model = build("llama", wide=True)
    engine = vllm_engines.engine_of(model, decode=spell)
    _samples_from_the_weights(engine, model, own=True, wrapper=wrapper, error=1e-4)


def _samples_from_the_weights(
    engine: Any, model: Any, *, own: bool, wrapper: str, error: float = 5e-6
) -> None:
    make: Callable[[Sync], contextlib.AbstractContextManager[Sync]] = WRAPPERS[wrapper]
    with make(engine.sync(learner_of(model))) as sync:
        for version, by in ((1, 1.3), (2, 0.5)):
            before = engine.generate(PROMPTS, SAMPLING, num_samples=2, seed=version)
            moved(model, by)
            if own:
                again = engine.generate(PROMPTS, SAMPLING, num_samples=2, seed=version)
                assert drawn(again) == drawn(before)
            sync(version)
            after = engine.generate(PROMPTS, SAMPLING, num_samples=2, seed=version)
            assert engine.version == version
            assert {rollout.version for group in after for rollout in group} == {version}
            assert largest_error(model, PROMPTS, answers=after, sampling=SAMPLING) < error
            assert largest_error(model, PROMPTS, answers=before, sampling=SAMPLING) > 1e-2
    engine.close()


class Unjudged:
    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [Score(value=0.0) for _ in rollouts]


@pytest.mark.parametrize("slots", [True, False])
@pytest.mark.parametrize("name", [*REAL, "pool of two"])
def test_a_completion_goes_on_under_new_weights(name: str, slots: bool) -> None:
    """Where new weights come in the middle of it, each token is of the policy of its version."""
    model = small_model()
    kind: Any = REAL.get(name, partial(pool_of, NativeEngine))
    options = {} if name == "transformers" else {"slots": slots}
    engine = kind(copy.deepcopy(model), end_tokens=(END,), decode=spell, **options)
    _goes_on_under_new_weights(engine, model)


@pytest.mark.vllm
def test_a_completion_goes_on_under_new_weights_of_a_vllm_server() -> None:
    """Its prefix cache is emptied with every update: what was sampled before is read again."""
    model = build("llama", wide=True)
    engine = vllm_engines.engine_of(model, decode=spell)
    _goes_on_under_new_weights(engine, model, error=1e-4)


def _goes_on_under_new_weights(engine: Any, model: Any, *, error: float = 5e-6) -> None:
    sampling = Sampling(max_new_tokens=9, temperature=0.8)
    source = PartialSource(
        engine,
        Unjudged(),
        partial=3,
        end_tokens=(END,),
        decode=spell,
        prompts=PromptCycle(PROMPTS, seed=0),
        sampling=sampling,
        prompts_per_step=2,
        group_size=3,
        seed=0,
    )
    sync, kept, mixed = engine.sync(learner_of(model)), [copy.deepcopy(model)], 0
    for number, batch in enumerate(source.steps(5)):
        for rollout in batch.rollouts:
            turn = rollout.turns[0]
            begun = max(0, number - 2)
            assert turn.token_versions == tuple(
                min(number, begun + place // 3) for place in range(len(turn.tokens))
            )
            assert turn.text == spell([t for t in turn.tokens if t != END])
            known = [
                naive_logprobs(each, rollout.prompt, completion=rollout, sampling=sampling)
                for each in kept
            ]
            for place, version in enumerate(turn.token_versions):
                assert abs(known[version][place] - rollout.logprobs[place]) < error
            mixed += abs(float(known[begun][-1]) - rollout.logprobs[-1]) > 1e-2
        moved(model, 1.3 if number % 2 else 0.7)
        kept.append(copy.deepcopy(model))
        sync(number + 1)
    assert mixed > 5  # the weights of the first token would not explain the last one
    engine.close()


def test_an_engine_without_weights_carries_the_version_alone() -> None:
    engine: Engine = ScriptedEngine(lambda prompt, sample: "x")
    engine.sync(learner_of(small_model()))(7)
    ((rollout,),) = engine.generate(PROMPTS[:1], SAMPLING, num_samples=1, seed=0)
    assert (engine.version, rollout.version) == (7, 7)


@pytest.mark.parametrize("name", REAL)
def test_weights_that_are_shared_in_part_arrive_whole(name: str) -> None:
    """An engine on the learner's own embedding, and on a copy of all else."""
    model = small_model()
    sampled = copy.deepcopy(model)
    sampled.set_input_embeddings(model.get_input_embeddings())
    assert sampled.get_input_embeddings().weight is model.get_input_embeddings().weight
    engine = REAL[name](sampled, end_tokens=(END,), decode=spell)
    sync = engine.sync(learner_of(model))
    for version, by in ((1, 1.3), (2, 0.5)):
        moved(model, by)
        sync(version)
        answers = engine.generate(PROMPTS, SAMPLING, num_samples=2, seed=version)
        assert {rollout.version for group in answers for rollout in group} == {version}
        assert largest_error(model, PROMPTS, answers=answers, sampling=SAMPLING) < 5e-6


@pytest.mark.parametrize("name", REAL)
def test_weights_of_another_model_are_refused(name: str) -> None:
    model = small_model()
    engine = REAL[name](copy.deepcopy(model), end_tokens=(END,), decode=spell)
    with pytest.raises(ValueError, match="not a copy of the one that is trained"):
        engine.sync(learner_of(model.get_decoder()))
