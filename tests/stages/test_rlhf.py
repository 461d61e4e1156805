"""From a policy to preferences, a reward model and RL on it: whole runs, resumed, and refused."""

import copy
import json
import math
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import TINY, recipe, small_run, timeless
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from posttrain.cli.app import main
from posttrain.models.load import load_policy
from posttrain.models.save import save_policy
from posttrain.runs import RunFolder
from posttrain.stages.results import Run

JUDGED = {"numeric": {"extract": "whole"}, "length": {"target": 1, "per_token": 0.1}}
WATCHED = {"numeric": {"weight": 0.0, "extract": "whole"}, "model": {"weight": 2.0}}


def whole(folder: Path, algorithm: str, **sections: Any) -> dict[str, Any]:
    """The recipe of a whole run; the reward model alone decides."""
    given = recipe(
        folder,
        rewards=None,
        sft={"epochs": 10, "learning_rate": 1e-2},
        prefer={"rewards": JUDGED, "samples": 4, "max_new_tokens": 4},
        reward={"epochs": 4, "batch_size": 16, "learning_rate": 3e-3},
        rl={"algorithm": algorithm},
    )
    return {**given, "rewards": copy.deepcopy(WATCHED), **sections}


@pytest.fixture(scope="module", params=["ppo", "grpo"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished run."""
    folder = tmp_path_factory.mktemp("rlhf") / request.param
    return small_run(whole(folder, request.param))[0]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a reward model of the small model, trained on a few pairs."""
    folder = tmp_path_factory.mktemp("reward")
    return Path(small_run(reward_recipe(folder / "r", written(folder, PAIRS)))[0].model)


def scores(folder: Path, rows: Sequence[Sequence[int]]) -> list[float]:
    """What transformers alone says: the raw score of each row of tokens."""
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        return [float(model(torch.tensor([row])).logits) for row in rows]


def normalised(folder: Path, rows: Sequence[Sequence[int]]) -> list[float]:
    notes = json.loads((folder / "config.json").read_text())["posttrain"]
    mean, deviation = notes["score_mean"], notes["score_deviation"]
    return [(raw - mean) / deviation for raw in scores(folder, rows)]


def exchange(row: dict[str, Any], end: int, *, as_cut: bool) -> list[int]:
    """Prompt and completion of a rollout, ended once, or else as it stands."""
    tokens = [*row["prompt_tokens"], *row["completion_tokens"]]
    assert (tokens[-1] == end) == (row["stop_reason"] == "stop")
    return tokens if row["stop_reason"] == "stop" or as_cut else [*tokens, end]


def test_a_whole_run_leaves_its_files(run: Run) -> None:
    """Preferences, verdict, picture and a reward model that transformers loads as it is."""
    folder = run.folder
    assert folder.stages == ["sft", "prefer", "reward", "rl", "eval"]
    pairs = (folder.path / "prefer" / "pairs.jsonl").read_text().splitlines()
    record = folder.stage_record("prefer")["train"]
    assert len(pairs) == record["sets"] > 10
    assert record["sets"] + record["ties"] == 40 * 4 // 2
    assert (folder.path / "reward" / "calibration.png").read_bytes().startswith(b"\x89PNG")
    model = AutoModelForSequenceClassification.from_pretrained(folder.path / "reward" / "model")
    assert model.config.num_labels == 1
    assert run.model == folder.path / "rl" / "model"
    assert load_policy(str(run.model)).end_tokens  # a policy, not the reward model


def test_the_verdict_is_that_of_transformers(run: Run) -> None:
    """Accuracy and margin on the held-out pairs, and scores with mean 0 and deviation 1."""
    folder = run.folder.path / "reward"
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    lines = (run.folder.path / "prefer" / "test_pairs.jsonl").read_text().splitlines()
    rows = [
        [*tokenizer(row["prompt"] + text).input_ids, *([tokenizer.eos_token_id] * ended)]
        for row in map(json.loads, lines)
        for text, ended in zip(row["ranked"], row.get("ended", [True, True]), strict=True)
    ]
    assert any("ended" in line for line in lines)
    found = scores(folder / "model", rows)
    gaps = [better - worse for better, worse in zip(found[::2], found[1::2], strict=True)]
    verdict = json.loads((folder / "verdict.json").read_text())
    assert verdict["num_pairs"] == len(gaps) == len(lines)
    assert verdict["accuracy"] == sum(gap > 0 for gap in gaps) / len(gaps)
    assert verdict["margin"] == pytest.approx(sum(gaps) / len(gaps), abs=1e-5)
    loss = sum(math.log1p(math.exp(-gap)) for gap in gaps) / len(gaps)
    assert verdict["loss"] == pytest.approx(loss, abs=1e-5)
    scaled = normalised(folder / "model", rows)
    assert sum(scaled) / len(scaled) == pytest.approx(0, abs=1e-4)
    assert sum(value**2 for value in scaled) / len(scaled) == pytest.approx(1, abs=1e-4)


def test_the_reward_is_the_models_normalised_score(run: Run) -> None:
    """Of the very tokens that were sampled, as the pairs had them; the weight makes the reward."""
    rows = run.samples(limit=100)
    end = load_policy(str(run.model)).end_tokens[0]
    assert {row["stop_reason"] for row in rows} == {"stop", "length"}
    expected = normalised(
        run.folder.path / "reward" / "model", [exchange(row, end, as_cut=True) for row in rows]
    )
    assert [row["parts"]["model"] for row in rows] == pytest.approx(expected, abs=1e-4)
    assert [row["reward"] for row in rows] == pytest.approx([2 * e for e in expected], abs=1e-3)
    assert len({round(value, 3) for value in expected}) > 20


def test_a_half_finished_run_goes_on(run: Run, tmp_path: Path) -> None:
    """What is finished is not redone, and it is the SFT's model that goes on to learn."""
    folder = tmp_path / "again"
    shutil.copytree(run.folder.path, folder)
    for gone in ("rl", "eval"):
        shutil.rmtree(folder / gone)
    (folder / "summary.json").unlink()
    before = {stage: (folder / stage / "done.json").read_text() for stage in ("sft", "reward")}
    again, printed = small_run(whole(folder, run.folder.path.name))
    for stage in ("sft", "prefer", "reward"):
        assert f"{stage}: already finished; taken from the run folder" in printed
    assert {stage: (folder / stage / "done.json").read_text() for stage in before} == before
    assert timeless(again.folder.stage("rl").records()) == timeless(
        run.folder.stage("rl").records()
    )


@pytest.mark.parametrize("critic", ["policy", "reward model"])
def test_a_reward_model_from_elsewhere(trained: Path, tmp_path: Path, critic: str) -> None:
    """By its folder, with options; a critic that starts from it values every state by its score."""
    source = {"source": str(trained)} if critic == "reward model" else {}
    given = recipe(
        tmp_path / "r",
        sft=None,
        eval=None,
        rewards=None,
        rl={"algorithm": "ppo", "epochs": 1, "critic": source},
    )
    given["rewards"] = {"model": {"weight": 1.0, "path": str(trained), "normalise": False}}
    run, _ = small_run(given)
    rows = run.samples(1, limit=16)
    expected = scores(trained, [exchange(row, 1, as_cut=False) for row in rows])
    assert [row["reward"] for row in rows] == pytest.approx(expected, abs=1e-4)
    texts = [(row["prompt_tokens"], row["completion_tokens"]) for row in rows]
    states = [[*before, *new[:place]] for before, new in texts for place in range(len(new))]
    values = normalised(trained, states) if source else [0.0]
    first = run.folder.stage("rl").records()[0]["value/mean"]
    assert first == pytest.approx(sum(values) / len(values), abs=1e-5)


PAIRS = [
    {"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": f"{n} or {n + 2}"} for n in range(8)
]
RANKED = [{"prompt": f"{n}+1=", "ranked": [str(n + 1), str(n), "?"]} for n in range(8)]
LABELLED = [
    {"prompt": f"{n}+1=", "completion": text, "score": score}
    for n in range(8)
    for text, score in ((str(n + 1), 1), ("no", 0), ("well", 0.5))
]


def written(folder: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path = folder / "preferences.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def reward_recipe(folder: Path, data: Path | str) -> dict[str, Any]:
    return {
        "run": {"folder": str(folder), "seed": 1},
        "model": {"name": "tiny", "options": TINY},
        "reward": {"data": str(data), "batch_size": 4, "epochs": 3, "learning_rate": 3e-3},
    }


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**PAIRS[0], "rejected": "1 "}, "preferences.jsonl:9: .*are the same text"),
        ({**PAIRS[0], "chosen": ""}, "preferences.jsonl:9: .*'chosen'.*empty"),
        ({**RANKED[0], "chosen": "1"}, "preferences.jsonl:9: the row has columns of"),
    ],
)
def test_preferences_that_say_nothing(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    """By file and line, before the first step."""
    with pytest.raises(ValueError, match=message):
        small_run(reward_recipe(tmp_path / "r", written(tmp_path, [*PAIRS, row])))
    assert not (tmp_path / "r" / "reward").exists()


def altered(trained: Path, folder: Path, config: dict[str, Any], *, words: bool = True) -> Path:
    """A reward model with other settings, or with a tokenizer that knows another word for x."""
    shutil.copytree(trained, folder)
    settings, tokenizer = folder / "config.json", folder / "tokenizer.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | config))
    if words:
        tokenizer.write_text(tokenizer.read_text().replace('"x":', '"y y":'))
    return folder


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("two labels", "reward model: .* has 2 labels; a reward is one number"),
        ("another tokenizer", "the tokenizer in .* is not the one it was trained with"),
        ("nothing", "rewards.model: there is no .*nothing"),
        ("policy", "is a language model without a score head"),
    ],
)
def test_reward_models_that_are_none(
    trained: Path, tmp_path: Path, model: str, message: str
) -> None:
    """Refused at once: SFT, which would come first, has not begun."""
    folder = tmp_path / model
    if model == "two labels":
        altered(trained, folder, {"id2label": {"0": "bad", "1": "good"}}, words=False)
    elif model == "another tokenizer":
        altered(trained, folder, {})
    elif model == "policy":
        save_policy(load_policy("tiny", options=TINY), folder)
    given = whole(tmp_path / "r", "grpo", rewards={"model": {"path": str(folder)}})
    with pytest.raises(ValueError, match=message):
        small_run(given)
    assert not (tmp_path / "r" / "sft").exists()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("foreign", "rl.critic.source: .* has another vocabulary than the policy .*'x' is missing"),
        ("nothing", "rl.critic.source: there is no .*nothing"),
    ],
)
def test_a_critic_that_cannot_start(
    trained: Path, tmp_path: Path, source: str, message: str
) -> None:
    """It must know the policy's tokens; nothing is learned before that is known."""
    if source == "foreign":
        altered(trained, tmp_path / source, {"posttrain": {}})
    rl = {"algorithm": "ppo", "critic": {"source": str(tmp_path / source)}}
    with pytest.raises(ValueError, match=message):
        small_run(recipe(tmp_path / "r", sft=None, eval=None, rl=rl))
    assert not list(tmp_path.glob("r/rl/metrics*"))


