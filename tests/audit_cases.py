"""Loops under audit that break one line of the checklist each, at a place of their own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from loop_parts import plan
from small_model import small_model

from posttrain.algorithms.advantages import batch_whitened, group_centred
from posttrain.algorithms.kl import Coefficient
from posttrain.algorithms.losses import squared
from posttrain.algorithms.shaping import score_at_last_token
from posttrain.learn.learner import LocalLearner
from posttrain.learn.optim import adamw
from posttrain.models.frozen import Reference
from posttrain.pipelines.audit import Audit
from posttrain.pipelines.plan import Plan
from posttrain.pipelines.rl import Step, train
from posttrain.protocols import Objective, StepResult
from posttrain.rollout.collect import RolloutSource
from posttrain.rollout.engines.native import NativeEngine
from posttrain.rollout.engines.weight_sync import SharedWeights
from posttrain.rollout.prompt_order import PromptCycle
from posttrain.types import Batch, Prompt, Rollout, Sampling, Score

IN_REWARD: dict[str, Any] = {
    "kl_placement": "reward",
    "kl_estimator": "k1",
    "kl": Coefficient(value=0.1),
}


class SmallTokens:
    """Rewards the share of tokens with a small number."""

    def score(self, rollouts: list[Rollout]) -> list[Score]:
        shares = [[token < 50 for token in r.tokens] for r in rollouts]
        return [Score(value=sum(share) / len(share)) for share in shares]


class Learner(LocalLearner):
    """The learner itself, but for what it is told to add to an inferred or a learned batch."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.doctor: Callable[[Batch], Batch] = lambda batch: batch
        self.hidden = ""

    def infer(self, batch: Batch) -> Batch:
        return self.doctor(super().infer(batch))

    def step(self, batch: Batch, objective: Objective) -> StepResult:
        result = super().step(batch, objective)
        kept = {name: value for name, value in result.metrics.items() if name != self.hidden}
        return replace(result, metrics=kept)


class Mixed(NativeEngine):
    """The last completion of every prompt claims to be of the version before."""

    def generate(self, *arguments: Any, **options: Any) -> list[list[Rollout]]:
        groups = super().generate(*arguments, **options)
        return [[*group[:-1], self._older(group[-1])] for group in groups]

    def _older(self, rollout: Rollout) -> Rollout:
        (turn,) = rollout.turns
        return replace(rollout, turns=(replace(turn, version=self.version - 1),))


TWO_EPOCHS = plan(epochs=2, **IN_REWARD)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A loop that keeps to ``loop``, and an audit that was promised the same, or another plan."""

    loop: Plan = TWO_EPOCHS
    promised: Plan | None = None
    normalised: str = "group"
    doctor: Callable[[Batch], Batch] = lambda batch: batch
    hidden: str = ""
    engine: type[NativeEngine] = NativeEngine
    copies: bool = True
    syncs: bool = True
    reference: bool = True
    found: str = ""
    step: int = 1


def audited(case: Case) -> int:
    """Three steps of the real loop under audit; how many were finished."""
    model = small_model(dtype=torch.float32)
    sampled = model if case.copies else copy.deepcopy(model)
    engine = case.engine(sampled, end_tokens=(1,), decode=str)
    prompts = [Prompt(id=str(n), text="", tokens=(5 + n, 6, 7)[: 2 + n % 2]) for n in range(4)]
    source = RolloutSource(
        engine,
        SmallTokens(),
        prompts=PromptCycle(prompts, seed=0),
        sampling=Sampling(max_new_tokens=5),
        prompts_per_step=4,
        group_size=4,
        seed=0,
    )
    learner = Learner(
        model,
        adamw(model, learning_rate=5e-3),
        save=lambda folder: None,
        reference=Reference() if case.reference else None,
    )
    learner.doctor, learner.hidden = case.doctor, case.hidden
    done: list[Any] = []
    audit = Audit(case.promised or case.loop, normalised=case.normalised)

    def on_step(step: Step) -> None:
        audit.check(step)
        done.append(step)

    train(
        source.steps(3),
        learner,
        plan=case.loop,
        sync=SharedWeights(engine) if case.syncs else lambda version: None,
        pad_token=0,
        seed=0,
        on_step=on_step,
    )
    return len(done)


def requiring_grad(name: str) -> Callable[[Batch], Batch]:
    """A stage that leaves one field with a gradient."""

    def doctored(batch: Batch) -> Batch:
        tensor = getattr(batch, name)
        tensor = torch.zeros(batch.tokens.shape) if tensor is None else tensor.clone()
        return batch.replace(**{name: tensor.requires_grad_()})

    return doctored


def advantages(
    change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    base: Callable[[Batch], Batch] = group_centred,
) -> Plan:
    """A plan whose advantages are changed, given where the policy's own tokens are."""

    def doctored(batch: Batch) -> Batch:
        batch = base(batch)
        return batch.replace(advantages=change(batch.advantages, batch.active))

    return plan(epochs=2, advantage=doctored)


