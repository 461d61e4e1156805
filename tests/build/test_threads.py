"""The number of CPU threads: tried at the start, noted, and the same when a run goes on."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from resumed_runs import cut, given, go
from small_runs import TINY, recipe

from posttrain.build import threads
from posttrain.build.threads import Threads, choose_threads, pick, try_each
from posttrain.check import check_recipe
from posttrain.config import recipe_from_dict
from posttrain.models.load import load_policy
from posttrain.runs import write_sealed


def chosen(folder: Path, *, seconds: dict[int, float] | None = None, **run: Any) -> Threads:
    """What is chosen for a recipe where a trial takes these seconds; without any, it may not."""

    def measure(count: int) -> float:
        assert seconds is not None, "nothing is to be tried"
        return seconds[count]

    values = recipe(folder)
    values["run"] |= {"deterministic": False, **run}
    return choose_threads(
        recipe_from_dict(values), load_policy("tiny", options=TINY), measure=measure
    )


def test_the_trial_decides_and_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    found = chosen(tmp_path, seconds={6: 0.4, 3: 0.1, 1: 0.2})
    assert found.number == 3
    assert str(found) == (
        "threads: 3, the fastest; a trial step took 200 ms with 1, 100 ms with 3, 400 ms with 6"
    )
    assert chosen(tmp_path, seconds={6: 0.4, 3: 0.38, 1: 0.9}).number == 6


def test_a_number_that_is_given_wins_and_nothing_is_tried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    assert chosen(tmp_path, threads=16).number == 16
    assert chosen(tmp_path, deterministic=True).number == 64
    monkeypatch.setattr(threads, "LARGE", 10)
    assert chosen(tmp_path).number == 64
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert chosen(tmp_path).number == 4
    assert chosen(tmp_path, device="cpu").number == 64
    assert chosen(tmp_path, threads=16).number == 16


def test_numbers_are_tried_in_turns_and_one_slow_round_does_not_count() -> None:
    asked: list[int] = []
    hiccup = 7  # the call that another process delays

    def measure(count: int) -> float:
        asked.append(count)
        return 0.9 if len(asked) == hiccup else 0.1 / count

    assert try_each([2, 1], measure) == {2: 0.05, 1: 0.1}
    assert asked == [2, 1] * 6


def test_where_each_try_takes_long_one_round_is_enough() -> None:
    asked: list[int] = []

    def measure(count: int) -> float:
        asked.append(count)
        return 5.0 / count

    assert try_each([2, 1], measure) == {2: 2.5, 1: 5.0}
    assert asked == [2, 1] * 2


def test_fewer_threads_must_be_clearly_faster() -> None:
    """A choice on the edge would fall one way today and the other tomorrow."""
    assert pick({4: 1.29, 2: 1.0, 1: 1.5}) == 4
    assert pick({4: 1.31, 2: 1.0, 1: 1.5}) == 2
    assert pick({4: 1.0, 2: 2.0, 1: 3.0}) == 4


def test_a_trial_leaves_weights_gradients_and_random_numbers_alone() -> None:
    policy = load_policy("tiny", options=TINY)
    before = {name: weight.clone() for name, weight in policy.model.named_parameters()}
    state, count = torch.random.get_rng_state(), torch.get_num_threads()
    with threads.own_threads():
        assert threads._trial(policy, 1000, learns=True)(2) > 0
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == count
    assert torch.equal(state, torch.random.get_rng_state())
    for name, weight in policy.model.named_parameters():
        assert weight.grad is None
        assert torch.equal(weight, before[name])


def test_a_trial_samples_only_where_the_threads_would(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, widths = load_policy("tiny", options=TINY), []
    policy.model.register_forward_pre_hook(
        lambda *given: widths.append(given[-1]["input_ids"].shape[1]), with_kwargs=True
    )
    with threads.own_threads():
        threads._trial(policy, 1000, learns=True)(2)
        assert widths == [16]
        monkeypatch.setattr("posttrain.rollout.engines.local.SHARED", 0)
        threads._trial(policy, 1000, learns=True)(2)
    assert widths == [16, 1, 1, 1, 1, 16]


def short(folder: Path) -> dict[str, Any]:
    """A run that chooses its threads, of four steps and two checkpoints."""
    values = given(folder / "run", {"steps": 4, "save_every": 2}, sft=None, eval=None)
    values["run"]["deterministic"] = False
    return values


def used(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of threads that torch had whenever a stage of a run began."""
    seen: list[int] = []
    whole = threads.settle_threads

    def settle(*arguments: Any, **options: Any) -> Threads:
        found = whole(*arguments, **options)
        seen.append(torch.get_num_threads())
        return found

    monkeypatch.setattr("posttrain.stages.job.settle_threads", settle)
    return seen


