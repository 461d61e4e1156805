"""The quick starts of TRL's documentation, as scripts of ours: each runs, in as few lines.

The data is written as the sets that they name have it (columns, messages); model and data are then
the only words of a script that are replaced, and the test makes the stage short.
"""

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from small_runs import TINY

import posttrain

FOLDER = Path(__file__).parents[2] / "examples" / "trl"
# Lines of code in TRL's, without blank ones and comments: docs/trl, quickstart and rloo_trainer.
TRL_LINES = {"sft": 7, "grpo": 9, "reward_model": 8, "rloo": 13}
CHAT = {"model_options": {"options": {**TINY, "chat": True, "max_positions": 128}}}
RL = {"steps": 2, "prompts_per_step": 2, "group_size": 2, "max_new_tokens": 4, "check": "off"}
SHORT: dict[str, dict[str, Any]] = {"sft": {}, "reward": {}, "rl": RL}


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


ROWS: dict[str, list[dict[str, Any]]] = {
    "trl-lib/Capybara": [
        {"source": "x", "messages": [said("user", f"{n}?"), said("assistant", str(n))]}
        for n in range(8)
    ],
    "trl-lib/DeepMath-103K": [
        {"prompt": [said("user", f"{n}+1=")], "solution": str(n + 1)} for n in range(4)
    ],
    "trl-lib/ultrafeedback-prompt": [{"prompt": [said("user", f"{n}?")]} for n in range(4)],
    "trl-lib/ultrafeedback_binarized": [
        {
            "chosen": [said("user", f"{n}?"), said("assistant", "yes")],
            "rejected": [said("user", f"{n}?"), said("assistant", "no")],
            "score_chosen": 8.0,
            "score_rejected": 3.0,
        }
        for n in range(12)
    ],
}


def code_lines(text: str) -> int:
    return sum(1 for line in text.splitlines() if line.strip() and line.strip()[0] != "#")


@pytest.mark.parametrize("name", TRL_LINES)
def test_a_quick_start_runs_in_no_more_lines(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    assert code_lines(text) <= TRL_LINES[name]
    for source, rows in ROWS.items():
        file = tmp_path / f"{Path(source).name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        text = text.replace(f'"{source}"', repr(str(file)))
    text = re.sub(r'"Qwen/[^"]+"', '"tiny"', text)
    assert "trl-lib" not in text
    for job, options in SHORT.items():
        made = functools.partial(getattr(posttrain, job), **CHAT, **options)
        monkeypatch.setattr(posttrain, job, made, raising=False)
    (tmp_path / "script.py").write_text(text)
    namespace: dict[str, Any] = {"__name__": "script"}
    exec(compile(text, str(tmp_path / "script.py"), "exec"), namespace)
    run = namespace["run"]
    assert run.folder.path == Path("runs") / f"{run.summary['stages'][0]}-1"
    assert run.model.is_dir()
    if name == "rloo":
        assert run.samples(1)[0]["reward"] == len(set(run.samples(1)[0]["completion"]))
