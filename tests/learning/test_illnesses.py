"""Every illness that the diagnosis knows, caught for real: a tiny model made ill in a few steps."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from small_runs import TINY, small_run

from posttrain.build.results import Run
from posttrain.build.run import Supplied
from posttrain.models.load import Policy
from posttrain.rewards import declare
from posttrain.rewards.scorer import RewardScorer
from posttrain.rollout.engines import ENGINES, NativeEngine
from posttrain.rollout.engines.draws import Decode
from posttrain.tasks import PromptTask
from posttrain.track.diagnosis import RULES
from posttrain.types import Prompt


def task() -> PromptTask:
    """Two digits; the answer is the second."""

    def prompt(text: str) -> Prompt:
        return Prompt(id=text, text=text, columns={"answer": text[-1]})

    return PromptTask(
        name="echo",
        rewards={"exact": 1.0},
        train=tuple(prompt(f"{a} {b}") for a in range(10) for b in range(10) if (a + b) % 5),
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


def fragile(prompt: str, completion: str) -> float:
    """Cannot read the questions that end on 4 to 9."""
    return letters(completion) / (prompt[-1] < "4")


def forgotten(policy: Policy, decode: Decode, *, compute: str = "auto") -> NativeEngine:
    """An engine with weights of its own, which new ones never reach."""
    model = copy.deepcopy(policy.model)
    return NativeEngine(model, end_tokens=policy.end_tokens, decode=decode)


Rewards = dict[Callable[..., float], float]


@dataclass(frozen=True, kw_only=True)
class Case:
    """What makes a run ill."""

    rewards: Rewards
    rl: dict[str, Any] = field(default_factory=dict)
    warm_up: int = 0
    wrong_share: float = 0.0


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
    supplied = Supplied(task=task(), rewards=RewardScorer(case.rewards))
    return small_run(given, supplied=supplied)


def test_every_rule_has_its_case() -> None:
    assert list(CASES) == list(RULES)


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
    assert finding["remedy"] == RULES[name].remedy
    assert f"! step {finding['step']}: {finding['text']}. " in capsys.readouterr().out
    assert finding in run.folder.stage("rl").findings()
    assert f"{name}, step {finding['step']} to " in printed


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
