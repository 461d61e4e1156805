"""A run on a Ray cluster: learners and engines get their places, and what they need from disk."""

from __future__ import annotations

import functools
import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.build.cluster import LearningStage
from posttrain.config import ClusterSection, Resolved
from posttrain.distributed.ray_nodes import Bundle, Say, check_nodes, wait_for_room
from posttrain.distributed.ray_start import LOCAL, init
from posttrain.distributed.remote_learner import RemoteLearner
from posttrain.distributed.spans import Spans
from posttrain.distributed.worker import handed_over
from posttrain.models.load import Policy
from posttrain.models.reward import RewardModel
from posttrain.models.save import save_policy, write_base
from posttrain.protocols import Engine, Learner
from posttrain.track.progress import phase

if TYPE_CHECKING:
    from posttrain.build.setup import Setup
    from posttrain.distributed.recipe_engines import EnginePool

SCRATCH = ".cluster"  # in the run folder, which every node sees; removed at the end


class RayCluster:
    """Satisfies ``Cluster`` on the Ray cluster that ``[cluster]`` names, or on one of its own.

    ``folder`` is the run folder. All that was started goes with :meth:`close`, and with this
    process however it ends: no actor is detached.
    """

    def __init__(
        self,
        recipe: Resolved,
        folder: Path,
        *,
        spans: Spans | None = None,
        say: Say = warnings.warn,
    ) -> None:
        assert recipe.cluster is not None
        assert recipe.cluster.address is not None
        self._section, self._folder, self.spans, self._say = recipe.cluster, folder, spans, say
        self._learner: RemoteLearner | None = None
        self._engines: EnginePool | None = None
        self._scratch = folder.absolute() / SCRATCH
        shutil.rmtree(self._scratch, ignore_errors=True)  # of a driver that was killed
        with phase(f"connecting to the Ray cluster {recipe.cluster.address}"):
            self._ray = init(recipe.cluster.address)
        try:
            self._gpus = self._choose_gpus(recipe)
            self._group = self._placed()
        except BaseException:
            self.close()
            raise

    def make_learner(
        self,
        recipe: Resolved,
        model: Policy | RewardModel,
        *,
        stage: LearningStage,
        total_steps: int,
        reward_model: Path | None = None,
    ) -> Learner:
        """The learner of a stage, over ``cluster.learners`` ranks; the one before it is ended."""
        from posttrain.distributed.ray_group import RankGroup, RankOptions

        if self._learner is not None:
            self._learner.close()
        scratch = self._scratch / stage
        section = self._section
        request, save = handed_over(
            recipe,
            model,
            stage=stage,
            scratch=scratch,
            total_steps=total_steps,
            reward_model=reward_model,
        )
        options = RankOptions(
            threads=recipe.run.threads or max(1, int(section.cpus_per_learner)),
            deterministic=recipe.run.deterministic,
            on_gpu=self._gpus["learner"] > 0,
            deadline=section.deadline,
        )
        start = functools.partial(
            RankGroup, request, size=section.learners, place=self.learner_place, options=options
        )
        with phase(f"starting {section.learners} learner rank{'s' * (section.learners > 1)}"):
            self._learner = RemoteLearner(
                start,
                model=model.model,
                save=save,
                scratch=scratch,
                spans=self.spans,
                say=self._say,
            )
        return self._learner

    def make_engine(self, setup: Setup) -> Engine:
        """The engine that samples from the setup's policy, over ``cluster.engines`` replicas."""
        from posttrain.distributed.recipe_engines import make_engine_pool

        section, scratch = self._section, self._scratch / "engines"
        write_base(setup.policy)
        save_policy(setup.policy, scratch / "model")
        self._engines = make_engine_pool(
            setup,
            [self.engine_place(number) for number in range(section.engines)],
            model=scratch / "model",
            on_gpu=self._gpus["engine"] > 0,
            share=self._ray.put,
            say=self._say,
            spans=self.spans,
        )
        return self._engines

    def metrics(self) -> dict[str, float]:
        """What learners and engines count."""
        parts = [part for part in (self._learner, self._engines) if part is not None]
        return {name: value for part in parts for name, value in part.metrics().items()}

    def close(self) -> None:
        """End what was started for this run; a cluster that was there before stays."""
        if self._engines is not None:
            self._engines.close()
        if self._learner is not None:
            self._learner.close()
            self._learner = None
        self._ray.shutdown()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def learner_place(self, rank: int) -> dict[str, Any]:
        """Options of Ray for the actor of a learner's rank."""
        share = 1 + self._engines_beside(rank)
        amounts = (self._section.cpus_per_learner, self._gpus["learner"] / share)
        return self._place(rank, *amounts)

    def engine_place(self, number: int) -> dict[str, Any]:
        """Options of Ray for the actor of an engine: a place of its own, or beside a learner."""
        section = self._section
        bundle, share = section.learners + number, 1
        if section.colocate:
            bundle = number % section.learners
            share = 1 + self._engines_beside(bundle)
        return self._place(bundle, section.cpus_per_engine, self._gpus["engine"] / share)

    def _engines_beside(self, rank: int) -> int:
        """Engines on the resources of a learner's rank."""
        section = self._section
        return len(range(rank, section.engines, section.learners)) if section.colocate else 0

    def _place(self, bundle: int, *amounts: float) -> dict[str, Any]:
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        cpus, gpus = amounts
        return {
            "num_cpus": cpus,
            "num_gpus": gpus,
            "scheduling_strategy": strategy(
                placement_group=self._group, placement_group_bundle_index=bundle
            ),
        }

    def _choose_gpus(self, recipe: Resolved) -> dict[str, float]:
        """GPUs of a learner and of an engine: as asked, else one where the cluster has them."""
        section = self._section
        there = self._ray.cluster_resources().get("GPU", 0.0) > 0 and recipe.run.device != "cpu"
        asked = {"learner": section.gpus_per_learner, "engine": section.gpus_per_engine}
        return {key: float(there) if given is None else given for key, given in asked.items()}

    def _placed(self) -> Any:
        """Room for all, on nodes that have the same software and see the run folder."""
        section, ray = self._section, self._ray
        bundles = make_bundles(section, self._gpus)
        may_join = section.address != LOCAL
        wait_for_room(ray, bundles, deadline=section.deadline, may_join=may_join, say=self._say)
        group = ray.util.placement_group(bundles, strategy="PACK")
        if not group.wait(section.deadline):
            used = ray.available_resources()
            raise ValueError(
                f"cluster: no place for all processes within {section.deadline:g} s "
                f"(cluster.deadline): of the cluster's CPUs {used.get('CPU', 0.0):g} and of its "
                f"GPUs {used.get('GPU', 0.0):g} are free, others hold the rest; wait for them, or "
                "ask for less"
            )
        nodes = ray.util.placement_group_table(group)["bundles_to_node_id"].values()
        check_nodes(ray, nodes, scratch=self._scratch, deadline=section.deadline)
        return group


def make_bundles(section: ClusterSection, gpus: dict[str, float]) -> list[Bundle]:
    """What is placed together: each learner, and each engine, alone or beside a learner."""
    learners = [
        {"CPU": section.cpus_per_learner, "GPU": gpus["learner"]} for _ in range(section.learners)
    ]
    engines = [
        {"CPU": section.cpus_per_engine, "GPU": gpus["engine"]} for _ in range(section.engines)
    ]
    if section.colocate:
        for number, engine in enumerate(engines):
            home = learners[number % section.learners]
            home["CPU"] += engine["CPU"]
            home["GPU"] = max(home["GPU"], engine["GPU"])
        engines = []
    return [
        {kind: amount for kind, amount in bundle.items() if amount}
        for bundle in (*learners, *engines)
    ]
