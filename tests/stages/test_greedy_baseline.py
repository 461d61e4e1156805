"""Advantages that need more than rollouts: the run makes what a piece declares, and counts it."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from small_runs import recipe, small_run

import posttrain
from posttrain.build.setup import Supplied
from posttrain.check import check_recipe
from posttrain.config import recipe_from_dict, resolve
from posttrain.config.piece_facts import min_group_size, wants_greedy
from posttrain.config.quantities import arithmetic
from posttrain.rewards.scorer import RewardScorer
from posttrain.rollout.engines.scripted import ScriptedEngine
from posttrain.runs import RunFolder
from posttrain.types import Prompt, Rollout, Sampling

NO_KL = {"placement": "none"}


class TwoMinds(ScriptedEngine):
    """Draws texts of one and of two characters in turn; its greedy answer has three."""

    def __init__(self) -> None:
        super().__init__(lambda prompt, sample: "55"[: 1 + sample % 2], end_token=1)
        self.num_greedy = 0

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, num_samples: int, seed: int
    ) -> list[list[Rollout]]:
        if sampling.temperature > 0:
            return super().generate(prompts, sampling, num_samples=num_samples, seed=seed)
        self.num_greedy += len(prompts)
        greedy = ScriptedEngine(lambda prompt, sample: "555", end_token=1, version=self.version)
        return greedy.generate(prompts, sampling, num_samples=num_samples, seed=seed)


def length(completion: str) -> float:
    return len(completion) / 4


def fails_on_greedy(completion: str) -> float:
    if completion == "555":
        raise ZeroDivisionError("three is too many")
    return len(completion) / 4


def trained(
    folder: Path, reward: Any = length, *, rl: dict[str, Any]
) -> tuple[posttrain.Run, TwoMinds]:
    engine = TwoMinds()
    given = recipe(folder, sft=None, eval=None, rewards=None, grading={"workers": 0}, rl=rl)
    supplied = Supplied(engine=engine, rewards=RewardScorer({reward: 1.0}))
    run, _ = small_run(given, supplied=supplied)
    return run, engine


def records(run: posttrain.Run) -> list[dict[str, float]]:
    return run.folder.stage("rl").records()


def test_the_greedy_answer_is_the_baseline_and_is_not_trained_on(tmp_path: Path) -> None:
    """1/4 − 3/4 and 2/4 − 3/4 in turn; 4 prompts × 4 answers, and none of them greedy."""
    run, engine = trained(tmp_path / "r", rl={"algorithm": "remax", "kl": NO_KL})
    rows = run.samples(1, limit=100)
    assert [row["completion"] for row in rows] == ["5", "55"] * 8
    assert [row["advantage"] for row in rows] == [-0.5, -0.25] * 8
    assert engine.num_greedy == 3 * 4
    for record in records(run):
        assert (record["reward/greedy"], record["reward/greedy_invalid"]) == (0.75, 0.0)
        assert record["reward/mean"] == 0.375
        assert record["train/gradient_norm"] > 0


def test_nobody_else_pays_for_greedy_answers(tmp_path: Path) -> None:
    run, engine = trained(tmp_path / "r", rl={"algorithm": "rloo", "kl": NO_KL})
    assert engine.num_greedy == 0
    assert not any(name.startswith("reward/greedy") for name in records(run)[0])


def test_a_baseline_that_could_not_be_scored_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"4 of 4 scores of greedy completions are broken") as it:
        trained(tmp_path / "r", fails_on_greedy, rl={"algorithm": "remax", "kl": NO_KL})
    assert "three is too many" in str(it.value)
    assert "completion: 555" in str(it.value)


def test_a_missing_baseline_is_no_baseline_of_zero(tmp_path: Path) -> None:
    """The rewards are good and are told; with nothing to compare them with, nothing moves."""
    rl = {"algorithm": "remax", "kl": NO_KL, "max_invalid": 1.0}
    run, _ = trained(tmp_path / "r", fails_on_greedy, rl=rl)
    assert {row["advantage"] for row in run.samples(limit=100)} == {0.0}
    for record in records(run):
        assert record["reward/greedy_invalid"] == 1.0
        assert "reward/greedy" not in record
        assert (record["reward/mean"], record["reward/invalid"]) == (0.375, 0.0)
        assert record["train/gradient_norm"] == 0.0


def test_a_piece_of_ones_own_gets_what_it_declares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_piece.py").write_text(
        "from posttrain.algorithms import per_token, piece, sequence_returns\n"
        "\n"
        "@piece(needs={'greedy_rewards'}, smallest_group=2)\n"
        "def doubled(batch, *, scale: float = 2.0):\n"
        "    return per_token(batch, scale * (sequence_returns(batch) - batch.greedy_rewards))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    rl = {"algorithm": "remax", "kl": NO_KL, "advantage": "own_piece:doubled", "group_size": 2}
    run, _ = trained(tmp_path / "r", rl=rl)
    assert [row["advantage"] for row in run.samples(1, limit=100)] == [-1.0, -0.5] * 4
    with pytest.raises(
        ValueError, match="'own_piece:doubled' compares the completions of a prompt, 2 at"
    ):
        trained(tmp_path / "alone", rl={**rl, "group_size": 1})
    sys.modules.pop("own_piece", None)


def section(**rl: Any) -> Any:
    return resolve(recipe_from_dict({"task": "arithmetic", "rl": rl}))


def test_what_a_section_asks_for() -> None:
    remax, grpo = section(algorithm="remax"), section()
    assert (wants_greedy(remax.rl), min_group_size(remax.rl)) == (True, 1)
    assert (wants_greedy(grpo.rl), min_group_size(grpo.rl)) == (False, 2)
    assert min_group_size(section(algorithm="pkpo", advantage={"k": 6}).rl) == 7
    rows = {row.name: (row.value, row.how) for row in arithmetic(remax)}
    assert rows["greedy completions per step"] == (16, "one for each of 16 prompts: its baseline")
    assert "greedy completions per step" not in {row.name for row in arithmetic(grpo)}
    again = section(algorithm="remax", group_size=2, dynamic_sampling=True, max_resamples=2)
    rows = {row.name: (row.value, row.how) for row in arithmetic(again)}
    how = "one for each of 48 prompts that are drawn: its baseline"
    assert rows["greedy completions per step, at most"] == (48, how)


@pytest.mark.parametrize(
    "rl",
    [
        {"algorithm": "remax"},
        {"algorithm": "pkpo", "advantage": {"k": 17}, "group_size": 18, "prompts_per_step": 2},
        {"advantage": {"name": "leave_one_out_normalised", "deviation": "population"}},
    ],
    ids=["remax", "more than the check would sample", "others"],
)
def test_the_check_samples_what_the_advantage_needs(rl: dict[str, Any], tmp_path: Path) -> None:
    given = recipe(tmp_path / "r", sft=None, eval=None, rl={**rl, "check": "stop"})
    report = check_recipe(given, fast=True)
    failed = [str(line) for line in report.lines if line.area in ("numerics", "speed")]
    assert failed
    assert not any("members" in line for line in failed)
    run, _ = small_run(given)
    assert len(RunFolder(run.folder.path).stage("rl").records()) == 3
