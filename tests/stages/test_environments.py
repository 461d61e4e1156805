"""Runs with an environment: cut short between two turns' worth of steps, they go on exactly."""

from pathlib import Path

import pytest
from resumed_runs import GRPO, cut, given, go, same

import posttrain
from posttrain.build.fingerprint import fingerprints
from posttrain.check import check_recipe, resources, speed
from posttrain.cli.app import main
from posttrain.config import recipe_from_dict, resolve
from posttrain.rollout.collect import collect
from posttrain.runs import read_rollouts
from posttrain.types import Score

TWO_TURNS = {"env": {"name": "scripted", "replies": ["+1="]}}


@pytest.mark.parametrize("max_lag", [0, 1])
def test_a_run_of_two_turns_goes_on_exactly(tmp_path: Path, max_lag: int) -> None:
    """Metrics, weights, and the stored rollouts with their masks; batches that wait among them."""
    values = [
        given(tmp_path / name, {**GRPO, "steps": 4, "max_lag": max_lag}, task=TWO_TURNS)
        for name in ("whole", "cut")
    ]
    whole, _ = go(values[0])
    cut(values[1], save=2)
    again, told = go(values[1], resume=True)
    assert "from step 2" in told or "step 2" in told
    same(whole.folder, again.folder)
    rows = read_rollouts(again.folder.stage("rl").rollouts)
    for row in rows:
        missing = [place for place, known in enumerate(row["sampler_logprobs"]) if known is None]
        assert len(missing) == 3  # "+1=", character by character
        assert missing == list(range(missing[0], missing[0] + 3))
        assert row["length"] == len(row["completion_tokens"]) - 3


def test_the_environment_is_part_of_what_a_run_depends_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another file is another run; the options stand in the resolved recipe."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "depended_env.py").write_text(
        "class Asks:\n    def __init__(self, *, times: int = 1): ...\n"
        "    def start(self, prompt): ...\n    def reply(self, state, turn): ...\n"
    )
    (tmp_path / "depended_check.py").write_text("def right(completion): return 1.0\n")
    own = {"env": "depended_env:Asks", "accuracy": "depended_check:right"}
    values = given(tmp_path / "run", {}, task=own)
    resolved = resolve(recipe_from_dict(values))
    assert resolved.task is not None
    assert resolved.task["env"] == {"name": "depended_env:Asks", "times": 1}
    assert {"task.env", "task.accuracy"} <= fingerprints(resolved)["contents"].keys()
    with pytest.raises(ValueError, match=r"task\.env 'depended_env:Asks': unknown option 'time'"):
        resolve(
            recipe_from_dict(
                given(tmp_path, {}, task={"env": {"name": "depended_env:Asks", "time": 1}})
            )
        )
    with pytest.raises(ValueError, match=r"task\.env: unknown name 'script'; did you mean"):
        resolve(recipe_from_dict(given(tmp_path, {}, task={"env": "script"})))


def test_generate_plays_all_turns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the run's environment says stands between the policy's turns, and so does its score."""
    env = {"name": "scripted", "replies": ["+1=", "+2="], "score": 0.5}
    done, _ = go(given(tmp_path / "run", {**GRPO, "steps": 1}, task={"env": env}))
    for sample in done.folder.samples:  # held-out answers of a report are whole episodes too
        for turns in (sample["turns_before"], sample["turns_after"]):
            assert [turn["text"] for turn in turns[1::2]] == ["+1=", "+2="]
            assert [turn["reward"] for turn in turns] == [0.0, None, 0.0, None, 0.5]
    assert done.folder.samples
    answers = posttrain.generate(done.folder.path, "3+4=", num_samples=2, max_new_tokens=2)
    for answer in answers:
        assert [turn.sampled for turn in answer.turns] == [True, False] * 2 + [True]
        assert [turn.text for turn in answer.turns[1::2]] == ["+1=", "+2="]
        assert answer.score == Score(value=0.5)
    monkeypatch.setattr("sys.argv", ["posttrain", "generate", str(done.folder.path), "3+4="])
    capsys.readouterr()
    with pytest.raises(SystemExit, match="0"):
        main()
    (whole,) = posttrain.generate(done.folder.path, "3+4=")
    said = []
    for number, (asked, turn) in enumerate(zip(["+1=", "+2=", ""], whole.turns[::2], strict=True)):
        length = len(turn.tokens)
        said += [f"policy · turn {number + 1} · {length} token{'s' * (length > 1)}"]
        said += [f"  {turn.text}", *(["environment · 3 tokens", f"  {asked}"] if asked else [])]
    assert capsys.readouterr().out == "\n".join([*said, "score 0.5"]) + "\n"


def test_an_environment_that_needs_a_row_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of one's own has no columns; the answer is given all the same."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "wanting_env.py").write_text(
        "class Wants:\n"
        "    def start(self, prompt): return prompt.columns['answer']\n"
        "    def reply(self, state, turn): return None\n"
    )
    task = {"env": "wanting_env:Wants"}
    done, _ = go(given(tmp_path / "run", {**GRPO, "steps": 1}, task=task))
    with pytest.warns(UserWarning, match=r"task\.env: .*KeyError.*has no columns of a row"):
        (answer,) = posttrain.generate(done.folder.path, "3+4=", max_new_tokens=2)
    assert [turn.sampled for turn in answer.turns] == [True]


def test_check_measures_every_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns a rollout are told, the time of sampling has the replies in it, and tokens a second
    count what the policy wrote.
    """
    replies = []
    monkeypatch.setattr(
        resources,
        "collect",
        lambda *asked, reply, **more: replies.append(reply) or collect(*asked, reply=reply, **more),
    )
    monkeypatch.setattr(speed, "_shape", lambda bench: None)
    values = given(tmp_path / "run", GRPO, task={"env": {"name": "scripted", "replies": ["+1="]}})
    lines = {line.name: line.text for line in check_recipe(values, fast=True).lines}
    assert " tokens a turn, 2.0 turns a rollout, " in lines["length"]
    assert replies
    assert None not in replies
