"""A reward is its text and what it uses: closure, globals, helpers, state; the same everywhere."""

import functools
import importlib
import linecache
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import TINY

import posttrain
from posttrain.build.fingerprint import fingerprints
from posttrain.build.function_digest import function_digest
from posttrain.config import recipe_from_dict


def make(value: Any) -> Callable[[str], float]:
    def inner(completion: str) -> float:
        return float(completion == value)

    return inner


def adding(completion: str, bonus: float = 0.0, *, factor: float = 1.0) -> float:
    return len(completion) * factor + bonus


@dataclass
class Settings:
    goal: int


@dataclass(frozen=True, slots=True)
class Slotted:
    goal: int


class Length:
    def __init__(self, target: int) -> None:
        self.target = target

    def __call__(self, completion: str) -> float:
        return -abs(len(completion) - self.target)

    def score(self, completion: str) -> float:
        return self(completion)


PLAIN = {
    "number": (1, 2),
    "float": (0.1, 0.2),
    "kind of number": (1, True),
    "numpy": (np.int64(1), np.int64(2)),
    "text": ("a", "b"),
    "nothing": (None, ""),
    "tuple": ((1, 2), (2, 1)),
    "list": ([1, [2]], [1, [3]]),
    "where one ends": (["a", "b"], ["a', 'b"]),
    "dict": ({"a": 1}, {"a": 2}),
    "set": ({"a", "b"}, {"a", "c"}),
    "large": (list(range(300_000)), [*range(150_000), -1, *range(150_001, 300_000)]),
    "pattern": (re.compile("a"), re.compile("a", re.I)),
    "search": (re.compile("a").search, re.compile("b").search),
    "path": (PurePosixPath("a"), PurePosixPath("b")),
    "dataclass": (Settings(1), Settings(2)),
    "slots": (Slotted(1), Slotted(2)),
    "object": (Length(1), Length(2)),
    "function": (make(1), make(2)),
    "which is which": ({"a": make(1), "b": make(2)}, {"a": make(2), "b": make(1)}),
}


@pytest.mark.parametrize("name", PLAIN)
def test_a_closure_counts(name: str) -> None:
    one, other = PLAIN[name]
    assert function_digest(make(one)) == function_digest(make(one))
    assert function_digest(make(one)) != function_digest(make(other))


