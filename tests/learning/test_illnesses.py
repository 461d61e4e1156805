"""Every illness that the diagnosis knows, caught for real: a tiny model made ill in a few steps."""

from __future__ import annotations

import copy
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from small_runs import TINY, small_run

from posttrain.build.setup import Supplied
from posttrain.check import CheckFailedError
from posttrain.data.template import Template
from posttrain.models.load import Policy, load_policy
from posttrain.models.save import save_policy
from posttrain.protocols import Learner, Sync
from posttrain.rewards import declare
from posttrain.rewards.scorer import RewardScorer
from posttrain.rollout.engines import ENGINES, NativeEngine
from posttrain.rollout.engines.draws import Decode
from posttrain.rollout.engines.weight_sync import SharedWeights
from posttrain.stages.results import Run
from posttrain.tasks import PromptTask
from posttrain.track.diagnosis import RULES
from posttrain.types import Prompt, Rollout


def task(*, arbitrary: bool = False, num_train: int | None = None) -> PromptTask:
    """Two digits; the answer is the second, or one that can only be known by heart."""

    def prompt(text: str) -> Prompt:
        answer = str(zlib.crc32(text.encode()) % 10) if arbitrary else text[-1]
        return Prompt(id=text, text=text, columns={"answer": answer})

    train = [prompt(f"{a} {b}") for a in range(10) for b in range(10) if (a + b) % 5]
    return PromptTask(
        name="echo",
        rewards={"exact": 1.0},
        train=tuple(train[:num_train]),
        test=tuple(prompt(f"{a} {b}") for a in range(10) for b in range(10) if not (a + b) % 5),
        solve=lambda prompt: prompt.columns["answer"],
    )


def nothing(completion: str) -> float:
    return 0.0


def whim(completion: str) -> float:
    """A taste without sense, never content."""
    return zlib.crc32(completion.encode()) % 100 / 200


def enormous(completion: str) -> float:
    """The same taste, in numbers whose squares are beyond float32."""
    return 1e29 * whim(completion)


def late(completion: str) -> float:
    """Half marks at best, for characters late in the alphabet."""
    return sum(min(ord(character), 127) for character in completion) / 254 / max(1, len(completion))


def letters(completion: str) -> float:
    """The share of small letters."""
    return sum("a" <= character <= "z" for character in completion) / max(1, len(completion))


@declare(checks_answer=True)
def impossible(completion: str) -> float:
    return float(completion == "an answer that never comes")


@declare(checks_answer=True)
def right(completion: str, answer: str) -> float:
    return float(completion == answer)


def long(num_tokens: int) -> float:
    return num_tokens / 20


@declare(checks_answer=True, maximum=10.0)
def one_of_ten(completion: str) -> float:
    return 1.0


def fragile(prompt: str, completion: str) -> float:
    """Cannot read the questions that end on 4 to 9."""
    return letters(completion) / (prompt[-1] < "4")


def forgotten(policy: Policy, decode: Decode, *, compute: str = "auto") -> NativeEngine:
    """An engine with weights of its own, which new ones never reach."""
    model = copy.deepcopy(policy.model)
    engine = NativeEngine(model, end_tokens=policy.end_tokens, decode=decode)
    engine.sync = lambda learner: SharedWeights(engine)  # type: ignore[method-assign]
    return engine


Rewards = dict[Callable[..., float], float]


@dataclass(frozen=True, kw_only=True)
class Case:
    """What makes a run ill."""

    rewards: Rewards
    rl: dict[str, Any] = field(default_factory=dict)
    warm_up: int = 0
    wrong_share: float = 0.0
    task: PromptTask = field(default_factory=task)
    evaluated: bool = False


