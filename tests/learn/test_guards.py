"""The learner's guards: a gradient that is no number changes nothing; no memory, smaller parts."""

import copy
import functools
import math
import warnings
import weakref
from collections.abc import Callable

import pytest
import torch
from critic_parts import ROWS
from small_model import parameters, small_model
from torch import nn

from posttrain.algorithms.losses.policy import clipped
from posttrain.algorithms.weights import sequence_mean
from posttrain.data.collate import collate_demonstrations
from posttrain.fast.score import score_tokens
from posttrain.learn.learner import LocalLearner
from posttrain.learn.optim import adamw
from posttrain.learn.trained import Trained
from posttrain.models import gpu_memory
from posttrain.models.frozen import Reference
from posttrain.protocols import Objective, Outputs
from posttrain.types import Batch, Terms


def batch() -> Batch:
    """Three sequences of 6, 3 and 4 tokens with advantages."""
    made = collate_demonstrations(ROWS, pad_token=0)
    advantages = torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64) * made.mask
    return made.replace(advantages=advantages, rewards=advantages[:, 0])


@Objective
def policy_loss(outputs: Outputs, part: Batch) -> Terms:
    return clipped(outputs.logprobs, part)


def learner(model: nn.Module, **options: object) -> LocalLearner:
    return LocalLearner(
        model, adamw(model, learning_rate=1e-3), save=lambda folder: None, **options
    )


GIVEN = sequence_mean(batch())


def schedule(step: int) -> float:
    return 1 / (step + 1)


def moments(trained: Trained) -> list[torch.Tensor]:
    """Everything the optimiser keeps, copied."""
    entries = trained.optimizer.state.values()
    return [torch.as_tensor(value).clone() for entry in entries for value in entry.values()]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


def poisoned(value: float, *, only: str = "loss") -> Objective:
    """The objective, with this value in the loss or in the gradient of one token."""

    @Objective
    def loss(outputs: Outputs, part: Batch) -> Terms:
        terms = policy_loss(outputs, part)
        poison = torch.zeros_like(terms.loss)
        poison[0, 1] = value
        if only == "gradient":  # sqrt(0) is 0, and its gradient is infinite: 0 · inf is NaN
            poison = (outputs.logprobs * 0).abs().sqrt() * poison.abs().clamp_max(1.0).nan_to_num(1)
        return Terms(loss=terms.loss + poison, means=terms.means)

    return loss


@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_step_that_is_no_number_is_as_if_it_had_not_been(value: float, where: str) -> None:
    """Weights, moments, schedule: and the steps after it are those of a run without it."""
    model, other = small_model(), small_model()
    student, undisturbed = (learner(each, schedule=schedule) for each in (model, other))
    for each in (student, undisturbed):
        assert not each.step(GIVEN, policy_loss).skipped
    before, held = parameters(model), moments(student.trained)
    result = student.step(GIVEN, poisoned(value, only=where))
    assert result.skipped
    assert not math.isfinite(result.gradient_norm) or where == "loss"
    assert math.isfinite(result.loss) is (where == "gradient")
    assert torch.equal(parameters(model), before)
    assert same(moments(student.trained), held)
    assert student.trained.num_steps == 1
    assert all(weight.grad is None for weight in model.parameters())
    rates = [each.step(GIVEN, policy_loss).learning_rate for each in (student, undisturbed)]
    assert rates[0] == rates[1]
    assert torch.equal(parameters(model), parameters(other))


class Scarce:
    """A forward pass, and with ``backward`` a backward pass, that more tokens than these break."""

    def __init__(self, most: int, *, error: Exception, backward: bool = False) -> None:
        self.most = most
        self.attempts: list[int] = []
        self._error = error
        self._backward = backward

    def __call__(self, model: nn.Module, part: Batch, **options: object) -> Outputs:
        self.attempts.append(part.tokens.numel())
        outputs = score_tokens(model, part, **options)
        if part.tokens.numel() <= self.most:
            return outputs
        if not self._backward or not torch.is_grad_enabled():
            raise copy.copy(self._error)
        outputs.logprobs.register_hook(self._fail)
        return outputs

    def _fail(self, gradient: torch.Tensor) -> None:
        raise copy.copy(self._error)


ERRORS = {
    "gpu": torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "cpu": RuntimeError("alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried"),
    "cublas": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
    "python": MemoryError(),
}


def run(student: LocalLearner, *, infer: bool) -> list[object]:
    """Three steps, with inference before each or without; what was found."""
    found: list[object] = []
    for _ in range(3):
        known = student.infer(batch()) if infer else batch()
        result = student.step(sequence_mean(known), policy_loss)
        logprobs = [known.old_logprobs.tolist(), known.ref_logprobs.tolist()] if infer else []
        found.append((logprobs, result))
    return found


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("kind", ERRORS)
def test_out_of_memory_halves_and_the_weights_are_those_of_the_smaller_size(
    kind: str, backward: bool
) -> None:
    """Bit for bit: weights, moments, results, log-probs of policy and reference."""
    options = {"reference": Reference(), "schedule": schedule}
    model, other = small_model(), small_model()
    scarce = Scarce(8, error=ERRORS[kind], backward=backward)
    student = learner(model, forward=scarce, micro_batch_tokens=64, **options)
    with pytest.warns(UserWarning, match="out of memory: micro_batch_tokens is"):
        found = run(student, infer=not backward)
    assert student.micro_batch_tokens == 8
    plain = learner(other, micro_batch_tokens=8, **options)
    assert found == run(plain, infer=not backward)
    assert torch.equal(parameters(model), parameters(other))
    assert same(moments(student.trained), moments(plain.trained))


