"""Recipes with one mistake each that real users make, and the line that must say so.

``HEALTHY`` passes; every row of ``BROKEN`` changes keys of it. The files and functions that they
name are written by ``write_files``. The table in docs/check.md is printed from here:
``python tests/check/broken_recipes.py``.
"""

import copy
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

NUM_TEST = 10
SMALL = {"hidden_size": 32, "num_layers": 2, "max_positions": 64}

HEALTHY: dict[str, Any] = {
    "run": {"seed": 1, "threads": 1, "stages": ["rl", "eval"]},
    "model": {"name": "warm"},
    "task": {"name": "jsonl", "path": "train.jsonl", "test_path": "test.jsonl"},
    "rewards": {"numeric": {"extract": "whole"}},
    "rl": {
        "algorithm": "grpo",
        "steps": 20,
        "prompts_per_step": 4,
        "group_size": 8,
        "learning_rate": 1e-3,
        "max_new_tokens": 4,
    },
    "eval": {"problems": NUM_TEST},
}

REWARDS = """
import random

def always_one(completion):
    return 1.0

def always_zero(completion):
    return 0.0

def broken(completion):
    return 1 / 0

def broken_now_and_then(completion):
    return 1 / (sum(map(ord, completion)) % 3)

def hinted(completion, hint):
    return float(hint in completion)

def digits(completion):
    return sum(character.isdigit() for character in completion) / max(1, len(completion))

def longer(completion):
    return len(completion) / 100

def shorter(completion):
    return 1 - len(completion) / 100

def nonsense(completion, answer):
    return len(completion) % 2

def opposite(completion, answer):
    return 0.0 if completion.strip() == answer else 1.0

def without(completion, keyword):
    return 0.0 if completion.strip() == keyword else 1.0

def noisy(completion, answer):
    return 1 - random.Random(completion + answer).random() if completion else 0.0
"""


class Broken(NamedTuple):
    """A mistake, the keys that make it (dotted), and the line that catches it."""

    mistake: str
    changes: dict[str, Any]
    area: str
    state: str
    phrase: str


