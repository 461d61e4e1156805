"""Runs to look at, and a server over them."""

from __future__ import annotations

import json
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_runs import recipe, small_run

from posttrain.runs import RunFolder, rollout_file, write_rollouts
from posttrain.track import Stage
from posttrain.track.jsonl import JsonlTracker
from posttrain.types import Prompt, Rollout, Score, Turn

TOKEN = "the-token"
EVIL = "</td><script>window.hacked=1</script>\x1b[31m\u202e<img src=x onerror='window.hacked=1'>"


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs that were evaluated: the second is the first, with three answers undone."""
    folder = tmp_path_factory.mktemp("view") / "runs"
    rl = {"steps": 6, "minibatches": 2, "learning_rate": 1e-2, "evaluate_every": 3}
    given = recipe(folder / "first", rl=rl, grading={"workers": 0})
    given["sft"]["epochs"] = 40  # so that some answers are right before, and more after
    small_run(given)
    shutil.copytree(folder / "first", folder / "second")
    problems = folder / "second" / "eval" / "problems.jsonl"
    rows = [json.loads(line) for line in problems.read_text().splitlines()]
    for row in rows[:3]:
        row |= {"correct": not row["correct"], "reward": 1.0 - row["reward"]}
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = json.loads((folder / "second" / "config.json").read_text())
    assert config["rl"]["steps"] == 6
    return folder


def turn(text: str, *, sampled: bool = True) -> Turn:
    tokens = tuple(range(5, 5 + max(1, min(len(text), 40))))
    return Turn(tokens=tokens, text=text, logprobs=(-0.5,) * len(tokens) if sampled else None)


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A run of three steps whose every text wants to be more than text; one is very long."""
    run = RunFolder.create(tmp_path / "runs" / "hostile", config={"rl": {"steps": 3}}, recipe=EVIL)
    stage = run.begin("rl")
    tracker = JsonlTracker(Stage(name="rl", folder=stage.path, total_steps=3))
    for step in (1, 2, 3):
        tracker.log(
            step, {"reward/mean": 0.5 * step, f"reward/part/{EVIL}": 1.0, "reward/part/b": 0.0}
        )
        prompt = Prompt(id=f"{EVIL}-{step}", text=f"asked {step}: {EVIL}", tokens=(1, 2))
        ok = Score(value=1.0, parts={EVIL: 1.0, "b": 0.0})
        broken = Score(value=0.0, state="crashed", reason=EVIL)
        said = [((turn(EVIL),), ok), ((turn("w" * 300_000),), broken)]
        said.append(((turn("4"), turn(EVIL, sampled=False), turn("5")), ok))
        rollouts = [Rollout(prompt=prompt, turns=t, group=0, score=s) for t, s in said]
        write_rollouts(
            rollout_file(stage.rollouts, step), rollouts, step=step, advantages=[1.0, None, -1.0]
        )
    tracker.close()
    finding = {"finding": EVIL, "step": 2, "until": None, "text": EVIL, "remedy": EVIL}
    (stage.path / "diagnosis.jsonl").write_text(json.dumps(finding) + "\n")
    row = {
        "id": EVIL,
        "prompt": EVIL,
        "answer": EVIL,
        "completion": EVIL,
        "correct": True,
        "reward": 1.0,
    }
    row |= {
        "parts": {},
        "state": "ok",
        "reason": "",
        "stop_reason": "stop",
        "num_tokens": 1,
        "index": 0,
    }
    (stage.path / "before.jsonl").write_text(
        json.dumps({**row, "correct": False, "reward": 0.0}) + "\n"
    )
    evaluated = run.begin("eval")
    (evaluated.path / "problems.jsonl").write_text(json.dumps(row) + "\n")
    return run.path


class Served:
    """A server in a thread of this process."""

    def __init__(self, folder: Path) -> None:
        uvicorn = pytest.importorskip("uvicorn")
        from posttrain.viewer.server import HOST, make_app
        from posttrain.viewer.shelf import Shelf

        self.folder = folder
        with socket.socket() as free:
            free.bind((HOST, 0))
            self.port = free.getsockname()[1]
        app = make_app(Shelf([folder]), token=TOKEN, port=self.port, warn=lambda text: None)
        config = uvicorn.Config(app, host=HOST, port=self.port, log_level="error")
        self.server = uvicorn.Server(config)
        self.address = f"http://{HOST}:{self.port}"
        self._thread = threading.Thread(target=self.server.run, daemon=True)
        self._thread.start()
        while not self.server.started:
            time.sleep(0.01)

    def close(self) -> None:
        self.server.should_exit = True
        self._thread.join()


@pytest.fixture(scope="session")
def served(runs: Path) -> Iterator[Served]:
    """A server over the two runs."""
    server = Served(runs)
    yield server
    server.close()


@pytest.fixture
def served_hostile(hostile: Path) -> Iterator[Served]:
    """A server over the hostile run."""
    server = Served(hostile.parent)
    yield server
    server.close()
