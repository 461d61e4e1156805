"""The learner: one step is one hand-written AdamW step, whatever it is computed in."""

import functools
import math
from pathlib import Path

import pytest
import torch
from small_model import naive_logits, naive_logprobs, parameters, small_model
from torch import Tensor, nn

from posttrain.algorithms.losses.policy import clipped
from posttrain.algorithms.weights import sequence_mean, token_mean
from posttrain.data.collate import collate_demonstrations
from posttrain.fast.score import score_tokens
from posttrain.learn.learner import LocalLearner
from posttrain.learn.optim import adamw, rate_factor
from posttrain.models.frozen import Reference
from posttrain.pipelines.rl import without_zero_advantages
from posttrain.protocols import Objective, Outputs
from posttrain.types import Batch, Terms

RATE = 1e-3


def batch(dtype: torch.dtype = torch.float64) -> Batch:
    """Three ragged sequences with advantages; one mask has a hole, as a tool's answer makes it."""
    made = collate_demonstrations(
        [
            ((5, 6, 7, 8, 9, 10), (False, True, True, False, True, True)),
            ((11, 12, 0), (False, True, True)),  # ends with the pad token, and it counts
            ((13, 14, 15, 16), (False, False, False, True)),
        ],
        pad_token=0,
    )
    advantages = torch.tensor([[1.0], [-2.0], [0.5]], dtype=dtype).expand(3, 6) * made.mask
    return made.replace(
        advantages=advantages,
        valid=torch.ones(3, dtype=torch.bool),
        rewards=torch.zeros(3, dtype=dtype),
    )


@Objective
def policy_loss(outputs: Outputs, part: Batch) -> Terms:
    return clipped(outputs.logprobs, part)


def learner(model: nn.Module, **options: object) -> LocalLearner:
    rate = float(options.pop("rate", RATE))
    return LocalLearner(
        model, adamw(model, learning_rate=rate), save=lambda folder: None, **options
    )


