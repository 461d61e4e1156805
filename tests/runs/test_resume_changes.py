"""Changes between two halves of a run: seen, and where they are allowed, nothing is mixed up."""

import functools
import json
import linecache
import sys
from pathlib import Path
from typing import Any

import pytest
from resumed_runs import GRPO, Killed, cut, given, go, same
from small_model import OPTIONS
from small_runs import same_weights

import posttrain
from posttrain.build import fingerprint
from posttrain.learn.checkpoint import load_learner, save_learner
from posttrain.learn.learner import LocalLearner
from posttrain.learn.optim import adamw
from posttrain.models.load import load_policy
from posttrain.models.save import save_policy
from posttrain.models.tiny import build_tiny
from posttrain.runs import read_json, read_rollouts
from posttrain.runs.folder import RunFolder
from posttrain.runs.resume import check_same
from posttrain.stages import job
from posttrain.tasks import make_task

AHEAD = {"steps": 6, "save_every": 1, "max_lag": 1}


def steps_of(folder: RunFolder) -> list[int]:
    return [int(record["step"]) for record in folder.stage("rl").records()]


@pytest.mark.parametrize("max_lag", [0, 2])
def test_another_lag(tmp_path: Path, max_lag: int) -> None:
    """What waits was sampled for the old one: it is sampled again, and no step is lost."""
    cut(given(tmp_path / "cut", AHEAD), save=4)
    changed = given(tmp_path / "cut", {**AHEAD, "max_lag": max_lag})
    done, text = go(changed, resume=True, allow_changes=["rl.max_lag", "rl.correction"])
    assert "rl: goes on from step 3" in text
    assert "allowed to change: rl.max_lag: 1 → " in text
    assert steps_of(done.folder) == [1, 2, 3, 4, 5, 6]
    noted = read_json(done.folder.path / "changes.json")
    assert any(change.startswith("rl.max_lag: 1 → ") for change in noted[0]["changes"])
    assert 3 <= noted[0]["steps"]["rl"] <= 4


def test_a_timeline_may_be_asked_for_at_any_time(tmp_path: Path) -> None:
    cut(given(tmp_path / "cut", AHEAD), save=4)
    watched = given(tmp_path / "cut", AHEAD)
    watched["run"]["trace"] = True
    done, text = go(watched, resume=True)
    assert "rl: goes on from step 3" in text
    events = read_json(done.folder.path / "rl" / "trace.json")["traceEvents"]
    assert {"step 4", "step 5", "step 6"} <= {event["name"] for event in events}


def test_other_prompts_under_what_waits(tmp_path: Path) -> None:
    """A row at the front of the file moves all others: no answer is learned for another prompt."""
    data = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(8)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = given(tmp_path / "cut", AHEAD, sft=None, eval=None, rewards=None)
    values["task"] = {"name": "jsonl", "path": str(data), "test_share": 0.0}
    values["rewards"] = {"exact": {}}
    cut(values, save=4)
    waiting = read_json(tmp_path / "cut/rl/checkpoints/step-000003/waiting.json")
    assert len(waiting["batches"]) == 1
    data.write_text(json.dumps({"prompt": "9+9=", "answer": "18"}) + "\n" + data.read_text())
    done, _ = go(values, resume=True, allow_changes=["contents"])
    assert steps_of(done.folder) == [1, 2, 3, 4, 5, 6]
    texts = {prompt.id: prompt.text for prompt in make_task(values["task"]).prompts("train")}
    seen = [row for row in read_rollouts(done.folder.stage("rl").rollouts) if row["step"] > 3]
    assert all(row["prompt"] == texts[row["prompt_id"]] for row in seen)
    drawn = [row["turns"][0]["text"] for row in waiting["batches"][0]["rollouts"]]
    assert [row["completion"] for row in seen if row["step"] == 4] != drawn