def off_by(factors: tuple[float, float]) -> Callable[[Batch], Batch]:
    """π_old as if the first ratio were these numbers in turn."""

    def doctored(batch: Batch) -> Batch:
        ratios = torch.tensor(factors).repeat(batch.tokens.shape[1])[: batch.tokens.shape[1]]
        return batch.replace(old_logprobs=(batch.old_logprobs - ratios.log()) * batch.mask)

    return doctored


def twice(batch: Batch) -> Batch:
    batch = score_at_last_token(batch)
    return batch.replace(token_rewards=2 * batch.token_rewards)


SCORED = {"epochs": 2, "shaping": (score_at_last_token,), "kl": Coefficient(value=0.1)}
ONE_STEP = plan()  # never looks back: the learner's first pass is π_old
BROKEN: dict[str, list[Case]] = {
    "frozen": [Case(engine=Mixed, found=r"rollouts of the versions \[-1, 0\]")],
    "copied": [
        Case(syncs=False, step=2, found="rollouts of version 0, and the learner is at 1"),
        Case(copies=False, hidden="mismatch", step=2, found="engine and learner differ by"),
        Case(copies=False, loop=ONE_STEP, step=2, found="engine and learner differ by"),
    ],
    "rewards": [
        # The first policy is its own reference: a KL that is left out shows at the second step.
        Case(
            loop=plan(**SCORED),
            promised=plan(**SCORED, kl_placement="reward"),
            step=2,
            found="KL make",
        ),
        Case(loop=plan(epochs=2, shaping=(twice,)), found="sequence 0 was given"),
        Case(loop=plan(epochs=2), promised=plan(epochs=2, **IN_REWARD), found="no token rewards"),
        Case(
            loop=plan(epochs=2),
            promised=plan(epochs=2, kl_placement="loss", kl=Coefficient(value=0.1)),
            reference=False,
            found="no reference log-probs",
        ),
    ],
    "detached": [
        *(
            Case(doctor=requiring_grad(name), found=f"{name} would be differentiated")
            for name in ("old_logprobs", "ref_logprobs", "values", "returns")
        ),
        Case(
            loop=advantages(lambda found, active: found.requires_grad_()),
            found="advantages would be differentiated",
        ),
    ],
    "normalised": [
        Case(
            loop=advantages(lambda found, active: found + 0.1 * ~active),
            found="did not choose, or broken scores, have",
        ),
        Case(
            loop=advantages(lambda found, active: found + 0.1 * active),
            found="of group 0 add up to 0.4, not to 0",
        ),
        Case(
            loop=advantages(lambda found, active: found + 0.1 * active, batch_whitened),
            normalised="batch",
            found="mean 0.1 and deviation 1$",
        ),
        Case(
            loop=advantages(lambda found, active: 1.1 * found, batch_whitened),
            normalised="batch",
            found=r"and deviation 1\.1$",
        ),
    ],
    "ratio": [
        Case(doctor=off_by((1.1, 1.1)), found=r"mean 1\.1, deviation"),
        Case(loop=plan(epochs=2), doctor=off_by((0.9, 1.1)), found=r"deviation 0\.(09|1)"),
    ],
    "losses": [
        Case(promised=plan(epochs=2, **IN_REWARD, value_loss=squared), found="no value_loss"),
        Case(
            promised=plan(epochs=2, **IN_REWARD, entropy_coefficient=0.1), found="no entropy_loss"
        ),
        Case(hidden="policy_loss", found="no policy_loss"),
    ],
    "epochs": [
        Case(promised=plan(epochs=3, **IN_REWARD), found="2 of 3 optimiser steps"),
        Case(promised=plan(epochs=2, minibatches=2, **IN_REWARD), found="2 of 4 optimiser steps"),
        Case(
            loop=plan(epochs=4, kl_stop=1e-9, **IN_REWARD),
            promised=plan(epochs=4, **IN_REWARD),
            found="2 of 4 optimiser steps, and no KL above the limit",
        ),
    ],
}
