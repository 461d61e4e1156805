"""The held-out loss of SFT: what is held out, what is shown, and the best weights, also resumed."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from resumed_runs import Killed, cut, given, go, same
from small_runs import recipe, same_weights, timeless

import posttrain
from posttrain.build import sft_rows as rows_of
from posttrain.learn.best import Best
from posttrain.learn.learner import LocalLearner
from posttrain.report import RunFacts
from posttrain.runs.folder import RunFolder, StageFolder
from posttrain.stages import sft as sft_stage
from posttrain.stages.open_stage import evaluation_steps

# Eight demonstrations learned by heart: the held-out loss falls, and then rises again.
MEMORISED = {
    "num_demonstrations": 8,
    "epochs": 24,
    "batch_size": 4,
    "learning_rate": 1e-2,
    "evaluate_every": 4,
}


def only_sft(folder: Path, sft: dict[str, Any], **more: Any) -> dict[str, Any]:
    values = given(folder, {}, sft=sft, **more)
    del values["rl"], values["eval"]
    return values


def losses(stage: StageFolder) -> dict[int, float]:
    records = stage.records()
    return {int(r["step"]): r["test/loss"] for r in records if "test/loss" in r}


@pytest.fixture(scope="module")
def memorised(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run whose best weights are not the last."""
    folder = tmp_path_factory.mktemp("sft") / "run"
    return go(only_sft(folder, MEMORISED))[0].folder


def test_it_is_measured_before_on_the_way_and_at_the_end(memorised: RunFolder) -> None:
    """48 steps, every fourth; a record keeps what training logged beside it."""
    sft = memorised.stage("sft")
    assert list(losses(sft)) == [0, *range(4, 49, 4)]
    record = next(record for record in sft.records() if record["step"] == 4)
    assert {"loss/total", "test/loss", "sft/tokens"} <= record.keys()
    assert (sft.path / "curves.png").stat().st_size > 1000


def test_the_summary_says_where_the_loss_was_lowest(memorised: RunFolder) -> None:
    """Its two ends alone would hide that it rose again."""
    found = losses(memorised.stage("sft"))
    best = min(found, key=lambda step: (found[step], step))
    label = f"sft held-out loss, lowest {found[best]:.3f} at step {best}"
    assert RunFacts(memorised).losses[label] == (found[0], found[48])


def test_the_best_weights_are_kept(memorised: RunFolder, tmp_path: Path) -> None:
    """``best/model`` is, bit for bit, the model of a stage that ends at that step."""
    sft = memorised.stage("sft")
    found = losses(sft)
    best = min(found, key=lambda step: (found[step], step))
    assert 0 < best < 48
    assert found[48] > 1.1 * found[best]  # it is memorised, not rounding
    record = memorised.stage_record("sft") or {}
    assert record["best"] == {"step": best, "test_loss": found[best]}
    assert record["last"] == {"step": 48, "test_loss": found[48]}
    assert record["demonstrations"] == 8
    assert record["held_out"] == 10  # all test prompts that the task has
    # The same training to that step, with the schedule of the whole, and nothing held out.
    values = only_sft(tmp_path / "other", {**MEMORISED, "evaluate_every": 0, "save_every": best})
    values["run"] |= {"keep_last": 0}
    other = go(values)[0].folder.stage("sft")
    assert same_weights(other.checkpoint(best) / "model", sft.best / "model")
    assert same_weights(other.model, sft.model)
    # Measuring has changed nothing of what was learned.
    ours = [{k: v for k, v in r.items() if k != "test/loss"} for r in sft.records() if r["step"]]
    assert timeless(ours) == timeless(other.records())


def test_the_best_can_be_the_result(memorised: RunFolder, tmp_path: Path) -> None:
    done, _ = go(only_sft(tmp_path / "run", {**MEMORISED, "result": "best"}))
    assert same_weights(done.folder.stage("sft").model, memorised.stage("sft").best / "model")
    assert not done.folder.stage("sft").best.exists()


def test_what_comes_after_sft_starts_from_the_result(tmp_path: Path) -> None:
    """In memory as from the folder: RL after ``best`` is RL from that model."""
    sections = {"sft": {**MEMORISED, "result": "best"}, "rl": {"steps": 2}}
    values = recipe(tmp_path / "both", grading={"workers": 0}, **sections)
    both = go(values)[0].folder
    model = {"name": str(both.stage("sft").model), "options": {}}
    values = recipe(tmp_path / "rl", grading={"workers": 0}, sft=None, rl={"steps": 2})
    values["model"] = model
    alone = go(values)[0].folder
    assert same_weights(both.stage("rl").model, alone.stage("rl").model)


