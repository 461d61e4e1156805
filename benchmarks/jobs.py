"""Runs of recipes in processes of their own, several at once on one device."""

from __future__ import annotations

import argparse
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run to make: a recipe, what is changed in it, a seed, and the folder it goes to."""

    recipe: Path
    overrides: tuple[str, ...]
    seed: int
    folder: Path

    def start(self) -> subprocess.Popen[bytes]:
        """Begin, or go on with, the run in a process of its own; it writes ``FOLDER.log``."""
        command = [sys.executable, "-m", "posttrain.cli", "run", str(self.recipe), "--resume"]
        command += [*self.overrides, "--run.seed", str(self.seed)]
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            return subprocess.Popen(
                [*command, "--run.folder", str(self.folder)], stdout=log, stderr=log
            )

    @property
    def log(self) -> Path:
        """What the run prints."""
        return self.folder.with_name(f"{self.folder.name}.log")


def add_running(parser: argparse.ArgumentParser) -> None:
    """The options of :func:`run_all`."""
    parser.add_argument("--parallel", type=int, default=1, help="so many runs at once")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop all runs after these")


def run_all(
    jobs: Iterable[Job], *, parallel: int, minutes: float, after_each: Callable[[], None]
) -> bool:
    """Make all runs, ``parallel`` at once; whether every one of them ended well.

    ``after_each`` is called whenever one has ended, so that what is done is on the disk whatever
    happens next. After ``minutes``, or on SIGTERM, what runs is asked to save itself and stop.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    waiting, running, failed = list(jobs), dict[Job, subprocess.Popen[bytes]](), list[Job]()
    until = time.monotonic() + 60 * minutes
    try:
        while waiting or running:
            while waiting and len(running) < parallel:
                job = waiting.pop(0)
                running[job] = job.start()
            time.sleep(0.2)
            for job in [job for job, process in running.items() if process.poll() is not None]:
                code = running.pop(job).returncode
                failed += [job] if code else []
                print(f"{job.folder}: {f'failed, see {job.log}' if code else 'done'}", flush=True)
                after_each()
            if time.monotonic() > until:
                left = [str(job.folder) for job in (*running, *waiting)]
                print(f"{minutes:g} minutes are over; not finished: {', '.join(left)}", flush=True)
                return False
    finally:
        for process in running.values():
            process.terminate()
        try:
            after_each()
        finally:  # whatever could not be written, no run is left behind
            for process in running.values():
                process.wait()
    return not failed
