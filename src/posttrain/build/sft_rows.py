"""What the stage ``sft`` learns from and is measured by: demonstrations as rows of tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.build.questions import first_question
from posttrain.build.rendered_prompts import tell_left_out
from posttrain.build.setup import Setup
from posttrain.config import SftSection
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
    """Demonstrations to learn from and held-out ones; ``note`` is what the user should know of it.

    Each is its tokens, with True where the completion is.
    """

    train: Sequence[Row]
    test: Sequence[Row] = ()
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class _Read:
    train: Sequence[Demonstration]
    test: Sequence[Demonstration] = ()
    note: str = ""


def sft_rows(setup: Setup) -> SftRows:
    """The demonstrations of a recipe, all of them."""
    read, template, end = _read(setup), setup.template, setup.policy.end_tokens[0]
    train, test = (_rows(rows, template, end=end) for rows in (read.train, read.test))
    return SftRows(train=train, test=test, note=read.note)


def fitting(rows: SftRows, policy: Policy, *, section: SftSection) -> SftRows:
    """The rows that fit into the model's context; the others are left out, loudly."""
    limit, note = context_length(policy.model), rows.note
    train, test = (
        [row for row in side if limit is None or len(row[0]) <= limit]
        for side in (rows.train, rows.test)
    )
    options: dict[str, Any] = {"option": "sft.data", "limit": limit}
    tell_left_out(len(train), len(rows.train), rows="demonstrations", **options)
    if test:
        tell_left_out(len(test), len(rows.test), rows="held-out demonstrations", **options)
    elif rows.test:
        note = f"{NONE}: none of the held-out demonstrations fits the model's context of {limit}"
    if section.result == "best" and not test:
        why = note.removeprefix(f"{NONE}: ") or "the task has no test prompts"
        raise ValueError(
            f'sft.result: "best" goes by the held-out loss, and nothing is held out ({why}); set '
            'it to "last", or give a file in sft.test_data'
        )
    return SftRows(train=train, test=test, note=note)


def _rows(rows: Sequence[Demonstration], template: Template, *, end: int) -> list[Row]:
    chats = [row["messages"] for row in rows if "messages" in row]
    prompts = [first_question(row) for row in rows if "messages" not in row]
    template.prepare(prompts, conversations=chats)
    return [_tokens(row, number, template=template, end=end) for number, row in enumerate(rows)]


def _tokens(row: Demonstration, number: int, *, template: Template, end: int) -> Row:
    if "messages" in row:
        return template.render_conversation(row["messages"])
    prompt = template.render(Prompt(id=f"demonstration-{number}", text=row["prompt"])).tokens
    completion = template.encode_completion(row["completion"], end)
    chosen = (False,) * len(prompt) + (True,) * len(completion)
    return (*prompt, *completion), chosen


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
                f"sft.test_share: {why}, and none may stand on both sides; raise it, or give a "
                "file in sft.test_data"
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
