"""The loop with a real model: weights reach the engine, the bonus works, broken scores do not."""

import functools
from collections.abc import Sequence

import pytest
import torch
from loop_parts import plan, rollout
from small_model import parameters, small_model

from posttrain.fast.score import score_tokens
from posttrain.learn.learner import LocalLearner
from posttrain.learn.optim import adamw
from posttrain.models.frozen import Reference
from posttrain.pipelines.plan import Plan
from posttrain.pipelines.rl import Step, train
from posttrain.rollout.collect import RolloutSource
from posttrain.rollout.engines.native import NativeEngine
from posttrain.rollout.engines.weight_sync import SharedWeights
from posttrain.rollout.prompt_order import PromptCycle
from posttrain.types import Collected, Prompt, Rollout, Sampling, Score

END = 1


class SmallTokens:
    """Rewards the share of tokens with a small number."""

    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [
            Score(value=sum(token < 50 for token in r.tokens) / len(r.tokens)) for r in rollouts
        ]


def learn(model: torch.nn.Module, chosen: Plan, *, steps: int, rate: float = 5e-3) -> list[Step]:
    """Sample, score and learn for real."""
    engine = NativeEngine(model, end_tokens=(END,), decode=str)
    prompts = [Prompt(id=str(n), text="", tokens=(5 + n, 6, 7)[: 2 + n % 2]) for n in range(6)]
    source = RolloutSource(
        engine,
        SmallTokens(),
        prompts=PromptCycle(prompts, seed=0),
        sampling=Sampling(max_new_tokens=5),
        prompts_per_step=3,
        group_size=4,
        seed=0,
    )
    learner = LocalLearner(
        model,
        adamw(model, learning_rate=rate),
        save=lambda folder: None,
        reference=Reference() if chosen.kl_placement != "none" else None,
        forward=functools.partial(
            score_tokens, entropy="gradient" if chosen.entropy_coefficient > 0 else "value"
        ),
    )
    reports: list[Step] = []
    train(
        source.steps(steps),
        learner,
        plan=chosen,
        sync=SharedWeights(engine),
        pad_token=0,
        seed=0,
        on_step=reports.append,
    )
    return reports


def test_every_batch_comes_from_the_newest_weights() -> None:
    """Step k carries version k, and the engine's log-probs are those of the weights of step k."""
    model = small_model()
    start = parameters(model)
    reports = learn(model, plan(epochs=2), steps=4)
    for step, report in enumerate(reports):
        assert set(report.batch.versions.tolist()) == {step}
        difference = (report.batch.old_logprobs - report.batch.sampler_logprobs).abs()
        assert float(difference[report.batch.mask].max()) < 1e-5
    assert float((parameters(model) - start).abs().max()) > 1e-2


@pytest.mark.parametrize("coefficient", [0.0, 1.0])
def test_the_entropy_bonus_raises_entropy(coefficient: float) -> None:
    """Where rewards say nothing, the bonus alone moves the weights; without it nothing does."""
    model = small_model(sharpness=40.0)
    start = parameters(model)
    silent = plan(
        advantage=lambda batch: batch.replace(advantages=torch.zeros(batch.tokens.shape)),
        entropy_coefficient=coefficient,
    )
    reports = learn(model, silent, steps=6)
    entropies = [report.metrics()["objective/entropy"] for report in reports]
    if coefficient:
        assert entropies[-1] > entropies[0] + 0.2
    else:
        assert torch.equal(parameters(model), start)


def gradient(rollouts: list[Rollout]) -> torch.Tensor:
    """The gradient of one step on these rollouts."""
    model = small_model()
    learner = LocalLearner(model, adamw(model, learning_rate=1e-3), save=lambda folder: None)
    train(
        [Collected(rollouts=rollouts)],
        learner,
        plan=plan(),
        sync=lambda version: None,
        pad_token=0,
        seed=0,
        on_step=lambda report: None,
    )
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


def test_a_broken_score_has_no_influence_on_the_gradient() -> None:
    """The step is the one without that rollout, whatever its tokens were."""
    good = [rollout(1.0), rollout(0.0, tokens=(9, 8, 1))]
    broken = rollout(None, tokens=(20, 30, 40, 50))
    expected = gradient(good)
    assert torch.allclose(gradient([*good, broken]), expected, rtol=1e-9, atol=1e-14)
    wrong = rollout(0.0, tokens=(20, 30, 40, 50))
    assert not torch.allclose(gradient([*good, wrong]), expected, rtol=1e-2)
