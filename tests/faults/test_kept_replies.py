"""What environments said is kept: a run that was killed repeats its steps, whatever was drawn."""

import json
from pathlib import Path
from typing import Any

import pytest
from resumed_runs import cut, given, go
from small_runs import timeless

from posttrain.rollout.kept_replies import REPLIES, KeptReplies
from posttrain.runs import read_rollouts
from posttrain.runs.folder import RunFolder

RANDOM = {"name": "arithmetic", "env": "faults.turns_env:RepliesAtRandom"}


def rows(folder: Path, *, until: int) -> list[dict[str, Any]]:
    found = read_rollouts(RunFolder(folder).stage("rl").rollouts)
    return [row for row in found if row["step"] <= until]


def calls(folder: Path) -> list[int]:
    lines = (RunFolder(folder).stage("rl").path / REPLIES).read_text().splitlines()
    return [json.loads(line)["call"] for line in lines]


@pytest.mark.parametrize("max_lag", [0, 1])
def test_a_run_that_was_killed_repeats_its_steps(tmp_path: Path, max_lag: int) -> None:
    """Killed in step 4, it goes on from step 2: steps 3 and 4 are what they were, bit for bit."""
    rl = {"steps": 6, "save_every": 2, "max_lag": max_lag}
    values = given(tmp_path / "run", rl, task=RANDOM, sft=None, eval=None)
    cut(values, save=2)
    before = rows(tmp_path / "run", until=4)
    records = RunFolder(tmp_path / "run").stage("rl").records()
    assert {row["step"] for row in before} == {1, 2, 3, 4}
    assert {2, 3} <= set(calls(tmp_path / "run"))
    resumed, told = go(values, resume=True)
    assert "step 2" in told
    assert rows(tmp_path / "run", until=4) == before
    again = resumed.folder.stage("rl").records()
    assert timeless(again[: len(records)]) == timeless(records)
    said = [row["turns"][1]["text"] for row in rows(tmp_path / "run", until=6)]
    assert len(set(said)) > len(said) / 2  # it does draw
    assert min(calls(tmp_path / "run")) == 4  # the last checkpoint but one has learned from 0 to 3


def test_replies_of_calls_before_the_last_checkpoint_but_one_are_dropped(tmp_path: Path) -> None:
    replies = KeptReplies(tmp_path, since=0)
    said = [{0: [(7, {"text": "so?"})]}]
    for call in range(6):
        assert replies.known(call, "a") == []
        replies.keep(call, "a", said=said)
        if call % 2:
            replies.saved(call + 1)
    with (tmp_path / REPLIES).open("a") as file:
        file.write('{"call": 6, "pas')  # cut short
    again = KeptReplies(tmp_path, since=4)
    assert [again.known(call, "a") for call in (3, 4, 5, 6)] == [[], said, said, []]
    kept = (tmp_path / REPLIES).read_bytes()
    again.keep(4, "a", said=said)  # the same again
    assert (tmp_path / REPLIES).read_bytes() == kept
    again.keep(5, "a", said=[{0: [(7, {"text": "no?"})]}])  # turns that differ have other answers
    assert KeptReplies(tmp_path, since=5).known(5, "a") == [{0: [(7, {"text": "no?"})]}]
    assert KeptReplies(tmp_path, since=5).known(5, "b") == []  # other prompts, or another seed
    broken = [(7, {"text": "so?"}), (8, {"failure": {"kind": "raised", "reason": "no key"}})]
    again.keep(6, "a", said=[{0: broken}])
    assert KeptReplies(tmp_path, since=6).known(6, "a") == [{0: broken[:1]}]  # asked anew
