"""The loop: what is called when, what is carried from step to step, and what a step sees."""

import pytest
import torch
from loop_parts import OLD, REFERENCE, FakeLearner, collected, plan, sampled

from posttrain.algorithms.advantages import moving_baseline, plain_return
from posttrain.algorithms.kl import Coefficient
from posttrain.pipelines.plan import Plan, State
from posttrain.pipelines.rl import Step, train
from posttrain.protocols import Outputs
from posttrain.types import Collected

STEPS = [
    collected(1.0, 0.0, 1.0, 1.0),
    collected(0.0, 1.0, 0.0, 0.0),
    collected(1.0, 1.0, 1.0, 1.0),
]


def run(
    learner: FakeLearner,
    chosen: Plan,
    *,
    steps: list[Collected] = STEPS,
    state: State | None = None,
) -> list[Step]:
    reports: list[Step] = []
    train(
        sampled(learner, steps),
        learner,
        plan=chosen,
        sync=lambda version: learner.calls.append(f"sync {version}"),
        pad_token=0,
        seed=0,
        on_step=reports.append,
        state=state,
    )
    return reports


def test_the_order_of_a_step() -> None:
    """Sample, look back, step, hand the weights over; only then is the next batch sampled."""
    learner = FakeLearner()
    run(learner, plan(epochs=2))
    step = ["sample", "infer", "step", "step"]
    assert learner.calls == [*step, "sync 1", *step, "sync 2", *step, "sync 3"]
    assert learner.version == 3


def test_one_step_without_reference_never_looks_back() -> None:
    """π is π_old then: no forward pass is spent on it."""
    learner = FakeLearner()
    run(learner, plan(), steps=STEPS[:1])
    assert learner.calls == ["sample", "step", "sync 1"]
    assert learner.batches[0].old_logprobs is None


@pytest.mark.parametrize(("epochs", "minibatches"), [(1, 1), (3, 1), (1, 4), (2, 2)])
def test_epochs_times_minibatches_are_the_optimiser_steps(epochs: int, minibatches: int) -> None:
    """Each pass is a partition of the batch, and weights are those of the mini-batch."""
    learner = FakeLearner()
    (report,) = run(learner, plan(epochs=epochs, minibatches=minibatches), steps=STEPS[:1])
    assert report.metrics()["train/optimiser_steps"] == epochs * minibatches
    assert len(learner.batches) == epochs * minibatches
    for start in range(0, len(learner.batches), minibatches):
        rewards = [
            r for b in learner.batches[start : start + minibatches] for r in b.rewards.tolist()
        ]
        assert sorted(rewards) == [0.0, 1.0, 1.0, 1.0]
    for part in learner.batches:
        assert float(part.weights.sum()) == pytest.approx(1)


def test_kl_stop_leaves_the_batch_after_the_step_that_passes_it() -> None:
    """The step that went too far is the last of its batch; the next batch starts afresh."""
    learner = FakeLearner(approx_kl=[0.0, 0.2, 0.0, 0.05, 0.0, 0.0])
    reports = run(learner, plan(epochs=4, kl_stop=0.1), steps=STEPS[:2])
    assert [report.metrics()["train/optimiser_steps"] for report in reports] == [2, 4]
    assert reports[0].metrics()["policy/approx_kl"] == pytest.approx(0.1)


def test_an_adaptive_coefficient_follows_the_divergence() -> None:
    """Two tokens at 0.5 nats each are 1 nat: above the target β doubles, below it halves."""
    for target, factor in ((0.1, 2.0), (10.0, 0.5)):
        kl = Coefficient(value=0.1, rule="doubling", target=target)
        reports = run(FakeLearner(), plan(kl_placement="loss", kl=kl))
        assert [report.metrics()["objective/kl"] for report in reports] == pytest.approx([1.0] * 3)
        assert [report.metrics()["kl/coefficient"] for report in reports] == pytest.approx(
            [0.1, 0.1 * factor, 0.1 * factor**2]
        )
        assert reports[-1].state.kl.value == pytest.approx(0.1 * factor**3)


def test_the_moving_baseline_is_carried() -> None:
    """The first batch stands in for its own past; then b ← 0.9 b + 0.1 mean, after its use."""
    reports = run(FakeLearner(), plan(advantage=moving_baseline))
    baselines = [0.75, 0.75, 0.9 * 0.75 + 0.1 * 0.25]
    for report, baseline, rewards in zip(
        reports, baselines, ([1, 0, 1, 1], [0, 1, 0, 0], [1, 1, 1, 1]), strict=True
    ):
        expected = torch.tensor(rewards, dtype=torch.float64) - baseline
        assert torch.allclose(report.batch.advantages[:, 2].double(), expected, atol=1e-6)
    assert reports[-1].state.baseline == pytest.approx(0.9 * baselines[2] + 0.1)


