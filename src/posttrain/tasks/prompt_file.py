"""Prompts of your own: any file, folder, hub data set or rows."""

from __future__ import annotations

import json
import math
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from posttrain.data.conventions import read_as, understood
from posttrain.data.row_checks import check_messages, check_text, mapping
from posttrain.protocols import Split
from posttrain.rewards.numeric import parse_number
from posttrain.rewards.sample_data import FROM_ROLLOUT
from posttrain.tasks.splits import held_out
from posttrain.tasks.task import PromptTask, episode, identity
from posttrain.types import Prompt

# The reward that checks answers where none of the recipe does: it accepts no wrong answer, and
# finds an answer that is marked as one; of answers that are numbers, in any notation.
TEXT_CHECK = {"name": "exact", "extract": "auto"}
NUMBER_CHECK = {"name": "numeric", "extract": "answer"}


def file_task(
    *,
    path: str | Path,
    test_path: str | Path | None = None,
    test_share: float = 0.0,
    columns: Mapping[str, str] | None = None,
) -> PromptTask:
    """Prompts of your own: rows with ``prompt`` or ``messages``, and maybe ``answer``.

    ``path`` is a JSONL, JSON, CSV or Parquet file, a folder saved by ``datasets``, or a hub id
    ``"owner/name:config:split"``; :mod:`posttrain.data.conventions` says which columns are
    understood, and ``columns`` names others: ``{"prompt": "task_text"}``.

    Every other column goes to the rewards by its name. The test split is the file ``test_path``,
    or the share ``test_share`` of ``path``, chosen by a hash of the prompt: a row stays on its
    side when others are added; 1: all of it. Without either there is no test split.

    A row that repeats an earlier one is dropped, with a warning that counts them. The same prompt
    with other columns is another episode of an environment, and held out by these too; without one
    it is an error. So is an empty prompt. An ``answer`` is text; a number is turned into text.
    Where all prompts have one and no reward checks it, ``exact`` does, or ``numeric`` where all of
    them are numbers.
    """
    if test_path is not None and test_share:
        raise ValueError("task 'file': give test_path or test_share, not both")
    if not 0 <= test_share <= 1:
        raise ValueError(f"task 'file': test_share must be from 0 to 1, got {test_share}")
    rows, alike = read_prompts(path, columns=columns)
    if test_path is not None:
        train, (test, also) = rows, read_prompts(test_path, columns=columns)
        alike = alike or also
    else:
        times = Counter(map(identity, rows.values()))
        held = {n for n, p in rows.items() if _is_test(p, test_share, alone=times[identity(p)] < 2)}
        train = {line: p for line, p in rows.items() if line not in held}
        test = {line: p for line, p in rows.items() if line in held}
    if (not train and test_share < 1) or (test_share and not test):
        raise ValueError(
            f"task 'file': test_share={test_share} leaves {len(train)} rows of {path} for "
            f"training and {len(test)} for the test; choose another share, or give test_path"
        )
    check = answer_check((*train.values(), *test.values()))
    return PromptTask(
        name="file",
        told=understood("prompts", path, columns=columns),
        rewards=default_rewards(check or answer_check([*rows.values()])),
        train=name_prompts("train", train),
        test=name_prompts("test", test),
        solve=gold_answer,
        accuracy=check,
        alike=alike,
    )


def answer_check(prompts: Sequence[Prompt]) -> dict[str, str] | None:
    """The reward that checks answers by default; None where a prompt has no answer."""
    if not prompts or any("answer" not in prompt.columns for prompt in prompts):
        return None
    numbers = all(parse_number(prompt.columns["answer"]) is not None for prompt in prompts)
    return NUMBER_CHECK if numbers else TEXT_CHECK


def default_rewards(check: Mapping[str, str] | None) -> dict[str, float]:
    """The rewards where a recipe names none: the check of answers, with its own defaults.

    >>> default_rewards(NUMBER_CHECK), default_rewards(TEXT_CHECK), default_rewards(None)
    ({'numeric': 1.0}, {'exact': 1.0}, {})
    """
    return {check["name"]: 1.0} if check else {}