def test_the_last_weights_need_no_second_copy(tmp_path: Path) -> None:
    """While the loss still falls, the model is the best one."""
    done, _ = go(only_sft(tmp_path / "run", {"epochs": 2}))
    sft = done.folder.stage("sft")
    assert min(losses(sft).values()) == losses(sft)[4]
    assert not sft.best.exists()
    assert (done.folder.stage_record("sft") or {})["best"]["step"] == 4


@pytest.mark.parametrize("result", ["last", "best"])
@pytest.mark.parametrize("save", [2, 5, 9])
def test_a_cut_stage_finds_the_same_best(
    save: int, result: str, *, tmp_path: Path, memorised: RunFolder
) -> None:
    """Died at the second, fifth and ninth checkpoint, 5 steps apart: before and after the best."""
    options = {**MEMORISED, "save_every": 5, "result": result}
    whole = go(only_sft(tmp_path / "whole", options))[0].folder
    values = only_sft(tmp_path / "cut", options)
    cut(values, save=save)
    done, text = go(values, resume=True)
    assert f"sft: goes on from step {5 * (save - 1)}" in text
    same(done.folder, whole, stages=("sft",))
    one, other = done.folder, whole
    for name in ("best", "last", "held_out"):
        assert (one.stage_record("sft") or {})[name] == (other.stage_record("sft") or {})[name]
    expected = memorised.stage("sft").best / "model"
    place = one.stage("sft")
    assert same_weights(place.model if result == "best" else place.best / "model", expected)
    assert place.best.exists() == (result == "last")


