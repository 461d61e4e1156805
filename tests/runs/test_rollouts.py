"""Rollouts in Parquet: everything comes back, and the schema stays what it is."""

import math
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from posttrain.runs import (
    SCHEMA,
    RolloutWriter,
    read_rollouts,
    rollout_file,
    rollout_steps,
    rollout_table,
    sequence_advantages,
    token_ages,
    write_rollouts,
)
from posttrain.types import Batch, Prompt, Rollout, Score, Turn

# Any change here is a change of the layout that users' tools read: raise the version with it.
_TURN = "struct<start: int32, length: int32, sampled: bool, text: string, reward: double>"
EXPECTED_SCHEMA = f"""\
step: int64
group: int32
sample: int32
prompt_id: string
prompt: string
completion: string
prompt_tokens: list<element: int32>
  child 0, element: int32
completion_tokens: list<element: int32>
  child 0, element: int32
sampler_logprobs: list<element: float>
  child 0, element: float
reward: double
state: string
reason: string
parts: map<string, double>
  child 0, entries: struct<key: string not null, value: double> not null
      child 0, key: string not null
      child 1, value: double
advantage: double
version: int64
stop_reason: string
length: int32
turns: list<element: {_TURN}>
  child 0, element: {_TURN}
      child 0, start: int32
      child 1, length: int32
      child 2, sampled: bool
      child 3, text: string
      child 4, reward: double
token_versions: list<element: int32>
  child 0, element: int32"""


def make(group: int = 0, *, text: str = "7", score: Score | None = None) -> Rollout:
    prompt = Prompt(id=f"train-{group}", text="3+4=", tokens=(3, 10, 4))
    completion = Turn(
        tokens=(7, 1), logprobs=(-0.25, -1.5), text=text, stop_reason="stop", version=5
    )
    return Rollout(prompt=prompt, turns=(completion,), group=group, score=score)


def write(folder: Path, *, step: int, rollouts: list[Rollout]) -> None:
    write_rollouts(rollout_file(folder, step), rollouts, step=step)


def test_the_schema_is_stable(tmp_path: Path) -> None:
    write(tmp_path, step=1, rollouts=[make()])
    stored = pq.read_schema(tmp_path / "step-000001.parquet")
    assert SCHEMA.remove_metadata().to_string() == EXPECTED_SCHEMA
    assert stored.equals(SCHEMA)
    assert stored.metadata[b"posttrain.rollouts"] == b"3"
    columns = pq.ParquetFile(tmp_path / "step-000001.parquet").metadata.row_group(0)
    compressions = {columns.column(i).compression for i in range(columns.num_columns)}
    assert compressions == {"ZSTD"}


def test_a_rollout_comes_back_whole(tmp_path: Path) -> None:
    score = Score(value=1.5, parts={"answer": 1.0, "format": 0.5})
    rollouts = [make(0, score=score), make(1), make(0, score=Score(value=0.0))]
    path = rollout_file(tmp_path, 12)
    write_rollouts(path, rollouts, step=12, advantages=[0.75, None, torch.tensor(-0.75)])
    first, second, third = read_rollouts(tmp_path, step=12)
    assert first == {
        "step": 12,
        "group": 0,
        "sample": 0,
        "prompt_id": "train-0",
        "prompt": "3+4=",
        "completion": "7",
        "prompt_tokens": [3, 10, 4],
        "completion_tokens": [7, 1],
        "sampler_logprobs": [-0.25, -1.5],
        "reward": 1.5,
        "state": "ok",
        "reason": "",
        "parts": {"answer": 1.0, "format": 0.5},
        "advantage": 0.75,
        "version": 5,
        "stop_reason": "stop",
        "length": 2,
        "turns": None,
        "token_versions": None,
    }
    assert (second["reward"], second["state"], second["advantage"]) == (None, None, None)
    assert (second["group"], second["sample"], second["parts"]) == (1, 0, {})
    assert (third["group"], third["sample"], third["advantage"]) == (0, 1, -0.75)


def test_each_token_has_its_version_where_there_are_several(tmp_path: Path) -> None:
    (turn,) = make().turns
    mixed = replace(make(), turns=(replace(turn, versions=(5, 6)),))
    write(tmp_path, step=7, rollouts=[mixed, make()])
    rows = read_rollouts(tmp_path)
    assert [(row["version"], row["token_versions"]) for row in rows] == [(5, [5, 6]), (5, None)]
    assert token_ages([mixed, make()], 7) == {
        "staleness/tokens_1": 0.25,
        "staleness/tokens_2": 0.75,
    }


def test_broken_grades_and_strange_text_are_kept(tmp_path: Path) -> None:
    score = Score(value=math.nan, state="crashed", reason="ValueError: \ud800")
    rollouts = [make(text="half \ud83d, \x00, [red], 数", score=score), make(text="")]
    write(tmp_path, step=0, rollouts=rollouts)
    first, second = read_rollouts(tmp_path)
    assert math.isnan(first["reward"])
    assert (first["state"], first["reason"]) == ("crashed", "ValueError: ?")
    assert first["completion"] == "half ?, \x00, [red], 数"
    assert second["completion"] == ""


def test_a_chat_prompt_is_shown_as_its_messages(tmp_path: Path) -> None:
    messages = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "3+4?"})
    rollout = Rollout(
        prompt=Prompt(id="a", text="", messages=messages), turns=make().turns, group=0
    )
    write(tmp_path, step=0, rollouts=[rollout])
    (row,) = read_rollouts(tmp_path)
    assert row["prompt"] == "system: Be brief.\nuser: 3+4?"


