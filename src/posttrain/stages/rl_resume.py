"""What the RL loop carries beside its learner: into a checkpoint, and back out of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from posttrain.algorithms.kl import Coefficient
from posttrain.config import RlSection
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

WAITING, ORDER = "waiting.json", "prompt_order.json"
NOTHING: Mapping[str, Any] = {"prompts": [], "batches": []}


def lag_of(section: RlSection) -> dict[str, int]:
    """What decides how old the batches are that a checkpoint keeps."""
    return {"max_lag": section.max_lag, "partial": section.partial}


def rl_state(
    step: Step,
    waiting: Sequence[Collected],
    *,
    prompts: Sequence[Prompt],
    order: Callable[[int], Any],
    lag: Mapping[str, int],
    accuracy: float | None,
) -> ExtraState:
    """What the RL loop carries beside its learner: for ``more`` of :meth:`Keeper.stepped`.

    The batches that wait were sampled by older weights: they are kept as they are, and the source
    goes on behind the last of them, with the completions that were not finished there and the state
    that the ``order`` of prompts has there.
    """
    last = waiting[-1] if waiting else step.collected
    unfinished = last.unfinished
    begun = unfinished[-1] if unfinished else last

    def place(batch: Collected) -> dict[str, int]:
        return {"position": batch.position, "num_calls": batch.num_calls}

    def more(folder: Path) -> dict[str, Any]:
        plain = {**to_plain(waiting, prompts), "unfinished": to_plain(unfinished, prompts)}
        write_json(folder / WAITING, plain)
        going_on = {"position": begun.position, "num_calls": last.num_calls}
        if (known := order(begun.position)) is not None:
            write_json(folder / ORDER, known)
        return {
            "loop": asdict(step.state),
            "source": {**lag, "last": going_on, "learned": place(step.collected)},
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
    lag: Mapping[str, int],
) -> tuple[State | None, list[Collected]]:
    """Take learner, source and engine to the checkpoint; the loop's state, and what waits there.

    Where the ``lag`` or the prompts were allowed to change, what waits is sampled again.
    """
    begins_at = keeper.begins_at
    if begins_at is None:
        return None, []
    keeper.restore(learner)
    sync(learner.version)
    known = begins_at.state["source"]
    waiting = None
    if {"partial": 1, **known}.items() >= lag.items():
        plain = read_json(begins_at.path / WAITING)
        unfinished = from_plain(plain.get("unfinished", NOTHING), prompts)
        if unfinished is not None:
            waiting, source.unfinished = from_plain(plain, prompts), tuple(unfinished)
    if waiting is None:
        source.unfinished = ()
    place = known["learned" if waiting is None else "last"]
    kept = begins_at.path / ORDER
    source.prompts.restore(place["position"], read_json(kept) if kept.exists() else None)
    source.num_calls = place["num_calls"]
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
