"""The runs that the page may show, by short names: nobody who asks for a run gives a path.

What is in a run folder was written by a stranger, perhaps: a link in it that leads out of it is
refused, and what cannot be read is told as a problem.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from posttrain.data.token_texts import FILE_NAME as TOKENIZER
from posttrain.data.token_texts import TokenTexts
from posttrain.report import RunFacts, find_runs, overview
from posttrain.runs import Rollouts, RunFolder, rollout_file
from posttrain.runs.token_numbers import TokenNumbers, read_tokens

Value = TypeVar("Value")
Stamp = tuple[tuple[str, int, int], ...]
MAX_RUNS = 200
SECONDS_BETWEEN_LOOKS = 1.0  # at a folder of rollouts, which may hold thousands of files
_CACHED_STEPS = 2


class UnknownError(LookupError):
    """Nothing of that name is here."""


class NotRecordedError(LookupError):
    """What it takes to compute these numbers was not recorded."""


@dataclass
class ShownRun:
    """A run that is shown; what it has is read on first use, and again once it has changed."""

    name: str
    folder: Path
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False)
    _known: dict[str, tuple[Any, Any]] = field(default_factory=dict, repr=False)
    _tokens: dict[int, tuple[Stamp, TokenNumbers | None]] = field(default_factory=dict, repr=False)

    @property
    def run(self) -> RunFolder:
        """Its folder, checked: no link leads out of it."""
        check_run(self.folder)
        return RunFolder(self.folder)

    @property
    def facts(self) -> RunFacts:
        """What came out of it, so far."""
        return self.fresh("facts", lambda: RunFacts(self.run), stamp=self.stamp())

    def stamp(self) -> Stamp:
        """Changes whenever a file of the run or of a stage does."""
        return tuple(_stamps(self.folder))

    def row(self) -> dict[str, Any]:
        """The run in a line, as ``posttrain runs`` has it."""

        def look() -> dict[str, Any]:
            try:
                check_run(self.folder)
            except ValueError as error:
                return {"state": "broken", "problem": str(error)}
            return {**asdict(overview(self.folder)), "path": self.folder.name}

        found = self.fresh("row", look, stamp=self.stamp())
        stored = (self.folder / "rl" / "rollouts").is_dir()
        return {"name": self.name, **found, "has_rollouts": stored, "stamp": hash(self.stamp())}

    def rollouts(self) -> Rollouts:
        """Its rollouts, with what has come since."""
        found = self.rollouts_or_none()
        if found is None:
            raise UnknownError(f"{self.name}: has no rollouts; they come with the stage rl")
        return found

    def rollouts_or_none(self) -> Rollouts | None:
        """Its rollouts; None before there are any."""
        folder = self.folder / "rl" / "rollouts"
        if not folder.is_dir():
            return None
        with self._lock:
            looked, store = self._known.get("rollouts", (0.0, None))
            now = time.monotonic()
            if store is None or now - looked > SECONDS_BETWEEN_LOOKS:
                check_links(folder, self.folder)
                if store is None:
                    store = Rollouts(folder)
                else:
                    store.refresh()
                self._known["rollouts"] = (now, store)
            found: Rollouts = store
        return found

    def tokens(self, step: int) -> TokenNumbers | None:
        """What each token of a step came to, where it was recorded; read again once it changes."""
        folder = self.folder / "rl" / "tokens"
        if not folder.is_dir():
            return None
        with self._lock:
            stamp = self.tokens_stamp(step)
            if self._tokens.get(step, (None, None))[0] != stamp:
                check_links(folder, self.folder)
                self._tokens.pop(step, None)
                if len(self._tokens) >= _CACHED_STEPS:
                    self._tokens.pop(next(iter(self._tokens)))
                self._tokens[step] = (stamp, read_tokens(folder, step))
            return self._tokens[step][1]

    def tokens_stamp(self, step: int) -> Stamp:
        """Changes when the numbers of a step's tokens are written, or written again."""
        return tuple(file_stamps([rollout_file(self.folder / "rl" / "tokens", step)], self.folder))

    def texts(self) -> TokenTexts | None:
        """Its tokenizer; None where the folder has none."""
        run = self.folder
        places = [run / "rl" / "tokens", *(run / stage / "model" for stage in ("rl", "dpo", "sft"))]
        found = next((p / TOKENIZER for p in places if (p / TOKENIZER).is_file()), None)
        if found is None:
            return None
        check_links(found.parent, self.folder)
        return self.fresh("texts", lambda: TokenTexts.read(found), stamp=found)

    def models(self) -> dict[str, Path]:
        """The trained models and checkpoints inside it, by what they are called."""
        found: dict[str, Path] = {}
        for stage in ("sft", "dpo", "rl"):
            for path in sorted((self.folder / stage / "checkpoints").glob("step-*/model")):
                found[f"{stage}, step {int(path.parent.name.removeprefix('step-'))}"] = path
            if (self.folder / stage / "model").is_dir():
                found[f"{stage}, the end"] = self.folder / stage / "model"
        for path in found.values():
            check_links(path, self.folder)
        return found

    def fresh(self, name: str, make: Callable[[], Value], *, stamp: Any) -> Value:
        """What was made before, if nothing has changed since."""
        with self._lock:
            known = self._known.get(name)
            if known is None or known[0] != stamp:
                known = self._known[name] = (stamp, make())
            value: Value = known[1]
            return value