def test_defaults_and_bound_arguments_count(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = functools.partial(adding, bonus=1.0)
    seen = {function_digest(adding), function_digest(bound)}
    seen.add(function_digest(functools.partial(adding, bonus=2.0)))
    seen.add(function_digest(functools.partial(adding, "a")))
    seen.add(function_digest(functools.partial(bound, factor=3.0)))
    monkeypatch.setattr(adding, "__defaults__", (5.0,))
    seen.add(function_digest(adding))
    monkeypatch.setattr(adding, "__kwdefaults__", {"factor": 7.0})
    seen.add(function_digest(adding))
    monkeypatch.setattr(adding, "batched", True, raising=False)
    seen.add(function_digest(adding))
    assert len(seen) == 8


def test_an_object_counts_by_its_class_and_its_attributes() -> None:
    assert function_digest(Length(3)) == function_digest(Length(3))
    assert function_digest(Length(3)) != function_digest(Length(4))
    assert function_digest(Length(3).score) == function_digest(Length(3).score)
    assert function_digest(Length(3).score) != function_digest(Length(4).score)


REWARDS = """
import helpers_of_mine, package_of_mine.words
from helpers_of_mine import clean, Judge
from functools import cache

LIMIT = 10
TABLE = {"a": {1, 2}}
UNUSED = 1
judge = Judge()

def own(text):
    return text.strip()

@cache
def cached(text):
    return text[:1]

def loud(function):
    def call(completion):
        return 2 * function(completion)
    return call

@loud
def right(completion):
    found = [own(text) for text in completion.split() if len(text) < LIMIT]
    cached(completion), TABLE, clean(found), helpers_of_mine.weigh(1), Later
    return judge(found) + package_of_mine.words.count(completion)

class Later:
    @staticmethod
    def made():
        return right
"""
HELPERS = """
FACTOR = 3

def weigh(number):
    return number * FACTOR

def clean(text):
    return weigh(text)

class Base:
    bias = 1

    def again(self):
        return 7

class Judge(Base):
    def __call__(self, found):
        return len(found)

    @property
    def strict(self):
        return True
"""
WORDS = "def count(text):\n    return len(text)\n"
EDITS = [
    ("LIMIT = 10", "LIMIT = 11"),
    ("{1, 2}", "{1, 3}"),
    ("text.strip()", "text.lstrip()"),
    ("text[:1]", "text[:2]"),
    ("2 * function", "3 * function"),
    ("return right", "return own"),
    ("FACTOR = 3", "FACTOR = 4"),
    ("return weigh(text)", "return -weigh(text)"),
    ("bias = 1", "bias = 2"),
    ("return 7", "return 8"),
    ("return len(found)", "return -len(found)"),
    ("return True", "return False"),
    ("return len(text)", "return 2 * len(text)"),
]


def digest_of(folder: Path, *, edit: tuple[str, str] = ("", "")) -> Any:
    """Of ``rewards_of_mine:right`` in a recipe, imported anew."""
    (folder / "package_of_mine").mkdir(exist_ok=True)  # without an __init__.py
    texts = {
        "rewards_of_mine": REWARDS,
        "helpers_of_mine": HELPERS,
        "package_of_mine/words": WORDS,
    }
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text.replace(*edit) if edit[0] else text)
    for name in [name for name in sys.modules if "_of_mine" in name]:
        del sys.modules[name]
    linecache.clearcache()
    importlib.invalidate_caches()
    recipe = {"rewards": {"rewards_of_mine:right": 1.0}, "model": {"name": "tiny"}, "eval": {}}
    return fingerprints(recipe_from_dict(recipe))["contents"]["rewards.rewards_of_mine:right"]


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return tmp_path


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit[0])
def test_what_a_named_reward_uses_counts(on_path: Path, edit: tuple[str, str]) -> None:
    """Globals, helpers here and in other modules, decorators, classes and their bases."""
    assert edit[0] in REWARDS + HELPERS + WORDS
    first = digest_of(on_path)
    assert digest_of(on_path) == first
    assert digest_of(on_path, edit=("UNUSED = 1", "UNUSED = 2")) == first
    assert digest_of(on_path, edit=edit) != first


def test_what_a_reward_remembers_does_not_count() -> None:
    """A run that was interrupted is resumed with the same reward, which has counted its calls."""
    calls = 0

    def counting(completion: str) -> float:
        nonlocal calls
        calls += 1
        return float(len(completion))

    before = function_digest(counting)
    counting("a")
    assert (calls, function_digest(counting)) == (1, before)


def test_without_source_the_code_counts() -> None:
    made: list[Any] = []
    for text in ("x + 1", "x + 2", "x - 1", "abs(x)", "(lambda: x + 9)()", "(lambda: x + 8)()"):
        known: dict[str, Any] = {}
        exec(f"def f(x):\n    return {text}", known)
        made.append(function_digest(known["f"]))
    assert len(set(made)) == len(made)


class Lines(list[int]):
    def __iter__(self) -> Any:
        raise RuntimeError


def strange_values() -> dict[str, Any]:
    class Raising:
        def __getattribute__(self, name: str) -> Any:
            raise RuntimeError(name)

        def __call__(self, completion: str) -> float:
            return 0.0

    class Meta(type):
        def __getattribute__(cls, name: str) -> Any:
            raise RuntimeError(name)

    class Strange(metaclass=Meta):
        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: object) -> bool:
            raise RuntimeError

        def __repr__(self) -> str:
            raise RuntimeError

    cycle: list[Any] = []
    cycle.append({"again": cycle})
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    wide: list[Any] = [1]
    for _ in range(100):
        wide = [wide, wide]
    return {
        "raising": Raising(),
        "metaclass": Strange(),
        "class": Strange,
        "subclass": Lines([1]),
        "cycle": cycle,
        "deep": deep,
        "wide": wide,
        "tensor": torch.ones(3),
        "model": torch.nn.Linear(2, 2),
        "lock": threading.Lock(),
        "file": sys.stderr,
        "object": object(),
        "long": 10**5000,
        "surrogate": "\ud800",
        "module": sys,
        "generator": (n for n in range(3)),
    }


