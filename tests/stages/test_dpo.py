"""The stage dpo: whole runs of every loss, resumed to the bit, on all formats, and refused."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from resumed_runs import cut, go, same
from small_runs import TINY, recipe, same_weights, small_run, timeless

import posttrain
from posttrain.build.preference_rows import direct_rows
from posttrain.build.setup import make_setup
from posttrain.cli.app import main
from posttrain.config import recipe_from_dict, resolve
from posttrain.data.preference_sets import read_labelled, read_preferences, write_preferences
from posttrain.models.load import load_policy
from posttrain.report import RunFacts
from posttrain.runs import RunFolder

LOSSES = ("dpo", "ipo", "kto", "orpo", "simpo")
PAIRS = [{"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": "0"} for a in range(1, 5)
         for b in range(1, 6)]  # fmt: skip


def dpo_recipe(folder: Path, data: Path | None = None, **options: Any) -> dict[str, Any]:
    """SFT, preferences of the policy or a file of them, and DPO."""
    given = recipe(folder, rl=None, eval=None, rewards=None, sft={"epochs": 2}, prefer={
        "rewards": {"length": {"target": 1, "per_token": 0.1}}, "samples": 4, "max_new_tokens": 4,
    })  # fmt: skip
    given["run"]["save_minutes"] = 0.0
    given["dpo"] = {"batch_size": 8, "learning_rate": 3e-3, "epochs": 2, **options}
    if data is not None:
        del given["prefer"], given["task"], given["sft"]
        given["dpo"] |= {"data": str(data), "test_share": 0.2}
    return given


def written(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("loss", LOSSES)
def test_a_run_from_a_file_learns_what_is_preferred(loss: str, tmp_path: Path) -> None:
    """Prompts it has not seen: right answers over "0", which no right answer is."""
    options: dict[str, Any] = {"loss": loss, "epochs": 20, "evaluate_every": 0}
    options |= {"learning_rate": 1e-2, "batch_size": 16}
    done, _ = small_run(dpo_recipe(tmp_path / "run", written(tmp_path, PAIRS), **options))
    records = done.folder.stage("dpo").records()
    first, last = records[0], records[-1]
    assert first["step"] == 0
    assert last["test/accuracy"] > 0.8
    assert last["test/margin"] > 0.1
    assert last["test/loss"] < first["test/loss"]
    assert last["preference/accuracy"] > 0.6
    told = [label for label in RunFacts(done.folder).measures if label.startswith("held-out pref")]
    assert told == [f"held-out preferences in their order, of {last['test/num']:.0f}"]
    assert last["test/num"] >= 2
    assert done.model == done.folder.stage("dpo").model
    kept = done.folder.stage("dpo").path / "reference.npy"
    assert kept.exists() == (loss in ("dpo", "ipo", "kto"))
    if kept.exists():  # before the first step, policy and reference are one
        assert first["test/margin"] == 0.0
        assert first["test/accuracy"] == 0.5


@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_a_run_that_was_killed_goes_on_to_the_bit(loss: str, tmp_path: Path) -> None:
    """The reference's log-probs are read, not computed again: weights are other ones by then."""
    given = {"loss": loss, "save_every": 2, "epochs": 3}
    data = written(tmp_path, PAIRS)
    whole, _ = go(dpo_recipe(tmp_path / "whole", data, **given))
    values = dpo_recipe(tmp_path / "killed", data, **given)
    cut(values, save=2)
    folder = RunFolder(tmp_path / "killed").stage("dpo").path
    kept = (folder / "reference.npy").stat()
    again, _ = go(values, resume=True)
    assert (folder / "reference.npy").stat().st_mtime_ns == kept.st_mtime_ns
    same(whole.folder, again.folder, stages=("dpo",))


def test_kept_log_probs_that_were_changed_are_refused(tmp_path: Path) -> None:
    values = dpo_recipe(tmp_path / "run", written(tmp_path, PAIRS), save_every=2)
    cut(values, save=2)
    path = tmp_path / "run" / "dpo" / "reference.npy"
    numbers = np.load(path)
    numbers[0] += 1
    np.save(path, numbers)
    with pytest.raises(ValueError, match=r"reference\.npy: has changed since it was written; put"):
        go(values, resume=True)
    path.unlink()  # then they are computed again, of the weights that the stage began with
    again, _ = go(values, resume=True)
    whole, _ = go(dpo_recipe(tmp_path / "whole", tmp_path / "pairs.jsonl", save_every=2))
    same(whole.folder, again.folder, stages=("dpo",))


