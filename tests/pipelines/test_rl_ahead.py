"""The loop with a real model and rollouts that run ahead: whose tokens each batch holds."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from loop_parts import plan
from small_model import naive_logprobs, small_model

from posttrain.algorithms.corrections import truncated
from posttrain.learn.learner import LocalLearner
from posttrain.learn.optim import adamw
from posttrain.pipelines.rl import Step, train, weighed
from posttrain.rollout.collect import RolloutSource
from posttrain.rollout.engines.native import NativeEngine
from posttrain.rollout.engines.weight_sync import CopiedWeights
from posttrain.rollout.partial import PartialSource
from posttrain.rollout.prompt_order import PromptCycle
from posttrain.rollout.run_ahead import RunAhead
from posttrain.types import Prompt, Rollout, Sampling, Score


class SmallTokens:
    """Rewards the share of tokens with a small number."""

    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [
            Score(value=sum(token < 50 for token in r.tokens) / len(r.tokens)) for r in rollouts
        ]


@pytest.mark.parametrize(("ahead", "partial"), [(1, 1), (2, 1), (1, 2), (1, 3)])
def test_every_token_comes_from_the_weights_of_its_version(ahead: int, partial: int) -> None:
    """The engine's log-probs are those of version max(0, k − max_lag), the learner's of version k.

    Of partial rollouts the next tokens are of the versions after it. The correction is the ratio of
    the two, at most 2, token by token, and the gradient −Σ w · correction · A · ∇ log π.
    """
    max_lag = ahead + partial - 1
    model = small_model()
    kept = [copy.deepcopy(model)]
    copied = copy.deepcopy(model)
    engine = NativeEngine(copied, end_tokens=(1,), decode=str)
    prompts = [Prompt(id=str(n), text="", tokens=(5 + n, 6, 7)[: 2 + n % 2]) for n in range(6)]
    asked: dict[str, Any] = {
        "prompts": PromptCycle(prompts, seed=0),
        "sampling": Sampling(max_new_tokens=6),
        "prompts_per_step": 3,
        "group_size": 4,
        "seed": 0,
    }
    source = RolloutSource(engine, SmallTokens(), **asked)
    if partial > 1:
        parts = {"partial": partial, "end_tokens": (1,), "decode": str}
        source = PartialSource(engine, SmallTokens(), **parts, **asked)  # type: ignore[arg-type]
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
    steps = plan(epochs=2, correction=truncated)
    with RunAhead(source.steps(6), sync, max_lag=ahead) as running:
        train(
            running,
            learner,
            plan=steps,
            sync=running.sync,
            pad_token=0,
            seed=0,
            on_step=on_step,
        )
    for step, report in enumerate(reports):
        batch, version = report.batch, max(0, step - max_lag)
        assert set(batch.need("versions").tolist()) == {version}
        drawn_by = batch.mask.long() - 1  # [B, T]: the version of each token, −1 of the others
        drawn = [v for r in report.collected.rollouts for v in r.turns[0].token_versions]
        drawn_by[batch.mask] = torch.tensor(drawn)
        assert sorted(set(drawn)) == list(range(version, max(0, step - ahead) + 1))
        known = [naive_logprobs(model, batch).detach() for model in kept[: step + 1]]
        sampled = sum(torch.where(drawn_by == v, each, 0.0) for v, each in enumerate(known))
        assert isinstance(sampled, torch.Tensor)
        old, active = known[step], batch.active
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
        new = naive_logprobs(kept[step], batch)
        weight = weighed(batch, steps).need("weights") * expected["correction"]
        loss = -(weight * batch.need("advantages") * new)[active].sum()
        found = torch.autograd.grad(loss, list(kept[step].parameters()), allow_unused=True)
        norm = sum(float(each.square().sum()) for each in found if each is not None) ** 0.5
        assert report.results[0].gradient_norm == pytest.approx(norm, rel=1e-4)
    assert len(reports) == 6
