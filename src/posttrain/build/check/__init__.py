"""``posttrain check``: whether a run can work, told before it begins.

Each area is a file: config, data, rewards, signal, numerics, resources. What breaks in one becomes
a line: one that fails where a run would break too, one that warns where it is the check itself.
Nothing is trained, and every weight that a check moves is put back.
"""

from __future__ import annotations

import contextlib
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.build.check.answers import Answers, grade_answers
from posttrain.build.check.bench import Bench, make_bench, with_engine
from posttrain.build.check.data import (
    check_answer_length,
    check_answers,
    check_demonstrations,
    check_leaks,
    check_passes,
    check_preferences,
    check_prompts,
    check_splits,
    check_texts,
)
from posttrain.build.check.disk import check_disk
from posttrain.build.check.numerics import check_numerics
from posttrain.build.check.report import AREAS, Area, Book, CheckFailedError, Line, Report, new_book
from posttrain.build.check.resources import check_resources, enough_memory
from posttrain.build.check.rewards import check_grading, check_kinds, is_ready
from posttrain.build.check.signal import check_signal, sample
from posttrain.build.check.trial import take_step
from posttrain.build.stages import Context
from posttrain.build.threads import own_threads, use_threads
from posttrain.config import (
    Recipe,
    arithmetic,
    cautions,
    read_recipe,
    recipe_from_dict,
    resolve,
)
from posttrain.config.read import parse_overrides
from posttrain.data.template import PromptTooLong
from posttrain.models.quiet import compiler_explained
from posttrain.protocols import Engine, Task
from posttrain.track.progress import phase

if TYPE_CHECKING:
    from posttrain.build.run import Supplied

__all__ = ["Area", "CheckFailedError", "Line", "Report", "before_rl", "check_file", "check_recipe"]

NOT_TRAINED = "not trained yet: the stage sft comes first and may mend this"

TRIED = 64  # rollouts of the step that is tried


def check_file(path: str | Path, overrides: Sequence[str] = (), *, fast: bool = False) -> Report:
    """Check the recipe in a file; a file or a command line that cannot be read raises."""
    parse_overrides(overrides)
    if not _is_toml(Path(path)):
        read_recipe(path)  # says what is wrong with the file
    return _check(lambda: read_recipe(path, overrides), fast=fast, supplied=None)


def _is_toml(path: Path) -> bool:
    try:
        tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        return False
    return True


def check_recipe(
    recipe: Recipe | Mapping[str, Any], *, fast: bool = False, supplied: Supplied | None = None
) -> Report:
    """Check a recipe, or the dict of one; ``supplied`` are parts handed over as objects."""

    def read() -> Recipe:
        return recipe if isinstance(recipe, Recipe) else recipe_from_dict(recipe)

    return _check(read, fast=fast, supplied=supplied)


def before_rl(context: Context, *, engine: Engine | None = None) -> Report:
    """The quick check of an rl stage that is about to begin, on the parts that it will use."""
    begun, book = time.perf_counter(), new_book()
    bench = Bench(
        recipe=context.recipe,
        task=context.parts.task,
        policy=context.policy,
        parts=context.parts,
        engine=engine,
        fast=True,
        supplied_engine=engine is not None,
        under_way=True,
        reward_model=context.reward_model,
    )
    with contextlib.closing(with_engine(bench, book["signal"])) as bench:
        _look(bench, book)
    return _report(book, begun=begun)


def _check(read: Callable[[], Recipe], *, fast: bool, supplied: Supplied | None) -> Report:
    begun, book = time.perf_counter(), new_book()
    recipe: Recipe | None = None
    with book["config"].guard("recipe"):
        recipe = resolve(read(), supplied=supplied.names() if supplied is not None else ())
    if recipe is None:
        return _report(book, begun=begun)
    book["config"].passed("recipe", f"{' → '.join(recipe.stages)}, every key resolved")
    for caution in cautions(recipe):
        key, _, said = caution.partition(": ")
        text, _, fix = said.partition("; ")
        book["config"].warned(key, text, fix=f"{fix}, or leave it if meant")
    with own_threads(), compiler_explained():
        bench = make_bench(recipe, book, fast=fast, supplied=supplied)
        try:
            if bench.policy is not None:
                threads = use_threads(recipe, bench.policy)
                book["resources"].passed("threads", f"{threads.number}, {threads.reason}")
            _look(bench, book)
        finally:
            bench.close()
            if bench.parts is not None:
                bench.parts.close()
    return _report(book, begun=begun, recipe=recipe, task=bench.task)


