"""A reward is the files behind it and the values it holds; the same in every process."""

import copy
import functools
import importlib
import os
import re
import subprocess
import sys
import threading
import tracemalloc
from array import array
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from enum import Enum
from fractions import Fraction
from pathlib import Path, PurePosixPath
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from small_runs import TINY

import posttrain
from posttrain.build.fingerprint import fingerprints, function_digest
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


class Mode(Enum):
    STRICT = 1
    LOOSE = 2


class Length:
    def __init__(self, target: int) -> None:
        self.target = target

    def __call__(self, completion: str) -> float:
        return -abs(len(completion) - self.target)

    def score(self, completion: str) -> float:
        return self(completion)


class Row(np.ndarray):
    pass


class Word(str):
    pass


class Words(set[str]):
    pass


PLAIN = {
    "number": (1, 2),
    "float": (0.1, 0.2),
    "kind of number": (1, True),
    "numpy": (np.int64(1), np.int64(2)),
    "array": (np.array([1, 2]), np.array([1, 3])),
    "tensor": (torch.tensor([1.0]), torch.tensor([2.0])),
    "text": ("a", "b"),
    "nothing": (None, ""),
    "tuple": ((1, 2), (2, 1)),
    "list": ([1, [2]], [1, [3]]),
    "where one ends": (["a", "b"], ["a', 'b"]),
    "dict": ({"a": 1}, {"a": 2}),
    "set": ({"a", "b"}, {"a", "c"}),
    "text of one's own": (Word("a"), Word("b")),
    "set of one's own": (Words({"a", "b"}), Words({"a", "c"})),
    "large": (list(range(300_000)), [*range(150_000), -1, *range(150_001, 300_000)]),
    "counts": (Counter("a"), Counter("b")),
    "queue": (deque([1]), deque([2])),
    "date": (date(2026, 1, 1), date(2026, 1, 2)),
    "fraction": (Fraction(1, 3), Fraction(2, 3)),
    "choice": (Mode.STRICT, Mode.LOOSE),
    "pattern": (re.compile("a"), re.compile("a", re.I)),
    "search": (re.compile("a").search, re.compile("b").search),
    "path": (PurePosixPath("a"), PurePosixPath("b")),
    "dataclass": (Settings(1), Settings(2)),
    "slots": (Slotted(1), Slotted(2)),
    "object": (Length(1), Length(2)),
    "function": (make(1), make(2)),
    "on one line": (lambda x: x + 1, lambda x: x + 2),
    "method": (Length(1).score, Length(2).score),
    "cached": (functools.cache(make(1)), functools.cache(make(2))),
    "of a library": (functools.partial(max, 1), functools.partial(max, 2)),
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
from helpers_of_mine import FACTOR

LIMIT = 10

def right(completion):
    from package_of_mine.lazy import bonus
    return len(completion) * FACTOR + LIMIT + bonus  # the sum
"""
FILES = {
    "rewards_of_mine": REWARDS,
    "helpers_of_mine": "from os import path\nimport torch\nFACTOR = 3\n",
    "package_of_mine/words": "from . import deeper\nSIZE = 1\n",
    "package_of_mine/deeper": "DEEP = 1\n",
    "package_of_mine/lazy": "bonus = 5\n",
    "not_imported_of_mine": "UNUSED = 1\n",
}
EDITS = ["LIMIT = 10", "FACTOR = 3", "SIZE = 1", "DEEP = 1", "bonus = 5"]


def digest_of(folder: Path, *, edit: tuple[str, str] = ("", "")) -> Any:
    """Of ``rewards_of_mine:right`` in a recipe, imported anew."""
    (folder / "package_of_mine").mkdir(exist_ok=True)  # without an __init__.py
    for name, text in FILES.items():
        (folder / f"{name}.py").write_text(text.replace(*edit) if edit[0] else text)
    for name in [name for name in sys.modules if "_of_mine" in name]:
        del sys.modules[name]
    importlib.invalidate_caches()
    recipe = {"rewards": {"rewards_of_mine:right": 1.0}, "model": {"name": "tiny"}, "eval": {}}
    return fingerprints(recipe_from_dict(recipe))["contents"]["rewards.rewards_of_mine:right"]


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return tmp_path


def test_the_text_of_what_a_named_reward_imports_counts(on_path: Path) -> None:
    """Constants, packages without a file of their own, an import inside the function.

    Its comments and its layout do not.
    """
    first = digest_of(on_path)
    assert digest_of(on_path) == first
    assert digest_of(on_path, edit=("# the sum", "# what counts")) == first
    assert digest_of(on_path, edit=("LIMIT = 10\n", "LIMIT = (\n    10\n)\n\n\n")) == first
    assert digest_of(on_path, edit=("UNUSED = 1", "UNUSED = 2")) == first
    edited = [digest_of(on_path, edit=(text, f"{text}7")) for text in EDITS]
    assert len({first, *edited}) == 1 + len(EDITS)
    assert "package_of_mine.lazy" not in sys.modules  # found, not imported
    right = sys.modules["rewards_of_mine"].right
    before = function_digest(right)
    importlib.import_module("package_of_mine.lazy")
    assert function_digest(right) == before


def test_the_values_of_globals_count(on_path: Path) -> None:
    """A script may take them from its command line: the files are the same then."""
    digest_of(on_path)
    module = sys.modules["rewards_of_mine"]
    before = function_digest(module.right)
    module.LIMIT = 11
    assert function_digest(module.right) != before


def made_of_text(text: str) -> Any:
    known: dict[str, Any] = {"__name__": "notebook"}
    exec(text, known)
    return known["f"]


def test_without_a_file_code_and_globals_count() -> None:
    """As in a notebook."""
    forms = ("x + 1", "x + 2", "x - 1", "abs(x)", "(lambda: x + 9)()", "(lambda: x + 8)()")
    texts = [f"def f(x):\n    return {form}" for form in forms]
    texts += [f"N = {n}\ndef g(x): return x + N\ndef f(x): return g(x)" for n in (1, 2)]
    texts += [f"class J:\n  def call(self): return {n}\ndef f(x): return J().call()" for n in "12"]
    texts += [f"f = lambda x: x[:{n}]" for n in (1, 2)]
    assert len({function_digest(made_of_text(text)) for text in texts}) == len(texts)
    assert function_digest(made_of_text(texts[0])) == function_digest(made_of_text(texts[0]))


class Lines(list[int]):
    def __iter__(self) -> Any:
        raise RuntimeError


def strange_values() -> dict[str, Any]:
    cycle: list[Any] = []
    cycle.append({"again": cycle})
    wide: list[Any] = [1]
    for _ in range(100):
        wide = [wide, wide]
    return {
        "subclass": Lines([1]),
        "cycle": cycle,
        "wide": wide,
        "model": torch.nn.Linear(2, 2),
        "lock": threading.Lock(),
        "file": sys.stderr,
        "object": object(),
        "long": 10**5000,
        "surrogate": "\ud800",
        "module": sys,
        "mock": MagicMock(),
        "generator": (n for n in range(3)),
    }


@pytest.mark.parametrize("name", strange_values())
def test_strange_objects_never_raise(name: str) -> None:
    one, other = (function_digest(make(strange_values()[name])) for _ in range(2))
    assert one == other
    assert one != function_digest(make(None))


def test_what_is_nested_deep_counts() -> None:
    one: list[Any] = [1]
    other: list[Any] = [2]
    for _ in range(100_000):
        one, other = [one], [other]
    assert function_digest(make(one)) != function_digest(make(other))


def test_which_cycle_a_value_leads_to_counts() -> None:
    def tables(*, own: bool) -> list[Any]:
        back: list[Any] = []
        one, other = ["A", back], ["C", back]
        back.append(one)
        if own:
            other[1] = [other]
        return [one, other]

    assert function_digest(make(tables(own=False))) != function_digest(make(tables(own=True)))


def test_an_array_counts_by_its_bytes() -> None:
    """In a list of its numbers each takes a hundred bytes and more."""
    numbers = np.arange(200_000.0)
    tracemalloc.start()
    try:
        for value in (numbers, torch.from_numpy(numbers)):
            function_digest(make(value))
        assert tracemalloc.get_traced_memory()[1] < 3 * numbers.nbytes
    finally:
        tracemalloc.stop()


ARRAYS = {
    "of objects": (np.array([Slotted(1)]), np.array([Slotted(2)])),
    "of Python": (array("d", [1.0]), array("d", [2.0])),
    "of one number": (torch.tensor(1.0, dtype=torch.bfloat16), torch.tensor(2, dtype=torch.int8)),
    "transposed": (np.arange(4).reshape(2, 2), np.arange(4).reshape(2, 2).T),
    "of another type": (np.zeros(2, dtype=np.int32), np.zeros(2, dtype=np.float32)),
    "masked": (np.ma.array([1, 2], mask=[0, 1]), np.ma.array([1, 2], mask=[0, 0])),
    "true": (torch.tensor([True]), torch.tensor([False])),
    "complex": (torch.tensor([1j]).conj(), torch.tensor([1j])),
    "half": (torch.ones(3, dtype=torch.bfloat16)[::2], torch.zeros(2, dtype=torch.bfloat16)),
    "with a gradient": (torch.ones(1, requires_grad=True), torch.zeros(1, requires_grad=True)),
    "user's": (np.ones(1).view(Row), np.zeros(1).view(Row)),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_of_every_kind_count(name: str) -> None:
    one, other = ARRAYS[name]
    copied = copy.deepcopy(one.detach() if isinstance(one, torch.Tensor) else one)
    assert function_digest(make(one)) == function_digest(make(copied))
    assert function_digest(make(one)) != function_digest(make(other))


def test_a_package_that_is_not_imported_is_not_run(on_path: Path) -> None:
    """Found without it are its files, also where a folder has none of its own."""
    package = on_path / "script_of_mine"
    (package / "bare" / "deep").mkdir(parents=True)
    (package / "__init__.py").write_text(
        "open(__file__ + '.ran', 'w').close(); raise SystemExit(3)"
    )
    deep = package / "bare" / "deep" / "values.py"
    deep.write_text("SIZE = 1\n")
    edit = ("LIMIT = 10", "if 0: import script_of_mine.bare.deep.values\nLIMIT = 10")
    before = digest_of(on_path, edit=edit)
    deep.write_text("SIZE = 2\n")
    assert digest_of(on_path, edit=edit) != before
    assert not (package / "__init__.py.ran").exists()


SCRIPT = """
import dataclasses, re, threading
from pathlib import Path
import torch
from posttrain.build.fingerprint import function_digest

@dataclasses.dataclass
class Settings:
    words: frozenset = frozenset({"x", "y", "z"})
    lock: object = dataclasses.field(default_factory=threading.Lock)

WORDS = {"one", "two", "three", ("four", 5), frozenset({"six", "seven"})}
TABLE = {word: WORDS for word in {"a", "b", "c"}}
MODEL = torch.nn.Linear(2, 2)
settings = Settings()

def even(n): return n == 0 or odd(n - 1)
def odd(n): return n != 0 and even(n - 1)
BOTH = {even, odd, len, lambda n: n in {"p", "q", "r"}}

def f(n): return g(n)
def g(n): return h(n)
def h(n): return f(n)
PAIRS = {("a", f), ("b", g), ("c", h)}

class Judge:
    def __init__(self, bound): self.bound, self.seen, self.me = bound, {"s", "t", None}, self
    def __call__(self, completion): return super().__repr__(), settings, Path, MODEL

def make(k):
    def right(completion, mode={"m", "n"}):
        return right, k, WORDS, TABLE, BOTH, re.compile("a"), completion in {"u", "v", "w"}
    return right

print(function_digest(make(Judge(3))), function_digest(Judge(make(3))))
print(function_digest(lambda completion: completion in PAIRS))
"""


@pytest.mark.slow
def test_the_same_in_every_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def started(arguments: list[str], seed: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *arguments]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    ways = [[str(script)], ["-c", SCRIPT]]  # the second has no file
    running = [[started(way, seed) for seed in "123"] for way in ways]
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