def hand_loss(model: nn.Module, given: Batch, old: Tensor) -> Tensor:
    """The mean over sequences of the mean over tokens of −min(ρA, clip(ρ)A)."""
    ratio = (naive_logprobs(model, given) - old).exp()
    gain = given.advantages
    terms = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain) * given.mask
    return (terms.sum(1) / given.mask.sum(1)).mean()


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("micro_batch_tokens", [1, 8, 10_000])
def test_a_step_is_a_hand_written_adamw_step(micro_batch_tokens: int) -> None:
    """Three steps on one batch, in float64: weights equal to 1e-10, with clipping at work."""
    model, mine = small_model(), small_model()
    given = batch()
    student = learner(model, max_gradient_norm=0.05, micro_batch_tokens=micro_batch_tokens)
    with torch.no_grad():
        old = naive_logprobs(mine, given)
    optimizer = torch.optim.AdamW(mine.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    prepared = student.infer(given)
    for _ in range(3):
        result = student.step(sequence_mean(prepared), policy_loss)
        loss = hand_loss(mine, given, old)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.cat([weight.grad.flatten() for weight in mine.parameters()]).norm()
        assert float(norm) > 0.05
        for weight in mine.parameters():
            weight.grad *= 0.05 / (norm + 1e-6)
        optimizer.step()
        assert result.loss == pytest.approx(loss.item(), rel=1e-10, abs=1e-12)
        assert result.gradient_norm == pytest.approx(norm.item(), rel=1e-10)
        assert float((parameters(model) - parameters(mine)).abs().max()) < 1e-10


def test_a_short_gradient_is_left_as_it_is() -> None:
    """The reported norm is that before clipping; below the limit nothing is cut."""
    given = sequence_mean(batch())
    model, other = small_model(), small_model()
    free = learner(model, max_gradient_norm=1e9).step(given, policy_loss)
    cut = learner(other, max_gradient_norm=free.gradient_norm / 10).step(given, policy_loss)
    assert cut.gradient_norm == free.gradient_norm

    def gradient(chosen: nn.Module) -> Tensor:
        return torch.cat([weight.grad.flatten() for weight in chosen.parameters()])

    assert float(gradient(model).norm()) == pytest.approx(free.gradient_norm, rel=1e-12)
    assert torch.allclose(gradient(other), gradient(model) / 10, rtol=1e-5)


def test_the_schedule_is_asked_before_every_step() -> None:
    """The rate of each step is the base times the factor of the steps taken so far."""
    model = small_model()

    def factor(step: int) -> float:
        return rate_factor(step, total=4, warmup=2, schedule="linear")

    student = learner(model, schedule=factor)
    moves, rates = [], []
    for _ in range(5):
        before = parameters(model)
        rates.append(student.step(sequence_mean(batch()), policy_loss).learning_rate)
        moves.append(float((parameters(model) - before).abs().max()))
        assert [group["lr"] for group in student.trained.optimizer.param_groups] == [rates[-1]] * 2
    assert rates == pytest.approx([RATE * f for f in (0.5, 1.0, 1.0, 0.5, 0.0)])
    assert moves[0] == pytest.approx(RATE * 0.5, rel=1e-3)  # Adam's first step is ± the rate
    assert moves[4] == 0


def test_without_an_active_token_nothing_changes() -> None:
    """Neither weights nor optimiser state nor the step counter."""
    model = small_model()
    student = learner(model)
    student.step(sequence_mean(batch()), policy_loss)
    weights = parameters(model)
    state = [
        {name: torch.as_tensor(value).clone() for name, value in entry.items()}
        for entry in student.trained.optimizer.state.values()
    ]
    broken = batch().replace(valid=torch.zeros(3, dtype=torch.bool))
    result = student.step(sequence_mean(broken), policy_loss)
    assert (result.loss, result.gradient_norm, result.metrics) == (0.0, 0.0, {})
    assert student.trained.num_steps == 1
    assert torch.equal(parameters(model), weights)
    for before, entry in zip(state, student.trained.optimizer.state.values(), strict=True):
        assert all(torch.equal(before[name], torch.as_tensor(entry[name])) for name in before)


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("silent", [(0,), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("micro_batch_tokens", [1, 10_000])
def test_sequences_without_advantage_are_only_looked_at(
    silent: tuple[int, ...], micro_batch_tokens: int
) -> None:
    """Weights, momentum and metrics are those of differentiating them: their gradient is 0."""
    given = batch()
    results = []
    for cut in (lambda part: part, without_zero_advantages):
        model = small_model()
        student = learner(model, micro_batch_tokens=micro_batch_tokens)
        student.step(token_mean(given), policy_loss)  # so that there is momentum
        advantages = given.advantages.clone()
        advantages[list(silent)] = 0.0
        counted = Differentiated(model)
        part = cut(token_mean(given.replace(advantages=advantages)))
        metrics = student.step(part, policy_loss)
        results.append((model, metrics, counted.tokens))
    (expected, plain, tokens), (found, other, fewer) = results
    assert (fewer == 0) == (len(silent) == 3)
    assert fewer < tokens
    torch.testing.assert_close(parameters(found), parameters(expected), rtol=1e-10, atol=1e-12)
    assert other.loss == pytest.approx(plain.loss, abs=1e-14)
    assert other.metrics == pytest.approx(plain.metrics, rel=1e-12, abs=1e-14)
    assert other.gradient_norm == pytest.approx(plain.gradient_norm, rel=1e-10, abs=1e-14)


class Differentiated:
    """How many tokens a model saw with gradients enabled."""

    def __init__(self, model: nn.Module) -> None:
        self.tokens = 0
        model.get_decoder().register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, _: nn.Module, __: object, inputs: dict[str, Tensor]) -> None:
        if torch.is_grad_enabled():
            self.tokens += inputs["input_ids"].numel()


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_infer_is_a_naive_forward_pass(temperature: float) -> None:
    """Old and reference log-probs of chosen tokens; broken rows and other tokens are 0."""
    model = small_model()
    student = learner(
        model,
        reference=Reference(),
        forward=functools.partial(score_tokens, temperature=temperature),
        micro_batch_tokens=7,
    )
    start = small_model()
    student.step(sequence_mean(batch()), policy_loss)
    given = batch().replace(valid=torch.tensor([True, True, False]))
    found = student.infer(given)
    with torch.no_grad():
        for got, owner in ((found.old_logprobs, model), (found.ref_logprobs, start)):
            expected = naive_logprobs(owner, given, temperature=temperature)
            assert torch.allclose(got[:2], expected[:2], rtol=0, atol=1e-12)
            assert not bool(got[2].any())
    assert not torch.allclose(found.old_logprobs, found.ref_logprobs, atol=1e-4)
    assert found.old_logprobs.dtype == torch.float64


def test_without_a_reference_there_are_no_reference_logprobs() -> None:
    assert learner(small_model()).infer(batch()).ref_logprobs is None


def test_a_refreshed_reference_is_the_policy_of_now() -> None:
    """And stays it while the policy moves on."""
    student = learner(small_model(), reference=Reference(), rate=1e-2)
    student.step(sequence_mean(batch()), policy_loss)
    before = student.infer(batch())
    assert not torch.equal(before.old_logprobs, before.ref_logprobs)
    student.refresh_reference()
    fresh = student.infer(batch())
    assert torch.equal(fresh.ref_logprobs, before.old_logprobs)
    student.step(sequence_mean(batch()), policy_loss)
    assert torch.equal(student.infer(batch()).ref_logprobs, before.old_logprobs)


@pytest.mark.usefixtures("float64_throughout")
def test_without_old_logprobs_the_ratio_is_exactly_one() -> None:
    """π is π_old in the only step on a batch; the gradient is that of −A · log π."""
    model, mine = small_model(), small_model()
    result = learner(model, max_gradient_norm=math.inf).step(sequence_mean(batch()), policy_loss)
    assert result.metrics["ratio"] == 1.0
    assert result.metrics["ratio_max"] == 1.0
    assert result.metrics["approx_kl"] == 0.0
    given = batch()
    (-(naive_logprobs(mine, given) * given.advantages).sum(1) / given.mask.sum(1)).mean().backward()
    for one, other in zip(model.parameters(), mine.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, rtol=1e-9, atol=1e-14)


def test_bfloat16_compute_keeps_float32_weights() -> None:
    """An update of a millionth survives in the master weights; in bfloat16 it would vanish."""
    model = small_model(dtype=torch.float32)
    student = learner(model, compute=torch.bfloat16, rate=1e-6)
    before = parameters(model)
    result = student.step(token_mean(batch(torch.float32)), policy_loss)
    after = parameters(model)
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    moved = (after - before).abs()
    assert float(moved.max()) == pytest.approx(1e-6, rel=0.2)
    ones = before == 1  # the norms: bfloat16 next to 1 steps by 2^-8
    assert bool(moved[ones].any())
    assert torch.equal(after[ones].bfloat16(), before[ones].bfloat16())
    assert math.isfinite(result.loss)


def test_bfloat16_compute_is_really_used() -> None:
    """The log-probs are rounded, and close to those in float32."""
    model = small_model(sharpness=20.0, dtype=torch.float32)
    exact = learner(model).infer(batch(torch.float32)).old_logprobs
    rounded = learner(model, compute=torch.bfloat16).infer(batch(torch.float32)).old_logprobs
    error = (rounded - exact).abs()
    assert 1e-4 < float(error.max()) < 0.3


@pytest.mark.usefixtures("float64_throughout")
def test_the_entropy_has_a_gradient_only_where_it_is_asked_for() -> None:
    """Its value is −Σ p log p of a naive forward pass either way."""
    given = token_mean(batch())

    @Objective
    def entropy_loss(outputs: Outputs, part: Batch) -> Terms:
        return Terms(
            loss=outputs.logprobs * 0 + outputs.entropy, means={"entropy": outputs.entropy.detach()}
        )

    with torch.no_grad():
        everything = naive_logits(small_model(), given).log_softmax(-1)
        expected = -(everything.exp() * everything).sum(-1)[given.mask].mean()
    for wanted in (False, True):
        ask = functools.partial(score_tokens, entropy="gradient" if wanted else "value")
        result = learner(small_model(), forward=ask).step(given, entropy_loss)
        assert result.metrics["entropy"] == pytest.approx(float(expected), rel=1e-10)
        assert (result.gradient_norm > 0) is wanted


def test_save_is_handed_the_folder(tmp_path: Path) -> None:
    """The learner decides when, whoever built it decides how."""
    saved: list[Path] = []
    model = small_model()
    LocalLearner(model, adamw(model, learning_rate=RATE), save=saved.append).save(tmp_path)
    assert saved == [tmp_path]
