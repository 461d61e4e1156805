"""Going on with a run: whether it is still the same run, and where each stage stands."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from posttrain.data import row_objects
from posttrain.disk import MovedError, NotWrittenError
from posttrain.envs import shapes
from posttrain.registry import did_you_mean, dotted
from posttrain.runs.checkpoints import Checkpoint, cut_back, newest
from posttrain.runs.drift import FILES, config_digest, differences, is_within, settings
from posttrain.runs.files import SEAL, read_json, read_sealed, write_json, write_sealed
from posttrain.runs.folder import BEGUN, DONE, RunFolder, StageFolder
from posttrain.runs.interrupts import Stopped
from posttrain.track.printable import command_line

BESIDE_RECIPE = ("supplied", "contents", "code", FILES)
"""What config.json holds beside the recipe: objects handed over, files and functions, the code."""
# A run folder may be moved and watched, a cluster may have another address; who samples changes no
# token.
_OF_CLUSTER = ("address", "deadline", "engines", "colocate", "cpus_per_engine")
FREE = ("run.folder", "run.trace", *(f"cluster.{key}" for key in _OF_CLUSTER))
# What a stage is given more of to be prolonged: the steps before stay as they were.
PROLONGED = {**dict.fromkeys(("sft", "reward", "dpo"), ("steps", "epochs")), "rl": ("steps",)}
Say = Callable[[str], None]
BEFORE, BEFORE_PROBLEMS = "before.json", "before.jsonl"  # what a stage begins with, evaluated
_PROBLEMS = "problems_sha256"


def check_same(path: str | Path, config: Mapping[str, Any], *, allow: Sequence[str]) -> list[str]:
    """Refuse to go on with a run under another config, but for the keys in ``allow``.

    Where those are allowed to change, what was done under the old ones still counts; the changes
    are returned, and kept in changes.json. More steps of the last stage that trains are no other
    run, whether it is finished or not, if its learning rate does not depend on how many there are.
    """
    if not (Path(path) / "config.json").exists():
        return []
    folder = RunFolder(path)
    old = folder.config
    longer, more = _prolonged(old, config)
    if folder.holds(config["run"]["stages"]) and longer is None:
        return []
    for key in allow:
        known = [*settings(old), *settings(config)]
        if not any(is_within(name, [key]) for name in known):
            raise ValueError(f"--allow-changes {key}: no such key; {did_you_mean(key, known)}")
    changes = differences(old, config, ignore=FREE)
    free = [] if longer is None or config[longer]["schedule"] != "constant" else [more]
    refused = [change for change in changes if not is_within(_key(change), [*allow, *free])]
    if refused:
        keys = list(dict.fromkeys(_table(change) for change in refused))
        options = command_line(*(word for key in keys for word in ("--allow-changes", key)))
        how = f"allow_changes={keys}" if in_memory(old) else options
        raise ValueError(
            f"{folder.path}: cannot go on as the same run; to go on all the same, add {how}; this "
            "has changed:\n  "
            + "\n  ".join(refused)
            + _why_not_longer(more, refused, schedule=config[longer or "run"].get("schedule"))
            + "\nOr put it back as it was; or run the recipe without resume: what is not finished, "
            "or depends on the change, starts anew"
        )
    if changes:
        begins_at = newest(folder.stage("rl"))[0] if folder.begun("rl") else None
        if begins_at is not None and "rl" in config["run"]["stages"]:
            check_steps(config["rl"]["steps"], done=begins_at.step)
        if longer is not None:
            _reopen(folder, longer, stages=config["run"]["stages"])
        _adopt(folder, old=old, new=config)
        write_sealed(folder.path / "config.json", config)
        _note(folder, changes, stages=[*old["run"]["stages"], *config["run"]["stages"]])
        if longer == "rl" and (config["rl"]["max_lag"] or config["rl"]["partial"] > 1):
            ahead = "what the longer run would have sampled ahead by now comes from newer weights"
            changes.append(f"rl.max_lag, rl.partial: {ahead}")
    return changes


def _prolonged(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str | None, str]:
    """The last stage that trains, where it is to take more steps than before; and by which key."""
    stage = next((name for name in reversed(new["run"]["stages"]) if name in PROLONGED), None)
    if stage is None or stage not in old:
        return None, ""
    for key in PROLONGED[stage]:  # steps, where they are given, take the place of epochs
        before, after = (config[stage].get(key) for config in (old, new))
        if before is not None or after is not None:
            longer = before is not None and after is not None and after > before
            return (stage, f"{stage}.{key}") if longer else (None, "")
    return None, ""


def _why_not_longer(more: str, refused: Sequence[str], *, schedule: str | None) -> str:
    if more not in map(_key, refused):
        return ""
    longer = more.partition(".")[0]
    return (
        f"\n{longer}.schedule = {schedule} spreads the learning rate over all steps: those that "
        "are done had other rates than they would have in the longer run. If it is allowed, the "
        "rate goes on as in the longer run"
    )


def _reopen(folder: RunFolder, stage: str, *, stages: Sequence[str]) -> None:
    """Take the marks of its end off a finished stage and off those behind it, the run's first."""
    record = folder.stage_record(stage)
    if record is not None and "stopped" in record:
        raise ValueError(
            f"{folder.path}: a callback has ended {stage} after step {record['stopped']['step']} "
            f"({record['stopped']['reason']}); it is not prolonged. Start a new run from its "
            f"model, {folder.stage(stage).model}"
        )
    if record is not None and "stopped_at" in record:
        raise ValueError(
            f"{folder.path}: {stage} has run out of patience after step {record['stopped_at']}; it "
            "is not prolonged: with more epochs it stops there too. Start a new run from its "
            f"model, {folder.stage(stage).model}"
        )
    if record is not None and newest(folder.stage(stage))[0] is None:
        raise ValueError(
            f"{folder.path}: cannot be prolonged, because {stage} has left no checkpoint of its "
            "end (none was written: run.save_minutes, save_every; or it was removed); start a new "
            f"run from its model, {folder.stage(stage).model}"
        )
    (folder.path / "summary.json").unlink(missing_ok=True)
    for name in reversed(stages[stages.index(stage) :]):
        (folder.stage(name).path / DONE).unlink(missing_ok=True)