def _look(bench: Bench, book: Book) -> None:
    """Every area in turn; what needs a part that could not be made is left out, and said."""
    data = book["data"]
    with data.attempt("prompts"):
        check_splits(bench, data)
    with data.attempt("overlap"):
        check_leaks(bench, data)
    looks = {
        "texts": check_texts,
        "prompt": check_prompts,
        "passes": check_passes,
        "demonstrations": check_demonstrations,
        "preferences": check_preferences,
    }
    for name, look in looks.items() if bench.parts is not None else ():
        with data.attempt(name):
            look(bench, data)
    if bench.policy is not None:
        with book["resources"].attempt("disk"):
            check_disk(bench, book["resources"])
    answers = _rewards(bench, book) if bench.ready else None
    if "rl" not in bench.recipe.stages:
        return
    if answers is None or bench.engine is None:
        _left_out(book, "a part it needs could not be made")
    elif answers.everything and not any(r.score and r.score.ok for r in answers.everything):
        _left_out(book, "no score is valid")
    else:
        _rollouts(bench, book, answers=answers)


def _rewards(bench: Bench, book: Book) -> Answers | None:
    rewards = book["rewards"]
    answers: Answers | None = None
    with rewards.attempt("rewards"):
        check_kinds(bench, rewards)
    if not is_ready(bench, rewards):  # every answer would wait for it, and none have a score
        return None
    with rewards.guard("rewards"):
        answers = grade_answers(bench)
    if answers is None:
        return None
    with book["data"].attempt("gold answers"), book["data"].excused(bench.excuse):
        check_answers(bench, answers, findings=book["data"])
    with book["data"].attempt("answer length"):
        check_answer_length(bench, answers, findings=book["data"])
    with rewards.attempt("grading"):
        check_grading(bench, answers, findings=rewards)
    return answers


def _rollouts(bench: Bench, book: Book, *, answers: Answers) -> None:
    """What takes real rollouts: signal, numerics, resources."""
    signal = book["signal"]
    signal.soft = NOT_TRAINED if bench.untrained else ""
    seconds = [r.score.seconds for r in answers.everything if r.score is not None]
    sampled = trial = None
    with signal.guard("rollouts"):
        try:
            with phase("checking: a few rollouts"):
                sampled = sample(bench, seconds_per_grade=sum(seconds) / max(1, len(seconds)))
        except PromptTooLong:  # a line of the data says how much
            _left_out(book, "no prompt leaves room for an answer")
    if sampled is None:
        return
    with signal.attempt("rollouts"):
        check_signal(bench, sampled, answers=answers, findings=signal)
    enough = True
    with book["resources"].attempt("memory"):
        enough = enough_memory(bench, book["resources"])
    if enough:
        with book["numerics"].guard("one step"), phase("checking: one step"):
            trial = take_step(bench, sampled.part(TRIED))
    if trial is not None:
        check_numerics(bench, sampled, trial=trial, findings=book["numerics"])
        check_resources(bench, sampled, trial=trial, findings=book["resources"])


def _left_out(book: Book, why: str) -> None:
    book["signal"].warned(
        "not checked",
        f"signal, numerics and resources: {why}",
        fix="mend what fails above, then check again",
    )


def _report(
    book: Book, *, begun: float, recipe: Recipe | None = None, task: Task | None = None
) -> Report:
    prompts = len(task.prompts("train")) if task is not None else None
    return Report(
        lines=[line for area in AREAS for line in book[area].lines],
        arithmetic=arithmetic(recipe, num_prompts=prompts) if recipe is not None else (),
        seconds=time.perf_counter() - begun,
    )
