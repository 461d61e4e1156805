"""SFT by steps, with patience, on texts without a prompt, on rows of at most so many tokens."""

import json
from pathlib import Path
from typing import Any

import pytest
from resumed_runs import cut, go, same
from small_runs import recipe, same_weights

import posttrain
from posttrain.build.setup import Setup, make_policy, make_setup
from posttrain.build.sft_rows import fitting, sft_rows
from posttrain.config import recipe_from_dict, resolve

# Eight demonstrations learned by heart: the held-out loss falls, and then rises again.
MEMORISED = {
    "num_demonstrations": 8,
    "batch_size": 4,
    "learning_rate": 1e-2,
    "evaluate_every": 4,
    "save_every": 5,
}


def only_sft(folder: Path, **sft: Any) -> dict[str, Any]:
    values = recipe(folder, rl=None, eval=None, grading={"workers": 0})
    values["sft"] = sft
    values["run"] |= {"save_minutes": 0.0}
    return values


def setup_of(values: dict[str, Any]) -> Setup:
    found = resolve(recipe_from_dict(values))
    return make_setup(found, make_policy(found, "tiny", device="cpu"), device="cpu")


def test_steps_in_place_of_epochs(tmp_path: Path) -> None:
    """3 epochs of 2 steps are 6 steps, to the bit; 5 steps end inside an epoch."""
    options = {**MEMORISED, "schedule": "constant"}
    epochs, steps, fewer = (
        go(only_sft(tmp_path / name, **options, **length))[0].folder.stage("sft")
        for name, length in (("e", {"epochs": 3}), ("s", {"steps": 6}), ("f", {"steps": 5}))
    )
    assert same_weights(epochs.model, steps.model)
    assert [r["step"] for r in fewer.records()] == [0, 1, 2, 3, 4, 5]
    assert same_weights(fewer.model, epochs.checkpoint(5) / "model")


def test_patience_stops_the_stage_also_when_it_is_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the second evaluation in a row that is no better; the best model is kept."""
    options = {**MEMORISED, "epochs": 24, "patience": 2}
    done, _ = go(only_sft(tmp_path / "whole", **options))
    text = capsys.readouterr().out
    record = done.folder.stage_record("sft") or {}
    stopped, best = record["stopped_at"], record["best"]["step"]
    assert stopped == best + 8 < 48
    assert max(r["step"] for r in done.folder.stage("sft").records()) == stopped
    assert f"sft stops at step {stopped} of 48: the held-out loss was lowest at step {best}" in text
    assert (done.folder.stage("sft").best / "model").is_dir()
    values = only_sft(tmp_path / "cut", **options)
    cut(values, save=stopped // 5)
    same(go(values, resume=True)[0].folder, done.folder, stages=("sft",))


def test_texts_without_a_prompt_are_learned_whole(tmp_path: Path) -> None:
    """As TRL reads a column ``text``; what is longer than a row may be is cut, not dropped."""
    rows = [{"text": "1+2=3"}, {"text": "abcdefghij" * 3}]
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = only_sft(tmp_path / "run", data=str(file), max_length=12)
    setup = setup_of(values)
    made = fitting(sft_rows(setup), setup.policy, section=setup.recipe.sft)
    (first, mask), *others = made.train
    assert setup.template.tokenizer.decode(first) == "1+2=3<|end|>"
    assert mask == (False, *[True] * 5)
    assert [len(row) for row, _ in others] == [12, 12, 9]  # each begins with the last of another
    assert "2 demonstrations make 4 rows" in made.note
    done = posttrain.sft(data=rows, folder=tmp_path / "api", steps=3, test_share=0.5)
    assert done.folder.stage("sft").model.is_dir()


def test_rows_over_the_limit_are_left_out_and_all_of_a_row_may_be_learned(tmp_path: Path) -> None:
    rows = [{"prompt": "1+2=", "completion": "3"}, {"prompt": "1" * 20, "completion": "2"}]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = only_sft(tmp_path / "run", data=str(file), max_length=12, train_on="all")
    setup = setup_of(values)
    with pytest.warns(UserWarning, match="1 of 2 demonstrations are longer than sft.max_length"):
        [(tokens, mask)] = fitting(sft_rows(setup), setup.policy, section=setup.recipe.sft).train
    assert (len(tokens), mask) == (6, (False, *[True] * 5))


def test_patience_needs_something_held_out(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "1+2=", "completion": "3"}) + "\n")
    with pytest.raises(ValueError, match=r"sft\.patience: 2 goes by the held-out loss"):
        go(only_sft(tmp_path / "run", data=str(file), patience=2))