def test_a_repeated_step_is_the_step_of_the_smaller_size() -> None:
    """It fails in the backward pass of its second micro-batch, with half a gradient there."""
    known = sequence_mean(learner(small_model()).infer(batch()))
    model, other = small_model(), small_model()
    student = learner(model, micro_batch_tokens=12)
    calls: list[int] = []

    @Objective
    def fails_once(outputs: Outputs, part: Batch) -> Terms:
        calls.append(len(part.tokens))
        if len(calls) == 2:
            outputs.logprobs.register_hook(_raise)
        return policy_loss(outputs, part)

    def _raise(gradient: torch.Tensor) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.")

    with pytest.warns(UserWarning, match="micro_batch_tokens is 6 from here on, was 12"):
        result = student.step(known, fails_once)
    assert calls == [2, 1, 1, 1, 1]
    expected = learner(other, micro_batch_tokens=6).step(known, policy_loss)
    assert result == expected
    assert torch.equal(parameters(model), parameters(other))


def test_halving_goes_on_until_the_batch_is_cut_another_way() -> None:
    """From 65,536 tokens there is no point in trying 32,768 on a batch of eighteen."""
    scarce = Scarce(12, error=ERRORS["gpu"])
    student = learner(small_model(), forward=scarce, micro_batch_tokens=65_536)
    with pytest.warns(UserWarning, match="was 65536") as told:
        student.step(GIVEN, policy_loss)
    assert len(told) == 1
    assert max(scarce.attempts[1:]) <= 12
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        student.step(GIVEN, policy_loss)  # it stays as small as it is: nothing fails any more


def test_a_single_sequence_that_does_not_fit_is_a_clear_error() -> None:
    """With what to do, and with nothing changed."""
    model = small_model()
    before = parameters(model)
    student = learner(model, forward=Scarce(5, error=ERRORS["gpu"]), micro_batch_tokens=64)
    wanted = "single sequence.*Tried to allocate 2.00 GiB.*checkpoint_activations.*max_new_tokens"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(RuntimeError, match=wanted):
            student.step(GIVEN, policy_loss)
    assert torch.equal(parameters(model), before)
    assert student.trained.num_steps == 0
    assert all(weight.grad is None for weight in model.parameters())


def test_out_of_memory_in_the_optimiser_is_never_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the weights may have moved: a second try would move them twice."""
    student = learner(small_model(), micro_batch_tokens=64)
    calls: list[int] = []

    def fail() -> None:
        calls.append(1)
        raise copy.copy(ERRORS["gpu"])

    monkeypatch.setattr(student.trained.optimizer, "step", fail)
    with pytest.raises(RuntimeError, match=r"optimiser's own step.*Smaller micro-batches do not"):
        student.step(GIVEN, policy_loss)
    assert calls == [1]


def test_other_errors_pass_and_other_classes_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class OwnError(Exception):
        pass

    def student(error: Exception) -> Callable[[], object]:
        forward = Scarce(6, error=error)
        made = learner(small_model(), forward=forward, micro_batch_tokens=64)
        return functools.partial(made.step, GIVEN, policy_loss)

    for error in (RuntimeError("shapes cannot be multiplied"), ValueError("x"), OwnError("y")):
        with pytest.raises(type(error), match=str(error)):
            student(error)()
    monkeypatch.setattr(gpu_memory, "OUT_OF_MEMORY", (OwnError,))
    with pytest.warns(UserWarning, match="out of memory"):
        student(OwnError("y"))()


def test_sets_of_a_reward_model_stay_whole() -> None:
    """What is compared is never parted, however little memory there is."""
    sizes: list[int] = []

    def forward(model: nn.Module, part: Batch) -> Outputs:
        sizes.append(len(part.tokens))
        if len(part.tokens) > 2:
            raise copy.copy(ERRORS["gpu"])
        return score_tokens(model, part)

    given = GIVEN.replace(groups=torch.tensor([0, 0, 1]))
    student = learner(small_model(), forward=forward, micro_batch_tokens=64, keep_groups=True)
    with pytest.warns(UserWarning, match="out of memory"):
        student.step(given, policy_loss)
    assert sizes == [3, 2, 1]


def test_no_micro_batch_meets_the_graph_of_the_one_before() -> None:
    """A capture must not: nodes of the weights that another graph holds belong to its stream."""
    alive: list[bool] = []
    seen: list[weakref.ref[torch.Tensor]] = []

    def forward(model: nn.Module, part: Batch) -> Outputs:
        alive.extend(one() is not None for one in seen)
        found = score_tokens(model, part)
        seen.append(weakref.ref(found.logprobs))
        return found

    learner(small_model(), forward=forward, micro_batch_tokens=8).step(GIVEN, policy_loss)
    assert len(seen) > 1
    assert not any(alive)