def test_on_preferences_of_its_own_and_with_the_next_stage(tmp_path: Path) -> None:
    """sft, prefer, dpo, eval: what is evaluated is the model of dpo, also where it is resumed."""
    given = dpo_recipe(tmp_path / "run")
    given["eval"] = {"problems": 10, "max_new_tokens": 4}
    done, _ = small_run(given)
    done_rewards = done.folder.summary["rewards"]
    assert done.folder.stages == ["sft", "prefer", "dpo", "eval"]
    folder = done.folder
    assert not same_weights(folder.stage("sft").model, folder.stage("dpo").model)
    record = folder.stage_record("dpo")
    assert record["train_sets"] == folder.stage_record("prefer")["train"]["sets"]
    assert set(record["held_out"]) == {"loss", "accuracy", "margin", "num"}
    shutil.rmtree(folder.path / "eval")
    (folder.path / "summary.json").unlink()
    again, printed = small_run(given)
    assert "dpo: already finished; taken from the run folder" in printed
    assert again.folder.summary["rewards"] == done_rewards


CHAT = [{"role": "user", "content": "2+3="}]
FORMATS: dict[str, list[dict[str, Any]]] = {
    "pairs": PAIRS,
    "ranked": [{"prompt": f"{a}+1=", "ranked": [str(a + 1), "9", "0"]} for a in range(1, 7)],
    "scored": [
        {"prompt": f"{a}+1=", "completion": text, "score": score}
        for a in range(1, 7)
        for text, score in ((str(a + 1), 1), ("9", 0.5), ("0", 0))
    ],
    "messages": [
        {"messages": [{"role": "user", "content": f"{a}+1="}], "chosen": str(a + 1),
         "rejected": "0"}
        for a in range(1, 7)
    ],
    "chats": [
        {
            "chosen": [{"role": "user", "content": f"{a}+1="},
                       {"role": "assistant", "content": str(a + 1)}],
            "rejected": [{"role": "user", "content": f"{a}+1="},
                         {"role": "assistant", "content": "0"}],
        }
        for a in range(1, 7)
    ],
}  # fmt: skip
LABELLED = [
    {"prompt": f"{a}+1=", "completion": text, "label": label}
    for a in range(1, 7)
    for text, label in ((str(a + 1), True), ("0", False))
]


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_that_a_reward_model_reads(name: str, tmp_path: Path) -> None:
    for loss in ("dpo", "kto"):
        data = written(tmp_path, FORMATS[name])
        given = dpo_recipe(tmp_path / loss, data, loss=loss, epochs=1)
        if name in ("messages", "chats"):
            given["model"]["options"] = {**TINY, "chat": True}
        done, _ = small_run(given)
        assert done.folder.stage("dpo").records()[-1]["loss/total"] > 0


def test_kto_from_labels(tmp_path: Path) -> None:
    done, _ = small_run(dpo_recipe(tmp_path / "a", written(tmp_path, LABELLED), loss="kto"))
    record = done.folder.stage_record("dpo")
    assert record["train_sets"] + record["test_sets"] == len(LABELLED)
    # Pairs say the same as labels: the very same run.
    pairs = [{"prompt": f"{a}+1=", "chosen": str(a + 1), "rejected": "0"} for a in range(1, 7)]
    other, _ = small_run(dpo_recipe(tmp_path / "b", written(tmp_path, pairs), loss="kto"))
    records = [timeless(run.folder.stage("dpo").records()) for run in (done, other)]
    assert records[0] == records[1]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [row for row in LABELLED if row["label"]],
            r"dpo\.data: of \d completions to learn from all have the label true, .* give both",
        ),
        (
            [*LABELLED, {"prompt": "7+1=", "completion": "8"}],
            r"pairs\.jsonl:13: 'label' is not there; write true where the completion is desirable",
        ),
        (
            [{**LABELLED[0], "label": "yes"}],
            r"pairs\.jsonl:1: 'label' must be true or false, got 'yes'; write true",
        ),
    ],
)
def test_labels_that_kto_cannot_use(
    rows: list[dict[str, Any]], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        small_run(dpo_recipe(tmp_path / "run", written(tmp_path, rows), loss="kto"))


def test_from_python_and_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = written(tmp_path, PAIRS)
    given: dict[str, Any] = {"batch_size": 8, "epochs": 1, "learning_rate": 1e-3}
    run = posttrain.dpo(
        model="tiny", data=data, folder=tmp_path / "a", model_options={"options": TINY}, **given
    )
    arguments = [f"--model.options.{name}={value}" for name, value in TINY.items()] + [
        f"--dpo.{name}={value}" for name, value in given.items()
    ]
    where = [f"--dpo.data={data}", f"--run.folder={tmp_path / 'b'}"]
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["posttrain", "dpo", *where, *arguments])
    with pytest.raises(SystemExit) as done:
        main()
    assert not done.value.code
    assert same_weights(run.model, RunFolder(tmp_path / "b").stage("dpo").model)


