"""A class written for TRL's ``environment_factory``, as it is: in a chat, in a run, and played."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trl_class
from chat_families import end_tokens, family_tokenizer
from command_line import command_in
from played_episodes import Nothing, score, trained

import posttrain
from posttrain.data.template import Template
from posttrain.envs import make_env
from posttrain.envs.env_pool import EnvPool
from posttrain.models.load import load_policy
from posttrain.rollout.collect import collect_scored
from posttrain.rollout.engines.scripted import ScriptedEngine
from posttrain.rollout.environment import Environment
from posttrain.types import Prompt, Rollout, Sampling

QUESTION = {"role": "user", "content": "Open the safe."}
HERMES = '<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
LLAMA = '{{"name": "{name}", "parameters": {arguments}}}'
WRITTEN = {"qwen2.5": HERMES, "llama3": LLAMA}


def call(family: str, name: str, **arguments: Any) -> str:
    return WRITTEN[family].format(name=name, arguments=json.dumps(arguments))


def played(
    family: str, says: Sequence[str], *, rewards: list[str], workers: int = 0, **columns: Any
) -> tuple[Rollout, Template]:
    """An episode of a policy that says these, in the chat of a model family."""
    tokenizer = family_tokenizer(family)
    ends = end_tokens(family, tokenizer)
    bare = Template(tokenizer, chat=True, end_tokens=ends)
    spec = {"name": "trl_class:SafeEnv", "rewards": [f"trl_class:{name}" for name in rewards]}
    env: Any = make_env(spec, chat=True, tool_format=bare.tool_format)
    template = Template(tokenizer, chat=True, end_tokens=ends, tools=env.tools)
    prompt = Prompt(id="0", text="", messages=(QUESTION,), columns=columns)
    left = iter(says)
    engine = ScriptedEngine(
        lambda prompt, sample: next(left),
        encode=lambda text: template.encode_completion(text, ends[0], sampled=True)[:-1],
        decode=template.decode,
        end_token=ends[0],
    )
    environment = Environment(
        pool=EnvPool(env, workers=workers), encode=template.encode_reply, render=template.render
    )
    try:
        found = collect_scored(
            [replace(prompt, tokens=template.render(prompt).tokens)],
            Sampling(max_new_tokens=500),
            engine=engine,
            scorer=Nothing(),
            num_samples=1,
            seed=0,
            env=environment,
        )
    finally:
        environment.close()
    assert next(left, None) is None
    return found.rollouts[0], template


@pytest.mark.parametrize("family", WRITTEN)
@pytest.mark.parametrize("workers", [0, 1])
def test_in_a_chat_token_by_token(family: str, workers: int) -> None:
    """Calls in the model's own format; what was written is what the chat template writes of it."""
    calls = [("turn", {"steps": 6}), ("turn", {"steps": -1}), ("pull", {}), ("pull", {})]
    says = [*(call(family, name, **arguments) for name, arguments in calls), "It is open."]
    rollout, template = played(
        family, says, rewards=["reward_func", "brevity"], workers=workers, answer="5"
    )
    results = [
        "The dial is at 6.",
        "The dial is at 5.",
        "It opens.",
        json.dumps({"error": "Game over."}),
    ]
    assert [turn.text for turn in rollout.turns[1::2]] == results
    chat: list[dict[str, Any]] = [{"role": "user", "content": "Open the safe. The dial is at 0."}]
    for (name, arguments), result in zip(calls, results, strict=True):
        function = {"name": name, "arguments": arguments}
        called = {"type": "function", "function": function}
        chat += [{"role": "assistant", "content": "", "tool_calls": [called]}]
        chat += [{"role": "tool", "name": name, "content": result}]
    chat += [{"role": "assistant", "content": "It is open."}]
    whole = template.tokenizer.apply_chat_template(chat, tools=list(template.tools), tokenize=False)
    tokens = (*rollout.prompt.tokens, *rollout.tokens)
    assert template.tokenizer.decode(tokens, skip_special_tokens=False) == whole.rstrip("\n")
    sampled = [token for token, own in zip(rollout.tokens, rollout.mask, strict=True) if own]
    end = template.tokenizer.decode([rollout.turns[0].tokens[-1]], skip_special_tokens=False)
    assert template.tokenizer.decode(sampled, skip_special_tokens=False) == "".join(
        f"{text}{end}" for text in says
    )
    assert score(rollout).value == 1.0 - len("It is open.") / 1000
    counted = {"tool_calls": 4.0, "tool_errors": 1.0, "wrong_calls": 0.0, "malformed_calls": 0.0}
    given = {"reward_func": 1.0, "brevity": -0.011, **counted}
    assert score(rollout).parts == {
        "env": 0.989,
        **{f"env/{name}": value for name, value in given.items()},
    }