def test_a_completion_without_tokens_and_a_step_without_rollouts(tmp_path: Path) -> None:
    empty = Turn(tokens=(), logprobs=(), text="", stop_reason="length", version=0)
    rollout = Rollout(prompt=Prompt(id="a", text="x"), turns=(empty,), group=0)
    write(tmp_path, step=1, rollouts=[])
    write(tmp_path, step=2, rollouts=[rollout])
    (row,) = read_rollouts(tmp_path)
    assert (row["step"], row["completion_tokens"], row["length"]) == (2, [], 0)


def test_steps_are_read_in_order_and_only_as_far_as_needed(tmp_path: Path) -> None:
    for step in (1_000_000, 2, 10):
        write(tmp_path, step=step, rollouts=[make(0), make(1)])
    (tmp_path / ".step-000003.parquet.99.tmp").write_bytes(b"torn")
    (tmp_path / "step-notes.parquet").write_bytes(b"not ours")
    assert rollout_steps(tmp_path) == [2, 10, 1_000_000]
    assert [row["step"] for row in read_rollouts(tmp_path)] == [2, 2, 10, 10, 1_000_000, 1_000_000]
    (tmp_path / "step-1000000.parquet").write_bytes(b"unreadable")
    assert [row["step"] for row in read_rollouts(tmp_path, limit=3)] == [2, 2, 10]
    assert read_rollouts(tmp_path, limit=0) == []


def test_a_table_can_leave_columns_unread(tmp_path: Path) -> None:
    write(tmp_path, step=4, rollouts=[make(score=Score(value=1.0))])
    table = rollout_table(tmp_path, columns=["step", "reward"])
    assert table.to_pydict() == {"step": [4], "reward": [1.0]}


def test_a_step_that_is_not_there_is_an_error_that_says_what_is(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no rollouts of step 3; it holds none"):
        read_rollouts(tmp_path, step=3)
    write(tmp_path, step=1, rollouts=[])
    write(tmp_path, step=2, rollouts=[])
    with pytest.raises(ValueError, match="it holds steps 1 to 2"):
        read_rollouts(tmp_path, step=3)


def test_advantages_must_match_the_rollouts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="1 values for 2 rollouts"):
        write_rollouts(tmp_path / "a", [make(), make()], step=1, advantages=[0.5])


def test_a_sequence_advantage_is_the_mean_over_the_tokens_it_chose() -> None:
    batch = Batch(
        tokens=torch.zeros(3, 3, dtype=torch.long),
        mask=torch.tensor([[False, True, True], [False, True, False], [True, True, True]]),
        valid=torch.tensor([True, True, False]),
        advantages=torch.tensor([[9.0, 1.0, 2.0], [9.0, -1.0, 9.0], [1.0, 1.0, math.nan]]),
    )
    assert sequence_advantages(batch) == [1.5, -1.0, None]


def test_a_writer_leaves_what_write_rollouts_leaves(tmp_path: Path) -> None:
    score = Score(value=1.5, parts={"answer": 1.0})
    with RolloutWriter(tmp_path / "beside") as writer:
        for step in (1, 2):
            rollouts = [make(0, score=score), make(step)]
            writer.write(rollouts, step=step, advantages=[0.5, None])
            write_rollouts(
                rollout_file(tmp_path, step), rollouts, step=step, advantages=[0.5, None]
            )
        writer.wait()
        assert rollout_steps(tmp_path / "beside") == [1, 2]
    assert read_rollouts(tmp_path / "beside") == read_rollouts(tmp_path)


def test_what_a_writer_could_not_write_is_said_at_the_next_step(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with RolloutWriter(tmp_path / "file") as writer:
        writer.write([make()], step=1)
        with pytest.raises(OSError, match="file"):
            writer.write([make()], step=2)
    writer = RolloutWriter(tmp_path / "file")
    with pytest.raises(OSError, match="file"), writer:
        writer.write([make()], step=1)


def test_a_writer_does_not_hide_the_error_that_ends_a_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(KeyError), RolloutWriter(tmp_path / "file") as writer:  # noqa: PT012
        writer.write([make()], step=1)
        raise KeyError("the run's own")


def test_what_an_environment_wrote_has_no_log_prob(tmp_path: Path) -> None:
    """Two turns with a reply between: null where the policy did not choose the token."""
    (turn,) = make().turns
    two = Rollout(prompt=make().prompt, turns=(turn, Turn(tokens=(9,), text="?"), turn), group=0)
    write(tmp_path, step=1, rollouts=[two, make()])
    first, second = read_rollouts(tmp_path)
    assert first["completion_tokens"] == [7, 1, 9, 7, 1]
    assert first["sampler_logprobs"] == [-0.25, -1.5, None, -0.25, -1.5]
    assert second["sampler_logprobs"] == [-0.25, -1.5]
    assert (first["completion"], first["length"]) == ("7\n7", 4)
    assert pq.read_schema(rollout_file(tmp_path, 1)).equals(SCHEMA)


def test_turns_say_where_they_are_who_wrote_them_and_what_they_earned(tmp_path: Path) -> None:
    guess = Turn(tokens=(7, 1), logprobs=(-0.25, -1.5), text="5")
    low = Turn(tokens=(9,), text="low", reward=-0.5)
    one = make(score=Score(value=1.0))
    several = replace(one, turns=(guess, low, guess))
    write(tmp_path, step=1, rollouts=[one, several])
    first, second = read_rollouts(tmp_path, step=1)
    assert first["turns"] is None
    assert second["turns"] == [
        {"start": 0, "length": 2, "sampled": True, "text": "5", "reward": -0.5},
        {"start": 2, "length": 1, "sampled": False, "text": "low", "reward": None},
        {"start": 3, "length": 2, "sampled": True, "text": "5", "reward": 1.5},
    ]