@pytest.mark.parametrize("moment", ["best", "picture"])
def test_killed_at_the_end_of_the_stage(
    moment: str, *, tmp_path: Path, memorised: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the best model is written, with half of it there; and after it."""
    values = only_sft(tmp_path / "cut", {**MEMORISED, "save_every": 48})
    save = LocalLearner.save

    def dies(self: LocalLearner, folder: Path) -> None:
        save(self, folder)
        if folder.parent.name == "best":
            (folder / "model.safetensors").write_bytes(b"half")
            raise Killed

    def ends(*given: Any, **more: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        if moment == "best":
            patch.setattr(LocalLearner, "save", dies)
        else:
            patch.setattr(sft_stage, "plot_curves", ends)
        with pytest.raises(Killed):
            go(values)
    done, text = go(values, resume=True)
    assert "sft: goes on from step 48" in text
    same(done.folder, memorised, stages=("sft",))
    assert same_weights(
        done.folder.stage("sft").best / "model", memorised.stage("sft").best / "model"
    )


def fake() -> Any:
    """A learner of one weight, which is 3."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, 3.0)
    return SimpleNamespace(model=model, weights=lambda: dict(model.named_parameters()))


def test_a_stage_that_was_to_end_there_and_goes_on_keeps_its_best(tmp_path: Path) -> None:
    """Its last step was the best when it was killed; prolonged, the weights are lost to it."""
    learner = fake()
    first = Best(learner, last_step=4)
    first.saw(4, 0.5)
    assert not first.is_lost
    state = first.keep(tmp_path)
    second = Best(learner, last_step=8)
    second.restore(tmp_path, state["held_out"], step=4)
    torch.nn.init.constant_(learner.model.weight, 7.0)
    second.saw(8, 0.75)
    assert second.is_lost
    second.exchange()
    assert learner.model.weight.item() == 3.0
    second.exchange()
    assert learner.model.weight.item() == 7.0


def test_of_equal_losses_the_first_is_the_best_and_no_number_is_none() -> None:
    best = Best(fake(), last_step=9)
    best.saw(0, float("nan"))
    assert "best" not in best.record()
    for step, loss in ((1, 2.0), (2, 1.0), (3, 1.0), (4, float("inf"))):
        best.saw(step, loss)
    assert best.record()["best"] == {"step": 2, "test_loss": 1.0}


def test_about_ten_evaluations_and_one_an_epoch() -> None:
    """1,000 steps in 1, 4, 20 epochs; 7 steps in all."""
    assert [evaluation_steps(1000, epochs=epochs) for epochs in (1, 4, 20)] == [100, 100, 50]
    assert evaluation_steps(7, epochs=1) == 1


# ------------------------------------------------------------------------------ what is held out


def write(path: Path, rows: Sequence[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def sums(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{n // 10}+{n % 10}=", "completion": str(n)} for n in range(count)]


def sizes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Demonstrations to learn from and held out, of every stage that is run."""
    found: list[tuple[int, int]] = []
    fitting = rows_of.fitting

    def noted(*given: Any, **more: Any) -> Any:
        rows = fitting(*given, **more)
        found.append((len(rows.train), len(rows.test)))
        return rows

    monkeypatch.setattr("posttrain.stages.sft.fitting", noted)
    return found


@pytest.mark.parametrize(
    ("count", "options", "expected"),
    [
        (100, {}, (95, 5)),
        (40, {}, (38, 2)),
        (39, {}, (39, 0)),
        (39, {"test_share": 0.2}, (31, 8)),
        (100, {"evaluate_demonstrations": 3}, (97, 3)),
        (100, {"evaluate_demonstrations": 3, "test_share": 0.2}, (80, 3)),
        (100, {"num_demonstrations": 60}, (57, 3)),
        (100, {"evaluate_every": 0}, (100, 0)),
    ],
)
def test_of_a_file_some_are_held_out(
    count: int,
    options: dict[str, Any],
    expected: tuple[int, int],
    *,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """5 % by default, at most as many as are evaluated; none of fewer than 40, which is said."""
    found = sizes(monkeypatch)
    data = write(tmp_path / "rows.jsonl", sums(count))
    values = only_sft(tmp_path / "run", {"data": data, "wrong_share": 0.0, "epochs": 1, **options})
    done, text = go(values)
    assert found == [expected]
    assert bool(losses(done.folder.stage("sft"))) == bool(expected[1])
    if expected[1] and "evaluate_demonstrations" not in options:
        learned = f"sft learns from {expected[0]} demonstrations of {data}; {expected[1]} are held"
        assert learned in text
    assert ("no held-out loss" in text) == (not expected[1] and "evaluate_every" not in options)


def test_a_prompt_that_has_most_of_the_rows_is_learned(tmp_path: Path) -> None:
    """Where every prompt is too frequent to be held out, none is: said, or refused if asked for."""
    rows = [{"prompt": f"{n % 2}?", "completion": str(n)} for n in range(60)]
    data = write(tmp_path / "rows.jsonl", rows)
    options = {"data": data, "wrong_share": 0.0, "epochs": 1}
    _, text = go(only_sft(tmp_path / "run", options))
    assert "no held-out loss: every prompt of" in text
    with pytest.raises(
        ValueError, match=r"sft\.test_share: every prompt .* more than 12 of the 60"
    ):
        go(only_sft(tmp_path / "asked", {**options, "test_share": 0.2}))
    with pytest.raises(ValueError, match=r'sft\.result: "best" .* nothing is held out \(every'):
        go(only_sft(tmp_path / "best", {**options, "result": "best"}))


def test_a_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also beside the task; and no prompt of it may be learned."""
    found = sizes(monkeypatch)
    rows = sums(100)
    data = write(tmp_path / "train.jsonl", rows[:50])
    options = {"data": data, "wrong_share": 0.0, "epochs": 1}
    test = write(tmp_path / "test.jsonl", rows[50:70])
    posttrain.sft(
        folder=tmp_path / "run",
        model_options={"options": {"hidden_size": 32, "num_layers": 2, "max_positions": 64}},
        test_data=test,
        data=data,
    )
    words = write(tmp_path / "words.jsonl", [{"prompt": "Hi", "completion": "there"}] * 2)
    with pytest.warns(UserWarning, match="repeat an earlier one"):
        go(only_sft(tmp_path / "task", {"test_data": words, "epochs": 1}))
    assert found == [(50, 20), (40, 2)]
    both = write(tmp_path / "both.jsonl", rows[49:60])
    with pytest.raises(ValueError, match=r"sft\.test_data: 1 of 11 test prompts are also train"):
        go(only_sft(tmp_path / "both", {**options, "test_data": both}))


def test_test_prompts_without_answers_are_no_reason_not_to_learn(tmp_path: Path) -> None:
    """They were never asked for before; the note says what is missing."""
    train = write(tmp_path / "train.jsonl", [{"prompt": f"{n}=", "answer": n} for n in range(30)])
    test = write(tmp_path / "test.jsonl", [{"prompt": f"{n}+=", "other": n} for n in range(5)])
    values = only_sft(tmp_path / "run", {"wrong_share": 0.0, "epochs": 1})
    values["task"] = {"name": "jsonl", "path": train, "test_path": test}
    values["rewards"] = {"length": {"target": 1}}
    done, text = go(values)
    assert "sft has no held-out loss: prompt" in text
    assert not losses(done.folder.stage("sft"))