BROKEN = [
    Broken("A key is mistyped", {"rl.stepz": 20}, "config", "fail", "did you mean steps?"),
    Broken(
        "Rollouts do not divide into minibatches",
        {"rl.minibatches": 3},
        "config",
        "fail",
        "3 does not divide 4 prompts × 8 completions",
    ),
    Broken("The learning rate is 0", {"rl.learning_rate": 0.0}, "config", "fail", "above 0"),
    Broken("Sampling is greedy", {"rl.temperature": 0.0}, "config", "fail", "0 is greedy"),
    Broken(
        "GRPO with groups of one",
        {"rl.group_size": 1},
        "config",
        "fail",
        "compares the completions of a prompt",
    ),
    Broken(
        "The module of a reward is mistyped",
        {"rewards": {"my_rewrds:always_one": 1.0}},
        "config",
        "fail",
        "my_rewrds",
    ),
    Broken(
        "The model is not where the recipe says",
        {"model.name": "./warmm"},
        "config",
        "fail",
        "there is no 'warmm'",
    ),
    Broken(
        "The data file is not where the recipe says",
        {"task.path": "trian.jsonl"},
        "data",
        "fail",
        "trian.jsonl",
    ),
    Broken(
        "The answer column is empty",
        {"task.path": "empty_answers.jsonl"},
        "data",
        "fail",
        "'answer' is empty",
    ),
    Broken(
        "Train file and test file are the same",
        {"task.test_path": "train.jsonl"},
        "data",
        "fail",
        "is also train prompt",
    ),
    Broken(
        "The test rows are train rows in other white space",
        {"task.test_path": "spaced.jsonl"},
        "data",
        "fail",
        "10 of 10 test prompts are in train",
    ),
    Broken(
        "The demonstrations are of the test problems",
        {
            "run.stages": ["sft", "rl", "eval"],
            "sft": {"data": "test_demonstrations.jsonl"},
        },
        "data",
        "fail",
        "10 of 10 held-out problems are in sft.data",
    ),
    Broken(
        "The preferences are on the test problems",
        {"run.stages": ["reward", "eval"], "reward": {"data": "test_pairs.jsonl"}},
        "data",
        "fail",
        "10 of 10 held-out problems are in reward.data",
    ),
    Broken(
        "A prompt spells a special token",
        {"task.path": "forged.jsonl"},
        "data",
        "warn",
        "1 of 90 train prompts spell special tokens",
    ),
    Broken(
        "The tokenizer lacks a character of the data",
        {"task.path": "foreign.jsonl"},
        "data",
        "warn",
        "2 of 90 train prompts have characters that the tokenizer lacks: 'é' is read as",
    ),
    Broken(
        "Rows of the file are repeated",
        {"task.path": "repeated.jsonl"},
        "data",
        "warn",
        "rows repeat an earlier one",
    ),
    Broken(
        "A reward model is to be tested on what it learns from",
        {
            "run.stages": ["reward"],
            "reward": {"data": "pairs.jsonl", "test_data": "pairs.jsonl"},
        },
        "data",
        "fail",
        "90 of 90 test prompts are also train prompts",
    ),
    Broken(
        "The file of preferences is torn",
        {"run.stages": ["reward"], "reward": {"data": "torn_pairs.jsonl"}},
        "data",
        "fail",
        "torn_pairs.jsonl:90: not valid JSON",
    ),
    Broken(
        "A chat template is asked for, and the model has none",
        {"model.chat": True},
        "data",
        "fail",
        "no chat template",
    ),
    Broken(
        "A prompt that is a chat already is put into the chat template",
        {
            "model": {"name": "tiny", "options": {**SMALL, "chat": True}},
            "task.path": "wrapped.jsonl",
        },
        "data",
        "warn",
        "chat tokens are in the prompt's own text",
    ),
    Broken(
        "All prompts are longer than the context",
        {"task.path": "long.jsonl"},
        "data",
        "fail",
        "are longer than 60 tokens",
    ),
    Broken(
        "max_new_tokens is larger than the context",
        {"rl.max_new_tokens": 64},
        "data",
        "fail",
        "leaves no room for a prompt",
    ),
    Broken(
        "Some prompts are longer than the context",
        {"task.path": "mixed.jsonl"},
        "data",
        "warn",
        "45 of 90 train prompts (50%) are longer and left out",
    ),
    Broken(
        "A step asks for more prompts than there are",
        {"task.path": "few.jsonl"},
        "data",
        "warn",
        "each batch repeats prompts: 4 of 3",
    ),
    Broken(
        "The prompts are gone through hundreds of times",
        {"rl.steps": 9000},
        "data",
        "warn",
        "400.0 epochs (9,000 steps × 4 prompts ÷ 90)",
    ),
    Broken(
        "The reward looks for the answer where it is not",
        {"rewards.numeric.extract": "tag"},
        "data",
        "fail",
        'set extract = "whole"',
    ),
    Broken(
        "Answers are whole solutions, with the answer in a box",
        {"task.path": "solutions.jsonl", "rewards": {"exact": {"weight": 1.0, "extract": "boxed"}}},
        "data",
        "fail",
        "put only what it holds there",
    ),
    Broken(
        "The evaluation has no test split",
        {"task.test_path": None},
        "data",
        "fail",
        "no test prompts",
    ),
    Broken(
        "The reward wants a column that the file has not",
        {"rewards": {"my_rewards:hinted": 1.0}},
        "rewards",
        "fail",
        "needs the column 'hint'",
    ),
    Broken(
        "The reward raises on every row",
        {"rewards": {"my_rewards:broken": 1.0}},
        "rewards",
        "fail",
        "ZeroDivisionError",
    ),
    Broken(
        "The reward is given the answer, and does not look at it",
        {"rewards": {"my_rewards:nonsense": 1.0}},
        "rewards",
        "fail",
        "no: on average gold 0.50, wrong 0.50",
    ),
    Broken(
        "The reward is the wrong way round",
        {"rewards": {"my_rewards:opposite": 1.0}},
        "rewards",
        "fail",
        "the wrong way round",
    ),
    Broken(
        "The reward always returns 1",
        {"rewards": {"my_rewards:always_one": 1.0}},
        "signal",
        "fail",
        "the reward is constant",
    ),
    Broken(
        "RL from a model that was never trained",
        {"model": {"name": "tiny", "options": SMALL}},
        "signal",
        "warn",
        "groups agree (all wrong)",
    ),
    Broken(
        "max_new_tokens has no room for an answer",
        {"rl.max_new_tokens": 1},
        "data",
        "warn",
        "100% do not fit",
    ),
    Broken(
        "max_new_tokens cuts every answer",
        {"rl.max_new_tokens": 1},
        "signal",
        "warn",
        "raise rl.max_new_tokens",
    ),
    Broken(
        "The learning rate is absurd",
        {"rl.learning_rate": 1.0},
        "numerics",
        "fail",
        "moves log-probs by",
    ),
    Broken(
        "The learning rate is too small to move a weight",
        {"rl.learning_rate": 1e-15},
        "numerics",
        "warn",
        "raise rl.learning_rate",
    ),
]


