"""``posttrain check`` of a recipe with an environment: one episode token by token, and refusals."""

import io
from typing import Any

import pytest
from rich.console import Console

from posttrain.check import Report, check_recipe
from posttrain.cli.check import SHOWN, render
from posttrain.models import tiny

SAID = [[{"role": "user", "content": "sure?\x1b[2J"}]]


def checked(
    replies: Any = SAID, *, env: bool = True, score: float | None = None, **model: Any
) -> Report:
    options = {"hidden_size": 16, "num_layers": 1, "max_positions": 128, "chat": True}
    task: dict[str, Any] = {"name": "arithmetic", "digits": 1, "num_train": 20, "num_test": 5}
    if env:
        task["env"] = {"name": "scripted", "replies": replies, "score": score}
    return check_recipe(
        {
            "run": {"threads": 1, "stages": ["rl"]},
            "model": {"name": "tiny", "options": options, **model},
            "task": task,
            "rl": {"algorithm": "grpo", "group_size": 2, "max_new_tokens": 4, "steps": 2},
        },
        fast=True,
    )


def test_an_episode_is_shown_token_by_token_with_its_mask() -> None:
    report = checked()
    (line,) = [line for line in report.lines if line.name == "episode"]
    assert line.state == "pass"
    rows = report.episode
    writers = [row.writer for row in rows]
    assert [name for n, name in enumerate(writers) if writers[n - 1 : n] != [name]] == [
        "prompt",
        "policy",
        "environment",
        "policy",
    ]
    assert [row.trained for row in rows] == [writer == "policy" for writer in writers]
    said = "".join(row.text for row in rows if row.writer == "environment")
    # What the environment says is text and cannot touch the terminal; its turn is the template's.
    assert said.endswith("<|assistant|>")
    assert "<|user|>sure?" in said
    assert "\x1b" not in said
    counts = f"{sum(row.trained for row in rows)} of {len(rows) - writers[1:].index('policy') - 1}"
    assert f"3 turns, {counts} tokens" in line.text
    assert report.to_dict()["episode"][0]["writer"] == "prompt"
    console = Console(file=io.StringIO(), width=120)
    console.print(render(report))
    table = console.file.getvalue().partition("written by")[2]  # type: ignore[attr-defined]
    assert table.count(" yes") == sum(row.trained for row in rows)
    longest = max(writers.count("prompt"), writers.count("environment"))
    assert (" more " in table) == (longest > SHOWN)


def test_without_an_environment_there_is_no_episode() -> None:
    report = checked(env=False)
    assert not report.episode
    assert "episode" not in [line.name for line in report.lines]


def test_where_the_environment_scores_the_task_is_no_judge() -> None:
    """Nobody is told to fix the rewards of a task whose answers are not asked for."""
    lines = {line.name: line for line in checked(score=0.25).lines}
    assert lines["mean score"].text.startswith("0.25 by the environment, from 0.25 to 0.25; pass@1")
    assert "by 'numeric', which is only shown" in lines["mean score"].text
    assert lines["gold answers"].text.startswith("the environment scores the episodes, not 'num")
    assert not {"empty answers", "shuffled answers", "accuracy"} & lines.keys()
    nothing = lines["groups with signal"]
    assert nothing.text.endswith("groups agree (every episode scores 0.25)")
    assert "let the environment give partial credit" in nothing.fix
    assert "[rewards]" not in nothing.fix


def test_a_template_that_cannot_write_replies_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the reason, in the line by which a run does not begin."""
    made = tiny.build_tokenizer

    def without_end(*args: Any, **options: Any) -> Any:
        tokenizer = made(*args, **options)
        tokenizer.chat_template = (
            "{% for m in messages %}{{ m['role'] + m['content'] }}{% endfor %}"
        )
        return tokenizer

    monkeypatch.setattr(tiny, "build_tokenizer", without_end)
    report = checked()
    (line,) = [line for line in report.lines if line.name == "chat" and line.state == "fail"]
    assert "puts no end token after the assistant's turn" in line.text, report.lines
    assert "chat" not in [line.name for line in checked(env=False).of("fail")]
