"""A learner elsewhere that dies, wherever that is, goes on as if it had not: to the last bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import critic_parts
import pytest
import torch
from learner_parts import InThisProcess, local, policy

from posttrain.algorithms.weights import sequence_mean
from posttrain.distributed import remote_learner
from posttrain.distributed.remote_learner import RemoteLearner
from posttrain.protocols import Learner

STEPS = 5


def remote(scratch: Path, *, dies: dict[int, str] | None = None, **more: Any) -> RemoteLearner:
    """A learner over one rank, which dies at these calls: counted from 1, repeated ones too."""
    dies, seen = dies or {}, more.pop("seen", [])
    return RemoteLearner(
        lambda: InThisProcess(dies, seen=seen),
        model=policy().model,
        save=more.pop("save", lambda folder: None),
        scratch=scratch,
        **more,
    )


def shown(learner: Learner, *, after: Callable[[int], None] = lambda step: None) -> list[object]:
    """All that some steps of training show, and the weights at their end."""
    told: list[object] = []
    for step in range(STEPS):
        seen = learner.infer(sequence_mean(critic_parts.batch()))
        told += [seen.need("old_logprobs").tolist(), seen.need("ref_logprobs").tolist()]
        told.append(learner.step(seen, critic_parts.objective))
        learner.version += 1
        if step == 2:
            learner.refresh_reference()
        after(step)
    return [*told, learner.version, {k: v.tolist() for k, v in learner.weights().items()}]


@pytest.fixture(scope="module")
def undisturbed() -> list[object]:
    return shown(local("separate", reference=True))


def test_without_a_fault_it_is_the_learner_itself(
    undisturbed: list[object], tmp_path: Path
) -> None:
    assert shown(remote(tmp_path)) == undisturbed


@pytest.mark.parametrize(
    ("call", "when"),
    [(call, "after" if call % 2 else "before") for call in (1, 2, 3, 6, 7, 8, 9, 12, 13, 16)],
)
def test_whenever_it_dies_it_repeats_exactly(
    undisturbed: list[object], tmp_path: Path, call: int, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it dies in the middle of what it repeats, and of a state of its own."""
    monkeypatch.setattr(remote_learner, "CALLS", 2)
    monkeypatch.setattr(remote_learner, "SHARE", 1e9)  # whatever it takes
    said: list[str] = []
    seen: list[str] = []
    dies = {call: when, call + 2: "before"}
    learner = remote(tmp_path, dies=dies, say=said.append, seen=seen)
    assert shown(learner) == undisturbed
    assert learner.metrics() == {"cluster/learner_restarts": float(len(said))}
    assert len(said) == 2
    assert ("restore" in seen) == (call > 7)  # the first state is written by then
    assert said[0].startswith("cluster: learner rank 0 has died; all ranks are started anew")


def test_a_checkpoint_is_what_it_begins_from_and_may_be_removed(
    undisturbed: list[object], tmp_path: Path
) -> None:
    seen: list[str] = []
    place = tmp_path / "checkpoint"

    def saved(step: int) -> None:
        if step == 3:
            place.mkdir()
            learner.state(place)
            for file in sorted(place.rglob("*"), reverse=True):
                file.unlink() if file.is_file() else file.rmdir()
            seen.clear()

    learner = remote(tmp_path / "scratch", dies={2: "after"}, say=lambda text: None, seen=seen)
    # Of the first five calls the second dies; of those after the checkpoint too.
    assert shown(learner, after=saved) == undisturbed
    assert learner.restarts == 2
    assert seen[2] == "restore"


def test_restored_and_lost_it_is_what_the_checkpoint_says(tmp_path: Path) -> None:
    other = local("separate", reference=True)
    shown(other)
    (tmp_path / "checkpoint").mkdir()
    numbers = json.loads(json.dumps(other.state(tmp_path / "checkpoint")))
    seen: list[str] = []
    learner = remote(tmp_path / "scratch", dies={3: "after"}, say=lambda text: None, seen=seen)
    learner.restore(tmp_path / "checkpoint", numbers)
    assert learner.version == other.version == STEPS
    assert learner.restarts == 1
    weights = other.weights()
    assert all(torch.equal(weight, weights[name]) for name, weight in learner.weights().items())
    assert shown(learner) == shown(other)


def test_states_of_its_own_keep_the_list_of_calls_short_and_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_learner, "CALLS", 2)
    monkeypatch.setattr(remote_learner, "SHARE", 1e9)
    seen: list[str] = []
    learner = remote(tmp_path / "scratch", seen=seen)
    shown(learner)
    assert seen.count("state") == (STEPS + 1) // 2  # five steps and a refreshed reference
    assert len(list((tmp_path / "scratch").iterdir())) == 1
    learner.close()
    assert not (tmp_path / "scratch").exists()


def test_a_state_that_cannot_be_written_is_said_and_the_calls_are_kept(
    undisturbed: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_learner, "CALLS", 2)
    (tmp_path / "scratch").write_text("a file is in the way")
    said: list[str] = []
    learner = remote(tmp_path / "scratch", dies={14: "before"}, say=said.append)
    assert shown(learner) == undisturbed
    assert "no state of the learner could be kept" in said[0]
    assert learner.restarts == 1


def test_too_many_restarts_in_a_row_end_the_run_with_the_reason(tmp_path: Path) -> None:
    said: list[str] = []
    dies = dict.fromkeys(range(3, 99), "before")
    learner = remote(tmp_path, dies=dies, say=said.append)
    learner.infer(sequence_mean(critic_parts.batch()))
    with pytest.raises(
        RuntimeError, match=r"started anew 4 times in a row, and was lost again: le"
    ):
        learner.infer(sequence_mean(critic_parts.batch()))
    assert len(said) == 4
    assert "(4 of at most 4 times in a row)" in said[-1]


def test_weights_are_brought_here_once_a_version(tmp_path: Path) -> None:
    """However many optimiser steps are taken between two versions."""
    seen: list[str] = []
    learner = remote(tmp_path, seen=seen)
    batch = learner.infer(sequence_mean(critic_parts.batch()))
    for _ in range(3):
        learner.step(batch, critic_parts.objective)
    assert "weights" not in seen
    learner.version += 1
    learner.weights()
    learner.save(tmp_path)
    assert seen.count("weights") == 1
