"""That other processes have made a run slower is said once, and only where they have."""

import itertools
from pathlib import Path

import pytest
import torch

from posttrain.track.neighbours import Neighbours, waited_for_cores


def told(steps: list[tuple[float, float]]) -> list[str]:
    """What is said after steps of so many seconds a token, of which this share has waited."""
    clock = itertools.accumulate([0.0, *(1.0 for _ in steps)])
    waited = itertools.accumulate([0.0, *(share for _, share in steps)])
    neighbours = Neighbours(waited=lambda: next(waited), clock=lambda: next(clock))
    said = []
    for pace, share in steps:
        assert neighbours.waited() == pytest.approx(share)
        said.append(neighbours.remark(pace))
    return [remark for remark in said if remark]


QUIET, BUSY = (1.0, 0.02), (3.1, 0.9)


def test_a_core_that_others_take_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    remark = told([(9.0, 0.0), *[QUIET] * 50, *[BUSY] * 30])
    assert len(remark) == 1
    assert "3.1 times as long a token as at first" in remark[0]
    assert "--resume --run.threads 1 --allow-changes run.threads, which rounds" in remark[0]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert "run.threads" not in told([(9.0, 0.0), *[QUIET] * 5, *[BUSY] * 5])[0]


@pytest.mark.parametrize(
    "later",
    [
        pytest.param([(3.1, 0.1)] * 30, id="slower for another reason"),
        pytest.param([(1.5, 0.9)] * 30, id="hardly slower"),
        pytest.param([*[BUSY] * 4, QUIET] * 6, id="it comes and goes"),
    ],
)
def test_what_is_no_neighbour_s_fault_is_not_said(later: list[tuple[float, float]]) -> None:
    assert told([(9.0, 0.0), *[QUIET] * 6, *later]) == []


def test_what_the_system_does_not_tell_is_not_guessed() -> None:
    neighbours = Neighbours(waited=lambda: None, clock=lambda: 0.0)
    assert neighbours.waited() is None
    assert [neighbours.remark(pace) for pace in [1.0] * 10 + [9.0] * 10] == [""] * 20


def test_the_waits_of_all_threads_are_summed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As Linux writes them: nanoseconds that ran, nanoseconds that waited, turns."""
    monkeypatch.setattr("posttrain.track.neighbours._THREADS", tmp_path)
    for thread, line in {"11": "70 1500000000 3", "12": "90 250000000 1"}.items():
        (tmp_path / thread).mkdir()
        (tmp_path / thread / "schedstat").write_text(line)
    assert waited_for_cores() == 1.75
    (tmp_path / "13").mkdir()  # a thread that has just ended
    assert waited_for_cores() is None
    monkeypatch.setattr("posttrain.track.neighbours._THREADS", tmp_path / "no_linux")
    assert waited_for_cores() is None
