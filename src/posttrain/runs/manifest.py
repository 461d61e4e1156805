"""What a stage or a checkpoint has left, file by file, and whether it is still so.

A manifest is ``{"files": {NAME: {"bytes": …, "sha256": …}}}``. A checkpoint lists all its files. A
finished stage lists those that a later stage or a report reads: models, data, evaluations, metrics,
findings, rollouts; its record holds the hash of the list.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from posttrain.runs.drift import config_digest
from posttrain.runs.files import read_json, write_json
from posttrain.track.progress import advance, phase

MANIFEST = "manifest.json"
Files = Mapping[str, Mapping[str, Any]]
_BLOCK = 1 << 20
_SHOWN = 5  # changes in a message
# Of a stage: marks; what has a manifest of its own, is derived, or is read by no one of us.
_NOT_LISTED = (
    *(MANIFEST, "begun.json", "done.json", "checkpoints/*", "rollouts/index.arrow"),
    *("*.png", "skipped/*", "tensorboard/*", "wandb/*", "wandb_run.txt"),
)
# What later stages begin with. Not the other files of a model: they tell how it was loaded, too.
_HANDED_ON = ("model/*.safetensors", "pairs.jsonl", "test_pairs.jsonl")


def write_manifest(folder: Path, *, stage: bool = False) -> str:
    """List what a folder holds in its manifest, and return the hash of the list."""
    what = f"what the stage {folder.name} has left" if stage else "the checkpoint"
    files = _described(folder, _names(folder, stage=stage), doing=f"hashing {what}")
    write_json(folder / MANIFEST, {"files": files})
    return config_digest(files)


def read_manifest(folder: Path, *, digest: str | None = None) -> Files:
    """What a folder held when it was finished; ``digest`` is the hash that is known of the list."""
    try:
        files: dict[str, dict[str, Any]] = read_json(folder / MANIFEST)["files"]
        broken = digest is not None and config_digest(files) != digest
    except FileNotFoundError:
        raise ValueError(f"{MANIFEST} is missing") from None
    except (ValueError, KeyError, TypeError):
        broken = True
    if broken:
        raise ValueError(f"{MANIFEST} has changed")
    return files


def find_changes(
    folder: Path, files: Files, *, stage: bool = False, within: str = "", hashes: bool = True
) -> list[str]:
    """What of a folder is not as its manifest says; of what begins with ``within`` alone.

    Without ``hashes`` only names and sizes are compared, which takes no time.
    """
    known = {name: entry for name, entry in files.items() if name.startswith(within)}
    found = {name for name in _names(folder, stage=stage) if name.startswith(within)}
    there = [name for name in known if name in found]
    sizes = {name: (folder / name).stat().st_size for name in there}
    changed = {name for name in there if sizes[name] != known[name]["bytes"]}
    if hashes:
        whole = [name for name in there if name not in changed]
        now = _described(folder, whole, doing=f"verifying {folder}")
        changed |= {name for name in whole if now[name] != known[name]}
    told = {name: "is missing" for name in known if name not in found}
    told |= dict.fromkeys(changed, "has changed")
    told |= {name: "was added" for name in found if name not in known}
    return [f"{name} {what}" for name, what in sorted(told.items())]


def some_changes(changes: Collection[str]) -> str:
    """The first few changes, one a line."""
    rest = len(changes) - _SHOWN
    more = [f"and {rest} more"] if rest > 0 else []
    return "\n  ".join([*list(changes)[:_SHOWN], *more])


def handed_on(files: Files) -> str:
    """A name for all that a stage hands on to later ones: its weights, its preferences."""
    return config_digest({name: dict(files[name]) for name in files if _matches(name, _HANDED_ON)})


def _names(folder: Path, *, stage: bool) -> list[str]:
    """The files in a folder, also behind links; of a stage those that count."""
    found = (
        (Path(place) / name).relative_to(folder).as_posix()
        for place, _, names in os.walk(folder, followlinks=True)
        for name in names
        if (Path(place) / name).is_file()
    )
    left_out = _NOT_LISTED if stage else (MANIFEST,)
    return sorted(name for name in found if not _matches(name, (*left_out, ".*", "*/.*")))


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _described(folder: Path, names: Iterable[str], *, doing: str) -> dict[str, dict[str, Any]]:
    sizes = {name: (folder / name).stat().st_size for name in names}
    blocks = sum(-(-size // _BLOCK) for size in sizes.values())
    with phase(doing, total=blocks, unit="MiB"):
        return {
            name: {"bytes": size, "sha256": _sha256(folder / name)} for name, size in sizes.items()
        }


def _sha256(file: Path) -> str:
    digest, block = hashlib.sha256(), memoryview(bytearray(_BLOCK))
    with file.open("rb", buffering=0) as opened:
        while num_bytes := opened.readinto(block):
            digest.update(block[:num_bytes])
            advance()
    return digest.hexdigest()
