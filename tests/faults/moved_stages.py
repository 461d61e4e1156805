"""What may happen to a finished stage while its run is dead, and how the next attempt must end.

Changed, cut, deleted, moved or swapped files: the attempt refuses, says which, and leaves the
folder as it is; once everything is back the run ends bit for bit. A stage that is removed, or whose
record is, is done over. The harness calls :func:`harm` between a kill and the next attempt.
"""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import dataclass
from pathlib import Path

from posttrain.runs.folder import RunFolder

REFUSED = 2  # the exit code of a command that says why it does not go on
REDONE = ("removed", "record removed")
RECORDS = ("manifest.json", "done.json")
KINDS = ("flip", "cut", "delete", "move", "swap", "add", "empty", *REDONE)


@dataclass(frozen=True, kw_only=True)
class Harm:
    """What was done to a stage; ``reason`` is what a refusal must say, empty where none comes."""

    kind: str
    reason: str
    stage: Path
    kept: Path

    def undo(self) -> None:
        """Put the stage back as it was."""
        shutil.rmtree(self.stage)
        self.kept.rename(self.stage)


def harm(run: Path, generator: random.Random, *, kept: Path) -> Harm | None:
    """Do something to a finished stage, of which a copy is ``kept``; None where none is finished.

    What a refusal leaves to be put back, and what it does not, is known by ``Harm.reason``.
    """
    finished = RunFolder(run).stages if (run / "run.json").exists() else []
    if not finished:
        return None
    stage, kind = run / generator.choice(finished), generator.choice(KINDS)
    if kind in REDONE:
        shutil.rmtree(stage) if kind == "removed" else (stage / "done.json").unlink()
        return Harm(kind=kind, reason="", stage=stage, kept=kept)
    shutil.copytree(stage, kept)
    names = sorted(json.loads((stage / "manifest.json").read_text())["files"])
    files = [*names, "manifest.json"] if kind in ("delete", "move") else [*names, *RECORDS]
    reason = _do(kind, stage, name=generator.choice(files), generator=generator)
    found = Harm(kind=kind, reason=reason, stage=stage, kept=kept)
    if not reason:  # nothing to find fault with: another text of the same numbers, say
        found.undo()
        return None
    return found


def _do(kind: str, stage: Path, *, name: str, generator: random.Random) -> str:
    """Do it; what a refusal must say, or nothing where this kind has nothing to do with a file."""
    file = stage / name
    if kind in ("flip", "cut"):
        return _tear(file, kind, generator)
    if kind == "swap":
        return _swap(stage, name, generator)
    if kind == "add":
        shutil.copyfile(file, file.parent / "more.safetensors")
        return "more.safetensors was added"
    if kind == "empty":
        for entry in [path for path in stage.iterdir() if path.name != "done.json"]:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        return "manifest.json is missing"
    gone = file if kind == "delete" or file.parent == stage else file.parent
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    return "is missing"


def _tear(file: Path, kind: str, generator: random.Random) -> str:
    before = file.read_bytes()
    if not before:
        return ""
    after, place = bytearray(before), generator.randrange(len(before))
    if kind == "cut":
        del after[place:]
    else:
        after[place] ^= 1 << generator.randrange(8)
    file.write_bytes(after)
    return "" if file.name in RECORDS and _same(before, bytes(after)) else file.name


def _swap(stage: Path, name: str, generator: random.Random) -> str:
    """Put the file of another stage in its place."""
    before = (stage / name).read_bytes()
    donors = [path for path in stage.parent.glob(f"*/{name}") if path.read_bytes() != before]
    if name in RECORDS or not donors:
        return ""
    shutil.copyfile(generator.choice(sorted(donors)), stage / name)
    return f"{name} has changed"


def _same(before: bytes, after: bytes) -> bool:
    """Whether a record still says the same: 17 digits may be one number in two spellings."""
    try:
        return bool(json.loads(before) == json.loads(after))
    except ValueError:
        return False
