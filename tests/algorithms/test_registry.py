"""Names to callables: what resolves, and what each wrong spec is told."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict

import pytest
from algorithms.batches import refuses

from posttrain import registry
from posttrain.algorithms.losses import POLICY_LOSSES

if TYPE_CHECKING:
    from decimal import Decimal


class Speaks(Protocol):
    def speak(self) -> str: ...


class Sizes(TypedDict):
    width: int


def scale(
    x: float,
    *,
    factor: float = 2.0,
    count: int = 1,
    mode: Literal["up", "down"] = "up",
    name_of: str = "x",
    flag: bool = False,
    bound: float | None = None,
    anything: Any = None,
    untyped=None,
    call: Callable[[], int] | None = None,
    thing: object = None,
    speaker: Speaks | None = None,
    sizes: Sizes | None = None,
    nothing: None = None,
) -> float:
    """Options of every type."""
    return x * factor * count


def strict(x: float, *, factor: float) -> float:
    return x * factor


def later(x: float, *, amount: "Decimal", factor: float = 1.0) -> float:
    return x


TABLE = {"scale": scale, "strict": strict, "later": later, "a:b": abs}
NAMES = "a:b, later, scale, strict"


def resolve(spec: object) -> Callable[..., Any]:
    return registry.resolve(spec, TABLE, kind="tool")


def test_a_name_alone_is_the_function_itself() -> None:
    assert resolve("scale") is scale
    assert resolve({"name": "scale"}) is scale
    assert registry.look_up("scale", TABLE, kind="tool") is scale


def test_options_are_bound() -> None:
    spec = {"name": "scale", "factor": 3, "count": 2}
    assert resolve(spec)(5.0) == 30.0
    assert spec == {"name": "scale", "factor": 3, "count": 2}
    bound = registry.resolve({"name": "clipped", "clip_low": 0.1}, POLICY_LOSSES, kind="loss")
    assert isinstance(bound, partial)
    assert (bound.func, bound.keywords) == (POLICY_LOSSES["clipped"], {"clip_low": 0.1})


def test_a_path_names_a_function_outside_the_tables() -> None:
    assert resolve("math:sqrt") is math.sqrt
    assert resolve("os.path:join")("a", "b") == "a/b"
    assert resolve("a:b") is abs  # the table comes first


def test_a_spec_is_a_name_and_options() -> None:
    assert registry.split("gae", kind="tool") == ("gae", {})
    spec = {"gamma": 0.9, "name": "gae", "lam": 1}
    assert registry.split(spec, kind="tool") == ("gae", {"gamma": 0.9, "lam": 1})


@pytest.mark.parametrize("spec", [{}, {"factor": 2}, {"name": 3}, 5, None, ["scale"]])
def test_a_spec_without_a_name_is_refused(spec: object) -> None:
    with refuses(f"tool: expected a name or a table with a 'name', got {spec!r}"):
        resolve(spec)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("SCALE", "did you mean 'scale'? Known"),
        ("sclae", "did you mean 'scale'? Known"),
        ("stric", "did you mean 'strict'? Known"),
        ("zzz", "known"),
    ],
)
def test_an_unknown_name_gets_a_hint(name: str, hint: str) -> None:
    with refuses(f"tool: unknown name {name!r}; {hint}: {NAMES}"):
        resolve(name)


def test_hints_name_the_nearest_and_all() -> None:
    assert registry.did_you_mean("ppp", ["ppo", "grpo"]) == "did you mean 'ppo'? Known: grpo, ppo"
    assert registry.did_you_mean("x", []) == "known: none"
    assert registry.did_you_mean("abxx", ["abyy"]) == "did you mean 'abyy'? Known: abyy"
    assert registry.did_you_mean("axxx", ["abyy"]) == "known: abyy"


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("math:cube", "module 'math' has no attribute 'cube'"),
        (":f", "Empty module name"),
        (".ops:f", "the 'package' argument is required to perform a relative import for '.ops'"),
    ],
)
def test_a_path_that_leads_nowhere_is_refused(path: str, reason: str) -> None:
    with refuses(
        f"tool: cannot import {path!r} ({reason}); expected 'package.module:function', importable "
        "from the current folder, or from the recipe's"
    ):
        resolve(path)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("import not_here.part", "not_here, which is not installed (No module named 'not_here')"),
        ("from .no_part import x", "own_piece.no_part, which is not installed"),
    ],
)
def test_an_import_of_the_module_itself_that_fails_is_named(
    line: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path is right, and nothing is said of its form."""
    (tmp_path / "own_piece").mkdir()
    (tmp_path / "own_piece" / "__init__.py").write_text(f"{line}\ndef f(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="tool: cannot import") as caught:
        resolve("own_piece:f")
    assert f"own_piece imports {why}" in str(caught.value)
    assert "move f into a file of its own" in str(caught.value)
    assert "package.module" not in str(caught.value)


def test_a_name_that_an_installed_module_lacks_is_no_missing_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To install it again would not help: the line is told."""
    (tmp_path / "own_lacking.py").write_text("\nfrom json import not_there\ndef f(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    says = r"ImportError: cannot import name 'not_there' .*; fix line 2 of .*own_lacking\.py"
    with pytest.raises(ValueError, match=f"tool: cannot import 'own_lacking:f': {says}"):
        resolve("own_lacking:f")


def test_a_path_to_something_else_is_refused() -> None:
    with refuses("tool: 'math:pi' is a float, not a function"):
        resolve("math:pi")


def test_an_unknown_option_gets_a_hint() -> None:
    with refuses("tool 'strict': unknown option 'facto'; did you mean 'factor'? Known: factor"):
        resolve({"name": "strict", "facto": 2.0})
    with refuses("loss 'naive': unknown option 'clip_low'; known: none"):
        registry.resolve({"name": "naive", "clip_low": 0.1}, POLICY_LOSSES, kind="loss")


def test_a_missing_option_is_refused() -> None:
    with refuses("tool 'strict': option 'factor' is required"):
        resolve("strict")
    assert resolve({"name": "strict", "factor": 3.0})(2.0) == 6.0


FITS = [
    ("factor", 3),
    ("factor", 0.5),
    ("count", 3),
    ("mode", "down"),
    ("name_of", "y"),
    ("flag", True),
    ("bound", None),
    ("bound", 1),
    ("anything", [1, "a"]),
    ("anything", True),
    ("untyped", {"a": 1}),
    ("call", len),
    ("call", None),
    ("thing", True),
    ("thing", "x"),
    ("speaker", "anyone"),
    ("sizes", {"width": 3}),
    ("nothing", None),
]


@pytest.mark.parametrize(("name", "value"), FITS)
def test_options_of_the_right_type_pass(name: str, value: object) -> None:
    bound = resolve({"name": "scale", name: value})
    assert isinstance(bound, partial)
    assert bound.keywords == {name: value}


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("factor", "3", "float"),
        ("factor", True, "float"),
        ("factor", None, "float"),
        ("count", 1.5, "int"),
        ("count", False, "int"),
        ("mode", "sideways", "one of up, down"),
        ("name_of", 3, "str"),
        ("flag", 1, "bool"),
        ("flag", "yes", "bool"),
        ("bound", "high", "float | None"),
        ("bound", True, "float | None"),
        ("nothing", 1, "None"),
    ],
)
def test_options_of_the_wrong_type_are_refused(name: str, value: object, expected: str) -> None:
    with refuses(f"tool 'scale': option {name!r} must be {expected}, got {value!r}"):
        resolve({"name": "scale", name: value})


def test_a_mistyped_choice_gets_a_hint() -> None:
    message = "tool 'scale': option 'mode' must be one of up, down, got 'Dwon'; did you mean down?"
    with refuses(message):
        resolve({"name": "scale", "mode": "Dwon"})


def test_the_options_of_a_function_are_its_keyword_only_parameters() -> None:
    found = registry.options(strict)
    assert list(found) == ["factor"]
    assert found["factor"].annotation is float
    assert registry.options(abs) == {}


def test_an_annotation_that_exists_for_the_type_checker_only_is_let_through() -> None:
    assert resolve({"name": "later", "amount": "12.50"})(1.0) == 1.0
    with refuses("tool 'later': option 'amount' is required"):
        resolve({"name": "later", "factor": 2.0})
