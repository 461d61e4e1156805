"""The loop of a notebook: model objects, numbered and overwritten folders, local functions."""

import copy
import json
import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import RL, TASK, TINY, same_weights
from transformers import AutoModelForCausalLM, AutoTokenizer

import posttrain
from posttrain.models.load import load_policy
from posttrain.models.save import save_policy
from posttrain.report import RunFacts
from posttrain.runs import RunFolder
from posttrain.stages.whole.places import check_replaced, run_place

MODEL = {"options": TINY}
ROWS = {"prompts": ["1+1=", "2+2="]}
SHORT = {**RL, "steps": 1, "grading": {"workers": 0}}
UNSIZED = {name: value for name, value in SHORT.items() if name != "model_options"}


def shortness(completion: str) -> float:
    """Fewer characters are better."""
    return 1 - len(completion) / 10


def longness(completion: str) -> float:
    """More are."""
    return len(completion) / 10


@pytest.fixture(scope="module")
def tiny() -> Any:
    """A model with its tokenizer, as transformers has them in memory."""
    return load_policy("tiny", seed=3, options=TINY)


def test_runs_are_numbered_and_resumed_by_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An edited reward is another run; a mistake leaves no folder; resume takes the newest."""
    monkeypatch.chdir(tmp_path)
    first = posttrain.rl(reward=shortness, **ROWS, **SHORT)
    second = posttrain.rl(reward=longness, **ROWS, **SHORT)
    with pytest.raises(ValueError, match="group_sise"):
        posttrain.rl(reward=longness, **ROWS, group_sise=3)
    with pytest.raises(ValueError, match="needs the column 'answer'"):
        posttrain.rl(reward="exact", **ROWS, **SHORT)
    assert [run.folder.path for run in (first, second)] == [Path("runs/rl-1"), Path("runs/rl-2")]
    assert sorted(path.name for path in Path("runs").iterdir()) == ["rl-1", "rl-2"]
    again = posttrain.rl(reward=longness, resume=True, **ROWS, **{**SHORT, "steps": 2})
    assert again.folder.path == Path("runs/rl-2")
    assert len(again.folder.stage("rl").records()) == 2
    with pytest.raises(ValueError, match=r"overwrite: which folder\?"):
        posttrain.rl(reward=longness, overwrite=True, **ROWS, **SHORT)


def test_of_many_at_once_each_has_its_own_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def one(_: int) -> str:
        with run_place(None, "rl", resume=False, overwrite=False) as folder:
            (Path(folder) / "run.json").touch()
            return folder

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(one, range(40)))
    assert sorted(found) == sorted(f"runs/rl-{n}" for n in range(1, 41))


def test_overwrite_keeps_what_the_new_run_needs_and_what_is_not_a_runs(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder, model = Path("runs/a"), Path("runs/a/rl/model")
    RunFolder.create(folder, config={"run": {}})
    save_policy(tiny, model)
    given: Any = {"reward": longness, "folder": folder, "overwrite": True, **ROWS, **UNSIZED}
    with pytest.raises(ValueError, match="holds what the new run needs"):
        posttrain.rl(**{**given, "model": str(model)})
    with pytest.raises(ValueError, match="there is no 'typo'"):
        posttrain.rl(**{**given, "model": "runs/a/rl/typo"})
    for name in (".git", ".env", "base-notes.txt"):
        (folder / name).mkdir()
        with pytest.raises(ValueError, match=f"files that no run wrote .{re.escape(name)}."):
            check_replaced(str(folder))
        (folder / name).rmdir()
    monkeypatch.chdir(folder)
    for named in (".", str(tmp_path / folder)):
        with pytest.raises(ValueError, match="overwrite: "):
            check_replaced(named)
    assert (tmp_path / model / "config.json").exists()
    monkeypatch.chdir(tmp_path)
    check_replaced(str(folder))


def test_a_first_step_that_fails_does_not_cost_the_old_run(tmp_path: Path) -> None:
    """It goes when a step of the new one is done; what failed in a new folder stays to look at."""
    given: dict[str, Any] = {**ROWS, **SHORT, "check": "off"}
    posttrain.rl(reward=shortness, folder=tmp_path / "run", **given)
    before = (tmp_path / "run" / "rl" / "metrics.jsonl").read_bytes()
    with pytest.raises(RuntimeError, match="scores are broken"):
        posttrain.rl(reward=broken, folder=tmp_path / "run", overwrite=True, **given)
    assert (tmp_path / "run" / "rl" / "metrics.jsonl").read_bytes() == before
    assert RunFolder(tmp_path / "run").finished
    with pytest.raises(RuntimeError, match="scores are broken"):
        posttrain.rl(reward=broken, folder=tmp_path / "new", **given)
    assert (tmp_path / "new" / "rl").is_dir()


def test_overwrite_replaces_a_run_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    posttrain.rl(reward=shortness, folder=folder, **ROWS, **SHORT)
    with pytest.raises(ValueError, match=r"finished run of another recipe .*overwrite=True"):
        posttrain.rl(reward=longness, folder=folder, **ROWS, **SHORT)
    with pytest.raises(ValueError, match="group_sise"):
        posttrain.rl(reward=longness, folder=folder, overwrite=True, group_sise=2, **ROWS, **SHORT)
    assert (folder / "summary.json").exists()  # a mistake does not cost the old run
    with pytest.raises(ValueError, match="resumed or overwritten, not both"):
        posttrain.rl(reward=longness, folder=folder, overwrite=True, resume=True, **ROWS, **SHORT)
    run = posttrain.rl(reward=longness, folder=folder, overwrite=True, **ROWS, **SHORT)
    assert set(run.samples(1)[0]["parts"]) == {f"{__name__}:longness"}
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds files that no run wrote \(notes.txt\)"):
        posttrain.rl(reward=longness, folder=folder, overwrite=True, **ROWS, **SHORT)
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(ValueError, match="is a link"):
        check_replaced(str(tmp_path / "link"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(ValueError, match="is not a run folder"):
        check_replaced(str(tmp_path / "other"))
    assert (tmp_path / "other" / "file").exists()


def broken(completion: str) -> float:
    """A mistake in a reward."""
    raise RuntimeError(f"no score for {completion!r}")


def test_a_start_that_fails_leaves_the_folder_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is found before the first step costs no old run, and leaves no run to go on with."""
    monkeypatch.chdir(tmp_path)
    checked = {**SHORT, "check": "stop"}
    run = posttrain.rl(reward=shortness, folder="kept", **ROWS, **SHORT)

    def held() -> dict[Path, bytes]:
        files = (path for path in run.folder.path.rglob("[!.]*") if path.is_file())
        return {path: path.read_bytes() for path in files}

    before = held()
    other = {"reward": longness, "overwrite": True, **ROWS, **SHORT}
    mistakes: list[tuple[str, dict[str, Any]]] = [
        ("broken scores", {**other, "reward": broken, "check": "stop"}),
        ("needs the column 'answer'", {**other, "reward": "exact"}),
        ("leaves no room", {**other, "prompts": ["1" * 80]}),
    ]
    for said, mistake in mistakes:
        with pytest.raises(Exception, match=said):
            posttrain.rl(folder="kept", **mistake)
        assert held() == before
    for folder in (None, "new"):
        with pytest.raises(Exception, match="broken scores"):
            posttrain.rl(reward=broken, folder=folder, **ROWS, **checked)
    assert not Path("new").exists()
    assert not any(Path("runs").iterdir())
    again = posttrain.rl(reward=longness, resume=True, **ROWS, **SHORT)
    assert again.folder.path == Path("runs/rl-1")