def check_steps(asked: int, *, done: int) -> None:
    """Refuse fewer steps of rl than are done."""
    if done > asked:
        raise ValueError(f"rl.steps: {asked} are asked for, and {done} are done; raise it")


def set_unfinished_aside(
    path: str | Path, stages: Sequence[str], *, config: Mapping[str, Any], say: Say
) -> None:
    """Of a run that starts anew: what is half done belongs to the config that is about to go."""
    if not (Path(path) / "run.json").exists() or RunFolder(path).finished:
        return
    folder = RunFolder(path)
    further = ""
    with contextlib.suppress(ValueError):  # no config, or a damaged one: this run writes another
        if not differences(folder.config, config, ignore=FREE):
            further = f"; next time, to go on instead: {how_to_continue(folder)}"
    for stage in stages:
        moved = folder.set_aside(stage) if folder.stage_record(stage) is None else None
        _say_where(stage, moved, further=further, say=say)


def _note(folder: RunFolder, changes: Sequence[str], *, stages: Sequence[str]) -> None:
    """Write down what was allowed to change, and when: config.json knows the newest only."""
    path = folder.path / "changes.json"
    known = read_json(path) if path.exists() else []
    when = datetime.now(UTC).isoformat(timespec="seconds")
    begun = {name: folder.stage(name).records() for name in stages if folder.begun(name)}
    steps = {name: int(rows[-1]["step"]) if rows else 0 for name, rows in begun.items()}
    write_json(path, [*known, {"when": when, "steps": steps, "changes": list(changes)}])


def stage_digests(config: Mapping[str, Any], stages: Sequence[str]) -> dict[str, str]:
    """What each stage depends on, in one word: its section, its data, and the stages before it."""
    digest = config_digest(config["model"], str(config["run"]["seed"]))
    digests = {}
    for stage in stages:
        keys = (stage, "task", "rewards", "supplied")
        contents = config.get("contents", {}).items()
        # Files and functions that are the stage rl's alone: those before it do without.
        used = {k: value for k, value in contents if stage == "rl" or not k.startswith("rl.")}
        depends = {**{key: config.get(key, {}) for key in keys}, "contents": used}
        digest = config_digest(depends, digest)
        digests[stage] = digest
    return digests