class Shelf:
    """The runs that were named, or that lie in the folders that were named."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = list(folders)
        self._lock = threading.Lock()  # requests come in threads
        self._shown: dict[str, ShownRun] = {}  # a name stays that of its folder
        self.left_out = 0
        self.look()

    def look(self) -> list[ShownRun]:
        """All runs, or the latest; those that have appeared since are among them.

        ``left_out`` is how many runs there are beyond them.
        """
        with self._lock:
            found = [path.resolve() for folder in self._folders for path in find_runs(folder)]
            paths = list(dict.fromkeys(found))
            latest = set(sorted(paths, key=_begun)[-MAX_RUNS:])
            self.left_out = len(paths) - len(latest)
            known = {shown.folder: shown for shown in self._shown.values()}
            for path in paths:
                if path in latest and path not in known:
                    name = _free(_name(path), self._shown)
                    known[path] = self._shown[name] = ShownRun(name, path)
            return [known[path] for path in paths if path in latest]

    def get(self, name: str) -> ShownRun:
        """The run of a name."""
        if name not in self._shown:
            self.look()
        if name not in self._shown or not self._shown[name].folder.is_dir():
            raise UnknownError("there is no run of this name here")
        return self._shown[name]


def check_links(folder: Path, root: Path) -> None:
    """Refuse a folder that is not in the run folder ``root``, or has a link out of it."""
    root = root.resolve()
    with os.scandir(folder) as entries:  # knows links without looking at every file
        links = [Path(entry.path) for entry in entries if entry.is_symlink()]
    for path in (folder, *links):
        if not path.resolve().is_relative_to(root):
            raise ValueError(f"{path.name}: is a link out of the run folder, and is not followed")


def check_run(folder: Path) -> None:
    """The same of a run folder and the folders of its stages."""
    check_links(folder, folder)
    for path in folder.iterdir():
        if path.is_dir():
            check_links(path, folder)


def _stamps(folder: Path) -> Iterator[tuple[str, int, int]]:
    yield from file_stamps(sorted((*folder.glob("*.json*"), *folder.glob("*/*.json*"))), folder)


def file_stamps(paths: Sequence[Path], folder: Path) -> Iterator[tuple[str, int, int]]:
    """Which files of a folder there are, their sizes and when they were last written."""
    for path in paths:
        try:
            found = path.stat()
        except OSError:  # gone meanwhile
            continue
        yield (str(path.relative_to(folder)), found.st_size, found.st_mtime_ns)


def _begun(folder: Path) -> int:
    """When a run was begun, or its first file was last written."""
    try:
        return (folder / "run.json").stat().st_mtime_ns
    except OSError:  # gone meanwhile
        return 0


def _name(folder: Path) -> str:
    """What a run is called: an adapter, whose folder has a mere number, together with its run."""
    run = folder.parent.parent
    if folder.parent.name == "adapters" and (run / "run.json").is_file():
        return f"{run.name}/adapters/{folder.name}"
    return folder.name or "run"


def _free(name: str, taken: dict[str, Any]) -> str:
    number, free = 2, name
    while free in taken:
        free, number = f"{name}-{number}", number + 1
    return free
