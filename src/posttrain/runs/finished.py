"""Finished stages are used as they were left, or not at all: who reads one verifies it first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from posttrain.runs.drift import config_digest
from posttrain.runs.folder import RunFolder, StageFolder
from posttrain.runs.manifest import find_changes, handed_on, read_manifest, some_changes
from posttrain.runs.resume import Say

TRAINS = ("sft", "reward", "dpo", "rl")  # each leaves a model


def check_finished(path: str | Path, digests: Mapping[str, str], *, say: Say) -> None:
    """Refuse a run whose finished stages are not as they were left; those of ``digests`` count."""
    if not (Path(path) / "run.json").exists():
        return
    folder = RunFolder(path)
    for stage, digest in digests.items():
        if not folder.stage_done(stage, digest):
            continue
        if "manifest" in (folder.stage_record(stage) or {}):
            check_stage(folder, stage)
            continue
        if stage in TRAINS and not folder.stage(stage).model.is_dir():
            raise _refused(folder.stage(stage), ["model is missing"])
        say(
            f"{stage}: was finished by a version of posttrain that recorded no hashes, so nobody "
            "can tell whether it is as it was left"
        )


def check_stage(folder: RunFolder, stage: str, *, within: str = "", hashes: bool = True) -> None:
    """Raise where a finished stage is not as it was left; see ``find_changes``."""
    record, path = folder.stage_record(stage) or {}, folder.stage(stage).path
    if "manifest" not in record:
        return
    try:
        files = read_manifest(path, digest=record["manifest"])
        changes = find_changes(path, files, stage=True, within=within, hashes=hashes)
    except (ValueError, OSError) as error:
        changes = [str(error)]
    if changes:
        raise _refused(folder.stage(stage), changes)


class Finished:
    """The stages of a run that are done or taken so far, which later ones begin with.

    ``inputs`` is a name for what they hand on: a stage that was made from something else is not
    taken.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder, self._stages = folder, list[str]()
        self.inputs = ""

    def check(self) -> None:
        """Raise where what was verified or written before is gone or was cut since."""
        for stage in self._stages:
            if self._folder.stage_record(stage) is None:
                raise _refused(self._folder.stage(stage), ["done.json is missing"])
            check_stage(self._folder, stage, hashes=False)

    def holds(self, stage: str, *, digest: str, say: Say) -> bool:
        """Whether a stage is finished, under this config and from what is there now."""
        record = self._folder.stage_record(stage)
        if record is None or record["digest"] != digest:
            return False
        if record.get("inputs", self.inputs) != self.inputs:
            say(f"{stage}: was made from other files than the stages before it hold")
            return False
        return True

    def add(self, stage: str) -> None:
        """One more is done, or taken."""
        digest = (self._folder.stage_record(stage) or {}).get("manifest")
        path = self._folder.stage(stage).path
        files = read_manifest(path, digest=digest) if digest else {}
        self._stages.append(stage)
        self.inputs = config_digest(self.inputs, handed_on(files))


def run_of(path: Path) -> Path | None:
    """The run folder that a path is, or is in, also where a link leads there."""
    place = path.resolve()
    folders = (path, *path.parents, place, *place.parents)
    return next((folder for folder in folders if (folder / "run.json").is_file()), None)


def check_model(model: str) -> None:
    """Verify a model that is in a run folder, by what the stage or the checkpoint has recorded."""
    path = Path(model).expanduser()
    run = run_of(path)
    if run is None:
        return
    linked = not path.absolute().is_relative_to(run.absolute())
    place = path.resolve() if linked else path.absolute()
    stage, *inside = place.relative_to(run.absolute()).parts or ("",)
    if inside[:1] == ["checkpoints"] and len(inside) > 2:
        checkpoint, within = run / stage / inside[0] / inside[1], "/".join(inside[2:])
        if changes := find_changes(checkpoint, read_manifest(checkpoint), within=f"{within}/"):
            raise ValueError(
                f"{checkpoint}: is not as it was written:\n  {some_changes(changes)}\n"
                "Put it back as it was, or take another one"
            )
    elif stage in TRAINS and inside:
        check_stage(RunFolder(run), stage, within=f"{'/'.join(inside)}/")


def _refused(stage: StageFolder, changes: Sequence[str]) -> ValueError:
    path = stage.path
    return ValueError(
        f"{path}: is not as the stage {path.name} has left it:\n  {some_changes(changes)}\n"
        f"Put it back as it was; or remove the folder {path}, and a run that is resumed does the "
        "stage over"
    )
