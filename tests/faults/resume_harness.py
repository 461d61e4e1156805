"""Kills a run again and again, lets it go on each time, and compares the end with a whole run.

``python tests/faults/resume_harness.py --case ppo --kills 200`` is what ``make faults`` calls;
tests/faults/test_resume_faults.py takes a few kills. Every attempt is a process of its own, forked
from this one so that it need not import everything anew, and ended by SIGKILL at a random moment.
Between two attempts files are torn and clocks moved, finished stages are harmed
(tests/faults/moved_stages.py), and within them grading workers are killed, where the case says so.
Exits with 1, and says where, at the first difference in a metric, a rollout, a finding or a weight.

The cases ``default`` and ``counted`` save by time, as a recipe does that says nothing, in every
stage; some of their kills wait for a checkpoint or a model to be half written. What a kill has cost
is counted in steps: those logged after the newest whole checkpoint, from which the next attempt
must go on. In ``counted`` a clock moves by one minute a step, so that there is a limit to it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path[:0] = [str(Path(__file__).parents[2] / "src"), str(Path(__file__).parents[1])]

from faults import moved_stages  # noqa: E402
from faults.worker_kills import counted as workers_killed  # noqa: E402
from faults.worker_kills import killing_workers  # noqa: E402
from ledger_account import read_ledger  # noqa: E402
from small_runs import TINY, recipe, timeless  # noqa: E402

from posttrain.cli import main  # noqa: E402
from posttrain.config import recipe_from_dict, to_toml  # noqa: E402
from posttrain.models.load import load_policy  # noqa: E402
from posttrain.report import plot_curves  # noqa: E402
from posttrain.runs import (  # noqa: E402
    RunFolder,
    folder,
    keeper,
    read_rollouts,
)
from posttrain.runs.checkpoints import checkpoint_steps, newest  # noqa: E402
from posttrain.runs.ledger import LEDGER  # noqa: E402
from posttrain.stages import job  # noqa: E402

RL: dict[str, Any] = {
    "steps": 12,
    "save_every": 1,
    "evaluate_every": 4,
    "evaluate_problems": 5,
    "learning_rate": 1e-2,
}
KL = {"rule": "proportional", "target": 0.05, "horizon": 20, "refresh_every": 5}
CASES: dict[str, dict[str, Any]] = {
    "grpo": RL,
    "ppo": {**RL, "algorithm": "ppo", "epochs": 2, "critic": {"warmup_steps": 2}, "kl": KL},
    "ahead": {**RL, "max_lag": 2, "save_every": 2},
    "partial": {**RL, "max_lag": 2, "partial": 2, "save_every": 2},
    "seldom": {**RL, "save_every": 5},
}
CASES["adapter"] = CASES["ppo"]  # adapters of policy and critic, on one base
BY_TIME = {**{key: value for key, value in RL.items() if key != "save_every"}, "max_lag": 1}
DEFAULTS: dict[str, dict[str, Any]] = {
    "rl": BY_TIME,
    "sft": {"epochs": 15},
    "prefer": {
        "samples": 4,
        "repeats": 4,
        "error_rate": 0.2,
        "rewards": {"length": {"target": 1, "per_token": 0.1}},
    },
    "reward": {"batch_size": 8, "epochs": 2, "learning_rate": 1e-3},
}
COUNTED_MINUTES = 3  # and so many steps
MINUTES = {"default": 0.005, "counted": float(COUNTED_MINUTES)}
STAGES = ("sft", "prefer", "reward", "rl", "eval")
LONGEST = 0.6  # of the whole run's time: what an attempt may live, at most


def forked(work: Callable[[], Any], *, log: Path) -> int:
    """Do something in a process of its own; its number."""
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        with log.open("ab", buffering=0) as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        work()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1 if stop.code else 0
        print(stop.code, flush=True)
    except BaseException:  # noqa: BLE001 - nothing may leave the child and go on as the parent
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(code)


class Counted(keeper.Keeper):
    """Goes by a clock that moves by one minute a step, and stands still otherwise."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.now = 0.0
        super().__init__(*arguments, **{**options, "clock": lambda: self.now})

    def stepped(self, step: int, **options: Any) -> None:
        self.now += 60.0
        super().stepped(step, **options)


