"""Runs by torchrun: what one process comes to, and no hang where a rank dies."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from posttrain.runs import RunFolder

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "cluster.md"
SMALL = (
    "--task.num_train 60 --task.num_test 10 --sft.epochs 2 --rl.prompts_per_step 4 "
    "--rl.group_size 4 --rl.minibatches 2 --rl.evaluate_every 50 --rl.evaluate_problems 4 "
    "--eval.problems 4 --rl.check off --rl.kl.placement loss --rl.save_every 5 --run.keep_last 0"
)


def command(line: str, *more: str) -> list[str]:
    """A command line of the page, run by the Python of the tests."""
    words = shlex.split(line, comments=True)
    assert words[0] == "torchrun"
    return [sys.executable, "-m", "torch.distributed.run", *words[1:], *more]


def documented() -> str:
    """The command that the page gives."""
    found = re.search(r"^(torchrun .* -m posttrain run .*)$", PAGE.read_text("utf-8"), re.M)
    assert found
    return found[1]


def started(words: list[str], log: Path) -> subprocess.Popen[bytes]:
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    with log.open("wb") as output:
        return subprocess.Popen(
            words, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
        )


def done(words: list[str], log: Path) -> str:
    """What a command printed; it must end well."""
    assert started(words, log).wait() == 0, log.read_text()[-3000:]
    return log.read_text()


def rank_of(pid: int, folder: Path) -> int | None:
    """The rank that a process is in the run of a folder, where it is one."""
    try:
        if str(folder) not in Path(f"/proc/{pid}/cmdline").read_text():
            return None
        environment = Path(f"/proc/{pid}/environ").read_text()
    except OSError:
        return None
    found = re.search(r"(?:^|\0)RANK=(\d+)\0", environment)
    return int(found[1]) if found else None


def numbers(folder: Path, stage: str, name: str) -> list[float]:
    """What a stage has logged under a name, step by step."""
    records = RunFolder(folder).stage(stage).records()
    return [record[name] for record in records if name in record]


@pytest.mark.parametrize("adapter", ["", "--adapter.rank 4"], ids=["whole", "adapter"])
def test_the_documented_command_does_what_one_process_does(adapter: str, tmp_path: Path) -> None:
    options = shlex.split(f"{SMALL} --rl.steps 6 {adapter}")
    two, one = tmp_path / "two", tmp_path / "one"
    printed = done(command(documented(), *options, "--run.folder", str(two)), tmp_path / "log-2")
    assert "sharded over 2 ranks" in printed
    assert printed.count("Where things are") == 1  # only rank 0 prints
    plain = [sys.executable, "-m", "posttrain", "run", "recipes/demo.toml", *options]
    done([*plain, "--run.folder", str(one)], tmp_path / "log-1")
    for stage in ("sft", "rl"):
        for name in ("loss/total", "train/gradient_norm"):
            expected, found = (numbers(folder, stage, name) for folder in (one, two))
            assert len(found) == len(expected) > 1
            assert found[:3] == pytest.approx(expected[:3], rel=1e-5, abs=1e-6)
    assert not (two / ".ranks").exists()
    for stage in ("sft", "rl"):
        name = "adapter_model.safetensors" if adapter else "model.safetensors"
        assert (two / stage / "model" / name).exists()


def test_a_rank_that_dies_ends_all_and_the_run_goes_on_with_another_number(tmp_path: Path) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    words = command(
        documented(), *shlex.split(f"{SMALL} --rl.steps 60"), "--run.folder", str(folder)
    )
    process = started(words, log)
    while not list((folder / "rl").glob("checkpoints/step-*")):
        assert process.poll() is None, log.read_text()[-3000:]
        time.sleep(0.05)
    ranks = {
        rank_of(int(path.name), folder): int(path.name) for path in Path("/proc").glob("[0-9]*")
    }
    os.kill(ranks[1], signal.SIGKILL)
    assert process.wait() != 0
    assert re.search(r"a learner rank has gone|stopped after step", log.read_text())
    steps = sorted((folder / "rl" / "checkpoints").iterdir())
    assert (steps[0] / "optimizer").is_dir()
    three = f"torchrun --standalone --nproc-per-node 3 -m posttrain resume {folder}"
    done(command(three), tmp_path / "log-3")
    assert [record["step"] for record in RunFolder(folder).stage("rl").records()][-1] == 60
    assert len(numbers(folder, "rl", "loss/total")) == 60


FAILS = """
from torch import distributed
from posttrain.distributed import torchrun
from posttrain.distributed.remote_learner import LearnerCall
from posttrain.distributed.worker import LearnerHost

def call(self, name, *given, version=None):
    if self.ranks.rank == 1:
        raise ValueError("no such thing")
    distributed.barrier()

LearnerHost.call = call
torchrun.enter()
try:
    torchrun.meeting().ask(LearnerCall("step"))
except RuntimeError as error:
    print("rank 0 says:", error, flush=True)
"""


SILENT = """
import os, signal, sys, time
from pathlib import Path
from torch import distributed
from posttrain.distributed import torchrun
from posttrain.distributed.remote_learner import LearnerCall
from posttrain.distributed.worker import LearnerHost

def call(self, name, *given, version=None):
    if self.ranks.rank == 2:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(3600)
    distributed.barrier()

LearnerHost.call = call
here = Path(sys.argv[0]).parent
(here / f"rank-{os.environ['RANK']}").touch()
while len(list(here.glob("rank-*"))) < 3:  # one that is long in starting is not yet silent
    time.sleep(0.05)
torchrun.Meeting.__init__.__kwdefaults__["deadline"] = 15.0
torchrun.enter()
try:
    torchrun.meeting().ask(LearnerCall("step"))
except RuntimeError as error:
    print("rank 0 says:", error, flush=True)
"""


def test_a_silent_rank_is_named_and_not_one_that_waits_for_it(tmp_path: Path) -> None:
    script, log = tmp_path / "silent.py", tmp_path / "log"
    script.write_text(SILENT)
    line = f"torchrun --standalone --nproc-per-node 3 {script}"
    assert started(command(line), log).wait() != 0
    (said,) = re.findall("rank 0 says: .*", log.read_text())
    assert re.search(r"did not answer \(no answer from [^)]*learner rank 2\)", said)
    assert "learner rank 1 failed" not in said


def test_what_fails_in_another_rank_is_said_by_the_first(tmp_path: Path) -> None:
    """Though that one waits in an exchange for the rank that has failed."""
    script, log = tmp_path / "fails.py", tmp_path / "log"
    script.write_text(FAILS)
    line = f"torchrun --standalone --nproc-per-node 2 {script}"
    assert started(command(line), log).wait() != 0
    said = "rank 0 says: learner rank 1 failed: ValueError: no such thing. posttrain resume"
    assert said in log.read_text()
