"""How a run samples and learns: said in one line at its start, kept, and again where it changes."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loop_parts import FakeLearner
from small_runs import recipe, small_run

from posttrain.build import declared_ways as ways_module
from posttrain.build.declared_ways import Ways, declared, own_way, told
from posttrain.config import recipe_from_dict, resolve
from posttrain.fast import decode
from posttrain.learn.learning_way import SHARDED
from posttrain.pipelines.guard import Guard, Guarded
from posttrain.report import RunFacts
from posttrain.rollout.engines.scripted import ScriptedEngine
from posttrain.types.ways import Missing, Support, Way

FAST = (
    "sampling: continuous batching; learning: packed sequences where it saves work, shared prompts"
)
SLOTS = Way(uses=("slots",))
LOST = Missing(what="CUDA graphs", why="it syncs", cost="steps take longer")


def test_a_run_says_and_keeps_how_it_samples_and_learns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done, _ = small_run(recipe(tmp_path / "run", rl={"steps": 2}))
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "learning: " in line] == [FAST.partition("; ")[2], FAST]
    kept = json.loads(done.folder.stage("rl").ways.read_text())
    assert kept["line"] == FAST
    assert kept["samples"] == {"uses": ["continuous batching"], "without": []}
    assert done.summary["ways"] == {"sft": FAST.partition("; ")[2], "rl": FAST}
    assert RunFacts(done.folder).ways["rl"] == FAST


def test_a_run_that_falls_back_says_why_and_what_is_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "replaceable", lambda model: Support("it attends otherwise"))
    done, printed = small_run(recipe(tmp_path / "run", sft=None, rl={"steps": 1, "check": "stop"}))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "sampling: " in line]
    assert line.startswith(
        "! sampling: batches with a growing cache (no continuous batching: it attends otherwise"
    )
    assert "about as fast" in line
    kept = json.loads(done.folder.stage("rl").ways.read_text())
    assert kept["samples"]["without"][0]["why"] == "it attends otherwise"
    assert "it attends otherwise" not in printed  # the check before the stage leaves it to the run


def test_what_changes_is_told_again_and_only_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recording that fails shows only once it was tried."""
    said: list[tuple[str, str]] = []
    folder = SimpleNamespace(ways=tmp_path / "ways.json")
    keeper: Any = SimpleNamespace(
        folder=folder,
        info=lambda line: said.append(("info", line)),
        warn=lambda line: said.append(("warn", line)),
    )
    now = {"samples": SLOTS}
    ways = Ways(keeper, lambda: dict(now))
    ways.look()
    now["samples"] = Way(uses=("slots",), without=(LOST,))
    ways.look()
    ways.look()
    after = "sampling: slots (no CUDA graphs: it syncs, so steps take longer)"
    assert said == [("info", "sampling: slots"), ("warn", after)]
    assert json.loads(folder.ways.read_text())["line"] == after
    monkeypatch.setattr(ways_module, "compiler_remarks", ["PyTorch's compiler gives up on f"])
    ways.look()
    assert (
        json.loads(folder.ways.read_text())["line"] == f"{after}; PyTorch's compiler gives up on f"
    )
    assert len(said) == 2


@pytest.mark.parametrize(
    ("compiled", "steps", "words"),
    [
        (
            "auto",
            5,
            "no compilation: [rl] samples below 2,000,000 tokens, and model.compile is not set",
        ),
        (False, 500, "no compilation: model.compile is false, so sampling"),
        ("auto", 500_000, "compiled layers"),
    ],
)
def test_what_the_recipe_does_without_on_a_gpu_is_said(
    compiled: Any, steps: int, words: str, tmp_path: Path
) -> None:
    """As a choice: nothing fell back."""
    values = recipe(tmp_path, rl={"steps": steps}, model={"compile": compiled})
    layers = SimpleNamespace(layers=torch.nn.ModuleList([torch.nn.Linear(1, 1)]))
    learner: Any = SimpleNamespace(way=lambda longest: Way(uses=("packed",)))
    model = SimpleNamespace(get_decoder=lambda: layers, device=torch.device("cuda"))
    setup: Any = SimpleNamespace(
        recipe=resolve(recipe_from_dict(values)), policy=SimpleNamespace(model=model)
    )
    engine: Any = SimpleNamespace(way=lambda: SLOTS)
    ways = declared(setup, learner, longest=9, engine=engine)
    assert words in told(ways)
    assert not any(way.fell_back for way in ways.values())


def test_layers_that_are_sharded_are_not_called_compiled(tmp_path: Path) -> None:
    values = recipe(tmp_path, rl={"steps": 500_000})
    sharded = [("captured passes", Support(SHARDED), "each pass takes longer")]
    learner: Any = SimpleNamespace(way=lambda longest: Way.of("packed", wanted=sharded))
    layers = SimpleNamespace(layers=torch.nn.ModuleList([torch.nn.Linear(1, 1)]))
    model = SimpleNamespace(get_decoder=lambda: layers, device=torch.device("cuda"))
    setup: Any = SimpleNamespace(
        recipe=resolve(recipe_from_dict(values)), policy=SimpleNamespace(model=model)
    )
    engine: Any = SimpleNamespace(way=lambda: SLOTS)
    learns = declared(setup, learner, longest=9, engine=engine)["learns"]
    assert learns.uses == ("packed",)
    assert [missing.what for missing in learns.without] == ["captured passes", "compiled layers"]


def test_an_engine_or_a_learner_need_not_declare_its_way() -> None:
    engine = ScriptedEngine(lambda prompt, sample: "1", encode=lambda text: [4], end_token=1)
    assert str(own_way(engine)) == "as ScriptedEngine does"
    setup: Any = None  # of a stage that only learns, nothing else is asked
    guarded: Any = Guarded(FakeLearner(), Guard(most=1))
    assert told(declared(setup, guarded, longest=9)) == "learning: as Guarded does"
