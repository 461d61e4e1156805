"""What the stage ``sft`` learns from and is measured by: demonstrations as rows of tokens."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.build.questions import first_question
from posttrain.build.rendered_prompts import tell_left_out
from posttrain.build.setup import Setup
from posttrain.config import SftSection
from posttrain.data.learned_turns import pieces
from posttrain.data.prompt_splits import Demonstration, check_apart, hold_out
from posttrain.data.sources import read_demonstrations
from posttrain.data.template import Template
from posttrain.models.cache import context_length
from posttrain.models.load import Policy
from posttrain.pipelines.likelihood import Row
from posttrain.protocols import Task
from posttrain.tasks import demonstrations
from posttrain.types import Prompt

TEST_SHARE = 0.05  # of the demonstrations, held out where the recipe does not say how many
FEWEST_ROWS = 40  # of a file: with fewer, none is held out unless that was asked for
FEWEST_OF_TASK = 20  # these cost no training data
NONE = "sft has no held-out loss"


@dataclass(frozen=True, kw_only=True)
class SftRows:
    """Rows to learn from and held-out ones; ``note`` is what the user should know of it.

    Each is its tokens, with True where they are learned. A demonstration is one row, but where its
    text is longer than a row may be, or its chat template writes old turns differently.
    """

    train: Sequence[Row]
    test: Sequence[Row] = ()
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class _Read:
    train: Sequence[Demonstration]
    test: Sequence[Demonstration] = ()
    note: str = ""


def row_limit(policy: Policy, section: SftSection) -> int | None:
    """The most tokens that a row may have; None where nothing says."""
    known = [n for n in (context_length(policy.model), section.max_length) if n is not None]
    return min(known, default=None)


def sft_rows(setup: Setup) -> SftRows:
    """The demonstrations of a recipe, all of them."""
    read = _read(setup)
    train, test = (_rows(rows, setup) for rows in (read.train, read.test))
    note, more = read.note, len(train) - len(read.train)
    if more:
        note += f"{'; ' if note else ''}{len(read.train):,} demonstrations make {len(train):,} rows"
    return SftRows(train=train, test=test, note=note)


def fitting(rows: SftRows, policy: Policy, *, section: SftSection) -> SftRows:
    """The rows that are short enough; the others are left out, loudly."""
    limit, note = row_limit(policy, section), rows.note
    train, test = (
        [row for row in side if limit is None or len(row[0]) <= limit]
        for side in (rows.train, rows.test)
    )
    options: dict[str, Any] = {"option": "sft.data", "limit": limit}
    if section.max_length is not None and section.max_length == limit:
        options["what"] = "sft.max_length"
    tell_left_out(len(train), len(rows.train), rows="demonstrations", **options)
    if test:
        tell_left_out(len(test), len(rows.test), rows="held-out demonstrations", **options)
    elif rows.test:
        note = f"{NONE}: none of the held-out demonstrations is within {limit} tokens"
    for name in ("result", "patience"):
        if (value := getattr(section, name)) not in ("last", None) and not test:
            why = note.removeprefix(f"{NONE}: ") or "the task has no test prompts"
            raise ValueError(
                f"sft.{name}: {json.dumps(value)} goes by the held-out loss, and nothing is held "
                f"out ({why}); drop it, or give a file in sft.test_data"
            )
    return SftRows(train=train, test=test, note=note)


def _rows(rows: Sequence[Demonstration], setup: Setup) -> list[Row]:
    template, learn = setup.template, setup.recipe.sft.train_on
    end, limit = setup.policy.end_tokens[0], row_limit(setup.policy, setup.recipe.sft)
    chats = [row["messages"] for row in rows if "messages" in row]
    prompts = [first_question(row) for row in rows if "prompt" in row]
    template.prepare(prompts, conversations=chats, learn=learn)
    found: list[Row] = []
    for number, row in enumerate(rows):
        if "text" in row:
            found += pieces(template.encode_text(row["text"], end), limit)
        elif "messages" in row:
            found += template.render_conversation(row["messages"], learn=learn)
        else:
            question = Prompt(id=f"demonstration-{number}", text=row["prompt"])
            prompt = template.render(question).tokens
            whole = (*prompt, *template.encode_completion(row["completion"], end))
            first = 1 if learn == "all" else len(prompt)
            found.append((whole, tuple(place >= first for place in range(len(whole)))))
    return found


def _read(setup: Setup) -> _Read:
    section, seed, task = setup.recipe.sft, setup.recipe.run.seed, setup.task
    own = section.data == "task"
    if own and task is None:
        raise ValueError('sft.data: "task" needs a task; name one, or give a file')
    train: Sequence[Demonstration]
    if own and task is not None:
        wrong, count = section.wrong_share, section.num_demonstrations
        train = demonstrations(task, num=count, wrong_share=wrong, seed=seed)
    else:
        train = read_demonstrations(
            section.data, columns=section.columns, limit=section.num_demonstrations
        )
    if section.evaluate_every == 0:
        return _Read(train=train)
    if section.test_data is not None:
        test = read_demonstrations(section.test_data, columns=section.columns, name="sft.test_data")
        key = _question(setup.template, (*train, *test))
        check_apart(train, test, where="sft.test_data", key=key)
        return _Read(train=train, test=_some(test, section.evaluate_demonstrations, seed=seed))
    if own and task is not None:
        return _of_task(train, task, section=section, seed=seed)
    return _of_file(train, section=section, seed=seed, template=setup.template)


def _question(template: Template, rows: Sequence[Demonstration]) -> Callable[[Demonstration], str]:
    """What makes the prompts of rows the same: how they are written for the model."""
    template.prepare([first_question(row) for row in rows])
    return lambda row: template.question(first_question(row))


def _of_task(
    train: Sequence[Demonstration], task: Task, *, section: SftSection, seed: int
) -> _Read:
    """Held out are test prompts, answered in the same way: no training data is lost."""
    prompts = len(task.prompts("test"))
    if not prompts:
        return _Read(train=train)
    wanted = max(FEWEST_OF_TASK, round(TEST_SHARE * len(train)))
    own = getattr(task, "demonstrate", None) is not None  # it can answer a prompt more than once
    num = min(wanted, section.evaluate_demonstrations, *(() if own else (prompts,)))
    try:
        test = demonstrations(
            task, num=num, wrong_share=section.wrong_share, seed=seed, split="test"
        )
    except ValueError as error:  # test prompts without answers, say: no reason not to learn
        return _Read(train=train, note=f"{NONE}: {error}")
    return _Read(train=train, test=test)


def _of_file(
    rows: Sequence[Demonstration], *, section: SftSection, seed: int, template: Template
) -> _Read:
    """Held out is a share of the file, all rows of a prompt or none."""
    name, share = section.data, section.test_share
    if share is None and len(rows) < FEWEST_ROWS:
        few = f"{name} has {len(rows)} demonstrations, fewer than {FEWEST_ROWS}"
        return _Read(train=rows, note=f"{NONE}: {few}")
    most = section.evaluate_demonstrations if share is None else len(rows)
    wanted = min(max(1, round((share or TEST_SHARE) * len(rows))), most)
    train, test = hold_out(rows, wanted, seed=seed, key=_question(template, rows))
    if not test:
        why = f"every prompt of {name} has more than {wanted} of the {len(rows)} demonstrations"
        if share is not None:
            raise ValueError(
                f"sft.test_share: {why}, and no prompt may be in both parts; raise it, or "
                "give a file in sft.test_data"
            )
        return _Read(train=rows, note=f"{NONE}: {why}")
    note = f"sft learns from {len(train):,} demonstrations of {name}; {len(test):,} are held out"
    return _Read(
        train=train, test=_some(test, section.evaluate_demonstrations, seed=seed), note=note
    )


def _some(rows: Sequence[Demonstration], most: int, *, seed: int) -> Sequence[Demonstration]:
    """At most so many of the rows, in their order: the same ones every time."""
    chosen = random.Random(seed).sample(range(len(rows)), min(most, len(rows)))
    return [rows[place] for place in sorted(chosen)]