def _is_test(prompt: Prompt, share: float, *, alone: bool) -> bool:
    """Whether a prompt is in the test split; white space and roles do not change its side.

    One that does not stand ``alone`` in its file, but with other columns too, goes by these.
    """
    words = [prompt.text, *(message["content"] for message in prompt.messages)]
    said = " ".join(" ".join(words).split())
    return held_out(said if alone else episode(prompt), share=share)


def name_prompts(split: Split, prompts: Mapping[int, Prompt]) -> tuple[Prompt, ...]:
    """The prompts with the split and their line, or place in a list, as id."""
    return tuple(replace(p, id=f"{split}-{number}") for number, p in prompts.items())


def read_prompts(
    source: Any, *, columns: Mapping[str, str] | None = None, name: str = "prompts"
) -> tuple[dict[int, Prompt], str]:
    """The prompts of a source by line or number, and which differ in their columns alone.

    Each stands there once; ``name`` is that of an object.

    >>> read_prompts([{"question": "1+1=", "answer": 2}])[0][0].columns
    {'question': '1+1=', 'answer': '2'}
    """
    prompts: dict[int, Prompt] = {}
    places: dict[int, str] = {}
    first: dict[str, int] = {}
    seen: set[str] = set()
    num_repeated, alike = 0, ""
    for number, where, row in read_as("prompts", source, columns=columns, name=name):
        for theirs in {*(columns or {}).values()} & FROM_ROLLOUT.keys() - {"prompt"}:
            row.pop(theirs)  # known to the rewards by the name that it was given
        prompt = _prompt(row, where=where)
        earlier = first.setdefault(identity(prompt), number)
        if episode(prompt) in seen:
            num_repeated += 1
            continue
        seen.add(episode(prompt))
        prompts[number], places[number] = prompt, where
        if earlier != number and not alike:
            alike = (
                f"{where}: the prompt of {places[earlier]} again, with other columns; keep one, or "
                "name an environment that reads them (task.env; env=… from Python)"
            )
    if num_repeated:
        repeat, are = ("row repeats", "is") if num_repeated == 1 else ("rows repeat", "are")
        named = source if isinstance(source, str | Path) else name
        warnings.warn(
            f"{named}: {num_repeated} {repeat} an earlier one and {are} dropped", stacklevel=5
        )
    # Answers for all rows or for none: half of them would be a surprise in the middle of a run.
    missing = [number for number, prompt in prompts.items() if "answer" not in prompt.columns]
    if missing and len(missing) < len(prompts):
        raise ValueError(
            f"{places[missing[0]]}: no answer, while other rows have one ({len(missing)} of "
            f"{len(prompts)} lack it); fill it in or remove the row"
        )
    return prompts, alike


def _prompt(row: dict[str, Any], *, where: str) -> Prompt:
    rest = dict(row)
    if "messages" in row and "prompt" in row:
        raise ValueError(
            f"{where}: both 'prompt' and 'messages'; keep one of them, or choose it: "
            + mapping("prompt", "prompt")
        )
    text = ""
    messages: tuple[dict[str, str], ...] = ()
    if "messages" in row:
        messages = check_messages(rest.pop("messages"), where=where)
        if messages[-1]["role"] == "assistant":
            raise ValueError(
                f"{where}: the last message is the assistant's; a prompt ends with the user's"
            )
    else:
        text = check_text(row, "prompt", where=where)
        del rest["prompt"]
    answer = _answer(rest, where=where)
    for name in FROM_ROLLOUT:
        if name in rest:
            raise ValueError(
                f"{where}: the column {name!r} would hide the rollout's own {name!r} from the "
                f"rewards; rename it, or take it as the answer: {mapping('answer', name)}"
            )
    return Prompt(id="", text=text, messages=messages, columns={**rest, **answer})


def _answer(rest: dict[str, Any], *, where: str) -> dict[str, str]:
    """The answer as text, taken out of the row; nothing where the row has none."""
    if "answer" not in rest:
        return {}
    value = rest.pop("answer")
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        value = json.dumps(value)
    return {"answer": check_text({"answer": value}, "answer", where=where)}


def gold_answer(prompt: Prompt) -> str:
    """The answer of a prompt; a ``ValueError`` where there are none."""
    if "answer" not in prompt.columns:
        raise ValueError(
            f"prompt {prompt.id!r}: without answers there is no gold; add the column 'answer', "
            "or name the one that holds it in task.columns"
        )
    return str(prompt.columns["answer"])