CASES = {
    "no_signal": Case(rewards={nothing: 1.0}),
    "entropy_collapse": Case(
        rewards={late: 1.0}, rl={"prompts_per_step": 1, "learning_rate": 2e-2, "steps": 50}
    ),
    "kl_blow_up": Case(
        rewards={whim: 1.0},
        rl={
            "max_new_tokens": 8,
            "learning_rate": 5e-2,
            "steps": 20,
            "kl": {"placement": "loss", "coefficient": 1e-4},
        },
    ),
    "clip_fraction_near_one": Case(
        rewards={whim: 1.0}, rl={"epochs": 16, "prompts_per_step": 2, "steps": 6}
    ),
    "length_explosion": Case(
        rewards={right: 0.0, long: 1.0},
        rl={"max_new_tokens": 20, "learning_rate": 1e-3, "steps": 30},
        warm_up=10,
    ),
    "all_truncated": Case(rewards={whim: 1.0}, rl={"max_new_tokens": 1}),
    "format_learned_accuracy_flat": Case(rewards={impossible: 1.0, letters: 0.2}, rl={"steps": 40}),
    "hacking": Case(
        rewards={right: 0.0, letters: 1.0},
        rl={"learning_rate": 3e-3, "steps": 40, "evaluate_every": 5, "evaluate_problems": 10},
        warm_up=20,
    ),
    "grader_failing": Case(rewards={fragile: 1.0}, rl={"max_invalid": 1.0}),
    "steps_skipped": Case(rewards={enormous: 1.0}, rl={"algorithm": "dr_grpo", "max_skipped": 99}),
    "critic_worse_than_mean": Case(
        rewards={whim: 1.0},
        rl={"algorithm": "ppo", "group_size": 4, "steps": 24, "critic": {"learning_rate": 1.0}},
    ),
    "drift": Case(rewards={letters: 1.0}, rl={"engine": "forgotten", "epochs": 2, "steps": 12}),
    "memorised": Case(
        rewards={right: 1.0},
        task=task(arbitrary=True, num_train=30),
        rl={"learning_rate": 1e-5},
        warm_up=120,
        evaluated=True,
    ),
    "nothing_learned": Case(rewards={whim: 1.0}, rl={"learning_rate": 1e-9, "steps": 12}),
    "many_passes": Case(
        rewards={letters: 1.0}, task=task(num_train=2), rl={"prompts_per_step": 20}
    ),
}


HEALTHY = {
    "grpo": {
        "epochs": 2,
        "kl": {"placement": "loss", "coefficient": 0.01},
        "evaluate_every": 5,
        "evaluate_problems": 20,
    },
    "ppo": {"algorithm": "ppo", "epochs": 2, "minibatches": 2},
}


def ill(case: Case, folder: Path) -> tuple[Run, str]:
    """Run a case; the run, and what it printed."""
    rl = {
        "algorithm": "grpo",
        "steps": 10,
        "prompts_per_step": 4,
        "group_size": 8,
        "learning_rate": 1e-2,
        "max_new_tokens": 4,
        "kl": {"placement": "none"},
        "check": "off",  # it would stop most of these
    }
    given: dict[str, Any] = {
        "run": {"folder": str(folder), "seed": 0},
        "model": {"name": "tiny", "options": TINY, "chat": False},
        "grading": {"workers": 0},  # a reward here is one line: no process is worth starting
        "rl": {**rl, **case.rl},
    }
    if case.warm_up:
        given["sft"] = {
            "epochs": case.warm_up,
            "batch_size": 20,
            "learning_rate": 1e-2,
            "wrong_share": case.wrong_share,
        }
    if case.evaluated:
        given["eval"] = {}
    supplied = Supplied(task=case.task, rewards=RewardScorer(case.rewards))
    return small_run(given, supplied=supplied)


def test_every_rule_has_its_case() -> None:
    assert list(CASES) == [name for name, rule in RULES.items() if "rl" in rule.stages]


@pytest.mark.parametrize("name", CASES)
def test_the_illness_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the terminal when it begins, in the log, in the summary."""
    monkeypatch.setitem(ENGINES, "forgotten", forgotten)
    run, printed = ill(CASES[name], tmp_path / "run")
    found = {finding["finding"]: finding for finding in run.summary["diagnosis"]}
    assert name in found
    finding = found[name]
    assert finding["remedy"] in RULES[name].remedies.values()
    # What is said when it begins; at the end of the stage the words are brought up to date.
    lines = (run.folder.stage("rl").path / "diagnosis.jsonl").read_text().splitlines()
    begun = next(row for row in map(json.loads, lines) if row["finding"] == name)
    assert f"! step {begun['step']}: {begun['text']}. " in capsys.readouterr().out
    assert finding in [{"stage": "rl", **row} for row in run.folder.stage("rl").findings()]
    assert f"{name}, step {finding['step']} to " in printed


def test_one_of_ten_is_not_all_right(tmp_path: Path) -> None:
    """The full marks that a reward declares are known to the diagnosis."""
    run, _ = ill(Case(rewards={one_of_ten: 1.0}, rl={"steps": 5}), tmp_path / "run")
    (finding,) = [row for row in run.summary["diagnosis"] if row["finding"] == "no_signal"]
    assert finding["text"].endswith("every answer gets the same (one_of_ten 1.00 of 10)")
    assert "stop" not in finding["remedy"]


def test_what_is_known_by_heart_is_no_reason_to_stop(tmp_path: Path) -> None:
    """Every train prompt is right and few others are: fewer epochs of sft, not an end."""
    run, printed = ill(CASES["memorised"], tmp_path / "run")
    assert run.summary["accuracy_before"] < 0.5
    found = {finding["finding"]: finding for finding in run.summary["diagnosis"]}
    assert found["sft_memorises"]["stage"] == "sft"
    best = found["sft_memorises"]["change"]
    assert f"against sft_memorises: {best[2:].replace(' ', ' = ')}" in printed
    assert found["memorised"]["remedy"].startswith("The train prompts are known by heart since")
    assert found["memorised"]["change"] == "--sft.epochs 36"
    told = found.get("no_signal", found["memorised"])["remedy"]
    assert "stop" not in told
    proposed = printed.partition("What to try next")[2]
    assert proposed.count("sft.epochs = ") == 1  # by the finding that comes first


class Stale:
    """A user's own engine: it made a copy of the weights, and says that it has the new ones."""

    def __init__(self, folder: Path) -> None:
        policy = load_policy(str(folder))
        template = Template(policy.tokenizer, chat=False, end_tokens=policy.end_tokens)
        self._engine = NativeEngine(
            policy.model, end_tokens=policy.end_tokens, decode=template.decode
        )
        self.version = 0

    def generate(self, *given: Any, **options: Any) -> list[list[Rollout]]:
        groups = self._engine.generate(*given, **options)
        return [[self._renamed(rollout) for rollout in group] for group in groups]

    def sync(self, learner: Learner) -> Sync:
        return SharedWeights(self)

    def close(self) -> None:
        self._engine.close()

    def _renamed(self, rollout: Rollout) -> Rollout:
        turns = (replace(turn, version=self.version) for turn in rollout.turns)
        return replace(rollout, turns=tuple(turns))


