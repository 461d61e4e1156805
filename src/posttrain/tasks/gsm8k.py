"""GSM8K: grade-school word problems, from its files (Cobbe et al., 2021, arXiv:2110.14168)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from posttrain.data.sources import check_text, read_numbered
from posttrain.protocols import Split
from posttrain.rewards.extraction import MARKS, extract_answer
from posttrain.rewards.numeric import parse_number
from posttrain.tasks.task import PromptTask
from posttrain.types import Prompt

TEMPLATE = '{question} Let\'s think step by step and output the final answer after "####".'


def gsm8k_task(
    *,
    path: str | Path,
    template: str = TEMPLATE,
    num_train: int | None = None,
    num_test: int | None = None,
) -> PromptTask:
    """The problems of ``train.jsonl`` and ``test.jsonl`` in the folder ``path``, in their order.

    The files are those of https://github.com/openai/grade-school-math: rows of ``question`` and
    ``answer``, the answer a solution that ends in ``#### N``. The gold answer is that solution,
    the column ``answer`` the number N without commas. ``num_train`` and ``num_test`` take the first
    rows; without them, all.

    An answer counts however it is written (``extract = "answer"``), so that what is measured is
    whether a model can solve problems. Whether it keeps to the mark that the template names
    (``####``, ``\\boxed`` or ``<answer>``) is monitored beside it, as ``format``.
    """
    if "{question}" not in template:
        raise ValueError(f"task 'gsm8k': template must contain {{question}}, got {template!r}")
    return PromptTask(
        name="gsm8k",
        rewards={"numeric": {"weight": 1.0, "extract": "answer"}, **_obedience(template)},
        train=_read(Path(path), "train", template=template, limit=num_train),
        test=_read(Path(path), "test", template=template, limit=num_test),
        solve=lambda prompt: prompt.columns["solution"],
        accuracy={"name": "numeric", "extract": "answer"},
    )


def _obedience(template: str) -> dict[str, dict[str, Any]]:
    """What monitors the mark that a template asks for; nothing where it names none."""
    asked = [how for how, marks in MARKS.items() if any(mark in template for mark in marks)]
    return {"format": {"weight": 0.0, "extract": asked[0]}} if asked else {}


def _read(folder: Path, split: Split, *, template: str, limit: int | None) -> tuple[Prompt, ...]:
    file = folder / f"{split}.jsonl"
    if not file.is_file():
        raise FileNotFoundError(
            f"task 'gsm8k': {file} is missing; path must be the folder with train.jsonl and "
            "test.jsonl of https://github.com/openai/grade-school-math"
        )
    rows = read_numbered(file)
    if limit is not None and not 0 < limit <= len(rows):
        raise ValueError(
            f"task 'gsm8k': num_{split}={limit}, but {file} has {len(rows):,} problems; "
            f"ask for 1 to {len(rows)}, or leave it out for all"
        )
    prompts = []
    for number, row in rows[:limit]:
        where = f"{file}:{number}"
        question = check_text(row, "question", where=where)
        solution = check_text(row, "answer", where=where)
        answer = (extract_answer(solution, "hashes") or "").replace(",", "")
        if parse_number(answer) is None:
            raise ValueError(f"{where}: 'answer' must end in '#### ' and a number")
        prompts.append(
            Prompt(
                id=f"{split}-{number}",
                text=template.replace("{question}", question),
                columns={"answer": answer, "solution": solution, "question": question},
            )
        )
    return tuple(prompts)
