"""A million rollouts by page: what is found, in which order, and what a broken file can do."""

import os
from pathlib import Path
from typing import get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from posttrain.cli import viewing
from posttrain.runs import Filter, Rollouts, index, rollout_file, store, write_rollouts
from posttrain.runs.store import SHOWN
from posttrain.types import Prompt, Rollout, Score, Turn
from posttrain.types.text import ScoreState

REWARDS = {1: [0.0, 1.0, 0.5, 1.0], 2: [1.0, 0.25, 0.0, 0.5], 30: [0.75, 0.0, 1.0, 0.25]}


def make(step: int, reward: float, *, number: int) -> Rollout:
    tokens = (5,) * (number + 1)
    return Rollout(
        prompt=Prompt(id=f"train-{number // 2}", text=f"{number // 2}+4="),
        turns=(
            Turn(
                tokens=tokens,
                logprobs=(-0.5,) * len(tokens),
                text=f"Step {step}, answer {number} \x1b[31m<b>",
                stop_reason="length" if number == 3 else "stop",
                version=step,
            ),
        ),
        group=number // 2,
        score=Score(value=reward, parts={"answer": reward}),
    )


def write(folder: Path, step: int, *, rewards: list[float]) -> None:
    rollouts = [make(step, reward, number=number) for number, reward in enumerate(rewards)]
    write_rollouts(rollout_file(folder, step), rollouts, step=step)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The rollouts of three steps."""
    for step, rewards in REWARDS.items():
        write(tmp_path / "rollouts", step, rewards=rewards)
    return tmp_path / "rollouts"


def places(page: store.Page) -> list[tuple[int, int]]:
    """Step and row of every rollout of a page."""
    return [(row["step"], row["length"] - 1) for row in page.rows]


def test_a_page_holds_the_rows_and_how_many_there_are(folder: Path) -> None:
    rollouts = Rollouts(folder.parent)  # the folder of the stage will do
    page = rollouts.page(offset=3, limit=2)
    assert (page.offset, page.total, len(rollouts), rollouts.steps) == (3, 12, 12, [1, 2, 30])
    assert places(page) == [(1, 3), (2, 0)]
    assert tuple(page.rows[0]) == SHOWN
    assert page.rows[0]["completion"] == "Step 1, answer 3 \x1b[31m<b>"
    assert page.rows[0]["parts"] == {"answer": 1.0}
    (row,) = rollouts.page(limit=1, columns=["sampler_logprobs", "step"]).rows
    assert row == {"sampler_logprobs": [-0.5], "step": 1}
    assert rollouts.page(offset=12).rows == rollouts.page(limit=0).rows == []


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (
            Filter(first_step=2),
            [(2, 0), (2, 1), (2, 2), (2, 3), (30, 0), (30, 1), (30, 2), (30, 3)],
        ),
        (Filter(first_step=2, last_step=29), [(2, 0), (2, 1), (2, 2), (2, 3)]),
        (Filter(first_step=3, last_step=2), []),
        (Filter(first_step=31), []),
        (Filter(last_step=0), []),
        (Filter(min_reward=0.75), [(1, 1), (1, 3), (2, 0), (30, 0), (30, 2)]),
        (Filter(min_reward=0.25, max_reward=0.5), [(1, 2), (2, 1), (2, 3), (30, 3)]),
        (Filter(group=1, last_step=1), [(1, 2), (1, 3)]),
        (Filter(stop_reason="length"), [(1, 3), (2, 3), (30, 3)]),
        (Filter(prompt_id="train-0", max_reward=0.0), [(1, 0), (30, 1)]),
        (Filter(prompt_id="train-9"), []),
        (Filter(state="ok", min_reward=1.0, first_step=2), [(2, 0), (30, 2)]),
        (Filter(state="broken"), []),
        (Filter(text="step 30, ANSWER 2"), [(30, 2)]),
        (Filter(text="1+4", max_reward=0.25), [(2, 2), (30, 3)]),
        (Filter(text="(.*"), []),  # a text, not a pattern
        (Filter(text="", last_step=1), [(1, 0), (1, 1), (1, 2), (1, 3)]),
    ],
)
def test_filters(where: Filter, expected: list[tuple[int, int]], folder: Path) -> None:
    rollouts = Rollouts(folder)
    assert places(rollouts.page(where)) == expected
    assert rollouts.count(where) == rollouts.page(where, limit=1).total == len(expected)


def test_a_state_that_no_rollout_can_have_is_refused() -> None:
    """What is accepted is what is stored, and one word for all that is not ok."""
    for state in (None, "broken", *get_args(ScoreState)):
        assert Filter(state=state).state == state
    with pytest.raises(ValueError, match="state: 'time-out' is not one; did you mean 'timeout'"):
        Filter(state="time-out")
    assert {*get_args(viewing.State)} == {"broken", *get_args(ScoreState)}


def test_what_is_broken_and_what_has_no_score(tmp_path: Path) -> None:
    graded = make(1, 1.0, number=0)
    crashed = Score(value=float("nan"), state="crashed", reason="ValueError")
    rollouts = [graded, *(Rollout(**{**vars(graded), "score": s}) for s in (crashed, None))]
    write_rollouts(rollout_file(tmp_path, 1), rollouts, step=1)
    found = Rollouts(tmp_path)
    assert [row["state"] for row in found.page().rows] == ["ok", "crashed", None]
    assert [row["reason"] for row in found.page(Filter(state="broken")).rows] == ["ValueError"]
    assert found.count(Filter(state="crashed")) == found.count(Filter(min_reward=-1.0)) == 1
    # What has no value comes last, whichever way round.
    for descending in (False, True):
        page = found.page(sort="reward", descending=descending)
        assert [row["state"] for row in page.rows] == ["ok", "crashed", None]


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("sort", ["step", "reward", "advantage", "length"])
def test_pages_put_together_are_all_rows_in_order(
    sort: store.Order, descending: bool, tmp_path: Path
) -> None:
    random = np.random.default_rng(3)
    for step in (1, 2, 3, 4):
        write(tmp_path, step, rewards=random.integers(0, 3, 7).tolist())
    rollouts = Rollouts(tmp_path)
    where = Filter(last_step=3)
    pages = [
        rollouts.page(where, sort=sort, descending=descending, offset=offset, limit=4)
        for offset in range(0, 24, 4)
    ]
    rows = [row for page in pages for row in page.rows]
    everything = rollouts.page(where).rows  # by step
    sign = -1 if descending else 1
    if sort == "step":
        assert rows == everything[::sign]
    else:  # Python's sort keeps equal ones in order
        assert rows == sorted(everything, key=lambda row: sign * (row[sort] or 0.0))


def test_only_files_that_are_new_or_changed_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Rollouts(folder)
    read = []
    plain = index._read
    monkeypatch.setattr(index, "_read", lambda f, s, **o: read.append(s) or plain(f, s, **o))
    assert places(Rollouts(folder).page(limit=1)) == [(1, 0)]
    assert read == []
    write(folder, 7, rewards=[0.125])  # between the others
    write(folder, 2, rewards=[0.0, 0.0])  # a resumed run does a step again
    rollout_file(folder, 1).unlink()
    rollouts = Rollouts(folder)
    assert sorted(read) == [2, 7]
    expected = [(2, 0), (2, 1), (7, 0), (30, 0), (30, 1), (30, 2), (30, 3)]
    assert places(rollouts.page()) == expected
    assert places(rollouts.page(Filter(min_reward=0.125, max_reward=0.125))) == [(7, 0)]
    assert not rollouts.refresh()
    write(folder, 31, rewards=[1.0])
    assert rollouts.refresh()
    assert places(rollouts.page(sort="step", descending=True, limit=2)) == [(31, 0), (30, 3)]
    read.clear()
    assert places(Rollouts(folder).page()) == [*expected, (31, 0)]
    assert read == []


def test_an_index_is_written_again_only_when_much_is_new(tmp_path: Path) -> None:
    for step in range(40):
        write(tmp_path, step, rewards=[1.0])
    rollouts = Rollouts(tmp_path)
    written = (tmp_path / "index.arrow").stat().st_mtime_ns
    for step, again in ((40, False), (41, False), (42, True)):  # 3 · 16 ≥ 43
        write(tmp_path, step, rewards=[0.0])
        assert rollouts.refresh()
        assert ((tmp_path / "index.arrow").stat().st_mtime_ns != written) is again
        assert len(rollouts) == step + 1


@pytest.mark.parametrize("size", [0, 1, 100, 1000, -1])
def test_a_torn_index_is_made_again(size: int, folder: Path) -> None:
    Rollouts(folder)
    whole = (folder / "index.arrow").read_bytes()
    (folder / "index.arrow").write_bytes(whole[:size])
    assert len(Rollouts(folder)) == 12
    assert len((folder / "index.arrow").read_bytes()) == len(whole)


def test_what_a_killed_process_was_writing_is_removed(tmp_path: Path) -> None:
    left = tmp_path / ".index.arrow.1497.tmp"
    left.write_bytes(b"half of an index")
    write(tmp_path, 1, rewards=[1.0])
    Rollouts(tmp_path)
    assert (tmp_path / "index.arrow").exists()
    assert not left.exists()


def test_no_byte_of_an_index_can_do_harm(folder: Path) -> None:
    """Whatever a byte is changed to: an answer or an error, and never rows that are not there."""
    Rollouts(folder)
    whole = (folder / "index.arrow").read_bytes()
    random = np.random.default_rng(0)
    for place in random.integers(0, len(whole), 150):
        torn = bytearray(whole)
        torn[place] = random.integers(256)
        (folder / "index.arrow").write_bytes(bytes(torn))
        rollouts = Rollouts(folder)
        assert len(rollouts) == 12
        for sort in ("step", "reward"):
            assert len(rollouts.page(sort=sort).rows) == 12
        rollouts.count(Filter(state="broken", prompt_id="train-0"))


def test_an_index_that_does_not_fit_its_files_is_found_out(folder: Path) -> None:
    real = Rollouts(folder)._index
    files = [
        index.StepFile(**{**vars(f), "num_rows": n})
        for f, n in zip(real.files, (2, 6, 4), strict=True)
    ]
    index.save_index(folder, index.Index(tuple(files), real.table))
    assert places(Rollouts(folder).page(offset=2, limit=4)) == [(1, 2), (1, 3), (2, 0), (2, 1)]


def test_a_broken_step_file_is_named_and_the_others_are_shown(folder: Path) -> None:
    rollout_file(folder, 2).write_bytes(b"PAR1 no")
    pq.write_table(pa.table({"step": [31]}), rollout_file(folder, 31))
    rollouts = Rollouts(folder)
    assert (len(rollouts), rollouts.steps) == (8, [1, 30])
    assert list(rollouts.problems) == ["step-000002.parquet", "step-000031.parquet"]
    assert rollouts.problems["step-000031.parquet"] == "does not have the columns of rollouts"
    assert list(Rollouts(folder).problems) == list(rollouts.problems)  # from the index
    write(folder, 2, rewards=[1.0])
    assert rollouts.refresh()
    assert rollouts.count(Filter(first_step=2, last_step=2)) == 1


def test_a_file_that_claims_to_be_huge_is_not_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "MAX_BYTES", 100)
    assert "claims 4 rows" in Rollouts(folder).problems["step-000001.parquet"]


def test_a_file_that_changes_under_an_open_store_is_taken_up(folder: Path) -> None:
    rollouts = Rollouts(folder)
    write(folder, 1, rewards=[0.5])
    assert places(rollouts.page(limit=2)) == [(1, 0), (2, 0)]
    rollout_file(folder, 2).unlink()
    assert places(rollouts.page(limit=2)) == [(1, 0), (30, 0)]


def test_a_folder_that_cannot_be_written_can_be_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(os, "replace", refuse)
    assert len(Rollouts(folder)) == 12
    assert sorted(path.name for path in folder.iterdir())[0] == "step-000001.parquet"


def test_a_stage_without_rollouts_is_empty_and_no_folder_is_an_error(tmp_path: Path) -> None:
    empty = Rollouts(tmp_path)
    assert (len(empty), empty.steps, empty.page(Filter(state="ok"), sort="reward").rows) == (
        0,
        [],
        [],
    )
    with pytest.raises(ValueError, match="expected a stage's, like RUN/rl"):
        Rollouts(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "options",
    [{"sort": "prompt"}, {"limit": 1001}, {"limit": -1}, {"offset": -1}, {"columns": ["prompts"]}],
)
def test_what_no_page_can_be_is_refused(options: dict[str, object], folder: Path) -> None:
    with pytest.raises(ValueError, match=r"expected|no 'prompts'; there are step"):
        Rollouts(folder).page(**options)
