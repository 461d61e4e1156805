"""Learners for tests of whoever hosts them: one that is the same every time it is made."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ray import cloudpickle as pickled
from small_model import OPTIONS, small_model

from posttrain.distributed.ray_rank import LearnerRank
from posttrain.distributed.remote_learner import LearnerCall, RanksLostError, RemoteLearner
from posttrain.learn.learner import LocalLearner
from posttrain.learn.optim import adamw
from posttrain.learn.ranks import ALONE, Ranks
from posttrain.learn.trained import Trained
from posttrain.models.critic import separate_critic, shared_critic
from posttrain.models.frozen import Reference
from posttrain.models.load import Policy, load_policy
from posttrain.models.save import save_policy

CRITICS = {"separate": separate_critic, "shared": shared_critic}


def policy() -> Policy:
    return replace(load_policy("tiny", options=OPTIONS), model=small_model())


def local(critic: str = "", *, reference: bool = False, ranks: Ranks = ALONE) -> LocalLearner:
    made = policy()
    trained = None
    if critic:
        module = CRITICS[critic](made)
        trained = Trained(module, adamw(module, learning_rate=5e-3))
    return LocalLearner(
        made.model,
        adamw(made.model, learning_rate=1e-3, weight_decay=0.1),
        save=functools.partial(save_policy, made),
        schedule=lambda step: 1 / (step + 1),
        reference=Reference() if reference else None,
        critic=trained,
        ranks=ranks,
    )


@dataclass(frozen=True)
class LocalRequest:
    """Stands in for a ``LearnerRequest``: the learner above, on whichever rank."""

    critic: str = "separate"
    here: str = ""
    modules: tuple[str, ...] = ()

    def make(self, ranks: Ranks) -> LocalLearner:
        return local(self.critic, reference=True, ranks=ranks)


class InThisProcess:
    """The only rank of a learner, hosted as a Ray actor hosts it, but in this process.

    ``dies`` says at which calls, counted over all ranks that share the list, it is lost: before
    the call is done, or after, when the answer is under way.
    """

    def __init__(
        self, dies: dict[int, str] | None = None, *, seen: list[str] | None = None
    ) -> None:
        self._dies, self._seen = dies or {}, [] if seen is None else seen
        self._rank = LearnerRank(
            0, size=1, threads=torch.get_num_threads(), deterministic=False, on_gpu=True
        )
        request: Any = LocalRequest(here=os.getcwd())
        self._rank.build(request)

    def call(self, call: LearnerCall) -> Any:
        self._seen.append(call.name)
        when = self._dies.get(len(self._seen))
        if when == "before":
            raise RanksLostError("learner rank 0 has died")
        answer = self._rank.call(pickled.loads(pickled.dumps(call)))
        if when == "after":
            raise RanksLostError("learner rank 0 has died")
        return pickled.loads(pickled.dumps(answer))

    def end(self) -> None:
        pass


@contextlib.contextmanager
def ray_of_tests() -> Iterator[Any]:
    """A Ray cluster of this process, whose workers import what a test has pickled."""
    from posttrain.distributed import ray_start

    here = Path(__file__).parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{here.parent / 'src'}:{here}")
        ray = ray_start.init(ray_start.LOCAL)
        yield ray
        ray.shutdown()


def on_ray(
    scratch: Path,
    *,
    size: int,
    deadline: float = 600.0,
    say: Callable[[str], None] = pytest.fail,
    request: Any = None,
) -> RemoteLearner:
    """A learner over ranks in actors of the Ray that this process is connected to."""
    from posttrain.distributed.ray_group import RankGroup, RankOptions

    options = RankOptions(threads=1, deterministic=False, on_gpu=False, deadline=deadline)
    own = policy()

    def start() -> RankGroup:
        return RankGroup(
            request or LocalRequest(),
            size=size,
            place=lambda rank: {"num_cpus": 0.5},
            options=options,
        )

    save = functools.partial(save_policy, own)
    return RemoteLearner(start, model=own.model, save=save, scratch=scratch, say=say)
