"""All checks in their order: the one table of what is checked, and of what a run refuses.

A check is a function of the bench: it returns verdicts, or sets an attribute of it, or both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from posttrain.check import (
    answers,
    making,
    numerics,
    prompt_data,
    resources,
    scores,
    signal,
    speed,
    stage_data,
    trial,
)
from posttrain.check.bench import Bench, Moment
from posttrain.check.verdicts import WAY, Area, Line, Verdict, broke, problems

SOFT = {
    "untrained": "not trained yet: the stage sft comes first and may fix this",
    "stand_in": "the reward model is still to come and may judge differently",
    "env_scores": "the environment scores, and this reward is only shown beside it",
}
"""Why a failure is only a warning, by the attribute of the bench that is then True."""
BY_SCORES, BY_MODEL, BY_BOTH = ("stand_in",), ("untrained",), ("untrained", "stand_in")


class Check(NamedTuple):
    """A row of the table: a line of ``area`` called ``name``, unless its verdict has a name.

    It is skipped where the bench lacks what it ``needs``, and runs ``at`` these moments: a failure
    at the start of a run ends it. With ``runs`` it does what a run does, so an exception would
    break the run as well, and fails; in other checks an exception is an error of the check, and
    warns. ``soft`` names attributes of the bench that turn a failure into a warning.
    """

    area: Area
    name: str
    function: Callable[[Bench], Verdict | Iterable[Verdict] | None]
    needs: str = "recipe"
    at: tuple[Moment, ...] = ("check", "rl")
    runs: bool = False
    soft: tuple[str, ...] = ()


ALONE: tuple[Moment, ...] = ("check",)  # a run has reported this already, or has made the part
EARLY: tuple[Moment, ...] = ("check", "start")
ALWAYS: tuple[Moment, ...] = ("check", "start", "rl")

CHECKS = (
    Check("config", "recipe", making.read_recipe, "read", ALONE, runs=True),
    Check("config", "run.trackers", making.find_trackers, "recipe", EARLY, runs=True),
    Check("data", "task", making.take_task, "recipe", ALONE, runs=True),
    Check("config", "model", making.load_model, "recipe", ALONE, runs=True),
    Check("data", "chat", making.write_chats, "policy", ALONE, runs=True),
    Check("rewards", "rewards", making.make_rewards, "template", ALONE, runs=True),
    Check("signal", "engine", making.start_engine, "rl task scorer", runs=True),
    Check("resources", "threads", making.settle_threads, "policy", ALONE),
    Check("data", "prompts", prompt_data.count_prompts, "task", ALWAYS, runs=True),
    Check("data", "columns", prompt_data.say_understood, "recipe", ALONE),
    Check("data", "duplicates", prompt_data.find_repeated, "splits"),
    Check("data", "leaks", stage_data.find_leaks, "task", EARLY),
    Check("data", "chat", stage_data.read_texts, "setup", EARLY, runs=True),
    Check("data", "prompt", prompt_data.render_first, "task setup", runs=True),
    Check("data", "prompt", prompt_data.show_prompt, "rendered"),
    Check("data", "room for answers", prompt_data.check_context, "setup", ALWAYS, runs=True),
    Check("data", "prompt length", prompt_data.fit_prompts, "splits limit", runs=True),
    Check("data", "passes", prompt_data.count_passes, "rl task setup"),
    Check("data", "sft and rl prompts", prompt_data.count_shared, "rl task setup", runs=True),
    Check("data", "demonstrations", stage_data.read_demonstrations, "sft setup", ALONE, runs=True),
    Check("data", "preferences", stage_data.read_preferences, "reward setup", EARLY, runs=True),
    Check("data", "dpo preferences", stage_data.read_direct, "dpo setup", EARLY, runs=True),
    # In posttrain check, the trial step loads the critic.
    Check("config", "rl.critic.source", stage_data.load_critic, "setup", ("start",), runs=True),
    Check("config", "teacher.model", stage_data.load_teacher, "setup", ("start",), runs=True),
    Check("resources", "disk", resources.check_disk, "policy"),
    Check("rewards", "sandbox", scores.choose_sandbox, "task scorer", runs=True),
    Check("rewards", "signatures", scores.tell_signatures, "task scorer", ALONE),
    Check("rewards", "reward model", scores.name_models, "task scorer"),
    Check("rewards", "ready", scores.find_ready, "setup", ALWAYS, runs=True),
    Check("rewards", "rewards", answers.grade_answers, "task scorer ready", runs=True),
    Check("data", "answer length", answers.measure_answers, "answers limit"),
    Check("rewards", "grading time", scores.time_grading, "answers"),
    Check("signal", "rollouts", signal.sample, "rl", runs=True),
    # Real rollouts show whether an environment scores them, and these rewards only stand beside it.
    Check("data", "gold answers", answers.compare_answers, "answers", soft=BY_SCORES),
    Check("rewards", "broken scores", scores.count_broken, "answers", soft=("env_scores",)),
    Check("rewards", "tells answers apart", scores.tell_apart, "answers", soft=BY_SCORES),
    Check("signal", "broken scores", scores.count_broken_rollouts, "groups", soft=BY_MODEL),
    Check("signal", "accuracy", signal.measure_accuracy, "groups", soft=BY_BOTH),
    Check("signal", "groups with signal", signal.compare_groups, "groups", soft=BY_BOTH),
    Check("signal", "length", signal.measure_length, "groups", soft=BY_MODEL),
    Check("signal", "episode", signal.show_episode, "groups", ALONE),
    Check("resources", "parameters", resources.fit_weights, "groups"),
    Check("numerics", "one step", trial.try_step, "groups", runs=True),
    Check("numerics", "engine and learner", numerics.compare_engine, "trial"),
    Check("numerics", "sampling settings", numerics.keep_settings, "groups"),
    Check("numerics", "first ratio", numerics.measure_ratio, "trial"),
    Check("numerics", "micro-batches", numerics.compare_micro_batches, "trial"),
    Check("numerics", "one step", numerics.measure_step, "trial"),
    Check("numerics", WAY, numerics.follow_weights, "trial"),
    Check("resources", "way", speed.report_way, "trial", ALONE),
    Check("resources", "memory", resources.fit_step, "trial"),
    Check("resources", "time", resources.estimate_time, "less"),
    Check("resources", "sampling", speed.measure_sampling, "decode_seconds"),
    Check("resources", "learning", speed.measure_learning, "trial"),
)


def run_checks(bench: Bench) -> list[Line]:
    """The lines of all checks that run at the moment of the bench."""
    lines: list[Line] = []
    for check in CHECKS:
        if bench.moment in check.at and bench.has(check.needs):
            lines += _lines(check, bench)
    return lines


def _lines(check: Check, bench: Bench) -> list[Line]:
    """The lines of one check; at the start of a run, its exceptions are raised."""
    found: list[Verdict] = []
    raised: Iterable[Verdict] = ()
    try:
        verdicts = check.function(bench)
        found.extend([verdicts] if isinstance(verdicts, Verdict) else verdicts or ())
    except Exception as error:
        if bench.moment == "start":
            raise
        raised = problems(error) if check.runs else [broke(error)]
    soft = next((SOFT[name] for name in check.soft if getattr(bench, name)), "")
    lines = [Line.of(check.area, one, name=check.name, soft=soft) for one in found]
    return lines + [Line.of(check.area, one, name=check.name) for one in raised]