def test_a_stale_engine_is_not_trained_with_and_is_found_out_where_it_is(tmp_path: Path) -> None:
    """The check stops the run, under "warn" too; without it drift is found, at a staleness of 0."""
    save_policy(load_policy("tiny", options=TINY), tmp_path / "start")
    given: dict[str, Any] = {
        "run": {"seed": 0},
        "model": {"name": str(tmp_path / "start"), "chat": False},
        "grading": {"workers": 0},
        "rl": {"steps": 12, "prompts_per_step": 4, "learning_rate": 1e-3, "max_new_tokens": 4},
    }

    def run(mode: str) -> Run:
        given["run"]["folder"] = str(tmp_path / mode)
        given["rl"]["check"] = mode
        supplied = Supplied(
            task=task(), rewards=RewardScorer({letters: 1.0}), engine=Stale(tmp_path / "start")
        )
        return small_run(given, supplied=supplied)[0]

    for mode in ("stop", "warn"):
        with pytest.raises(CheckFailedError, match="numerics: weights to engine: see"):
            run(mode)
        assert not (tmp_path / mode).exists()  # a start that failed leaves nothing
    done = run("off")
    assert set(done.metrics()["staleness/mean"].to_pylist()) == {0.0}
    (finding,) = [row for row in done.summary["diagnosis"] if row["finding"] == "drift"]
    assert finding["remedy"] == RULES["drift"].remedies["it grows"]


@pytest.mark.parametrize("fair", [False, True])
def test_a_reward_model_that_follows_length_is_named(fair: bool, tmp_path: Path) -> None:
    """Shorter is better in every pair; or in half of them, where a digit says which is better."""
    rows = []
    for number in range(160):
        long, short = "abc" * 3 + str(number % 7), "abc"
        better, worse = (long, short) if fair and number % 2 else (short, long)
        better, worse = (f"+{better}", f"-{worse}") if fair else (better, worse)
        rows.append({"prompt": f"{number}", "chosen": better, "rejected": worse})
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {
        "run": {"folder": str(tmp_path / "run"), "seed": 0},
        "model": {"name": "tiny", "options": TINY, "chat": False},
        "reward": {"data": str(path), "epochs": 8, "batch_size": 16, "learning_rate": 3e-3},
    }
    run, printed = small_run(given)
    assert run.summary["reward_model"]["accuracy"] > 0.9
    found = run.summary["diagnosis"]
    assert [row["finding"] for row in found] == ([] if fair else ["score_follows_length"])
    assert ("reward: score_follows_length, step" in printed) == (not fair)
    assert fair or "shorter is better" in found[0]["text"]


@pytest.mark.slow
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_has_no_finding(name: str, tmp_path: Path) -> None:
    """It learns what the demonstrations got wrong, and nothing is said but that."""
    rl = {"steps": 30, "prompts_per_step": 16, "learning_rate": 3e-3, **HEALTHY[name]}
    case = Case(rewards={right: 1.0}, rl=rl, warm_up=20, wrong_share=0.5)
    run, printed = ill(case, tmp_path / "run")
    rewards = run.metrics()["reward/mean"].drop_null().to_pylist()
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 5 * 0.25
    assert run.summary["diagnosis"] == []
    assert "Diagnosis" not in printed
    assert not (run.folder.stage("rl").path / "diagnosis.jsonl").exists()
