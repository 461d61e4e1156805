"""What a run and an evaluation say while they are waited for."""

import contextlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from models.families import build
from rich.console import Console
from rollout.cases import END, ragged, spell
from small_runs import TINY, recipe, small_run

import posttrain
from posttrain.build.model_source import import_gguf
from posttrain.config import recipe_from_dict
from posttrain.rollout.engines import NativeEngine, TransformersEngine
from posttrain.stages.run import run
from posttrain.track.progress import Progress, current, phase, showing
from posttrain.types import Sampling

Phases = list[tuple[str, int, int | None]]


@pytest.fixture
def phases(monkeypatch: pytest.MonkeyPatch) -> Phases:
    """Every phase as it ends: what it is called, how many were done, and of how many."""
    found: Phases = []
    shown = Progress.phase

    @contextlib.contextmanager
    def seen(self: Progress, what: str, **options: Any) -> Iterator[None]:
        with shown(self, what, **options):
            inner = self._phases[-1]
            yield
            found.append((what, inner.done, options.get("total")))

    monkeypatch.setattr(Progress, "phase", seen)
    return found


def test_a_run_says_what_it_is_at(phases: Phases, tmp_path: Path) -> None:
    small_run(recipe(tmp_path / "run", sft=None, rl={"check": "stop", "steps": 2}))
    names = [name for name, _, _ in phases]
    told = [
        "loading the model tiny",
        "reading the data",
        "checking: a few rollouts",
        "checking: one step",
        "checking: data, rewards, a few rollouts, one step",
        "evaluating before training",
        "the first rollouts",
        "learning",
        "sampling and grading",
        "saving the model",
        "stage rl",
        "evaluating",
        "drawing the curves and writing the summary",
    ]
    assert [names.index(name) for name in told] == sorted(names.index(name) for name in told)
    counted = {name: (done, total) for name, done, total in phases if total and done}
    hashed = [name for name in counted if name.startswith("hashing")]
    assert all(done == total for done, total in map(counted.pop, hashed))
    assert hashed[-2:] == [f"hashing what the stage {stage} has left" for stage in ("rl", "eval")]
    assert counted == {
        "evaluating before training": (10, 10),
        "the first rollouts": (16, 16),
        "sampling and grading": (16, 16),
        "evaluating": (10, 10),
    }


def test_rollouts_that_run_ahead_are_waited_for_but_not_counted(
    phases: Phases, tmp_path: Path
) -> None:
    changes = {"max_lag": 1, "steps": 2}
    small_run(recipe(tmp_path / "run", sft=None, eval=None, rl=changes))
    assert ("the first rollouts", 0, None) in phases


def test_an_evaluation_from_python_says_so_too(
    phases: Phases, capsys: pytest.CaptureFixture[str]
) -> None:
    task = {"name": "arithmetic", "digits": 1, "num_train": 40, "num_test": 5}
    options = {"options": TINY}
    posttrain.evaluate("tiny", task=task, model_options=options, samples=2, max_new_tokens=2)
    assert ("loading the model tiny", 0, None) in phases
    assert ("evaluating", 15, 15) in phases
    assert capsys.readouterr().out == ""


def test_an_import_and_an_answer_say_so(phases: Phases, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from models.test_gguf import build as build_small
    from models.test_gguf import write

    file, folder = tmp_path / "small.gguf", tmp_path / "out"
    write(file, build_small(tied=True))
    import_gguf(file, folder)
    posttrain.generate(folder, "ab", num_samples=2, max_new_tokens=3, chat=False)
    assert phases == [
        (f"importing {file} into {folder}", 0, None),
        (f"loading the model {folder}", 0, None),
        ("sampling", 2, 2),
    ]


def test_a_quiet_run_is_quiet(phases: Phases, tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), quiet=True)
    given = recipe(tmp_path / "run", sft=None, eval=None, rl={"steps": 1})
    run(recipe_from_dict(given), console=console)
    assert phases
    assert console.file.getvalue() == ""


@pytest.mark.parametrize("slots", [True, False, None], ids=["slots", "parts", "transformers"])
def test_an_engine_counts_what_it_has_answered(slots: bool | None) -> None:
    """Each completion once, also where they do not fit at once."""
    make: Callable[..., Any] = TransformersEngine if slots is None else NativeEngine
    options = {} if slots is None else {"slots": slots}
    engine = make(build("llama"), end_tokens=(END,), decode=spell, max_sequences=4, **options)
    with showing(Console(quiet=True)), phase("sampling", total=15):
        engine.generate(ragged(3, 9, 1, 5, 9), Sampling(max_new_tokens=4), num_samples=3, seed=0)
        display = current()
        assert display is not None
        assert display._phases[-1].done == 15
