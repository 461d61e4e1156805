"""Kills whatever a run on a two-node Ray cluster consists of, and has it end as if nothing was.

``python tests/faults/chaos.py --kills 100 --folder F`` is what ``make chaos`` calls. Runs of 2
learner ranks and 2 engines, which sample ahead of learning, follow each other until so many
processes were killed with -9 at random moments: engines, learner ranks, grading workers, a node
with all that runs on it (another joins), the driver (then ``posttrain resume``). Some engines are
stopped instead: a hang must end with the deadline. Every run must end, its ledger must be exact,
its rollouts those of a run that nothing happened to, and never may the ledger stand still for
longer than the deadlines allow.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
os.environ["PYTHONPATH"] = f"{ROOT / 'src'}:{ROOT / 'tests'}"

from faults.ray_processes import actors, descendants, kill  # noqa: E402
from ledger_account import read_ledger  # noqa: E402
from small_runs import recipe  # noqa: E402

from posttrain.config import recipe_from_dict, to_toml  # noqa: E402
from posttrain.distributed.local_cluster import LocalCluster  # noqa: E402
from posttrain.runs import read_rollouts  # noqa: E402
from posttrain.runs.ledger import LEDGER  # noqa: E402

# How often each kind is chosen, once every kind has happened, and how many may be killed before the
# run has got further: who has no time to start cannot serve, and all are dead for longer than the
# deadline.
KINDS: dict[str, tuple[float, int]] = {
    "engine": (0.40, 2),
    "grading worker": (0.24, 2),
    "learner rank": (0.14, 1),
    "driver": (0.10, 1),
    "node": (0.09, 1),
    "engine hangs": (0.02, 1),
}
HEAVY = {"learner rank", "driver", "node", "engine hangs"}  # one of these at a time
RL: dict[str, Any] = {
    "max_lag": 1,
    "save_every": 4,
    "learning_rate": 1e-3,
    "prompts_per_step": 6,
    "kl": {"placement": "loss", "coefficient": 0.02},
}
CPUS = 2  # of a node: two of the four processes fit on each
LONGEST_ANSWER = 4  # deadlines in a row: a restart may be killed or hang in its turn


class Chaos:
    """Runs on a cluster of two nodes, of which one is replaced whenever it is killed."""

    def __init__(self, folder: Path, *, steps: int, seed: int, deadline: float) -> None:
        self.folder, self.deadline = folder, deadline
        self._rl = {**RL, "steps": steps}
        self.counts: Counter[str] = Counter()
        self.longest = 0.0
        self._random = random.Random(seed)
        self._log = (folder / "log.txt").open("ab", buffering=0)
        self._cluster = LocalCluster(nodes=1, cpus=CPUS)
        self._second = self._cluster.add_node(cpus=CPUS)
        self._driver: subprocess.Popen[bytes] | None = None
        self._since: Counter[str] = Counter()  # kills since the ledger has grown

    def close(self) -> None:
        """End what is still there."""
        if self._driver is not None and self._driver.poll() is None:
            self._driver.kill()
            self._driver.wait()
        self._cluster.close()
        self._log.close()

    def run(self, name: str, *, kills: int) -> Path:
        """A whole run, with kills until there are so many in all; its folder."""
        place = self.folder / name
        self._begin(place, resume=False)
        pause = grown = time.monotonic()
        size = 0
        while (code := self._driver.poll()) != 0:  # type: ignore[union-attr]
            if code is not None:
                self._fail(f"{name}: the driver ended with {code}")
            now, found = time.monotonic(), _size(place / "rl" / LEDGER)
            if found != size:
                self.longest = max(self.longest, now - grown)
                grown, size = now, found
                self._since.clear()
            if now - grown > LONGEST_ANSWER * self.deadline:
                self._fail(f"{name}: nothing was sampled or learned for {now - grown:.0f} s")
            if sum(self.counts.values()) < kills and now > pause and size > 0:
                pause = time.monotonic() + self._kill(place)
                size = _size(
                    place / "rl" / LEDGER
                )  # what came before a kill is no progress after it
            time.sleep(0.05)
        return place

    def check(self, place: Path, whole: Path) -> dict[str, Any]:
        """What the ledger of a run says; exits where it is not exact, or the run another one."""
        account = read_ledger(place / "rl")
        if account.problems:
            self._fail(f"{place.name}: {account.problems}")
        if account.trained != self._rl["steps"] * self._rl["prompts_per_step"]:
            self._fail(f"{place.name}: {account.trained} groups were trained")
        rows = [read_rollouts(each / "rl" / "rollouts") for each in (place, whole)]
        if rows[0] != rows[1]:
            first = next(n for n, (a, b) in enumerate(zip(*rows, strict=True)) if a != b)
            self._fail(f"{place.name}: other rollouts than {whole.name}, from row {first}")
        return {
            "trained": account.trained,
            "trained again": account.trained_again,
            "sampled again": account.sampled_again,
            "resumed": account.resumed,
        }

    def _begin(self, place: Path, *, resume: bool) -> None:
        cluster = {
            "address": self._cluster.address,
            "learners": 2,
            "engines": 2,
            "deadline": self.deadline,
        }
        arguments = ["resume", str(place)]
        if not resume:
            alone = {"sft": None, "eval": None}  # the stage rl
            given = recipe(place, rl=self._rl, cluster=cluster, grading={"workers": 2}, **alone)
            written = self.folder / f"{place.name}.toml"
            written.write_text(to_toml(recipe_from_dict(given)))
            arguments = ["run", str(written)]
        self._driver = subprocess.Popen(
            [sys.executable, "-m", "posttrain.cli", *arguments],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def _kill(self, place: Path) -> float:
        """Kill something, if anything may be; the seconds until the next kill."""
        heavy = any(self._since[kind] for kind in HEAVY)
        wanted = [kind for kind in KINDS if not self.counts[kind]] or list(KINDS)
        may = {
            kind: KINDS[kind][0]
            for kind in wanted
            if self._since[kind] < KINDS[kind][1] and not (heavy and kind in HEAVY)
        }
        if not may:
            return 0.2
        (kind,) = self._random.choices(list(may), list(may.values()))
        if self._struck(kind, place):
            self.counts[kind] += 1
            self._since[kind] += 1
            print(f"{sum(self.counts.values())}: {kind}", flush=True)
        return self._random.uniform(0.1, 2.0)

    def _struck(self, kind: str, place: Path) -> bool:
        """Whether there was such a process to kill."""
        assert self._driver is not None
        if kind == "node":
            self._cluster.remove_node(self._second)
            self._second = self._cluster.add_node(cpus=CPUS)
            return True
        if kind == "driver":
            self._driver.kill()
            self._driver.wait()
            self._begin(place, resume=True)
            return True
        if kind == "grading worker":
            own = Path(f"/proc/{self._driver.pid}/cmdline").read_bytes().replace(b"\0", b" ")
            forks = [pid for pid, title in descendants(self._driver.pid) if title.encode() == own]
            return bool(forks) and kill(self._random.choice(forks))
        found = actors("LearnerRank" if kind == "learner rank" else "EngineHost")
        if not found:
            return False
        number = signal.SIGSTOP if kind == "engine hangs" else signal.SIGKILL
        return kill(self._random.choice(found), number)

    def _fail(self, what: str) -> None:
        text = (self.folder / "log.txt").read_text(errors="replace")[-4000:]
        sys.exit(f"{text}\n{dict(self.counts)}\n{what}")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--steps", type=int, default=60, help="of each run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--deadline", type=float, default=60.0)
    parser.add_argument("--folder", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    given = parsed()
    given.folder.mkdir(parents=True)
    chaos = Chaos(given.folder, steps=given.steps, seed=given.seed, deadline=given.deadline)
    begun = time.monotonic()
    try:
        whole = chaos.run("whole", kills=0)
        told: Counter[str] = Counter()
        while sum(chaos.counts.values()) < given.kills:
            told["runs"] += 1
            told.update(chaos.check(chaos.run(f"run-{told['runs']}", kills=given.kills), whole))
    finally:
        chaos.close()
    kills = {kind: chaos.counts[kind] for kind in KINDS}
    figures = {"kills": sum(kills.values()), **kills, **told}
    figures["longest without progress, s"] = round(chaos.longest, 1)
    figures["seconds"] = round(time.monotonic() - begun)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
