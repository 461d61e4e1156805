"""The run folder: everything a run was given and everything it made, in one place.

::

    RUN/
      run.json        marks a run folder, and the version of this layout
      recipe.toml     as written          config.json   as resolved
      places.json     the folder it was started in, and those of its own modules
      threads.json    how many CPU threads it computes with    start-…/  a model that was an object
      summary.json    written last: a run that has one is finished
      samples.json    answers before and after        curves.png
      sft/  rl/  eval/                    one folder for each stage:
        metrics.jsonl     one line for each logged step
        diagnosis.jsonl   what went wrong on the way, if anything did
        rewards.json      which reward checks answers, how much each counts, options
        ways.json         how it samples and learns, in a line and part by part
        rollouts/         step-000012.parquet, …
        tokens/           the same names: posttrain.runs.token_numbers
        ledger.jsonl      each group of prompts, sampled and trained once: posttrain.runs.ledger
        checkpoints/      step-000012/, …: posttrain.runs.checkpoints
        model/            the trained model, an ordinary Hugging Face folder
        best/model/       the one of the lowest held-out loss (sft), where that is another
        begun.json        under which config it was begun, and from which files of stages before
        manifest.json     size and hash of what it has left: posttrain.runs.manifest
        done.json         written last: a stage that has one is not run again
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

from posttrain.model_paths import check_run
from posttrain.runs.before import in_doubt
from posttrain.runs.drift import differences
from posttrain.runs.files import (
    SEAL,
    read_json,
    read_record,
    read_sealed,
    write_json,
    write_sealed,
    write_text,
)
from posttrain.runs.manifest import write_manifest
from posttrain.runs.metrics_file import Record, frame, read_metrics
from posttrain.track.diagnosis import FILE_NAME as DIAGNOSIS
from posttrain.track.diagnosis import read_findings
from posttrain.track.jsonl import FILE_NAME
from posttrain.types.marks import Marks

_LONGER = re.compile(r"((?:sft|reward|dpo)\.(?:steps|epochs)|rl\.steps): (\d+) → (\d+)")
LAYOUT = 1
BEGUN, DONE = "begun.json", "done.json"
REWARDS = "rewards.json"
_STAGE = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True)
class StageFolder:
    """Where a stage keeps its things; ``previous`` is where an earlier attempt was moved to."""

    path: Path
    previous: Path | None = None

    @property
    def metrics(self) -> Path:
        """The log of numbers."""
        return self.path / FILE_NAME

    @property
    def rollouts(self) -> Path:
        """The folder of rollouts: :mod:`posttrain.runs.rollouts` writes and reads it."""
        return self.path / "rollouts"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        """The trained model; fill it through ``posttrain.runs.new_folder``."""
        return self.path / "model"

    @property
    def best(self) -> Path:
        """Where the best model of the stage is, if that is not the one it ended with."""
        return self.path / "best"

    @property
    def ways(self) -> Path:
        """How the stage samples and learns: ``line`` says it all."""
        return self.path / "ways.json"

    def checkpoint(self, step: int) -> Path:
        """The checkpoint after a step; fill it through ``posttrain.runs.new_folder``."""
        return self.checkpoints / f"step-{step:06d}"

    def records(self) -> list[Record]:
        """What was logged, in order; none before the first step."""
        return read_metrics(self.metrics) if self.metrics.exists() else []

    def findings(self) -> list[dict[str, Any]]:
        """What went wrong on the way, in order; ``docs/diagnosis.md`` explains each."""
        return read_findings(self.path / DIAGNOSIS)

    def write_marks(self, marks: Marks) -> None:
        """Write down which reward checks answers, how much each counts, and their options."""
        content = {"accuracy_by": marks.check, "weights": dict(marks.weights)}
        write_json(self.path / REWARDS, {**content, "options": dict(marks.options)})

    @property
    def accuracy_by(self) -> str:
        """The reward that checks answers; empty where none does, or no stage has said so."""
        return str(self._rewards.get("accuracy_by", ""))

    @property
    def weights(self) -> dict[str, float]:
        """The weight of every reward, 0 for one that is only monitored."""
        return {str(name): float(w) for name, w in self._rewards.get("weights", {}).items()}

    @property
    def _rewards(self) -> dict[str, Any]:
        path = self.path / REWARDS
        return read_record(path) if path.exists() else {}

    def frame(self) -> pa.Table:
        """What was logged, one row for each step; ``.to_pandas()`` where pandas is installed."""
        return frame(self.records())


class RunFolder:
    """An existing run folder; :meth:`create` makes one."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        check_run(self.path)
        content = read_json(self.path / "run.json")
        layout = content.get("layout") if isinstance(content, dict) else None
        if layout != LAYOUT:
            raise ValueError(
                f"{self.path}: is a run folder of layout {layout}, this posttrain knows {LAYOUT}; "
                "read it with the version of posttrain that made it"
            )

    @classmethod
    def create(
        cls, path: str | Path, *, config: Mapping[str, Any], recipe: str | None = None
    ) -> RunFolder:
        """Make the folder of a run, or take up the one that is there.

        Refused: a folder that is not a run's, and one with a finished run of another config; of
        another name it may be, and of other code. In one that is not finished all may change.
        """
        path, run = Path(path), cls.marked(path)
        if not (path / "config.json").exists():  # finished or not, it may be of another config
            (path / "summary.json").unlink(missing_ok=True)
        if run.finished:
            changes = differences(run.config, config, ignore=("run.folder", "code"))
            if changes:
                asked = [_LONGER.fullmatch(change) for change in changes]
                longer = all(found and int(found[2]) < int(found[3]) for found in asked)
                keys = " ".join(f"--{found[1]} {found[3]}" for found in asked if found)
                extend = f"extend it (posttrain resume {path} {keys}), " if longer else ""
                raise ValueError(
                    f"{path}: holds the finished run of another recipe ({_some(changes)}); "
                    f"{extend}choose another run folder (--run.folder NAME), or delete this one "
                    "(from Python: overwrite=True)"
                )
            return run
        for left in path.glob("vllm-*"):  # weights that a killed process had handed over
            shutil.rmtree(left, ignore_errors=True)
        if recipe is not None:
            write_text(path / "recipe.toml", recipe)
        write_sealed(path / "config.json", config)
        return run

    @classmethod
    def marked(cls, path: str | Path) -> RunFolder:
        """A folder that is marked as a run's, before anything is written into it."""
        make_writable(Path(path))
        if not (mark := Path(path) / "run.json").exists():
            made = datetime.now(UTC).isoformat(timespec="seconds")
            write_json(mark, {"layout": LAYOUT, "made": made})
        return cls(path)

    @property
    def config(self) -> dict[str, Any]:
        """The resolved config."""
        path = self.path / "config.json"
        if not path.exists():
            why = "because it was ended before it began, or someone has removed it"
            again = "start it again: posttrain run RECIPE"
            raise ValueError(f"{self.path}: has no config.json, {why}; {again}")
        config = read_sealed(path)
        return {name: value for name, value in config.items() if name != SEAL}

    @property
    def recipe(self) -> str | None:
        """The recipe as written, or None where the run was started from Python."""
        path = self.path / "recipe.toml"
        return path.read_text(encoding="utf-8") if path.exists() else None

    @property
    def finished(self) -> bool:
        """Whether every stage ran and the summary was written."""
        return (self.path / "summary.json").exists()

    def holds(self, stages: Sequence[str]) -> bool:
        """Whether it is finished, and each of these stages is still there."""
        return self.finished and set(stages) <= set(self.stages)

    @property
    def summary(self) -> dict[str, Any] | None:
        """What came out of it, or None before the end."""
        return read_record(self.path / "summary.json") if self.finished else None

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Answers before and after."""
        path = self.path / "samples.json"
        return list(read_json(path)) if path.exists() else []

    @property
    def curves(self) -> Path:
        """Where the picture of the run goes."""
        return self.path / "curves.png"

    @property
    def model(self) -> Path | None:
        """The policy of the last finished stage that has one; else the reward model."""
        stages = sorted(self.stages, key=lambda stage: stage != "reward")  # it comes first: last
        return next((self.stage(s).model for s in reversed(stages) if self._has_model(s)), None)

    def _has_model(self, stage: str) -> bool:
        """Whether a stage has left a model, though it may be gone."""
        recorded = (self.stage_record(stage) or {}).get("model")
        return self.stage(stage).model.is_dir() if recorded is None else bool(recorded)

    @property
    def stages(self) -> list[str]:
        """The finished stages, in the order they ran."""
        names = [path.parent.name for path in self.path.glob(f"*/{DONE}")]
        known = filter(_STAGE.fullmatch, names)  # not one that was moved aside
        positions = {name: (self.stage_record(name) or {})["position"] for name in known}
        return sorted(positions, key=lambda name: positions[name])

    def findings(self) -> list[dict[str, Any]]:
        """What went wrong in all stages, in their order, each with its ``stage``.

        Hacking that lasted comes first: it makes every other number mean something else.
        """
        found = [path.parent for path in self.path.glob(f"*/{DIAGNOSIS}")]
        begun = [path.name for path in found if _STAGE.fullmatch(path.name)]
        order = self.stages
        known = sorted(begun, key=lambda name: order.index(name) if name in order else len(order))
        rows = [{"stage": name, **row} for name in known for row in self.stage(name).findings()]
        return sorted(rows, key=lambda row: row["finding"] != "hacking" or row["until"] is not None)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write what came out of the run, which marks it as finished."""
        write_json(self.path / "summary.json", summary)

    def write_samples(self, samples: Sequence[Mapping[str, Any]]) -> None:
        """Write answers before and after."""
        write_json(self.path / "samples.json", samples)

    def stage(self, stage: str) -> StageFolder:
        """Where a stage keeps its things, whether or not it has run."""
        if not _STAGE.fullmatch(stage):
            raise ValueError(f"stage: expected a name like 'rl', got {stage!r}")
        return StageFolder(self.path / stage)

    def begin(self, stage: str, *, replace: bool = False) -> StageFolder:
        """An empty folder for a stage. An earlier attempt is moved to ``STAGE.old-1``, not deleted.

        A finished stage is refused unless ``replace`` is True; the run is then unfinished again.
        """
        folder = self.stage(stage)
        if self.stage_record(stage) is not None and not replace:
            raise ValueError(
                f"{folder.path}: the stage {stage!r} is finished; "
                "skip it, choose another run folder, or delete this one"
            )
        (self.path / "summary.json").unlink(missing_ok=True)
        previous = self.set_aside(stage)
        folder.path.mkdir(exist_ok=True)
        return StageFolder(folder.path, previous)

    def set_aside(self, stage: str) -> Path | None:
        """Move what a stage has left to ``STAGE.old-1``, and say where that is; None if nothing."""
        folder = self.stage(stage)
        if not folder.path.exists():
            return None
        if all(entry.name.startswith(".") for entry in folder.path.iterdir()):
            shutil.rmtree(folder.path)  # all it has is what a killed process began to write
            return None
        names = (f"{stage}.old-{number}" for number in itertools.count(1))
        previous = next(self.path / name for name in names if not (self.path / name).exists())
        os.replace(folder.path, previous)
        return previous

    def mark(self, stage: str, *, digest: str, inputs: str = "") -> None:
        """Note under which config a stage was begun, and from which files of stages before it."""
        path = self.stage(stage).path / BEGUN
        write_sealed(path, {"stage": stage, "digest": digest, "inputs": inputs})

    def begun(self, stage: str) -> dict[str, Any] | None:
        """What :meth:`mark` noted, or None."""
        path = self.stage(stage).path / BEGUN
        return read_sealed(path, "digest") if path.exists() else None

    def finish(
        self,
        stage: str,
        *,
        digest: str,
        inputs: str = "",
        position: int | None = None,
        record: Mapping[str, Any] | None = None,
    ) -> None:
        """Mark a stage as finished under the config that ``digest`` stands for.

        The mark vouches for what the stage has left, and for itself. ``position`` is the stage's
        among all of the run: behind those that are finished, unless one before them is done over.
        """
        others = [name for name in self.stages if name != stage]
        positions = [(self.stage_record(name) or {})["position"] for name in others]
        behind = 1 + max(positions, default=-1)
        done = {
            **(record or {}),
            "stage": stage,
            "digest": digest,
            "inputs": inputs,
            "position": behind if position is None else position,
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "model": self.stage(stage).model.is_dir(),
            "manifest": write_manifest(self.stage(stage).path, stage=True),
        }
        write_sealed(self.stage(stage).path / DONE, done)

    def stage_record(self, stage: str) -> dict[str, Any] | None:
        """What :meth:`finish` wrote, or None where the stage is not finished."""
        path = self.stage(stage).path / DONE
        return read_sealed(path, "digest", "position") if path.exists() else None

    def stage_done(self, stage: str, digest: str) -> bool:
        """Whether the stage is finished under this very config."""
        record = self.stage_record(stage)
        return record is not None and record["digest"] == digest


def make_writable(path: Path) -> None:
    """Make the folder, or see that it is a run's or empty, and that it can be written."""
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path}: is a file; choose another run folder")
    try:
        path.mkdir(parents=True, exist_ok=True)
        held = sorted(entry.name for entry in path.iterdir())
        if not ("run.json" in held or in_doubt(path)) and any(name[0] != "." for name in held):
            raise ValueError(
                f"{path}: exists and is not a run folder (it holds {_some(held)}); "
                "choose a new or an empty folder"
            )
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be written ({error.strerror}); choose another run folder, "
            "or change its permissions"
        ) from error


def _some(items: Sequence[str]) -> str:
    """The first few items."""
    rest = len(items) - 4
    return ", ".join(items[:4]) + (f" and {rest} more" if rest > 0 else "")