def command(*arguments: str, clock: float = 0.0, counted: bool = False) -> None:
    """The command line, in this process; with a clock that is wrong by some seconds."""
    if counted:
        job.Keeper = Counted  # type: ignore[misc]
    true, now = time.time, folder.datetime.now
    time.time = lambda: true() + clock

    class Wrong(folder.datetime):  # type: ignore[name-defined, misc]
        @classmethod
        def now(cls, zone: Any = None) -> Any:
            return now(zone).replace(year=2000 + int(abs(clock)) % 90)

    folder.datetime = Wrong
    sys.argv = ["posttrain", *arguments]
    main()


def ended(child: int) -> int:
    """Wait for a process; its exit code, or minus the signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def tear(run: Path, generator: random.Random) -> bool:
    """Damage a file of the newest checkpoint: cut it, flip a bit, or take it away."""
    for stage in ("rl", "reward", "prefer", "sft"):
        place = RunFolder(run).stage(stage) if (run / "run.json").exists() else None
        steps = checkpoint_steps(place) if place is not None else []
        if place is None or not steps:
            continue
        files = [path for path in place.checkpoint(steps[-1]).rglob("*") if path.is_file()]
        if not files:  # torn before, file by file
            return False
        chosen = generator.choice(sorted(files))
        content = bytearray(chosen.read_bytes())
        how = generator.choice(["cut", "flip", "gone"])
        if how == "gone" or not content:
            chosen.unlink()
        elif how == "cut":
            chosen.write_bytes(content[: generator.randrange(len(content))])
        else:
            content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
            chosen.write_bytes(content)
        return True
    return False


def age(run: Path, generator: random.Random) -> None:
    """Give every file a random date."""
    for path in run.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            when = generator.uniform(0, 4e9)
            os.utime(path, (when, when))


def difference(first: Path, second: Path) -> None:
    """Exit with what differs between two finished runs, if anything does."""
    one, other = RunFolder(first), RunFolder(second)
    for stage in [name for name in STAGES if one.stage(name).path.is_dir()]:
        ours, theirs = one.stage(stage), other.stage(stage)
        if timeless(ours.records()) != timeless(theirs.records()):
            sys.exit(f"{stage}: metrics differ")
        if ours.findings() != theirs.findings():
            sys.exit(f"{stage}: findings differ")
        if recorded(one, stage) != recorded(other, stage):
            sys.exit(f"{stage}: what it says of itself differs")
        if files(ours.path) != files(theirs.path):
            sys.exit(f"{stage}: weights or data differ")
        # SIGTERM has a step of its own saved, which may be one of the last that are kept.
        kept = [sorted(checkpoint_steps(each)) for each in (ours, theirs)]
        if len(kept[0]) != len(kept[1]) or kept[0][-1:] != kept[1][-1:]:
            sys.exit(f"{stage}: other checkpoints are left")
    if problems := read_ledger(other.stage("rl").path).problems:
        sys.exit(f"the ledger is not exact: {problems}")
    if read_rollouts(one.stage("rl").rollouts) != read_rollouts(other.stage("rl").rollouts):
        sys.exit("rollouts differ")
    hidden = [path for stage in STAGES for path in (second / stage).rglob(".*")]
    if left := [*hidden, *second.glob("*.old-*")]:
        sys.exit(f"left behind: {left}")


def files(folder: Path) -> dict[str, bytes]:
    """Models and data of a stage; its logs have clocks in them, and checkpoints are compared."""
    kinds = ("*.safetensors", "*.jsonl", "verdict.json")
    found = (path for kind in kinds for path in folder.rglob(kind))
    logs = ("metrics.jsonl", "diagnosis.jsonl", LEDGER)
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in found
        if path.name not in logs and "checkpoints" not in path.parts
    }


def recorded(run: RunFolder, stage: str) -> dict[str, Any]:
    """The record of a stage, but for clocks and hashes of what holds some."""
    record = run.stage_record(stage) or {}
    clocks = ("seconds", "finished", "manifest", "sha256")
    return {key: value for key, value in record.items() if key not in clocks}


def under_way(run: Path) -> dict[str, tuple[int, int]]:
    """Of each stage that is not done: its newest whole checkpoint, and the steps logged.

    Of several, where a stage was harmed that others had followed, the first is at work.
    """
    if not (run / "run.json").exists():
        return {}
    found, steps = RunFolder(run), {}
    for stage in STAGES:
        place = found.stage(stage)
        if place.path.is_dir() and found.stage_record(stage) is None:
            whole, _ = newest(place)
            records = place.records()
            logged = int(records[-1]["step"]) if records else 0
            steps[stage] = (whole.step if whole else 0, logged)
    return steps


def at_stake(run: Path) -> tuple[str, int, int]:
    """The stage at work, its newest whole checkpoint, and the steps logged; "" between stages."""
    for stage, steps in under_way(run).items():
        return stage, *steps
    return "", 0, 0


class Harness:
    """One case: the whole run, and runs that are killed until they are done."""

    def __init__(self, root: Path, case: str, *, seed: int, mishaps: bool) -> None:
        self.root = root
        self.counts: Counter[str] = Counter()
        self.log = root / "log.txt"
        self._random = random.Random(f"{case} {seed}")
        self._mishaps = mishaps
        self._longest = 0.0
        self._by_time, self._counted = case in MINUTES, case == "counted"
        self.most_lost = 0
        sections = DEFAULTS if self._by_time else {"rl": CASES[case], "sft": {"save_every": 2}}
        adapter = {"rank": 4} if case == "adapter" else {}
        values = recipe(root / "unused", **sections, adapter=adapter)
        values["grading"] = {"workers": 2, "seconds": 600.0}
        if self._by_time:
            values["run"]["save_minutes"] = MINUTES[case]
        self._recipe = root / "recipe.toml"
        self._recipe.write_text(to_toml(recipe_from_dict(values)))

    def whole(self) -> None:
        """The run that nothing happens to."""
        arguments = ("run", str(self._recipe), "--run.folder", str(self.root / "whole"))
        started = time.monotonic()
        counted = self._counted
        code = ended(forked(lambda: command(*arguments, counted=counted), log=self.log))
        self._longest = LONGEST * (time.monotonic() - started)
        self._expect(code == 0, "the whole run failed")

    def killed(self, num_kills: int) -> None:
        """Runs that are killed, until there were as many kills."""
        number = 0
        while self.counts["kills"] < num_kills:
            number += 1
            run = self.root / f"run-{number}"
            while not self._attempt(run, may_kill=self.counts["kills"] < num_kills):
                if self._mishaps:
                    self._mishap(run)
            compare = functools.partial(difference, self.root / "whole", run)
            code = ended(forked(compare, log=self.log))
            self._expect(code == 0, f"{run.name} is not the whole run")
            self.counts["runs"] += 1
            shutil.rmtree(run)

    def _attempt(self, run: Path, *, may_kill: bool) -> bool:
        """Start or continue a run; whether it is done."""
        clock = self._random.uniform(-1e6, 1e6) if self._mishaps else 0.0
        arguments = ["run", str(self._recipe), "--run.folder", str(run), "--resume"]
        if (run / "config.json").exists() and self._random.random() < 0.5:
            arguments = ["resume", str(run)]
        stage, saved, _ = at_stake(run)
        torn = {name: logged - whole for name, (whole, logged) in under_way(run).items()}
        said = self.log.stat().st_size
        counted = self._counted
        seed = self._random.random()

        def work() -> None:
            with contextlib.ExitStack() as stack:
                if self._mishaps:
                    kills = killing_workers(random.Random(seed), self.root / "workers.txt")
                    stack.enter_context(kills)
                command(*arguments, clock=clock, counted=counted)

        child = forked(work, log=self.log)
        politely = self._mishaps and self._random.random() < 0.2
        if may_kill:
            self._wait(run)
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGTERM if politely else signal.SIGKILL)
        code = ended(child)
        kinds = {-signal.SIGKILL: "kills", 128 + signal.SIGTERM: "terms", -signal.SIGTERM: "terms"}
        self._expect(code == 0 or code in kinds, f"an attempt ended with {code}")
        with self.log.open("rb") as file:
            file.seek(said)
            text = file.read().decode(errors="replace")
        if stage and f"{stage}: starts over" in text:
            self._expect(saved == 0, f"{stage} starts over, and had saved step {saved}")
        if stage and f"{stage}: goes on from step " in text:
            self._expect(
                f"{stage}: goes on from step {saved}\n" in text, f"{stage} had saved step {saved}"
            )
        if code:
            self.counts[kinds[code]] += 1
            self._count_lost(run, torn=torn)
        return code == 0

    def _wait(self, run: Path) -> None:
        """Until the moment to kill: a random one, or one at which something is half written."""
        until = time.monotonic() + self._random.uniform(0, self._longest)
        moments = ["*/checkpoints/.*.tmp", "*/.model-*", "*/best", "*/.checkpoints.*"]
        chosen = self._random.choice(moments)
        if not self._by_time or self._random.random() < 0.5:
            time.sleep(max(0.0, until - time.monotonic()))
            return
        before = _seen(run, chosen)
        while time.monotonic() < until and not _seen(run, chosen) - before:
            time.sleep(0.0005)
        time.sleep(self._random.uniform(0, 0.02))

    def _count_lost(self, run: Path, *, torn: dict[str, int]) -> None:
        """What a kill has cost, in steps; by the clock that counts them there is a limit.

        Beyond it is only what had been lost before, with a checkpoint that was ``torn``: an attempt
        may be killed before it has cut the records back to the one before.
        """
        stage, saved, logged = at_stake(run)
        self.counts[f"killed in {stage or 'between'}"] += 1
        self.counts["while saving"] += bool(_seen(run, "*/checkpoints/.*.tmp"))
        self.counts["lost steps"] += logged - saved
        self.most_lost = max(self.most_lost, logged - saved)
        if self._counted:
            lost = f"{stage}: step {logged} is logged and step {saved} saved"
            self._expect(logged - saved <= max(COUNTED_MINUTES, torn.get(stage, 0)), lost)

    def _mishap(self, run: Path) -> None:
        if self._random.random() < 0.3 and tear(run, self._random):
            self.counts["torn"] += 1
        age(run, self._random)
        if self._random.random() < 0.3:
            self._harm(run)

    def _harm(self, run: Path) -> None:
        """Something happens to a finished stage: the next attempt refuses it, or does it over."""
        harm = moved_stages.harm(run, self._random, kept=self.root / "kept")
        if harm is None:
            return
        self.counts[harm.kind] += 1
        if not harm.reason:
            return
        said = self.log.stat().st_size
        code = ended(forked(lambda: command("resume", str(run)), log=self.log))
        text = self.log.read_bytes()[said:].decode(errors="replace")
        self._expect(code == moved_stages.REFUSED, f"{harm}: an attempt ended with {code}")
        self._expect(harm.reason in text, f"{harm}: not said")
        self.counts["refused"] += 1
        harm.undo()

    def _expect(self, holds: bool, what: str) -> None:
        if not holds:
            text = self.log.read_text(errors="replace")[-3000:]
            sys.exit(f"{what}\n{dict(self.counts)}\n{text}")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=sorted([*CASES, *MINUTES]), required=True)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--mishaps", action="store_true", help="torn files, SIGTERM, wrong clocks, dead workers"
    )
    parser.add_argument("--folder", type=Path, required=True)
    return parser.parse_args()


def _seen(run: Path, pattern: str) -> set[Path]:
    """What is there of a run at work, which may move a folder away while it is looked into."""
    with contextlib.suppress(FileNotFoundError):
        return set(run.glob(pattern))
    return set()


if __name__ == "__main__":
    given = parsed()
    given.folder.mkdir(parents=True)
    load_policy("tiny", options=TINY)  # so that the attempts need not import it, nor what draws
    plot_curves([{"step": step, "loss/total": 1.0} for step in (1, 2)], given.folder / "curves.png")
    harness = Harness(given.folder, given.case, seed=given.seed, mishaps=given.mishaps)
    harness.whole()
    harness.killed(given.kills)
    counts = {**harness.counts, "most lost steps": harness.most_lost}
    counts |= workers_killed(given.folder / "workers.txt")
    print(json.dumps({"case": given.case, **counts}))