@pytest.mark.parametrize("folder", ["mine", "adapters/mine", "kept/adapters/mine"])
def test_what_fails_after_the_first_step_keeps_its_run(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its folder is called."""
    monkeypatch.chdir(tmp_path)
    RunFolder.marked("kept")

    def ends(_: object) -> None:
        raise KeyboardInterrupt

    given: Any = {"reward": longness, **ROWS, **SHORT, "steps": 2, "save_every": 1}
    with pytest.raises(KeyboardInterrupt):
        posttrain.rl(folder=folder, callbacks=[ends], **given)
    assert (Path(folder) / "rl" / "metrics.jsonl").exists()
    assert not (Path(folder) / ".before.tmp").exists()


def test_a_model_object_is_its_folder(tmp_path: Path, tiny: Any) -> None:
    """Trained bit for bit as from its folder, and left as it was; another one is another run."""
    save_policy(tiny, tmp_path / "saved")
    model, before = tiny.model, copy.deepcopy(tiny.model.state_dict())
    config, mode = model.config.to_dict(), model.training
    given = {"reward": shortness, **ROWS, **UNSIZED}
    named = posttrain.rl(model=tmp_path / "saved", folder=tmp_path / "named", **given)
    both = {"model": model, "tokenizer": tiny.tokenizer, "folder": tmp_path / "run"}
    run = posttrain.rl(**both, **given)
    assert same_weights(run.model, named.model)
    assert model.config.to_dict() == config
    assert model.training == mode
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    longer = posttrain.rl(**both, resume=True, **{**given, "steps": 2})
    assert len(longer.folder.stage("rl").records()) == 2
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight += 1
    with pytest.raises(ValueError, match=r"cannot go on as the same run.*\n.*model\.name"):
        posttrain.rl(**{**both, "model": other}, resume=True, **{**given, "steps": 3})
    assert len(list((tmp_path / "run").glob("start-*"))) == 1


def test_a_model_object_is_evaluated_and_asked(tmp_path: Path, tiny: Any) -> None:
    save_policy(tiny, tmp_path / "saved")
    both = {"tokenizer": tiny.tokenizer}
    options = {"max_new_tokens": 4, "temperature": 1.0, "num_samples": 3}
    answers = posttrain.generate(tiny.model, "1+1=", **both, **options)
    same = posttrain.generate(tmp_path / "saved", "1+1=", **options)
    assert [a.text for a in answers] == [a.text for a in same]
    found = posttrain.evaluate(tiny.model, task=TASK, max_new_tokens=4, **both)
    assert len(found.greedy) == 10
    for call in (posttrain.generate, posttrain.evaluate):
        with pytest.raises(ValueError, match="comes with its tokenizer, and none was given"):
            call(tiny.model, **({"prompt": "a"} if call is posttrain.generate else {}))
    with pytest.raises(ValueError, match="tokenizer: has no effect beside the name of a model"):
        posttrain.generate("tiny", "1+1=", **both)


def test_test_data_may_be_rows(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}+1=", "completion": str(n + 1)} for n in range(6)]
    run = posttrain.sft(
        data=rows[:4], test_data=rows[4:], folder=tmp_path / "r", model_options=MODEL
    )
    assert run.folder.stage_record("sft")["held_out"] == 2


def test_a_reward_model_beside_a_function(tmp_path: Path) -> None:
    """The recommended monitored reward in a notebook: the function is watched, the model counts."""
    pairs = [{"prompt": f"{n}:", "chosen": "a", "rejected": "bb"} for n in range(12)]
    judge = posttrain.reward(
        model="tiny", data=pairs, folder=tmp_path / "reward", model_options=MODEL
    )
    table = {"model": {"weight": 1.0, "path": str(judge.model)}, shortness: 0.0}
    run = posttrain.rl(reward=table, folder=tmp_path / "rl", **ROWS, **SHORT)
    row = run.samples(1)[0]
    assert set(row["parts"]) == {"model", f"{__name__}:shortness"}
    assert row["reward"] == pytest.approx(row["parts"]["model"])
    assert run.folder.config["rewards"]["model"]["path"] == str(judge.model)
    watched = {"model": {"weight": 0.0, "path": str(judge.model)}, shortness: 1.0}
    run = posttrain.rl(reward=watched, folder=tmp_path / "watched", **ROWS, **SHORT)
    row = run.samples(1)[0]
    assert row["reward"] == pytest.approx(row["parts"][f"{__name__}:shortness"])
    with pytest.raises(ValueError, match="every weight is 0"):
        posttrain.rl(reward={"model": 0.0, shortness: 0.0}, folder=tmp_path / "n", **ROWS, **SHORT)


def test_an_annotator_that_is_a_function(tmp_path: Path) -> None:
    run = posttrain.prefer(
        model="tiny",
        reward=shortness,
        folder=tmp_path / "run",
        model_options=MODEL,
        max_new_tokens=4,
        samples=4,
        prompts=[f"{n}:" for n in range(8)],
    )
    lines = (run.folder.path / "prefer" / "pairs.jsonl").read_text().splitlines()
    pairs = [json.loads(line) for line in lines]
    assert pairs
    assert all(len(row["ranked"][0]) < len(row["ranked"][1]) for row in pairs), pairs[0]


def test_sections_by_name_and_what_is_none(tmp_path: Path) -> None:
    """Every section is reached; one that is no mapping, and a misspelt one, are said."""
    given = {"reward": shortness, "folder": tmp_path / "run", **ROWS, **SHORT}
    with pytest.raises(ValueError, match=r"run_options: expected a mapping of the keys of \[run\]"):
        posttrain.rl(**given, run_options="wandb")
    with pytest.raises(ValueError, match=r"cluster\.lerners"):
        posttrain.rl(**given, cluster={"lerners": 2})
    with pytest.raises(ValueError, match=r"gradings: posttrain\.rl calls it grading"):
        posttrain.rl(**given, gradings={"workers": 0})
    with pytest.raises(ValueError, match=r"eval\.problem"):
        posttrain.rl(**given, test_prompts=["3+3="], evaluate={"problem": 1})
    run = posttrain.rl(
        **given, test_prompts=["3+3=", "4+4="], evaluate={"problems": 1, "samples": 2}
    )
    assert run.folder.config["eval"]["samples"] == 2


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("rewards", "reward"),
        ("reward_funcs", "reward"),
        ("train_dataset", "prompts"),
        ("output_dir", "folder"),
        ("promts", "prompts"),
        ("callback", "callbacks"),
        ("model_optons", "model_options"),
    ],
)
def test_a_name_of_another_library_is_answered_with_the_parameter(given: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"^{given}: posttrain.rl calls it {meant}; write {meant}"):
        posttrain.rl(**{given: []})


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("rewards", "reward={function: weight}"),
        ("reward_weights", "reward={function: weight}"),
        ("resume_from_checkpoint", "resume=True"),
    ],
)
def test_the_hint_is_written_as_python_writes_it(given: str, written: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"write {written}")):
        posttrain.rl(**{given: True})


@pytest.mark.parametrize("function", ["rl", "sft", "prefer", "reward", "dpo", "evaluate"])
def test_an_unknown_name_is_said_whatever_its_value_and_before_data_is_read(function: str) -> None:
    """A section that the function does not take is none of its names either."""
    data = {"data": "nope.jsonl"} if function in ("sft", "reward", "dpo") else {"prompts": "nope"}
    call: Any = partial(getattr(posttrain, function), model="tiny", **data)
    for unknown in ({"bogus": None}, {"bogus": 3}, {"sweeps": None}):
        with pytest.raises(ValueError, match=next(iter(unknown))):
            call(**unknown)
    if function != "rl":
        with pytest.raises(ValueError, match=r"sweep: unknown key"):
            call(sweep=[])


def test_an_unknown_algorithm_is_said_before_data_is_read() -> None:
    with pytest.raises(ValueError, match=r"rl\.algorithm: .* did you mean 'reinforce_pp'"):
        posttrain.rl(prompts="nope.jsonl", algorithm="REINFORCE++")


def test_a_run_is_opened_by_its_folder_and_shows_the_stage_it_has(tmp_path: Path) -> None:
    """The loss is that of the weights that were kept; a policy may be a model object."""
    rows = [{"prompt": f"{number}+1=", "completion": str(number + 1)} for number in range(40)]
    kept = {"result": "best", "evaluate_every": 1, "steps": 8, "batch_size": 8}
    run = posttrain.sft(data=rows, folder=tmp_path / "run", learning_rate=3.0, **kept)
    again = posttrain.Run(tmp_path / "run")
    assert repr(again) == repr(run)
    losses = [loss for loss in again.metrics().column("test/loss").to_pylist() if loss is not None]
    assert min(losses) < losses[-1]
    ((label, (_, after)),) = (
        each for each in RunFacts(run.folder).losses.items() if "held-out" in each[0]
    )
    assert "of the best weights" in label
    assert after == min(losses)
    model = AutoModelForCausalLM.from_pretrained(run.model)
    tokenizer = AutoTokenizer.from_pretrained(run.model)
    asked = {"max_new_tokens": 4}
    with posttrain.Policy(model, tokenizer=tokenizer) as one, posttrain.Policy(run.model) as other:
        assert one.generate("2+1=", **asked)[0].tokens == other.generate("2+1=", **asked)[0].tokens
    with pytest.raises(ValueError, match="is not a run folder"):
        posttrain.Run(tmp_path)
