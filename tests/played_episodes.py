"""Episodes through the one way to sample and score, by a policy that says what it is told."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from small_runs import recipe

from posttrain.envs.env_pool import EnvPool
from posttrain.rollout.collect import collect_scored
from posttrain.rollout.engines.scripted import ScriptedEngine, code_points
from posttrain.rollout.environment import Environment
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


class Scripted(ScriptedEngine):
    """Says ``says[sample][turn]``, also where an opening gave each sample a prompt of its own."""

    def __init__(self, says: Sequence[Sequence[str]]) -> None:
        super().__init__(lambda prompt, sample: self._says(prompt, sample))
        self.says = says

    def _says(self, prompt: Prompt, sample: int) -> str:
        number = self.numbers.get(prompt.id, sample)
        return self.says[number][prompt.text.count(END)]

    def generate(self, prompts: Sequence[Prompt], *given: Any, **named: Any) -> Any:
        own = named["num_samples"] == 1
        named_so = [replace(p, id=f"{n}/{p.id}") if own else p for n, p in enumerate(prompts)]
        self.numbers = {p.id: n % len(self.says) for n, p in enumerate(named_so) if own}
        return super().generate(named_so, *given, **named)


def rendered(prompt: Prompt) -> Prompt:
    """The tokens of the last message, or of the text."""
    text = prompt.messages[-1]["content"] if prompt.messages else prompt.text
    return replace(prompt, tokens=tuple(code_points(text)))


def play(env: Any, prompts: Sequence[Prompt], *, says: Sequence[Sequence[str]]) -> list[Rollout]:
    """The rollouts of a policy that says ``says[sample][turn]``; their tokens are checked."""
    pool = EnvPool(env, workers=0)
    with contextlib.closing(Environment(pool=pool, encode=encode, render=rendered)) as made:
        found = collect_scored(
            prompts,
            Sampling(max_new_tokens=200),
            engine=Scripted(says),
            scorer=Nothing(),
            num_samples=len(says),
            seed=0,
            env=made,
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