def test_a_run_that_goes_on_keeps_its_threads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another number would round differently: what a new trial says is not asked."""
    seen = used(monkeypatch)
    slow_with_two = {2: 3.0, 1: 1.0}
    slow_with_one = {2: 1.0, 1: 3.0}
    values = short(tmp_path)
    with threads.own_threads():
        torch.set_num_threads(2)
        monkeypatch.setattr(
            threads, "_trial", lambda policy, weights, learns: slow_with_two.__getitem__
        )
        cut(values, save=2)
        record = json.loads((tmp_path / "run" / "threads.json").read_text())
        assert record["threads"] == 1
        assert record["seconds"] == {"2": 3.0, "1": 1.0}
        assert record["reason"] == "the fastest; a trial step took 1000 ms with 1, 3000 ms with 2"
        monkeypatch.setattr(
            threads, "_trial", lambda policy, weights, learns: slow_with_one.__getitem__
        )
        go(values, resume=True)
        assert torch.get_num_threads() == 2
    assert seen == [1, 1]
    assert json.loads((tmp_path / "run" / "threads.json").read_text()) == record


def test_fewer_cores_than_the_run_began_with_are_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = used(monkeypatch)
    values = short(tmp_path)
    cut(values, save=2)
    write_sealed(tmp_path / "run" / "threads.json", {"threads": 3, "reason": "by trial"})
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1}, raising=False)
    _, printed = go(values, resume=True)
    assert seen[-1] == 3
    assert "threads: 3, as the run began, though here are 2 cores" in printed
    assert "posttrain run RECIPE --resume --run.threads 2 --allow-changes run.threads" in printed


def test_other_threads_are_a_change_that_must_be_allowed(tmp_path: Path) -> None:
    values = short(tmp_path)
    cut(values, save=2)
    values["run"]["threads"] = 2
    with pytest.raises(ValueError, match=r"run\.threads"):
        go(values, resume=True)
    go(values, resume=True, allow_changes=["run.threads"])
    record = json.loads((tmp_path / "run" / "threads.json").read_text())
    assert (record["threads"], record["reason"]) == (2, "as run.threads says")


def test_a_number_of_threads_that_was_changed_in_the_folder_is_refused(tmp_path: Path) -> None:
    values = short(tmp_path)
    cut(values, save=2)
    path = tmp_path / "run" / "threads.json"
    record = json.loads(path.read_text())
    for changed in ({**record, "threads": 7}, {"reason": "?"}):
        path.write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=r"threads\.json: has changed since it was written"):
            go(values, resume=True)


def test_check_says_the_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seconds = {2: 1.0, 1: 3.0}
    monkeypatch.setattr(threads, "_trial", lambda policy, weights, learns: seconds.__getitem__)
    values = recipe(tmp_path / "run", run={"deterministic": False})
    with threads.own_threads():
        torch.set_num_threads(2)
        report = check_recipe(values, fast=True)
    line = next(line for line in report.lines if line.name == "threads")
    assert (line.area, line.state) == ("resources", "pass")
    assert line.text == "2, the fastest; a trial step took 3000 ms with 1, 1000 ms with 2"


@pytest.mark.parametrize(
    ("given_policy", "expected"), [(None, "passive 2000"), ("active", "active None")]
)
def test_waiting_threads_sleep_unless_told_otherwise(
    given_policy: str | None, expected: str
) -> None:
    """Set by the import, before torch reads it; what the user has set stands."""
    own = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    environment = {k: v for k, v in os.environ.items() if k not in own}
    if given_policy is not None:
        environment["OMP_WAIT_POLICY"] = given_policy
    code = (
        "import sys, posttrain, os; assert 'torch' not in sys.modules; "
        "print(os.environ['OMP_WAIT_POLICY'], os.environ.get('GOMP_SPINCOUNT'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == expected


def test_what_onednn_keeps_is_bounded() -> None:
    """1,500 row counts took 4 GB otherwise; read by torch when it is loaded."""
    names = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
    environment = {k: v for k, v in os.environ.items() if k not in names} | {names[1]: "7"}
    code = f"import posttrain, os; print([os.environ[name] for name in {names}])"
    given = [sys.executable, "-c", code]
    done = subprocess.run(given, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['64', '7']"