def test_labels_of_tables_are_read_and_without_pairs_told_of_kto(tmp_path: Path) -> None:
    rows = [{**row, "label": int(row["label"])} for row in LABELLED]
    path = written(tmp_path, rows)
    assert [row.desirable for row in read_labelled(path)] == [row["label"] for row in LABELLED]
    path = written(tmp_path, [{**rows[0], "prompt": f"{n}="} for n in range(4)])
    with pytest.raises(ValueError, match=r"no preference; .*rows with a label are for dpo.loss ="):
        small_run(dpo_recipe(tmp_path / "a", path, loss="dpo"))


def test_a_completion_that_was_cut_off_is_not_taught_to_end(tmp_path: Path) -> None:
    """What prefer has sampled up to its limit has no end token, in DPO as in the reward model."""
    rows = [{"prompt": "1+1=", "ranked": ["2", "3", "4"], "ended": [True, False, True]}]
    rows.append({"prompt": "2+2=", "ranked": ["4", "5"]})
    path = written(tmp_path, rows)
    assert [s.ended for s in read_preferences(path)] == [(True, False, True), (True, True)]
    write_preferences(tmp_path / "again.jsonl", read_preferences(path))
    assert read_preferences(tmp_path / "again.jsonl") == read_preferences(path)
    labels = [row.ended for row in read_labelled(path)]
    assert labels == [(True,), (True,), (True,), (True,)]  # of three, the middle one has no label
    values = resolve(recipe_from_dict(dpo_recipe(tmp_path / "run", path)))
    policy = load_policy("tiny", options=values.model.options)
    setup = make_setup(values, policy, device="cpu")
    found = {tuple(row) for part in direct_rows(setup) for s in part for row in s.rows}
    end = policy.end_tokens[0]
    for text, ended in (("1+1=2", True), ("1+1=3", False), ("1+1=4", True), ("2+2=5", True)):
        tokens = tuple(policy.tokenizer(text).input_ids)
        assert ((*tokens, end) if ended else tokens) in found
    with pytest.raises(ValueError, match=r"pairs\.jsonl:1: ended: must be true or false for each"):
        read_preferences(written(tmp_path, [{**rows[0], "ended": [True]}]))


def test_rows_are_taken_as_a_file_is(tmp_path: Path) -> None:
    """And a run goes on with the same rows alone."""
    options: dict[str, Any] = {"model": "tiny", "model_options": {"options": TINY}}
    options |= {"folder": tmp_path / "rows", "epochs": 1, "batch_size": 8}
    by_rows = posttrain.dpo(data=PAIRS, **options)
    options["folder"] = tmp_path / "file"
    by_file = posttrain.dpo(data=written(tmp_path, PAIRS), **options)
    same_weights(by_rows.model, by_file.model)
    with pytest.raises(ValueError, match="data"):
        posttrain.dpo(data=PAIRS[1:], resume=True, **{**options, "folder": tmp_path / "rows"})
    with pytest.raises(ValueError, match=r"data\[0\]: 'prompt' is nothing that JSON can hold"):
        posttrain.dpo(data=[{"prompt": object()}], **{**options, "folder": tmp_path / "none"})


def test_chats_for_a_model_without_a_template_are_called_that(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": row["prompt"]}], "chosen": row["chosen"],
             "rejected": row["rejected"]} for row in PAIRS]  # fmt: skip
    with pytest.raises(ValueError, match="chat: this tokenizer has no chat template"):
        small_run(dpo_recipe(tmp_path / "run", written(tmp_path, rows)))
