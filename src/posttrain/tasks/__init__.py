"""Tasks: prompts, how their answers are scored by default, and gold answers to check that with.

A task is a function whose keyword-only parameters are its options; ``make_task`` turns a name, or
a table with a name and options, into a task.
"""

from collections.abc import Callable
from typing import Any

from posttrain.protocols import Task
from posttrain.registry import Spec, resolve, split
from posttrain.tasks.arithmetic import arithmetic_task
from posttrain.tasks.board_positions import tic_tac_toe_task
from posttrain.tasks.countdown import countdown_task
from posttrain.tasks.demonstrations import demonstrations
from posttrain.tasks.gsm8k import gsm8k_task
from posttrain.tasks.melody import melody_task
from posttrain.tasks.mixture import mixture_task
from posttrain.tasks.number_ranges import guess_number_task
from posttrain.tasks.prompt_file import file_task
from posttrain.tasks.reasoning_gym import reasoning_gym_task
from posttrain.tasks.sort import sort_task
from posttrain.tasks.task import PromptTask, check_told_apart

TASKS: dict[str, Callable[..., Task]] = {
    "sort": sort_task,
    "arithmetic": arithmetic_task,
    "countdown": countdown_task,
    "melody": melody_task,
    "guess_number": guess_number_task,
    "tic_tac_toe": tic_tac_toe_task,
    "gsm8k": gsm8k_task,
    "file": file_task,
    "mixture": mixture_task,
    "jsonl": file_task,  # as it was called when it read nothing else
    "reasoning_gym": reasoning_gym_task,  # also written reasoning_gym:NAME
}

__all__ = ["TASKS", "PromptTask", "check_told_apart", "demonstrations", "full_spec", "make_task"]


def make_task(spec: Spec) -> Task:
    """The task a spec names, made with its options; ``accuracy`` and ``env`` are for others.

    Prompts that differ in their columns alone are refused, unless there is an ``env``.

    >>> task = make_task({"name": "sort", "length": 3, "num_train": 10, "num_test": 2})
    >>> task.prompts("train")[0].text
    'sort: 1 2 6\\n'
    """
    options = {
        key: value for key, value in full_spec(spec).items() if key not in ("accuracy", "env")
    }
    task: Task = resolve(options, TASKS, kind="task")()
    if not (hasattr(task, "prompts") and hasattr(task, "rewards")):
        told = "which has no prompts(split) and rewards; docs/tasks.md shows a task"
        raise ValueError(f"task {options['name']!r}: gave {task!r}, {told}")
    if isinstance(spec, str) or spec.get("env") is None:
        check_told_apart(task)
    return task


def full_spec(spec: Spec) -> dict[str, Any]:
    """A spec as a table whose name is one of ``TASKS`` or a ``"module:function"``.

    >>> full_spec("reasoning_gym:chain_sum")
    {'name': 'reasoning_gym', 'dataset': 'chain_sum'}
    """
    name, options = split(spec, kind="task")
    library, _, dataset = name.partition(":")
    if library == "reasoning_gym" and dataset:
        return {"name": library, "dataset": dataset, **options}
    return {"name": name, **options}
