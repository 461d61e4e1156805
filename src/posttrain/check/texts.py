"""Warnings about how the tokenizer reads the texts of a run, before it begins.

Special tokens that the data spells, characters without a token, and chats of which the template
leaves out a part.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.check.verdicts import Verdict
from posttrain.config import Resolved
from posttrain.data.preference_sets import read_compared
from posttrain.data.sources import read_demonstrations
from posttrain.data.template import Template
from posttrain.data.token_texts import lost_characters
from posttrain.protocols import Split, Task
from posttrain.types import Prompt

TOKENS = 'set model.special_tokens = "tokens"'
MOST = 3  # examples that a note names at most


@dataclass(frozen=True, kw_only=True)
class Row:
    """The texts of a row of data, its name in messages, and the prompt that it holds."""

    name: str
    texts: Sequence[str]
    prompt: Prompt | None = None


def find_notes(data: Mapping[str, Sequence[Row]], template: Template) -> list[Verdict]:
    """Warnings about the rows of each kind; raises for a chat that the template refuses."""
    notes: list[Verdict] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for row in (row for rows in data.values() for row in rows):
            if row.prompt is not None:
                template.try_prompt(row.prompt)
    for text, _, fix in (str(warning.message).rpartition("; ") for warning in caught):
        notes.append(Verdict("warn", text, fix, "chat"))
    for name, rows in data.items():
        notes += _special_tokens(name, rows, template=template)
        notes += _characters(name, rows, template=template)
    return notes


def read_rows(
    recipe: Resolved, task: Task | None, *, stages: Collection[str]
) -> dict[str, list[Row]]:
    """The rows of each kind that these stages learn from or are measured by."""
    with warnings.catch_warnings():  # the stage itself gives these warnings when it reads the rows
        warnings.simplefilter("ignore")
        return {name: rows for name, rows in _data(recipe, task, stages=stages) if rows}


def _data(
    recipe: Resolved, task: Task | None, *, stages: Collection[str]
) -> Iterator[tuple[str, list[Row]]]:
    splits: dict[Split, set[str]] = {
        "train": {"sft", "prefer", "rl"},
        "test": {"prefer", "rl", "eval"},
    }
    for split, users in splits.items():
        prompts = task.prompts(split) if task is not None and users & {*stages} else ()
        if prompts:
            yield f"{split} prompts", [_of_prompt(prompt) for prompt in prompts]
            answers = [(p.id, p.columns.get("answer")) for p in prompts]
            rows = [Row(name=name, texts=[text]) for name, text in answers if isinstance(text, str)]
            yield f"{split} answers", rows
    if "sft" in stages and recipe.sft.data != "task":
        section = recipe.sft
        found = read_demonstrations(
            section.data, columns=section.columns, limit=section.num_demonstrations
        )
        yield "demonstrations", [_of_demonstration(n, row) for n, row in enumerate(found, start=1)]
    sections = [getattr(recipe, stage) for stage in ("reward", "dpo") if stage in stages]
    files = {each.data: each.columns for each in sections if each.data != "prefer"}
    for path, columns in files.items():
        sets = read_compared(path, columns=columns)
        asked = [
            Prompt(id=f"number {n}", text=s.prompt, messages=s.messages)
            for n, s in enumerate(sets, start=1)
        ]
        yield (
            "preferences",
            [
                Row(name=prompt.id, texts=[*_of_prompt(prompt).texts, *ranked.completions])
                for prompt, ranked in zip(asked, sets, strict=True)
            ],
        )


def _of_prompt(prompt: Prompt) -> Row:
    said = [prompt.text, *(message["content"] for message in prompt.messages)]
    return Row(name=prompt.id, texts=said, prompt=prompt)


def _of_demonstration(number: int, row: Mapping[str, Any]) -> Row:
    name = f"number {number}"
    if "text" in row:
        return Row(name=name, texts=[row["text"]])
    if "messages" not in row:
        prompt = Prompt(id=name, text=row["prompt"])
        return Row(name=name, texts=[row["prompt"], row["completion"]], prompt=prompt)
    return _of_prompt(Prompt(id=name, text="", messages=tuple(row["messages"])))


def _special_tokens(name: str, rows: Sequence[Row], *, template: Template) -> Iterator[Verdict]:
    counts: Counter[str] = Counter()
    first, number = "", 0
    for row in rows:
        spelled = {token for text in row.texts for token in template.control.spelled(text)}
        counts.update(spelled)
        first, number = first or (row.name if spelled else ""), number + bool(spelled)
    if not number:
        return
    often = sorted(counts, key=lambda token: (-counts[token], token))[:MOST]
    most = ", ".join(f"{token} in {counts[token]:,}" for token in often)
    told = f"{number:,} of {len(rows):,} {name} spell special tokens ({most}; the first is {first})"
    if template.control.as_text:
        fix = f"leave it where the text is about them; if they are meant as tokens, {TOKENS}"
        yield Verdict("warn", f"{told}: read as text", fix, "special tokens")
    else:
        fix = "leave it where the data is your own: whoever wrote it can end turns and forge others"
        yield Verdict("warn", f"{told}: read as these tokens", fix, "special tokens")


def _characters(name: str, rows: Sequence[Row], *, template: Template) -> Iterator[Verdict]:
    every: set[str] = set().union(*(text for row in rows for text in row.texts))
    lost = lost_characters(template.tokenizer, every)
    if not lost:
        return
    having = [row for row in rows if any(not lost.keys().isdisjoint(t) for t in row.texts)]
    read = [f"{character!r} is read as {lost[character]!r}" for character in sorted(lost)[:MOST]]
    told = f"{len(having):,} of {len(rows):,} {name} have characters that the tokenizer lacks"
    yield Verdict(
        "warn",
        f"{told}: {', '.join(read)} ({len(lost):,} in all; the first is {having[0].name})",
        "take a model whose tokenizer has them, or write the texts without",
        "characters",
    )