def test_fewer_steps_than_are_done(tmp_path: Path) -> None:
    """They are refused before anything is written: the run can go on as it was."""
    values = given(tmp_path / "cut", GRPO)
    cut(values, save=3)
    fewer = given(tmp_path / "cut", {**GRPO, "steps": 3})
    with pytest.raises(ValueError, match=r"rl\.steps: 3 are asked for, and 4 are done"):
        go(fewer, resume=True, allow_changes=["rl.steps"])
    assert not (tmp_path / "cut/changes.json").exists()
    done, text = go(values, resume=True)
    assert "rl: goes on from step 4" in text
    assert steps_of(done.folder)[-1] == GRPO["steps"]


def test_a_key_that_there_is_not(tmp_path: Path) -> None:
    values = given(tmp_path / "cut", GRPO)
    cut(values, save=2)
    with pytest.raises(ValueError, match=r"--allow-changes rl\.stepps: no such key; .*rl\.steps"):
        go(values, resume=True, allow_changes=["rl.stepps"])


def test_two_keys_are_named_as_they_are_typed(tmp_path: Path) -> None:
    cut(given(tmp_path / "cut", GRPO), save=2)
    changed = given(tmp_path / "cut", {**GRPO, "learning_rate": 1e-3}, sft={"batch_size": 10})
    both = r"--allow-changes rl\.learning_rate --allow-changes sft\.batch_size;"
    with pytest.raises(ValueError, match=both):
        go(changed, resume=True)


