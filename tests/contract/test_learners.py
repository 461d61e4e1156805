"""What every learner keeps: one step at a time, a state that comes back, and no other change."""

import functools
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import critic_parts
import pytest
import torch
from critic_parts import either as objective
from learner_parts import InThisProcess, local, on_ray, policy, ray_of_tests
from rank_jobs import over_two_ranks
from small_model import naive_logprobs, small_model
from transformers import AutoModelForCausalLM

from posttrain.algorithms.weights import sequence_mean
from posttrain.distributed.remote_learner import RemoteLearner
from posttrain.distributed.torchrun import TorchrunLearner
from posttrain.learn.learner import LocalLearner
from posttrain.models.save import save_policy
from posttrain.pipelines.guard import Guard, Guarded
from posttrain.protocols import Learner
from posttrain.types import Batch

ON_RAY = "two ranks on Ray"
SCRATCH = tempfile.TemporaryDirectory()


def elsewhere() -> RemoteLearner:
    """A learner over one rank, hosted as in another process."""
    own = policy()
    return RemoteLearner(
        InThisProcess,
        model=own.model,
        save=functools.partial(save_policy, own),
        scratch=Path(tempfile.mkdtemp(dir=SCRATCH.name)),
    )


LEARNERS: dict[str, Callable[[], Learner]] = {
    "plain": local,
    "with a reference": lambda: local(reference=True),
    "with a critic": lambda: local("separate", reference=True),
    "with a value head": lambda: local("shared"),
    "guarded": lambda: Guarded(local("separate", reference=True), Guard(most=9)),
    "elsewhere": elsewhere,
    "over two ranks": over_two_ranks,
}


@pytest.fixture(params=[*LEARNERS, pytest.param(ON_RAY, marks=pytest.mark.cluster)])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Learner]]:
    if request.param != ON_RAY:
        yield LEARNERS[request.param]
        return
    request.getfixturevalue("ray_here")
    made: list[RemoteLearner] = []

    def start() -> RemoteLearner:
        made.append(on_ray(tmp_path / f"scratch-{len(made)}", size=2))
        return made[-1]

    yield start
    for learner in made:
        learner.close()


@pytest.fixture(scope="module")
def ray_here() -> Iterator[None]:
    """A Ray cluster of this process."""
    with ray_of_tests():
        yield


def batch() -> Batch:
    return sequence_mean(critic_parts.batch())


def copied(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in learner.weights().items()}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    assert first.keys() == second.keys()
    return all(torch.equal(first[name], second[name]) for name in first)


def told(learner: Learner, steps: Sequence[int] = (1, 2)) -> list[object]:
    """Everything that further steps show."""
    shown: list[object] = []
    for _ in steps:
        seen = learner.infer(batch())
        shown += [seen.need("old_logprobs").tolist(), learner.step(seen, objective)]
        for name in ("values", "ref_logprobs"):
            found = getattr(seen, name)
            shown.append(None if found is None else found.tolist())
        learner.version += 1
    return [*shown, learner.version, [w.tolist() for w in copied(learner).values()]]


def test_every_learner_of_the_library_is_here() -> None:
    assert {type(make()) for make in LEARNERS.values()} == {
        *(LocalLearner, Guarded, RemoteLearner, TorchrunLearner)
    }


def test_it_infers_what_its_weights_say_and_changes_nothing(make: Callable[[], Learner]) -> None:
    learner, before = make(), batch()
    weights = copied(learner)
    seen = learner.infer(before)
    expected = naive_logprobs(small_model(), before).detach()
    chosen = before.mask
    torch.testing.assert_close(
        seen.need("old_logprobs")[chosen], expected[chosen], rtol=1e-6, atol=0
    )
    if seen.ref_logprobs is not None:  # before a step, the policy is its own reference
        assert torch.equal(seen.ref_logprobs[chosen], seen.need("old_logprobs")[chosen])
    assert torch.equal(seen.tokens, before.tokens)
    assert torch.equal(seen.mask, before.mask)
    assert same(copied(learner), weights)
    assert learner.version == 0


