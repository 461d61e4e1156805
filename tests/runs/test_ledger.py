"""The ledger: every group that was sampled is trained exactly once, whatever befell the run."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ledger_account import read_ledger

from posttrain.runs.ledger import LEDGER, Ledger
from posttrain.types import Collected, Prompt, Rollout, Turn


def batch(position: int, *, groups: int = 2, token: int = 0, version: int = 0) -> Collected:
    """A batch of groups of two, at this place in the cycle of prompts."""
    rollouts = [
        Rollout(
            prompt=Prompt(id=str(group), text="", tokens=(group,)),
            turns=(Turn(tokens=(position, token), text="", logprobs=(0.0, 0.0), version=version),),
            group=group,
            engine=f"engine {group}",
        )
        for group in range(groups)
        for _ in range(2)
    ]
    return Collected(rollouts=rollouts, position=position)


def lines(*steps: int, ahead: int = 0) -> Callable[[Ledger], None]:
    """Steps of a run that samples ``ahead`` of learning."""

    def write(ledger: Ledger) -> None:
        made = ledger.noted(batch(2 * step) for step in range(steps[0], steps[-1] + 1 + ahead))
        waiting = [next(made) for _ in range(ahead)]
        for step in steps:
            waiting.append(next(made))
            ledger.trained(step, waiting.pop(0))

    return write


def written(folder: Path, *lives: tuple[int, list[Collected], Callable[[Ledger], None]]) -> Any:
    for step, waiting, live in lives:
        with Ledger(folder, step=step, waiting=waiting) as ledger:
            live(ledger)
    return read_ledger(folder)


def test_a_whole_run(tmp_path: Path) -> None:
    found = written(tmp_path, (0, [], lines(1, 2, 3)))
    assert (found.trained, found.resumed, found.problems) == (6, 0, ())
    assert found.engines == ("engine 0", "engine 1")


def test_what_was_trained_after_the_checkpoint_is_trained_again(tmp_path: Path) -> None:
    found = written(tmp_path, (0, [], lines(1, 2, 3)), (1, [], lines(2, 3, 4)))
    assert (found.trained, found.trained_again, found.sampled_again) == (8, 4, 4)
    assert (found.resumed, found.problems) == (1, ())


def test_what_waited_at_the_checkpoint_is_not_sampled_again(tmp_path: Path) -> None:
    """Sampling runs one batch ahead; the checkpoint after step 2 holds the batch of step 3."""

    def rest(ledger: Ledger) -> None:
        ledger.trained(3, batch(6))
        made = ledger.noted(iter([batch(8)]))
        ledger.trained(4, next(made))

    first = (0, [], lines(1, 2, ahead=1))
    assert written(tmp_path, first, (2, [batch(6)], rest)).problems == ()
    lost = written(tmp_path, first, (2, [], rest)).problems
    assert "trained in step 3 as it was not sampled: 6/0" in lost


def test_a_line_that_was_cut_is_forgotten(tmp_path: Path) -> None:
    written(tmp_path, (0, [], lines(1, 2)))
    whole = (tmp_path / LEDGER).read_bytes()
    (tmp_path / LEDGER).write_bytes(whole[:-5])  # the end of "trained 2"
    assert read_ledger(tmp_path, finished=False).trained == 2
    found = written(tmp_path, *[(1, [], lines(2, 3))])
    assert (found.trained, found.problems) == (6, ())


def test_going_on_never_writes_the_lines_before_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill at any moment leaves them: what is refused here would be rewritten."""
    written(tmp_path, (0, [], lines(1, 2)))
    whole = (tmp_path / LEDGER).read_bytes()
    (tmp_path / LEDGER).write_bytes(whole + b'{"trained": 3, "gro')
    opened: list[str] = []
    real = io.open

    def spied(file: Any, mode: str = "r", *given: Any, **named: Any) -> Any:
        if "r" not in mode:
            opened.append(mode)
        return real(file, mode, *given, **named)

    monkeypatch.setattr(io, "open", spied)
    with Ledger(tmp_path, step=2):
        pass
    assert opened == ["ab"]  # "w" would empty it first
    begun = b'{"begin": 2, "waiting": []}\n'
    assert (tmp_path / LEDGER).read_bytes() == whole + begun


def test_a_run_that_begins_anew_has_a_new_ledger(tmp_path: Path) -> None:
    found = written(tmp_path, (0, [], lines(1, 2, 3)), (0, [], lines(1)))
    assert (found.trained, found.resumed) == (2, 0)


WRONG: dict[str, tuple[list[dict[str, Any]], str]] = {
    "twice": ([{"trained": 3, "groups": [["2/0", 7]]}], r"trained in steps 1 and 3: 2/0"),
    "not as sampled": (
        [{"sampled": [["6/0", 0, "", 7]]}, {"trained": 3, "groups": [["6/0", 8]]}],
        r"trained in step 3 as it was not sampled: 6/0",
    ),
    "never": ([{"sampled": [["6/0", 0, "", 7]]}], r"sampled and never trained: 6/0"),
    "there": ([{"sampled": [["2/0", 0, "", 7]]}], r"sampled although it was there: 2/0"),
    "skipped": ([{"trained": 4, "groups": []}], r"step 4 comes after step 2"),
    "too far": ([{"begin": 3, "waiting": []}], r"goes on after step 3, and only 2"),
    "from nowhere": ([{"begin": 2, "waiting": ["8/0"]}], r"waited at step 2 and never sampled"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_found(tmp_path: Path, wrong: str) -> None:
    written(tmp_path, (0, [], lines(1, 2)))
    added, problem = WRONG[wrong]
    with (tmp_path / LEDGER).open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in added)
    with pytest.raises(AssertionError, match=problem):
        assert read_ledger(tmp_path).problems == ()


def test_the_same_weights_must_draw_the_same_tokens_again(tmp_path: Path) -> None:
    def other(version: int) -> Callable[[Ledger], None]:
        def write(ledger: Ledger) -> None:
            drawn = batch(4, token=1, version=version)
            ledger.trained(2, next(ledger.noted(iter([drawn]))))

        return write

    for version, problems in ((0, 2), (1, 0)):  # other weights may
        found = written(tmp_path, (0, [], lines(1, 2)), (1, [], other(version)))
        assert len(found.problems) == problems