def recipe_of(changes: Mapping[str, Any]) -> dict[str, Any]:
    """``HEALTHY`` with these keys changed; None removes one."""
    given = copy.deepcopy(HEALTHY)
    for key, value in changes.items():
        *parents, last = key.split(".")
        table = given
        for parent in parents:
            table = table[parent]
        if value is None:
            del table[last]
        else:
            table[last] = copy.deepcopy(value)
    return given


def write_files(folder: Path) -> None:
    """Everything that the recipes name, but for the model."""
    sums = [(f"{a}+{b}=", str(a + b)) for a in range(10) for b in range(10)]
    train, test = sums[NUM_TEST:], sums[:NUM_TEST]
    files = {
        "train": train,
        "test": test,
        "empty_answers": [(prompt, "") for prompt, _ in train],
        "spaced": [(f" {prompt}", answer) for prompt, answer in train[:NUM_TEST]],
        "repeated": [*train, *train[:5]],
        "wrapped": [(f"<|user|>{prompt}<|end|><|assistant|>", answer) for prompt, answer in train],
        "long": [(f"{'1+' * 40}{prompt}", answer) for prompt, answer in train],
        "mixed": [
            (f"{'1+' * 40}{prompt}" if number % 2 else prompt, answer)
            for number, (prompt, answer) in enumerate(train)
        ],
        "few": train[:3],
        "solutions": [(prompt, f"{prompt}\\boxed{{{answer}}}") for prompt, answer in train],
        "forged": [("1+1=<|end|><|system|>", "2"), *train[1:]],
        "foreign": [("é1+1=", "2"), ("é1+2=", "3"), *train[2:]],
    }
    for name, rows in files.items():
        lines = [json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in rows]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    pairs = [{"prompt": p, "chosen": answer, "rejected": "?"} for p, answer in train]
    answered = [{"prompt": f"{p} ", "completion": answer} for p, answer in test]
    judged = [{"prompt": p, "chosen": answer, "rejected": "?"} for p, answer in test]
    for name, rows in {"test_demonstrations": answered, "test_pairs": judged}.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    text = "".join(json.dumps(row) + "\n" for row in pairs)
    (folder / "pairs.jsonl").write_text(text, encoding="utf-8")
    (folder / "torn_pairs.jsonl").write_text(text[:-9], encoding="utf-8")
    (folder / "my_rewards.py").write_text(REWARDS, encoding="utf-8")


def page_rows(rows: Iterable[Broken] = BROKEN) -> list[str]:
    """The gallery as the rows of a table in Markdown."""
    lines = ["| mistake | keys | caught by | what the line says |", "|---|---|---|---|"]
    for row in rows:
        keys = ", ".join(f"`{key}`" for key in row.changes)
        said = f"… {row.phrase} …"
        lines.append(f"| {row.mistake} | {keys} | {row.area}: {row.state} | {said} |")
    return lines


if __name__ == "__main__":
    print("\n".join(page_rows()))
