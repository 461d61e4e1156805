"""What the RL loop carries beside its learner: into a checkpoint, and back out of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from posttrain.algorithms.kl import Coefficient
from posttrain.pipelines.plan import State
from posttrain.pipelines.rl import Step
from posttrain.protocols import Learner, Sync
from posttrain.rollout.collect import RolloutSource
from posttrain.rollout.kept_replies import KeptReplies
from posttrain.rollout.waiting import from_plain, to_plain
from posttrain.runs import read_json, write_json
from posttrain.runs.checkpoints import checkpoint_steps
from posttrain.runs.folder import StageFolder
from posttrain.runs.keeper import ExtraState, Keeper
from posttrain.types import Collected, Prompt

WAITING = "waiting.json"


def rl_state(
    step: Step,
    waiting: Sequence[Collected],
    *,
    prompts: Sequence[Prompt],
    max_lag: int,
    accuracy: float | None,
) -> ExtraState:
    """What the RL loop carries beside its learner: for ``more`` of :meth:`Keeper.stepped`.

    The batches that wait were sampled by older weights: they are kept as they are, and the source
    goes on behind the last of them.
    """
    last = waiting[-1] if waiting else step.collected

    def place(batch: Collected) -> dict[str, int]:
        return {"position": batch.position, "num_calls": batch.num_calls}

    def more(folder: Path) -> dict[str, Any]:
        write_json(folder / WAITING, to_plain(waiting, prompts))
        return {
            "loop": asdict(step.state),
            "source": {"max_lag": max_lag, "last": place(last), "learned": place(step.collected)},
            "accuracy": accuracy,
        }

    return more


def resume_rl(
    keeper: Keeper,
    learner: Learner,
    *,
    source: RolloutSource,
    prompts: Sequence[Prompt],
    sync: Sync,
    max_lag: int,
) -> tuple[State | None, list[Collected]]:
    """Take learner, source and engine to the checkpoint; the loop's state, and what waits there.

    Where ``max_lag`` or the prompts were allowed to change, what waits is sampled again.
    """
    begins_at = keeper.begins_at
    if begins_at is None:
        return None, []
    keeper.restore(learner)
    sync(learner.version)
    known = begins_at.state["source"]
    waiting = None
    if known["max_lag"] == max_lag:
        waiting = from_plain(read_json(begins_at.path / WAITING), prompts)
    place = known["learned" if waiting is None else "last"]
    source.prompts.position, source.num_calls = place["position"], place["num_calls"]
    return _read_state(begins_at.state["loop"]), waiting or []


def kept_replies(keeper: Keeper, stage: Path) -> KeptReplies:
    """What an environment replied since the checkpoint that the stage goes on from."""
    begins_at = keeper.begins_at
    if begins_at is None:
        return KeptReplies(stage, since=0)
    return KeptReplies(stage, since=begins_at.state["source"]["learned"]["num_calls"])


def drop_replies(replies: KeptReplies | None, step: Step, *, stage: StageFolder) -> None:
    """Behind a step: where a checkpoint was written, earlier replies are needed no more."""
    if replies is not None and step.state.step in checkpoint_steps(stage):
        replies.saved(step.collected.num_calls)


def _read_state(given: Mapping[str, Any]) -> State:
    penalty, baseline = given["penalty"], given["baseline"]
    return State(
        step=given["step"],
        kl=_coefficient(given["kl"]),
        penalty=None if penalty is None else _coefficient(penalty),
        baseline=None if baseline is None else float(baseline),
    )


def _coefficient(given: Mapping[str, Any]) -> Coefficient:
    return Coefficient(**{**given, "value": float(given["value"])})
