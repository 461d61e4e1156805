"""What the adapters of one run share: the base, the engine, and turns in which each learns."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from posttrain.build.setup import adapted, choose_compile, choose_device, make_template, read_policy
from posttrain.build.threads import Threads
from posttrain.config import Resolved
from posttrain.learn.learner import LocalLearner
from posttrain.models.adapter_group import AdapterGroup
from posttrain.models.adapters import AdapterSettings
from posttrain.models.files.adapter_folder import read_adapter
from posttrain.models.load import Policy
from posttrain.protocols import Engine, Learner, Tracker
from posttrain.rollout.engines import joint_engine
from posttrain.rollout.engines.joint import JointCall, JointEngine, MemberEngine
from posttrain.rollout.taking_turns import Turns
from posttrain.track import Several, Stage
from posttrain.track.console import MeanConsole
from posttrain.types import Rollout

Result = TypeVar("Result")


class Together:
    """The members of a run. Whenever one of them runs, the model has its adapter."""

    def __init__(self, number: int, *, folder: str, visible: bool = True) -> None:
        self.number, self._folder, self.visible = number, folder, visible
        self.turns: Turns[JointCall, list[list[Rollout]]] = Turns(self._sample, before=self._put)
        self._policy: Policy | None = None
        self._group: AdapterGroup | None = None
        self._engine: JointEngine | None = None
        self._learners: dict[float, LocalLearner] = {}
        self._fresh = False
        self.threads: Threads | None = None
        self._shown = MeanConsole(number)

    def run(self, job: Callable[[AdapterMember], Result]) -> list[Result | BaseException]:
        """Do a job for every member, in turns: what each returned, or raised."""
        members = [AdapterMember(self, number) for number in range(self.number)]
        found = self.turns.run([partial(job, member) for member in members])
        self.close()
        return found

    def tracker(self, member: int, stage: Stage) -> Tracker:
        """What shows the numbers of a member, in the mean with those of the others."""
        return self._shown.member(member, stage) if self.visible else Several(())

    def close(self) -> None:
        """Give memory back."""
        if self._engine is not None:
            self._engine.close()
        self._engine = self._group = self._policy = None
        self._learners.clear()

    def policy(self, member: int, recipe: Resolved, *, source: str) -> Policy:
        """The base with the adapter of a member: a new one, or that of a model folder."""
        device = choose_device(recipe)
        if self._policy is None:
            read = read_policy(recipe, recipe.model.name, device=device)
            self._fresh = read.adapter is None
            self._policy = adapted(recipe, read, device=device, folder=self._folder)
            self._group = AdapterGroup(self._policy.model, self.number)
        assert self._group is not None
        settings = AdapterSettings(**dict(recipe.adapter)) if self._fresh else self._policy.adapter
        assert settings is not None
        if source != recipe.model.name:
            found = read_adapter(Path(source).expanduser())
            self._group.add(member, found.settings, weights=found.weights)
            return replace(self._policy, adapter=found.settings, source=source)
        self._group.add(member, settings, seed=recipe.run.seed if self._fresh else None)
        return replace(self._policy, adapter=settings)

    def engine(self, member: int, recipe: Resolved) -> MemberEngine:
        """The engine of a member, of whose policy was asked before."""
        assert self._policy is not None
        assert self._group is not None
        if self._engine is None:
            given: dict[str, Any] = dict(recipe.rl.engine or {})
            compute = given.get("compute", "auto")
            self._engine = joint_engine(
                self._group,
                self._policy,
                decode=make_template(recipe, self._policy).decode,
                compute=recipe.model.compute if compute == "auto" else compute,
                max_sequences=given.get("max_sequences"),
                compiled=choose_compile(recipe, choose_device(recipe)),
            )
        return MemberEngine(member, self._engine, group=self._group, turns=self.turns)

    def learner(self, member: int, learner: Learner) -> Learner:
        """A member's learner, with what those before it have captured and measured."""
        if isinstance(learner, LocalLearner) and self._group is not None:
            scale = self._group.scales[member]
            first = self._learners.setdefault(scale, learner)  # a captured pass has the scale in it
            if first is not learner:
                learner.share(first)
        return learner

    def _sample(self, asked: Any) -> Any:
        assert self._engine is not None
        return self._engine.answer(asked)

    def _put(self, member: int) -> None:
        if self._group is not None:
            self._group.put(member)


class AdapterMember:
    """One of the adapters of a run, to the job that trains it as if it were alone."""

    def __init__(self, together: Together, number: int) -> None:
        self._together, self.number = together, number
        self._engine: MemberEngine | None = None

    @property
    def threads(self) -> Threads | None:
        """The CPU threads of all members, once the first has found out."""
        return self._together.threads

    @threads.setter
    def threads(self, found: Threads) -> None:
        self._together.threads = found

    def policy(self, recipe: Resolved, source: str) -> Policy:
        """The base with this adapter."""
        return self._together.policy(self.number, recipe, source=source)

    def engine(self, recipe: Resolved) -> Engine:
        """What samples from it."""
        self._engine = self._together.engine(self.number, recipe)
        return self._engine

    def shared(self, learner: Learner) -> Learner:
        """Its learner, with what the adapters can share."""
        return self._together.learner(self.number, learner)

    def alone(self) -> AbstractContextManager[None]:
        """Inside, no other member has its turn."""
        return nullcontext() if self._engine is None else self._engine.alone()

    def tracker(self, stage: Stage) -> Tracker:
        """What shows its numbers, in the mean with those of the others."""
        return self._together.tracker(self.number, stage)
