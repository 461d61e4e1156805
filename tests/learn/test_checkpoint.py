"""A learner comes back bit for bit: what it does next is what it would have done."""

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_model import OPTIONS, small_model
from torch import nn

from posttrain.algorithms.losses.policy import clipped
from posttrain.algorithms.losses.value import squared
from posttrain.algorithms.objective import with_values
from posttrain.algorithms.weights import sequence_mean
from posttrain.data.collate import collate_demonstrations
from posttrain.learn.checkpoint import load_learner, save_learner
from posttrain.learn.learner import LocalLearner
from posttrain.learn.optim import adamw
from posttrain.learn.trained import Trained
from posttrain.models.critic import separate_critic, shared_critic
from posttrain.models.frozen import Reference
from posttrain.models.load import load_policy
from posttrain.models.save import save_policy
from posttrain.protocols import Objective, Outputs
from posttrain.types import Batch, Terms


def batch() -> Batch:
    rows = [((5, 6, 7, 8, 9), (False, True, True, True, True)), ((11, 12, 0), (False, True, True))]
    made = collate_demonstrations(rows, pad_token=0)
    generator = torch.Generator().manual_seed(3)
    numbers = torch.randn(2, 2, 5, generator=generator) * made.mask
    return sequence_mean(
        made.replace(advantages=numbers[0], returns=numbers[1], rewards=numbers[0, :, 0])
    )


@Objective
def objective(outputs: Outputs, part: Batch) -> Terms:
    terms = clipped(outputs.need("logprobs"), part)
    if outputs.values is None:
        return terms
    return with_values(terms, squared(outputs.values, part), coefficient=0.5)


def learner(kind: str = "none", *, dtype: torch.dtype = torch.float32) -> LocalLearner:
    """A new learner of the same recipe, with a reference and a schedule that never stands still."""
    policy = replace(load_policy("tiny", options=OPTIONS), model=small_model(dtype=dtype))
    critic = None
    if kind != "none":
        module = separate_critic(policy) if kind == "separate" else shared_critic(policy)
        critic = Trained(module, adamw(module, learning_rate=5e-3), schedule=lambda n: 1 / (n + 1))
    return LocalLearner(
        policy.model,
        adamw(policy.model, learning_rate=1e-3, weight_decay=0.1),
        save=functools.partial(save_policy, policy),
        schedule=lambda step: 1 / (step + 1),
        reference=Reference(),
        critic=critic,
    )


def continued(student: LocalLearner) -> list[object]:
    """Everything that two more steps show."""
    shown: list[object] = [student.version, student.micro_batch_tokens]
    for _ in range(2):
        seen = student.infer(batch())
        shown += [seen.need("ref_logprobs").tolist(), seen.need("old_logprobs").tolist()]
        shown.append(student.step(seen, objective))
    modules = [student.model, *([] if student.critic is None else [student.critic.module])]
    return shown + [weight.tolist() for module in modules for weight in module.parameters()]


def restored(student: LocalLearner, folder: Path, *, into: LocalLearner) -> LocalLearner:
    """Through files and JSON text, into another learner."""
    folder.mkdir()
    numbers = json.loads(json.dumps(save_learner(student, folder)))
    load_learner(into, folder, numbers=numbers)
    return into


@pytest.mark.parametrize("kind", ["none", "separate", "shared"])
@pytest.mark.parametrize("refreshed", [False, True])
def test_the_next_steps_are_those_of_the_learner_that_went_on(
    tmp_path: Path, kind: str, refreshed: bool
) -> None:
    """Log-probs, losses, gradients, step sizes, weights of policy and critic: equal, not close."""
    student = learner(kind)
    for step in range(3):
        student.step(student.infer(batch()), objective)
        student.version += 1
        if refreshed and step == 1:
            student.refresh_reference()
    again = restored(student, tmp_path / "state", into=learner(kind))
    assert (tmp_path / "state" / "reference.safetensors").exists() is refreshed
    assert continued(again) == continued(student)


def _no_moments(student: LocalLearner) -> None:
    student.trained.optimizer.state.clear()


def _no_critic_moments(student: LocalLearner) -> None:
    student.critic.optimizer.state.clear()


def _no_schedule(student: LocalLearner) -> None:
    student.trained.num_steps = 0


def _no_critic_schedule(student: LocalLearner) -> None:
    student.critic.num_steps = 0


def _no_version(student: LocalLearner) -> None:
    student.version = 0


def _no_critic_weights(student: LocalLearner) -> None:
    with torch.no_grad():
        student.critic.module.head.weight.zero_()


FORGET = [
    _no_moments,
    _no_critic_moments,
    _no_schedule,
    _no_critic_schedule,
    _no_version,
    _no_critic_weights,
]


@pytest.mark.parametrize("forget", FORGET)
def test_what_is_forgotten_would_show(
    tmp_path: Path, forget: Callable[[LocalLearner], None]
) -> None:
    """Each part of the state matters to what is compared above: none is compared in vain."""
    student = learner("separate")
    for _ in range(3):
        student.step(student.infer(batch()), objective)
        student.version += 1
    again = restored(student, tmp_path / "state", into=learner("separate"))
    forget(again)
    assert continued(again) != continued(student)


def test_bfloat16_weights_and_a_model_folder_that_lacks_some(tmp_path: Path) -> None:
    """Whatever the folder for other tools does not hold bit for bit is kept beside it."""
    student = learner(dtype=torch.bfloat16)
    student._save = lambda folder: folder.mkdir()  # a format of its own: nothing we can read
    student.step(student.infer(batch()), objective)
    again = restored(student, tmp_path / "state", into=learner(dtype=torch.bfloat16))
    assert (tmp_path / "state" / "weights.safetensors").exists()
    assert continued(again) == continued(student)


def test_an_ordinary_folder_is_enough_for_the_weights(tmp_path: Path) -> None:
    """Weights are not written twice."""
    restored(learner(), tmp_path / "state", into=learner())
    assert not (tmp_path / "state" / "weights.safetensors").exists()
    assert (tmp_path / "state" / "model" / "model.safetensors").exists()


def test_another_model_is_refused(tmp_path: Path) -> None:
    """Weights of another shape or a missing critic are an error, not a silent start from zero."""
    student = learner()
    (tmp_path / "state").mkdir()
    numbers = save_learner(student, tmp_path / "state")
    with pytest.raises(ValueError, match="without a critic"):
        load_learner(learner("shared"), tmp_path / "state", numbers=numbers)
    wide = LocalLearner(
        nn.Linear(3, 2),
        torch.optim.AdamW(nn.Linear(3, 2).parameters()),
        save=lambda folder: None,
    )
    with pytest.raises(ValueError, match="2 of 2 weights are not in it, 'bias' for one"):
        load_learner(wide, tmp_path / "state", numbers=numbers)