def test_a_step_moves_the_weights_and_says_what_it_did(make: Callable[[], Learner]) -> None:
    learner = make()
    before = copied(learner)
    result = learner.step(learner.infer(batch()), objective)
    assert math.isfinite(result.loss)
    assert result.gradient_norm > 0
    assert result.learning_rate == 1e-3
    assert not result.skipped
    assert not same(copied(learner), before)
    again = learner.step(learner.infer(batch()), objective)
    assert again.learning_rate == pytest.approx(5e-4, rel=1e-12)
    assert learner.version == 0  # it is for whoever hands the weights to an engine


def test_it_says_how_many_tokens_a_pass_has(make: Callable[[], Learner]) -> None:
    """The same before and after a step that fits, which is what a resumed run is told."""
    learner = make()
    tokens = learner.micro_batch_tokens
    assert tokens >= batch().tokens.shape[1]  # one sequence at least
    learner.step(learner.infer(batch()), objective)
    assert learner.micro_batch_tokens == tokens


def test_nothing_to_learn_changes_nothing(make: Callable[[], Learner]) -> None:
    learner = make()
    before, empty = copied(learner), batch()
    empty = learner.infer(empty).replace(valid=torch.zeros(len(empty.tokens), dtype=torch.bool))
    assert not empty.active.any()
    result = learner.step(empty, objective)
    assert (result.loss, result.gradient_norm, dict(result.metrics)) == (0.0, 0.0, {})
    assert same(copied(learner), before)


def test_what_is_not_finite_is_skipped_and_the_next_step_is_as_if_it_had_not_been(
    make: Callable[[], Learner],
) -> None:
    learner, other = make(), make()
    before, broken = copied(learner), batch()
    advantages = broken.need("advantages").clone()
    advantages[0, 1] = math.inf
    result = learner.step(learner.infer(broken).replace(advantages=advantages), objective)
    assert result.skipped
    assert same(copied(learner), before)
    assert told(learner) == told(other)


def test_its_weights_are_those_that_are_trained_and_saved(
    make: Callable[[], Learner], tmp_path: Path
) -> None:
    """The same tensors all the time, so that whoever has them sees every step."""
    learner = make()
    known = learner.weights()
    learner.step(learner.infer(batch()), objective)
    assert all(weight is known[name] for name, weight in learner.weights().items())
    learner.save(tmp_path / "model")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64)
    assert same(dict(saved.named_parameters()), dict(known))


def test_it_comes_back_to_the_bit(make: Callable[[], Learner], tmp_path: Path) -> None:
    """Through a folder and JSON text, into a learner of the same recipe."""
    learner, other = make(), make()
    told(learner)
    numbers = json.loads(json.dumps(learner.state(tmp_path)))
    other.restore(tmp_path, numbers)
    assert other.version == learner.version == 2
    assert told(other) == told(learner)


def test_a_refreshed_reference_is_the_policy_of_now(make: Callable[[], Learner]) -> None:
    learner = make()
    told(learner)
    learner.refresh_reference()
    seen = learner.infer(batch())
    assert torch.equal(seen.need("ref_logprobs")[seen.mask], seen.need("old_logprobs")[seen.mask])


def test_the_critic_alone_leaves_the_policy_as_it_is(make: Callable[[], Learner]) -> None:
    learner = make()
    before, seen = copied(learner), learner.infer(batch())
    if seen.values is None:
        with pytest.raises(ValueError, match="this learner has no critic"):
            learner.step(seen, critic_parts.value_objective)
        return
    result = learner.step(seen, critic_parts.value_objective)
    assert math.isfinite(result.loss)
    values = learner.infer(batch()).need("values")
    assert not torch.equal(values[seen.mask], seen.values[seen.mask])
    assert same(copied(learner), before)