def test_the_row_is_as_the_task_wrote_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """``reset`` and rewards get messages and columns, and no markup of a chat template."""
    seen: dict[str, Any] = {}

    def keep(environments: list[trl_class.SafeEnv], **given: Any) -> list[float]:
        seen.update(given, row=environments[0].row)
        return [0.25]

    monkeypatch.setattr(trl_class, "reward_func", keep)
    says = [call("qwen2.5", "turn", steps=2), "So far."]
    rollout, _ = played("qwen2.5", says, rewards=["reward_func"], answer="5", level=3)
    assert seen["row"] == {"prompt": [QUESTION], "answer": "5", "level": 3}
    assert seen["answer"] == ["5"]
    asked = {"role": "user", "content": "Open the safe. The dial is at 0."}
    assert rollout.prompt.messages == (asked,)
    assert seen["prompts"] == [[asked]]  # as TRL gives them, with what reset returned
    assert rollout.prompt.text == ""  # the messages are all of it
    [[first, result, last]] = seen["completions"]
    assert first["tool_calls"] == [
        {"type": "function", "function": {"name": "turn", "arguments": {"steps": 2}}}
    ]
    assert (result["role"], result["content"]) == ("tool", "The dial is at 2.")
    assert last == {"role": "assistant", "content": "So far."}
    assert seen["completion_ids"] == [[*rollout.turns[0].tokens, *rollout.turns[2].tokens]]
    assert score(rollout).value == 0.25


def test_reset_that_says_nothing_leaves_the_prompt() -> None:
    rollout, template = played("qwen2.5", ["No."], rewards=["reward_func"], told=False)
    prompt = Prompt(id="0", text="", messages=(QUESTION,))
    assert rollout.prompt.messages == (QUESTION,)
    assert rollout.prompt.tokens == template.render(prompt).tokens
    assert score(rollout).value == 0.0


@pytest.mark.parametrize(
    ("said", "counted", "told"),
    [
        ('<tool_call>\n{"name": "turn", "arguments"', "malformed_calls", "malformed call"),
        (call("qwen2.5", "turn", steps="five"), "wrong_calls", "must be an integer"),
        (call("qwen2.5", "push"), "wrong_calls", "unknown tool 'push'; did you mean 'pull'?"),
        (call("qwen2.5", "_secret"), "wrong_calls", "unknown tool '_secret'"),
        (call("qwen2.5", "reset"), "wrong_calls", "unknown tool 'reset'"),
    ],
)
def test_a_wrong_call_is_answered_and_the_episode_goes_on(
    said: str, counted: str, told: str
) -> None:
    says = [said, call("qwen2.5", "turn", steps=5), call("qwen2.5", "pull"), "Open."]
    rollout, _ = played("qwen2.5", says, rewards=["reward_func"], answer="5")
    assert told in json.loads(rollout.turns[1].text)["error"]
    assert score(rollout).value == 1.0
    assert score(rollout).parts[f"env/{counted}"] == 1.0


def in_folder(folder: Path) -> dict[str, Any]:
    """The user's file in a folder, and the spec that names it there."""
    shutil.copy(trl_class.__file__, folder / "safe_env.py")
    return {
        "name": "safe_env:SafeEnv",
        "rewards": ["safe_env:reward_func", "safe_env:brevity"],
    }


def test_a_run_by_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few steps of GRPO, without a chat: tools and opening stand in the prompt as text.

    What the run's environment hears of a prompt that is given to ``generate`` is that prompt.
    """
    rows = trained(tmp_path, in_folder(tmp_path), steps=3, max_positions=1024)
    assert [row["step"] for row in rows] == [1, 1, 2, 2, 3, 3]
    for row in rows:
        assert row["prompt"].endswith("= The dial is at 0.")
        brevity = -len(row["completion"]) / 1000
        assert (row["state"], row["reward"]) == ("ok", pytest.approx(brevity, abs=1e-12))
        assert (row["parts"]["env/reward_func"], row["parts"]["env/tool_calls"]) == (0.0, 0.0)
        assert None not in row["sampler_logprobs"]  # one turn, all of it the policy's
    monkeypatch.syspath_prepend(tmp_path)
    [answer] = posttrain.generate(tmp_path / "run", "3+4=", max_new_tokens=2)
    assert answer.prompt.text == "3+4= The dial is at 0."
    tools = make_env("safe_env:SafeEnv").tools
    tokenizer = load_policy("tiny").tokenizer
    told = Template(tokenizer, tools=tools).render(Prompt(id="0", text=answer.prompt.text))
    assert answer.prompt.tokens == told.tokens


def test_play(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the model, and by a person in its place, who opens the safe."""
    in_folder(tmp_path)
    command = command_in(tmp_path, columns=400, monkeypatch=monkeypatch, capsys=capsys)
    model = ["play", "tiny", "safe_env:SafeEnv", "--model.options.max_positions", 2048]
    asked = [*model, "--prompt", "Open the safe."]
    found = command(*asked, "--max-new-tokens", 4)
    assert found.code == 0, found.err
    assert "\n  Open the safe. The dial is at 0.\nenvironment · opens, in the prompt" in found.out
    assert "\nscore 0 · env 0 · " in found.out
    lines = [
        '<tool>{"name": "turn", "arguments": {"steps": 7}}</tool>',
        '<tool>{"name": "pull"}</tool>',
        "Open.",
    ]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines) + "\n"))
    found = command(*asked, "--human", "policy", "--env", "rewards=safe_env:reward_func")
    assert found.code == 0, found.err
    assert found.out.index("<tool_result>The dial is at 7.") < found.out.index("It opens.")
    assert "\nscore 1 · env/reward_func 1 · env 1 · env/tool_calls 2 · " in found.out
