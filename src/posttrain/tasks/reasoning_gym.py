"""The procedural datasets of reasoning-gym (https://github.com/open-thought/reasoning-gym)."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterator, Mapping
from typing import Any

from posttrain.registry import did_you_mean
from posttrain.rewards.numeric import parse_number
from posttrain.tasks.splits import sample_splits
from posttrain.tasks.task import PromptTask
from posttrain.types import Prompt

_EXECUTES = "its scorer executes the model's answer as Python code"
_NO_GOLD = "it has no gold answers"

# Which scorers execute answers was found by giving every scorer of version 0.1.25 an answer that
# makes a folder when it runs; a test repeats that with the installed version.
REFUSED = {
    "binary_matrix": _EXECUTES,
    "countdown": f"{_EXECUTES}; use posttrain's own task 'countdown'",
    "intermediate_integration": _EXECUTES,
    "n_queens": _EXECUTES,
    "polynomial_multiplication": _EXECUTES,
    "puzzle24": f"{_EXECUTES}; use posttrain's own task 'countdown'",
    "simple_integration": _EXECUTES,
    "spiral_matrix": _EXECUTES,
    "string_insertion": _EXECUTES,
    "composite": "it may hold any of the others; name one dataset",
    "boxnet": _NO_GOLD,
    "graph_color": _NO_GOLD,
    "propositional_logic": _NO_GOLD,
    "rubiks_cube": _NO_GOLD,
    "rush_hour": _NO_GOLD,
}
_LARGEST = 20_000  # problems of a dataset at most; some datasets refuse to be larger


class Entry(dict[str, Any]):
    """One row of a dataset, with the dataset's name and settings: it can score an answer."""

    def score_answer(self, answer: str) -> float:
        """What the dataset's own scorer gives the answer, 0 to 1."""
        dataset = _load(self["dataset"], json.dumps(self["settings"], sort_keys=True))
        return float(dataset.score_answer(answer, self))


def reasoning_gym_task(
    *,
    dataset: str,
    settings: Mapping[str, Any] | None = None,
    num_train: int = 1000,
    num_test: int = 100,
    seed: int = 0,
) -> PromptTask:
    """The dataset of that name, with its own scorer; ``settings`` are the fields of its config.

    Written ``"reasoning_gym:chain_sum"``, or with ``dataset="chain_sum"``. An answer stands in
    ``<answer>``; where all of them are numbers, one counts however it is written, and the tag is
    only monitored. Datasets whose scorer runs the model's answer as code, or that have no gold
    answers, are refused (see ``REFUSED``).
    Needs reasoning-gym: ``pip install 'posttrain[reasoning_gym]'``.
    """
    chosen = dict(settings or {})
    for name in {"seed", "size"} & set(chosen):
        raise ValueError(f"task 'reasoning_gym': {name!r} is not for settings; the task sets it")
    # Problem i of a dataset depends on seed + i: neighbouring seeds would share nearly all
    # problems.
    chosen["seed"] = random.Random(seed).randrange(2**31)
    num_needed = num_train + num_test
    chosen["size"] = max(num_needed, min(8 * num_needed + 1000, _LARGEST))
    train, test = sample_splits(
        _entries(dataset, chosen),
        identity=lambda entry: f"reasoning_gym {dataset} {entry['question']}",
        num_train=num_train,
        num_test=num_test,
        kind=f"task 'reasoning_gym:{dataset}'",
        fix="make the problems larger in settings",
    )
    numbers = all(parse_number(entry["answer"]) is not None for entry in (*train, *test))
    extract = "answer" if numbers else "tag"
    rewards = {"reasoning_gym": {"weight": 1.0, "extract": extract}}
    obedience = {"format": {"weight": 0.0, "extract": "tag"}}
    return PromptTask(
        name=f"reasoning_gym:{dataset}",
        rewards=rewards | obedience if numbers else rewards,
        train=tuple(_prompt(f"train-{i}", entry) for i, entry in enumerate(train)),
        test=tuple(_prompt(f"test-{i}", entry) for i, entry in enumerate(test)),
        solve=lambda prompt: f"<answer>{prompt.columns['entry']['answer']}</answer>",
        accuracy={"name": "reasoning_gym", "extract": extract},
    )


def _entries(name: str, settings: dict[str, Any]) -> Iterator[Entry]:
    """The problems of a dataset, each question once."""
    source = _load(name, json.dumps(settings, sort_keys=True))
    seen: set[str] = set()
    for index in range(settings["size"]):
        try:
            row = source[index]
        except IndexError:  # the dataset has fewer problems than were asked for
            return
        if not isinstance(row["answer"], str) or not row["answer"].strip():
            raise ValueError(f"reasoning_gym {name!r}: problem {index} has no gold answer")
        if row["question"] not in seen:
            seen.add(row["question"])
            yield Entry(row, dataset=name, settings=settings)


@functools.lru_cache(maxsize=8)
def _load(name: str, settings: str) -> Any:
    """The dataset with these settings, a JSON object."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ImportError(
            "task 'reasoning_gym': reasoning-gym is not installed; run: "
            "pip install 'posttrain[reasoning_gym]'"
        ) from error
    if name in REFUSED:
        raise ValueError(f"reasoning_gym {name!r}: refused, because {REFUSED[name]}")
    if name not in DATASETS:
        known = set(DATASETS) - set(REFUSED)
        raise ValueError(f"reasoning_gym: unknown dataset {name!r}; {did_you_mean(name, known)}")
    try:
        return reasoning_gym.create_dataset(name, **json.loads(settings))
    except (TypeError, ValueError, AssertionError) as error:
        raise ValueError(f"reasoning_gym {name!r}: settings {settings}: {error}") from error


def _prompt(name: str, entry: Entry) -> Prompt:
    text = f"{entry['question']}\n\nWrite the final answer in <answer> </answer>.\n"
    return Prompt(id=name, text=text, columns={"entry": entry, "answer": entry["answer"]})
