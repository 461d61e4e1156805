"""Episodes through the one way to sample and score, by a policy that says what it is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from small_runs import recipe

from posttrain.rollout.collect import collect_scored
from posttrain.rollout.engines.scripted import ScriptedEngine, code_points
from posttrain.runs import read_rollouts
from posttrain.types import Prompt, Rollout, Sampling, Score

END = "\0"


class Nothing:
    """Rewards that give nothing: what counts is the environment's score."""

    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [Score(value=0.0) for _ in rollouts]


def encode(said: str | Sequence[Mapping[str, Any]], turn: Any = None) -> list[int]:
    """Messages as ``<role:content>``."""
    if isinstance(said, str):
        return code_points(said)
    return code_points("".join(f"<{each['role']}:{each['content']}>" for each in said))


def asked(text: str, **columns: Any) -> Prompt:
    """A chat of one message."""
    message = {"role": "user", "content": text}
    return Prompt(
        id=text, text=text, messages=(message,), tokens=tuple(code_points(text)), columns=columns
    )


def play(env: Any, prompts: Sequence[Prompt], *, says: Sequence[Sequence[str]]) -> list[Rollout]:
    """The rollouts of a policy that says ``says[sample][turn]``; their tokens are checked."""

    def script(prompt: Prompt, sample: int) -> str:
        return says[sample][prompt.text.count(END)]

    found = collect_scored(
        prompts,
        Sampling(max_new_tokens=200),
        engine=ScriptedEngine(script),
        scorer=Nothing(),
        num_samples=len(says),
        seed=0,
        env=env,
        encode=encode,
    )
    for number, rollout in enumerate(found.rollouts):
        said = [turn.text for turn in rollout.turns if turn.sampled]
        lines = says[number % len(says)][: len(said)]
        assert said == list(lines)
        sampled = [token for token, own in zip(rollout.tokens, rollout.mask, strict=True) if own]
        assert sampled == code_points("".join(line + END for line in lines))
    return list(found.rollouts)


def replies(rollout: Rollout) -> list[str]:
    """What the environment said."""
    return [turn.text for turn in rollout.turns if not turn.sampled]


def score(rollout: Rollout) -> Score:
    """The score, which is there."""
    assert rollout.score is not None
    return rollout.score


def trained(
    folder: Path, env: Mapping[str, Any], *, steps: int = 1, max_positions: int = 256
) -> list[dict[str, Any]]:
    """The rollouts of steps of GRPO with a tiny model, by the command line."""
    values = recipe(folder / "run", task={"env": dict(env)}, eval=None, sft=None)
    values["model"]["options"] = {**values["model"]["options"], "max_positions": max_positions}
    values["rl"] |= {"steps": steps, "prompts_per_step": 1, "group_size": 2}
    text = "\n".join(f"{name} = {_toml(section)}" for name, section in values.items())
    (folder / "recipe.toml").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "posttrain.cli", "run", "recipe.toml"]
    given = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(folder)])}
    done = subprocess.run(
        command, cwd=folder, env=given, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [file] = (folder / "run").rglob("rollouts*")
    return read_rollouts(file)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {_toml(each)}" for name, each in value.items()) + "}"
    return json.dumps(value)