@pytest.mark.parametrize("name", strange_values())
def test_strange_objects_count_by_type(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They never raise; and the work is bounded, also where few objects have many paths."""
    monkeypatch.setattr("posttrain.build.function_digest._MOST", 20_000)
    one, other = strange_values()[name], strange_values()[name]
    assert function_digest(make(one)) == function_digest(make(other))
    assert function_digest(one) == function_digest(other)
    assert function_digest(make(one)) != function_digest(make(None))


def test_large_sets_and_tables_count_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.build.function_digest._MOST", 1000)
    words = [str(n) for n in range(5000)]
    first = function_digest(make(set(words))), function_digest(make(dict.fromkeys(words, 1)))
    words[2500] = "another"
    assert function_digest(make(set(words))) != first[0]
    assert function_digest(make(dict.fromkeys(words, 1))) != first[1]


SCRIPT = """
import dataclasses, re, threading
from pathlib import Path
import torch
from posttrain.build.function_digest import function_digest

@dataclasses.dataclass
class Settings:
    words: frozenset = frozenset({"x", "y", "z"})
    lock: object = dataclasses.field(default_factory=threading.Lock)

WORDS = {"one", "two", "three", ("four", 5), frozenset({"six", "seven"})}
MANY = {(f"{n}", n) for n in range(2000)}
TOO_MANY = {(f"{n}", n) for n in range(600_000)} | {"a", "b"}
TABLE = {word: WORDS for word in {"a", "b", "c"}}
MODEL = torch.nn.Linear(2, 2)
settings = Settings()

def even(n): return n == 0 or odd(n - 1)
def odd(n): return n != 0 and even(n - 1)
BOTH = {even, odd, len, lambda n: n in {"p", "q", "r"}}

class Judge:
    def __init__(self, bound): self.bound, self.seen, self.me = bound, {"s", "t", None}, self
    def __call__(self, completion): return super().__repr__(), MANY, TOO_MANY, settings, Path, MODEL

def make(k):
    def right(completion, mode={"m", "n"}):
        return right, k, WORDS, TABLE, BOTH, re.compile("a"), completion in {"u", "v", "w"}
    return right

print(function_digest(make(Judge(3))), function_digest(Judge(make(3))))
"""


def test_the_same_in_every_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def started(arguments: list[str], seed: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *arguments]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    ways = [[str(script)], ["-c", SCRIPT]]  # the second has no source to read
    running = [[started(way, seed) for seed in ("1", "2", "3")] for way in ways]
    for processes in running:
        printed = {process.communicate()[0] for process in processes}
        assert [process.returncode for process in processes] == [0, 0, 0]
        assert len(printed) == 1


def test_another_closure_is_another_run(tmp_path: Path) -> None:
    """Asked with another value, a finished folder is not the answer; with the same it is."""

    def target(length: int) -> Callable[[str], float]:
        def near(completion: str) -> float:
            return -abs(len(completion) - length)

        return near

    options: dict[str, Any] = {
        "model_options": {"options": TINY},
        "prompts": ["1+1=", "2+2="],
        "folder": tmp_path / "run",
        "grading": {"workers": 0},
        "steps": 1,
        "group_size": 2,
        "prompts_per_step": 2,
        "max_new_tokens": 4,
        "check": "off",
    }
    done = posttrain.rl(reward=target(1), **options)
    again = posttrain.rl(reward=target(1), **options)
    assert again.summary == done.summary
    changed = r"another recipe \(supplied\.rewards\.near\.function_and_what_it_uses: "
    with pytest.raises(ValueError, match=changed):
        posttrain.rl(reward=target(3), **options)
    with pytest.raises(ValueError, match=r"\(supplied\.rewards\.near\.weight: 1\.0 → 2\.0\)"):
        posttrain.rl(reward={target(1): 2.0}, **options)
