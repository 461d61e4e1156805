"""The loop with a real model and rollouts that run ahead: whose tokens each batch holds."""

import copy
from collections.abc import Sequence

import pytest
import torch
from loop_parts import plan
from small_model import naive_logprobs, small_model

from posttrain.algorithms.corrections import truncated
from posttrain.learn.learner import LocalLearner
from posttrain.learn.optim import adamw
from posttrain.pipelines.rl import Step, train
from posttrain.rollout.collect import PromptCycle, RolloutSource
from posttrain.rollout.engines.native import NativeEngine
from posttrain.rollout.engines.weight_sync import CopiedWeights
from posttrain.rollout.run_ahead import RunAhead
from posttrain.types import Prompt, Rollout, Sampling, Score


class SmallTokens:
    """Rewards the share of tokens with a small number."""

    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [
            Score(value=sum(token < 50 for token in r.tokens) / len(r.tokens)) for r in rollouts
        ]


@pytest.mark.parametrize("max_lag", [1, 2])
def test_every_batch_comes_from_the_weights_of_its_version(max_lag: int) -> None:
    """The engine's log-probs are those of version max(0, k − max_lag), the learner's of version k.

    The correction is the ratio of the two, at most 2.
    """
    model = small_model()
    kept = [copy.deepcopy(model)]
    copied = copy.deepcopy(model)
    engine = NativeEngine(copied, end_tokens=(1,), decode=str)
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
    learner = LocalLearner(model, adamw(model, learning_rate=5e-3), save=lambda folder: None)
    reports: list[Step] = []

    def on_step(report: Step) -> None:
        reports.append(report)
        kept.append(copy.deepcopy(model))

    sync = CopiedWeights(
        engine,
        source=dict(model.named_parameters()),
        target=dict(copied.named_parameters()),
    )
    with RunAhead(source.steps(6), sync, max_lag=max_lag) as ahead:
        train(
            ahead,
            learner,
            plan=plan(epochs=2, correction=truncated),
            sync=ahead.sync,
            pad_token=0,
            seed=0,
            on_step=on_step,
        )
    for step, report in enumerate(reports):
        batch, version = report.batch, max(0, step - max_lag)
        assert set(batch.need("versions").tolist()) == {version}
        sampled, old = (naive_logprobs(kept[number], batch).detach() for number in (version, step))
        active = batch.active
        expected = {
            "sampler_logprobs": sampled,
            "old_logprobs": old,
            "correction": (old - sampled).exp().clamp_max(2.0),
        }
        for name, values in expected.items():
            found = batch.need(name)[active].double()  # type: ignore[arg-type]
            assert torch.allclose(found, values[active], rtol=0, atol=2e-6)
        if step:
            assert float((old - sampled)[active].abs().max()) > 1e-3
        assert report.metrics()["staleness/mean"] == step - version
    assert len(reports) == 6
