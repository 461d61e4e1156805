"""GSM8K: grade-school word problems, from its files (Cobbe et al., 2021, arXiv:2110.14168)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from posttrain.data.row_checks import check_text
from posttrain.data.sources import read_numbered
from posttrain.protocols import Split
from posttrain.rewards.extraction import MARKS, extract_answer
from posttrain.rewards.numeric import parse_number
from posttrain.tasks.task import PromptTask
from posttrain.types import Prompt

# The usual instruction for mathematics to Qwen's models and their like. Whatever the instruction,
# such a model writes a box far more often than "####".
TEMPLATE = "{question}\nPlease reason step by step, and put your final answer within \\boxed{}."
_WRITTEN = {"boxed": "\\boxed{%s}", "tag": "<answer>%s</answer>", "hashes": "#### %s"}


def gsm8k_task(
    *,
    path: str | Path,
    template: str = TEMPLATE,
    num_train: int | None = None,
    num_test: int | None = None,
) -> PromptTask:
    """The problems of ``train.jsonl`` and ``test.jsonl`` in the folder ``path``, in their order.

    The files are those of https://github.com/openai/grade-school-math: rows of ``question`` and
    ``answer``, the answer a solution that ends in ``#### N``. The column ``answer`` is the number N
    without commas. ``num_train`` and ``num_test`` take the first rows; without them, all.

    An answer counts however it is written (``extract = "answer"``), so that what is measured is
    whether a model can solve problems. Whether it keeps to the form that the template names
    (``\\boxed``, ``<answer>`` or ``####``) is monitored beside it, as ``format``; gold answers are
    in that form.
    """
    if "{question}" not in template:
        raise ValueError(f"task 'gsm8k': template must contain {{question}}, got {template!r}")
    form = next((how for how, marks in MARKS.items() if any(m in template for m in marks)), None)
    rewards: dict[str, dict[str, Any]] = {"numeric": {"weight": 1.0, "extract": "answer"}}
    if form is not None:
        rewards["format"] = {"weight": 0.0, "extract": form}
    return PromptTask(
        name="gsm8k",
        rewards=rewards,
        train=_read(Path(path), "train", template=template, limit=num_train),
        test=_read(Path(path), "test", template=template, limit=num_test),
        solve=lambda prompt: _in_form(prompt.columns["solution"], form),
        accuracy={"name": "numeric", "extract": "answer"},
    )


def _in_form(solution: str, form: str | None) -> str:
    """A solution of the files with its answer in the form that is asked for."""
    steps, _, answer = solution.rpartition("####")
    return steps + _WRITTEN[form or "hashes"] % answer.strip()


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
