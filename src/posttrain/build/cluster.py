"""Where a stage's parts are made: on a cluster, where the setup has one, or in this process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from posttrain.build.learners import learning_section, make_learner, make_reward_learner
from posttrain.config import Resolved
from posttrain.models.load import Policy
from posttrain.models.reward import RewardModel
from posttrain.models.save import write_base
from posttrain.protocols import Engine, Learner

if TYPE_CHECKING:
    from posttrain.build.setup import Setup

LearningStage = Literal["sft", "reward", "dpo", "rl"]


class Cluster(Protocol):
    """Other processes that learn and sample for this one."""

    def make_learner(
        self,
        recipe: Resolved,
        model: Policy | RewardModel,
        *,
        stage: LearningStage,
        total_steps: int,
        reward_model: Path | None = None,
    ) -> Learner:
        """The learner of a stage, which begins with the weights of ``model`` as they are.

        ``weights()`` and ``save()`` bring those it has by then into ``model``, in place. Of the
        learners that a cluster has made, the newest lives.
        """
        ...

    def make_engine(self, setup: Setup) -> Engine:
        """The engine that samples from the setup's policy, over all that the recipe asks for."""
        ...

    def metrics(self) -> Mapping[str, float]:
        """What its processes count, for the record of a step."""
        ...

    def close(self) -> None:
        """End what was started for this run."""
        ...


def stage_learner(
    setup: Setup, stage: LearningStage, *, total_steps: int, model: RewardModel | None = None
) -> Learner:
    """The learner of a stage, on the setup's cluster or here; ``model`` is that of stage reward."""
    recipe = setup.recipe
    write_base(setup.policy)
    if setup.cluster is not None:
        return setup.cluster.make_learner(
            recipe,
            model or setup.policy,
            stage=stage,
            total_steps=total_steps,
            reward_model=setup.reward_model,
        )
    if model is not None:
        return make_reward_learner(
            recipe,
            model,
            section=recipe.reward,
            device=setup.device,
            total_steps=total_steps,
            replicas=setup.replicas,
        )
    learner = make_learner(
        recipe,
        setup.policy,
        section=learning_section(recipe, stage),
        device=setup.device,
        total_steps=total_steps,
        reward_model=setup.reward_model,
        replicas=setup.replicas,
    )
    return learner if setup.member is None else setup.member.shared(learner)