def test_a_state_that_is_handed_in_goes_on() -> None:
    """Step number, β and baseline: what a resumed run needs."""
    state = State(step=4, kl=Coefficient(value=0.3), baseline=10.0)
    learner = FakeLearner()
    chosen = plan(advantage=moving_baseline, kl_placement="loss", refresh_every=4)
    (report,) = run(learner, chosen, steps=STEPS[:1], state=state)
    assert report.batch.advantages[0, 2] == -9.0
    assert report.metrics()["kl/coefficient"] == 0.3
    assert report.state.step == 5
    assert learner.calls[:2] == ["sample", "refresh"]


def test_the_reference_is_refreshed_every_so_many_steps() -> None:
    """Before the third and the fifth batch where it is every two, and never before the first."""
    learner = FakeLearner()
    run(learner, plan(refresh_every=2, kl_placement="loss"), steps=STEPS[:1] * 5)
    batches = " ".join(learner.calls).split("sample")[1:]
    assert ["refresh" in batch for batch in batches] == [False, False, True, False, True]
    assert batches[2].split() == ["refresh", "infer", "step", "sync", "3"]


def test_kl_in_the_reward() -> None:
    """k1 of both tokens comes off the return, and the loss has no KL term."""
    learner = FakeLearner()
    chosen = plan(
        advantage=plain_return,
        kl_placement="reward",
        kl_estimator="k1",
        kl=Coefficient(value=0.1),
    )
    (report,) = run(learner, chosen, steps=[collected(1.0, 0.0)])
    expected = torch.tensor([1.0, 0.0]) - 0.1 * 2 * (OLD - REFERENCE)
    assert torch.allclose(report.batch.advantages[:, 3].float(), expected)
    batch = learner.batches[0]
    terms = learner.objectives[0](Outputs(logprobs=batch.old_logprobs), batch)
    assert "kl" not in terms.means
    assert torch.allclose(terms.loss[:, 3].float(), -expected)


def test_kl_in_the_loss() -> None:
    """The return is untouched; every token pays β·k3, with gradient."""
    learner = FakeLearner()
    chosen = plan(advantage=plain_return, kl_placement="loss", kl=Coefficient(value=0.1))
    (report,) = run(learner, chosen, steps=[collected(1.0, 0.0)])
    assert report.batch.advantages[:, 3].tolist() == [1.0, 0.0]
    batch = learner.batches[0]
    logprobs = torch.full(batch.tokens.shape, OLD, requires_grad=True)
    terms = learner.objectives[0](Outputs(logprobs=logprobs), batch)
    gap = torch.tensor(REFERENCE - OLD)
    k3 = gap.exp() - gap - 1
    assert terms.loss[1, 3].item() == pytest.approx(0.1 * float(k3), rel=1e-6)
    terms.loss[1, 3].backward()
    assert logprobs.grad[1, 3].item() == pytest.approx(0.1 * (1 - float(gap.exp())), rel=1e-6)


def test_broken_scores_are_in_no_baseline_and_no_gradient() -> None:
    """The group's mean is that of the others, and the broken row has no advantage and no weight."""
    learner = FakeLearner()
    (report,) = run(learner, plan(), steps=[collected(1.0, 0.0, None, group_size=3)])
    assert report.batch.advantages[:, 3].tolist() == [0.5, -0.5, 0.0]
    assert learner.batches[0].weights[:, 3].tolist() == [0.25, 0.25, 0.0]
    assert report.metrics()["reward/mean"] == 0.5
    assert report.metrics()["reward/invalid"] == pytest.approx(1 / 3)
    assert report.state.baseline == 0.5


def test_shaping_comes_before_the_advantage() -> None:
    """In the order of the plan."""
    chosen = plan(
        advantage=plain_return,
        shaping=(
            lambda batch: batch.replace(rewards=batch.rewards + 1),
            lambda batch: batch.replace(rewards=batch.rewards * 10),
        ),
    )
    (report,) = run(FakeLearner(), chosen, steps=[collected(1.0, 0.0)])
    assert report.batch.advantages[:, 3].tolist() == [20.0, 10.0]


def test_the_correction_sees_old_and_sampler() -> None:
    """It comes last, once both log-probs are there, and enters the policy term."""
    learner = FakeLearner()
    chosen = plan(
        advantage=plain_return,
        correction=lambda batch: batch.replace(
            correction=(batch.old_logprobs - batch.sampler_logprobs).exp() / 2
        ),
    )
    run(learner, chosen, steps=[collected(1.0, 1.0)])
    batch = learner.batches[0]
    terms = learner.objectives[0](Outputs(logprobs=batch.old_logprobs), batch)
    assert learner.calls[1] == "infer"
    assert terms.loss[0, 2:].tolist() == [-0.5, -0.5]