def resume_stage(
    folder: RunFolder, stage: str, *, digest: str, inputs: str, say: Say
) -> tuple[StageFolder, Checkpoint | None]:
    """The folder of a stage that was begun, taken back to its last checkpoint that is whole.

    A stage that was not begun, or under another config, or from other files of the stages before
    it (``inputs``), gets a new folder.
    """
    begun = folder.begun(stage)
    if begun is None or begun["digest"] != digest or begun.get("inputs", inputs) != inputs:
        return start_stage(folder, stage, digest=digest, inputs=inputs, say=say), None
    found = folder.stage(stage)
    begins_at, problems = newest(found)
    for problem in problems:
        say(f"checkpoint left out: {problem}")
    cut_back(found, begins_at)
    if begins_at is None:
        say(f"{stage}: starts over, because it has no complete checkpoint")
    else:
        say(f"{stage}: goes on from step {begins_at.step}")
    return found, begins_at


def start_stage(
    folder: RunFolder, stage: str, *, digest: str, inputs: str, say: Say
) -> StageFolder:
    """A new folder for a stage; what an earlier attempt has left is kept, and it is said where."""
    made = folder.begin(stage, replace=True)
    folder.mark(stage, digest=digest, inputs=inputs)
    _say_where(stage, made.previous, say=say)
    return made


def _say_where(stage: str, moved: Path | None, *, further: str = "", say: Say) -> None:
    if moved is not None:
        say(f"{stage}: starts anew; what it had left is in {moved}{further}")


def in_memory(config: Mapping[str, Any]) -> list[str]:
    """What a run was given from Python that no folder can hold: objects, functions and rows."""
    marks = (("data", row_objects.HANDED_OVER), ("env.name", shapes.HANDED_OVER))
    handed = [
        key
        for key, value in dotted(config).items()
        if any(key.endswith(end) and str(value).startswith(mark) for end, mark in marks)
    ]
    return [*config.get("supplied", ()), *handed]


def how_to_continue(folder: RunFolder) -> str:
    """What to call to go on with a run."""
    if in_memory(folder.config):
        return "call the same function again with resume=True"
    return command_line("posttrain", "resume", folder.path)


@contextlib.contextmanager
def resume_hint(folder: RunFolder, *, new: Callable[[], bool]) -> Iterator[None]:
    """Let what ends a run early say how it can go on; of one that is still new nothing is left."""
    further = how_to_continue(folder)
    try:
        yield
    except KeyboardInterrupt as stop:
        if new():
            stop.args = ("stopped before the first step; nothing is left of it",)
            raise
        step = stop.saved if isinstance(stop, Stopped) else None
        what = "stopped at once; the last checkpoint, if there is one, is kept"
        if step is not None:
            what = f"stopped after step {step}, which is saved"
        stop.args = (f"{what}; to go on: {further}",)
        raise
    except (NotWrittenError, MovedError) as error:
        error.then = error.then if new() else further
        raise


def _adopt(folder: RunFolder, *, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Let what was begun or done under the old config count under the new one."""
    before = stage_digests(old, old["run"]["stages"])
    for stage, digest in stage_digests(new, new["run"]["stages"]).items():
        known = before.get(stage)
        path = folder.stage(stage).path
        records = {BEGUN: folder.begun(stage), DONE: folder.stage_record(stage)}
        for name, record in records.items():
            if record is not None and record["digest"] == known:
                write_sealed(path / name, {**record, "digest": digest})


def _key(change: str) -> str:
    return change.partition(": ")[0]


def _table(change: str) -> str:
    """What to allow: the key, or for digests, which come several at once, their table."""
    key = _key(change)
    table = key.partition(".")[0]
    return table if table in BESIDE_RECIPE else key


def write_before(stage: StageFolder, found: Mapping[str, Any]) -> None:
    """Keep what the evaluation before a stage found; its problems are written already."""
    write_sealed(stage.path / BEFORE, {**found, _PROBLEMS: _problems_digest(stage)})


def read_before(stage: StageFolder) -> dict[str, Any] | None:
    """What :func:`write_before` kept, or None; an error where that or the problems have changed."""
    path = stage.path / BEFORE
    if not path.exists():
        return None
    found = read_sealed(path, _PROBLEMS, SEAL)
    if found.pop(_PROBLEMS) != _problems_digest(stage):
        raise ValueError(
            f"{stage.path / BEFORE_PROBLEMS}: has changed since it was written, or is gone; put it "
            f"back as it was, or remove {path}: a run that is resumed evaluates again"
        )
    del found[SEAL]
    return found


def _problems_digest(stage: StageFolder) -> str:
    path = stage.path / BEFORE_PROBLEMS
    return hashlib.sha256(path.read_bytes() if path.exists() else b"").hexdigest()