@pytest.mark.parametrize(
    ("rows", "sets", "pairs_of_each"),
    [(PAIRS, 8, 1), (RANKED, 8, 3), (LABELLED, 24, 1)],
    ids=["pairs", "ranked", "labelled"],
)
@pytest.mark.parametrize("how", ["python", "command"])
def test_the_reward_stage_alone(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rows: Any,
    sets: int,
    pairs_of_each: int,
    how: str,
) -> None:
    """A file of each kind; one prompt of eight is held out, and the loss has fallen."""
    data = written(tmp_path, rows)
    if how == "python":
        small_run(reward_recipe(tmp_path / "r", data))
    else:
        sizes = [f"--model.options.{name}={size}" for name, size in TINY.items()]
        numbers = ["--reward.batch_size=4", "--reward.epochs=3", "--reward.learning_rate=0.003"]
        where = ["--reward.data", str(data), "--run.folder", str(tmp_path / "r")]
        monkeypatch.setattr(sys, "path", [*sys.path])
        monkeypatch.setattr(sys, "argv", ["posttrain", "reward", *where, *sizes, *numbers])
        with pytest.raises(SystemExit) as done:
            main()
        assert not done.value.code
    folder = RunFolder(tmp_path / "r")
    record = folder.stage_record("reward")
    assert record["train_sets"] + record["test_sets"] == sets
    assert record["test_sets"] == sets // 8
    assert record["verdict"]["num_pairs"] == record["test_sets"] * pairs_of_each
    losses = [found["loss/total"] for found in folder.stage("reward").records()]
    assert losses[-1] < 0.8 * losses[0]
    assert len(set(scores(folder.path / "reward" / "model", [[5, 6, 7], [8, 9]]))) == 2


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    """With the file that was probably meant."""
    written(tmp_path, PAIRS)
    with pytest.raises(ValueError, match=r"reward.data: no file .*preference.jsonl.*preferences"):
        small_run(reward_recipe(tmp_path / "r", tmp_path / "preference.jsonl"))
