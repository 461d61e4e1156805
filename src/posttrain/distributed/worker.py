"""The host of one learner rank, whoever brings it the calls: a Ray actor, or torchrun."""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from posttrain.build.cluster import LearningStage
from posttrain.build.learners import learning_section, make_learner, make_reward_learner
from posttrain.build.setup import choose_device, make_policy
from posttrain.config import Resolved
from posttrain.config.paths import import_from
from posttrain.distributed.remote_learner import LearnerCall
from posttrain.distributed.wire import PackedBatch, pack_batch, pack_tensor, unpack_batch
from posttrain.learn.ranks import ALONE, Ranks
from posttrain.models.load import Policy
from posttrain.models.reward import RewardModel, load_reward, save_reward
from posttrain.models.save import save_policy
from posttrain.protocols import Learner
from posttrain.types import Batch

Save = Callable[[Path], None]

# What torch.distributed says where another rank has gone, or has not answered in time; gloo has
# no type of its own for it.
_PEER_GONE = re.compile(r"gloo|nccl|connection (reset|closed|refused)|broken pipe|timed out", re.I)


def peer_gone(error: BaseException) -> bool:
    """Whether an error is that of a rank which could not reach another one, or waited too long.

    >>> peer_gone(RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer"))
    True
    >>> peer_gone(RuntimeError("my loss: no such sequence")), peer_gone(OSError("broken pipe"))
    (False, False)
    """
    if isinstance(error, distributed.DistError):
        return True
    return isinstance(error, RuntimeError) and bool(_PEER_GONE.search(str(error)))


@dataclass(frozen=True, kw_only=True)
class LearnerRequest:
    """All that a rank must know to build its part of a stage's learner; it pickles.

    ``model`` is a model folder that every process sees: of a policy, or in the stage reward of a
    reward model. ``reward_model`` is where that stage leaves its own, for a critic that starts
    there. Relative paths and modules of the user are looked for where the driver looks for them.
    """

    recipe: Resolved
    stage: LearningStage
    model: Path
    total_steps: int
    reward_model: Path | None = None
    here: str = field(default_factory=os.getcwd)
    modules: tuple[str, ...] = field(default_factory=lambda: tuple(sys.path))

    def make(self, ranks: Ranks) -> Learner:
        """The learner of one of these ranks, on this process's device."""
        recipe, stage = self.recipe, self.stage
        device = choose_device(recipe)
        if stage == "reward":
            return make_reward_learner(
                recipe,
                load_reward(str(self.model), dtype=recipe.model.dtype, device=device),
                section=recipe.reward,
                device=device,
                total_steps=self.total_steps,
                ranks=ranks,
            )
        return make_learner(
            recipe,
            make_policy(recipe, str(self.model), device=device),
            section=learning_section(recipe, stage),
            device=device,
            total_steps=self.total_steps,
            reward_model=self.reward_model,
            ranks=ranks,
        )


def handed_over(
    recipe: Resolved,
    model: Policy | RewardModel,
    *,
    stage: LearningStage,
    scratch: Path,
    total_steps: int,
    reward_model: Path | None,
) -> tuple[LearnerRequest, Save]:
    """Write a model where all ranks see it: what they build from it, and how it is saved again."""
    save: Save
    if isinstance(model, RewardModel):
        save = functools.partial(save_reward, model)
    else:
        save = functools.partial(save_policy, model)
    save(scratch / "model")
    request = LearnerRequest(
        recipe=recipe,
        stage=stage,
        model=scratch / "model",
        total_steps=total_steps,
        reward_model=None if reward_model is None else reward_model.absolute(),
    )
    return request, save


def compute_deterministically() -> None:
    """To the end of this process: the same bits every time, as ``run.deterministic`` asks."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


class LearnerHost:
    """One rank of a learner: builds it, and does what all ranks are asked at the same time."""

    def __init__(self, ranks: Ranks = ALONE) -> None:
        self.ranks = ranks
        self._learner: Learner | None = None

    def build(self, request: LearnerRequest) -> None:
        """Build this rank's learner anew; what there was before is dropped."""
        self._learner = None
        if os.path.isdir(request.here):
            os.chdir(request.here)
        import_from(*(Path(folder) for folder in request.modules if folder))
        self._learner = request.make(self.ranks)

    def call(self, name: str, *given: Any, version: int | None = None) -> Any:
        """What the learner's method or attribute ``name`` gives; ``version`` is set before it."""
        if self._learner is None:
            raise RuntimeError(f"{name}: asked of a learner that is not built yet")
        if version is not None:
            self._learner.version = version
        found = getattr(self._learner, name)
        return found(*given) if callable(found) else found

    def answer(self, call: LearnerCall) -> Any:
        """Do a call; rank 0 gives the answer, of batches and weights what is to be sent."""
        given = [unpack_batch(one) if isinstance(one, PackedBatch) else one for one in call.given]
        answer = self.call(call.name, *given, version=call.version)
        if self.ranks.rank:
            return None  # the same in all
        if isinstance(answer, Batch):
            return pack_batch(answer, beside=given[0])
        if call.name == "weights":
            return {name: pack_tensor(weight) for name, weight in answer.items()}
        return answer