def test_what_is_half_done_goes_aside_before_the_config_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a second start that dies early would pass other code off as what the first half had."""
    values = given(tmp_path / "cut", GRPO)
    cut(values, save=2)

    def dies(*_: Any, **__: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(fingerprint, "code_version", lambda: {"source": "another"})
        patch.setattr(job, "make_policy", dies)
        with pytest.raises(Killed):
            go(values)
        patch.undo()
        patch.setattr(fingerprint, "code_version", lambda: {"source": "another"})
        done, text = go(values, resume=True)
    assert "rl: goes on" not in text
    assert (done.folder.path / "rl.old-1").is_dir()


def test_another_evaluation_is_not_compared_with_the_old_one(tmp_path: Path) -> None:
    """Begun under ten problems, ended under three: the ones before are asked again."""
    values = given(tmp_path / "cut", GRPO, eval={"problems": 10})
    cut(values, save=2)
    changed = given(tmp_path / "cut", GRPO, eval={"problems": 3})
    done, _ = go(changed, resume=True, allow_changes=["eval"])
    before = (done.folder.stage("rl").path / "before.jsonl").read_text()
    assert len(before.splitlines()) == 3
    assert "accuracy_before" in (done.folder.summary or {})


def test_attention_survives_a_finished_stage(tmp_path: Path) -> None:
    """The policy comes back from the folder of sft: it computes as it did in memory."""
    model, tokenizer = build_tiny(hidden_size=32, num_layers=2, max_positions=64)
    source = tmp_path / "model"
    model.save_pretrained(source)
    tokenizer.save_pretrained(source)
    chosen = {"name": str(source), "options": {"attention": "eager"}}
    rl = {**GRPO, "engine": "transformers"}
    whole, _ = go(given(tmp_path / "whole", rl, model=chosen))
    values = given(tmp_path / "cut", rl, model=chosen)
    cut(values, save=2)
    done, text = go(values, resume=True)
    assert "sft: already finished" in text
    same(done.folder, whole.folder)


def test_a_micro_batch_that_was_halved_stays_so(tmp_path: Path) -> None:
    """The sums of the second half are rounded as they would have been."""

    def made(tokens: int) -> LocalLearner:
        policy = load_policy("tiny", options=OPTIONS)
        return LocalLearner(
            policy.model,
            adamw(policy.model, learning_rate=1e-3),
            save=functools.partial(save_policy, policy),
            micro_batch_tokens=tokens,
        )

    halved = made(512)
    halved.restore_tokens(64, asked=512)
    (tmp_path / "state").mkdir()
    numbers = save_learner(halved, tmp_path / "state")
    for asked, expected in ((512, 64), (256, 256)):
        restored = made(asked)
        load_learner(restored, tmp_path / "state", numbers=numbers)
        assert restored.micro_batch_tokens == expected


def test_an_edited_task_and_tokenizer_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "my_tasks.py"
    text = (
        "from posttrain.tasks.arithmetic import arithmetic_task\n\n\n"
        "def mine():\n    return arithmetic_task(digits=1, num_train=20, num_test=5)\n"
    )
    module.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    model, tokenizer = build_tiny(hidden_size=32, num_layers=2, max_positions=64)
    source = tmp_path / "model"
    model.save_pretrained(source)
    tokenizer.save_pretrained(source)
    chosen = {"name": str(source), "options": {}}
    values = given(tmp_path / "cut", GRPO, model=chosen)
    values["task"] = {"name": "my_tasks:mine"}
    cut(values, save=2)
    config = source / "tokenizer_config.json"
    config.write_text(config.read_text() + " ")
    with pytest.raises(ValueError, match=r"contents\.model\.name"):
        go(values, resume=True)
    config.write_text(config.read_text()[:-1])
    module.write_text(text.replace("num_train=20", "num_train=19"))
    monkeypatch.delitem(sys.modules, "my_tasks")
    linecache.clearcache()
    with pytest.raises(ValueError, match=r"contents\.task: "):
        go(values, resume=True)


def test_changes_can_be_allowed_from_python(tmp_path: Path) -> None:
    """With what a message says; and the run counts the time of both halves."""
    options: dict[str, Any] = {
        "model_options": {"options": {"hidden_size": 32, "num_layers": 2, "max_positions": 64}},
        "prompts": ["1+1=", "2+2="],
        "folder": tmp_path / "run",
        "grading": {"workers": 0},
        "group_size": 2,
        "prompts_per_step": 2,
        "max_new_tokens": 4,
        "save_every": 1,
        "check": "off",
    }
    calls = []

    def first(completion: str) -> float:
        calls.append(1)
        if len(calls) > 10:
            raise KeyboardInterrupt
        return float(len(completion))

    def second(completion: str) -> float:
        return -float(len(completion))

    with pytest.raises(KeyboardInterrupt, match="to go on: call the same function again with"):
        posttrain.rl(reward=first, steps=4, **options)
    saved = read_json(tmp_path / "run/rl/checkpoints/step-000002/state.json")["seconds"]
    assert saved > 0
    with pytest.raises(ValueError, match=r"allow_changes=\['supplied'\]") as refused:
        posttrain.rl(reward=second, steps=4, resume=True, **options)
    told = "supplied.rewards.first.function_and_what_it_uses: set → unset"
    assert told in str(refused.value)
    done = posttrain.rl(reward=second, steps=4, resume=True, allow_changes=["supplied"], **options)
    assert steps_of(done.folder) == [1, 2, 3, 4]
    assert done.summary["seconds"] > saved


def test_same_weights_is_not_blind(tmp_path: Path) -> None:
    """What these tests compare with sees a single bit."""
    for name, seed in (("a", 0), ("b", 1)):
        model, tokenizer = build_tiny(hidden_size=32, num_layers=2, max_positions=64, seed=seed)
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    assert not same_weights(tmp_path / "a", tmp_path / "b")


def test_a_cluster_may_have_another_address_and_more_engines_but_not_more_learners(
    tmp_path: Path,
) -> None:
    """Who samples changes no token; another number of ranks rounds differently."""
    config = {"run": {"folder": "run", "stages": ["sft"]}, "cluster": {"address": "a:1"}}
    folder = RunFolder.create(tmp_path / "run", config=config, recipe=None)
    other = {"address": "b:2", "engines": 4, "colocate": True, "deadline": 9.0}
    assert check_same(folder.path, {**config, "cluster": other}, allow=[]) == []
    more = {**config, "cluster": {"address": "a:1", "learners": 2}}
    with pytest.raises(ValueError, match=r"cluster\.learners"):
        check_same(folder.path, more, allow=[])
