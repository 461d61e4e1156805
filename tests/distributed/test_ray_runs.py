"""One recipe as one process and as several: the same numbers, whatever dies, and clear errors."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faults.ray_processes import PATIENCE, descendants, kill, until
from rich.console import Console
from small_runs import recipe, same_weights, small_run

from posttrain.config import read_recipe
from posttrain.distributed.local_cluster import LocalCluster
from posttrain.distributed.remote_learner import RemoteLearner
from posttrain.runs import RunFolder, read_rollouts
from posttrain.stages.run import run

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "recipes" / "demo.toml"
SHRUNK = {
    "--sft.epochs": "1",
    "--rl.steps": "3",
    "--rl.prompts_per_step": "16",
    "--rl.evaluate_every": "0",
    "--rl.check": "off",
    "--eval.problems": "20",
}
HALVES = {"--cluster.cpus_per_learner": "0.5"}


def posttrain(*arguments: object) -> subprocess.Popen[str]:
    """The command, in a process of its own."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'tests'}",
        "COLUMNS": "200",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "posttrain.cli", *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Two nodes of one CPU each, as ``posttrain cluster up`` starts them."""
    process = posttrain("cluster", "up", "--nodes", 2, "--cpus", 1)
    assert process.stdout is not None
    text = ""
    try:
        for line in process.stdout:
            text += line
            if "Ctrl-C ends it" in line:
                break
        found = re.search(r'address = "(127\.0\.0\.1:\d+)"', text)
        assert found, text
        yield found[1]
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0
        process.stdout.close()


def demo(folder: Path, **overrides: Any) -> RunFolder:
    """The demo, shrunk, in this process."""
    given = {**SHRUNK, "--run.folder": str(folder), **overrides}
    console = Console(file=io.StringIO(), width=200)
    return run(read_recipe(DEMO, overrides=_flat(given)), console=console).folder


def _flat(given: dict[str, Any]) -> list[str]:
    return [str(word) for pair in given.items() for word in pair]


def numbers(folder: RunFolder) -> list[tuple[str, int, float, float]]:
    """Loss and gradient norm of every step of both stages."""
    return [
        (stage, row["step"], row["loss/total"], row["train/gradient_norm"])
        for stage in ("sft", "rl")
        for row in folder.stage(stage).records()
        if "loss/total" in row
    ]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, int, float, float]]:
    return numbers(demo(tmp_path_factory.mktemp("demo") / "one"))


@pytest.mark.parametrize("layout", ["1+0", "1+1", "2+0", "2+2"])
def test_the_demo_has_the_same_losses_and_gradients_however_it_is_spread(
    one_process: list[Any], address: str, layout: str, tmp_path: Path
) -> None:
    learners, engines = layout.split("+")
    spread = {"--cluster.address": address, "--cluster.learners": learners, **HALVES}
    if engines != "0":
        spread |= {"--cluster.engines": engines, "--cluster.cpus_per_engine": "0.5"}
    found = numbers(demo(tmp_path / "run", **spread))
    assert len(found) == len(one_process) == 13 + 3
    for mine, theirs in zip(found, one_process, strict=True):
        assert mine[:2] == theirs[:2]
        assert mine[2:] == pytest.approx(theirs[2:], rel=1e-5, abs=1e-7)


def test_completions_go_on_under_new_weights_on_any_engine(address: str, tmp_path: Path) -> None:
    """Partial rollouts of two engines: tokens, their versions and what is learned from them."""
    parts = {"--rl.max_lag": "2", "--rl.partial": "2", "--rl.steps": "4"}
    engines = {"--cluster.engines": "2", "--cluster.cpus_per_engine": "0.5", **HALVES}
    here = demo(tmp_path / "here", **parts)
    there = demo(tmp_path / "there", **parts, **{"--cluster.address": address, **engines})
    for mine, theirs in zip(numbers(there), numbers(here), strict=True):
        assert mine[2:] == pytest.approx(theirs[2:], rel=1e-5, abs=1e-7)
    names = ("completion_tokens", "token_versions")
    first, second = (read_rollouts(run.stage("rl").rollouts) for run in (here, there))
    assert [[row[n] for n in names] for row in first] == [[row[n] for n in names] for row in second]
    assert any(row["token_versions"] == [0, 0, 0, 1] for row in first)


CLUSTER = {"address": "local", "cpus_per_learner": 0.5}


def test_every_stage_learns_elsewhere_what_it_learns_here(tmp_path: Path) -> None:
    """SFT, preferences, a reward model, and PPO with a critic that starts from it."""
    sections: dict[str, Any] = {
        "prefer": {"samples": 4, "rewards": {"length": {"target": 1, "per_token": 0.1}}},
        "reward": {"batch_size": 4, "learning_rate": 1e-3},
        "rl": {"algorithm": "ppo", "steps": 2, "critic": {"source": "reward"}},
    }
    small_run(recipe(tmp_path / "here", **sections))
    small_run(recipe(tmp_path / "there", cluster=CLUSTER, **sections))
    for stage in ("sft", "reward", "rl"):
        here, there = (RunFolder(tmp_path / name).stage(stage) for name in ("here", "there"))
        files = [(each.model / "model.safetensors").read_bytes() for each in (here, there)]
        assert files[0] == files[1]
        losses = [[row.get("loss/total") for row in each.records()] for each in (here, there)]
        assert losses[0] == losses[1]
        assert there.records()[-1]["cluster/learner_restarts"] == 0
    verdicts = [RunFolder(tmp_path / n).stage_record("reward") for n in ("here", "there")]
    assert verdicts[0] is not None
    assert verdicts[1] is not None
    assert verdicts[0]["verdict"] == verdicts[1]["verdict"]
    assert not (tmp_path / "there" / ".cluster").exists()


def test_a_rank_that_is_killed_in_a_run_is_counted_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rl = {"steps": 8}
    small_run(recipe(tmp_path / "here", rl=rl))
    learned, killed = RemoteLearner.step, list[int]()

    def step(self: RemoteLearner, *given: Any) -> Any:
        if not killed and _lines(tmp_path / "there" / "rl" / "metrics.jsonl"):
            ranks: Any = self._ranks
            killed.extend(int(re.findall(r"process (\d+)", name)[0]) for name in ranks._names)
            assert all(map(kill, killed))
        return learned(self, *given)

    monkeypatch.setattr(RemoteLearner, "step", step)
    done_run, printed = small_run(recipe(tmp_path / "there", rl=rl, cluster=CLUSTER))
    assert same_weights(tmp_path / "here" / "rl" / "model", tmp_path / "there" / "rl" / "model")
    assert done_run.folder.stage("rl").records()[-1]["cluster/learner_restarts"] == 1
    assert "all ranks are started anew" in printed


def test_a_driver_that_is_killed_leaves_nobody_behind_and_its_run_goes_on(
    tmp_path: Path, address: str
) -> None:
    folder = tmp_path / "there"
    steps = {"--rl.steps": "20", "--rl.save_every": "2"}  # it is killed long before the last one
    words = {**SHRUNK, **steps, "--run.folder": str(folder)}
    cluster = {"--cluster.address": address, **HALVES}
    expected = demo(tmp_path / "here", **steps)
    driver = posttrain("run", DEMO, *_flat({**words, **cluster}))
    saved = folder / "rl" / "checkpoints"
    until(lambda: list(saved.glob("step-*")) or driver.poll() is not None, why="a checkpoint")
    assert driver.poll() is None, driver.communicate()[0]
    driver.kill()
    driver.wait()
    assert driver.stdout is not None
    driver.stdout.close()
    until(lambda: not _ranks(), why="the learner's processes are to end with their driver")
    resumed = posttrain("resume", folder)
    text, _ = resumed.communicate(timeout=PATIENCE)
    assert resumed.returncode == 0, text
    assert same_weights(expected.stage("rl").model, folder / "rl" / "model")
    until(lambda: not _ranks(), why="they end with a run that ends well, too")


def _ranks() -> list[int]:
    """Learner ranks on the cluster of this module, which is below this process."""
    return [pid for pid, title in descendants(os.getpid()) if title.startswith("ray::LearnerRank")]


def test_two_drivers_on_one_run_folder(tmp_path: Path, address: str) -> None:
    folder = tmp_path / "run"
    words = _flat({**SHRUNK, "--run.folder": str(folder), "--cluster.address": address, **HALVES})
    first = posttrain("run", DEMO, *words)
    until(lambda: (folder / ".lock").exists() and (folder / ".lock").read_text(), why="the lock")
    first.send_signal(signal.SIGSTOP)  # it might end before the second one has begun
    second = posttrain("run", DEMO, *words)
    text, _ = second.communicate(timeout=PATIENCE)
    first.send_signal(signal.SIGCONT)
    assert second.returncode == 2
    assert f"process {first.pid} on" in text
    assert "is writing into this run folder" in text
    text, _ = first.communicate(timeout=PATIENCE)
    assert first.returncode == 0, text


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ({"address": "127.0.0.1:1"}, "nothing answers at 127.0.0.1:1"),
        ({"address": "nowhere"}, "'nowhere' is not the address of a Ray cluster"),
        ({"address": "local", "cpus_per_learner": 4096.0}, "asks for 4096 CPUs and no GPU in 1"),
        ({"address": "local", "gpus_per_learner": 99.0}, "asks for 1 CPU and 99 GPUs"),
    ],
)
def test_what_cannot_be_is_said_before_a_stage_begins(
    tmp_path: Path, cluster: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        small_run(recipe(tmp_path / "run", cluster=cluster))
    assert not (tmp_path / "run" / "sft").exists()


@pytest.fixture
def nodes() -> Iterator[LocalCluster]:
    """A cluster whose nodes come and go; its head has no room for a learner."""
    cluster = LocalCluster(nodes=1, cpus=0)
    yield cluster
    cluster.close()


def test_a_node_that_joins_late_is_waited_for(nodes: LocalCluster, tmp_path: Path) -> None:
    words = {**SHRUNK, "--run.folder": str(tmp_path / "run"), "--run.stages": "sft"}
    driver = posttrain("run", DEMO, *_flat({**words, "--cluster.address": nodes.address}))
    assert driver.stdout is not None
    lines: list[str] = []
    try:
        for line in driver.stdout:
            lines.append(line)
            if "waiting up to 600 s for a node to join" in line:
                nodes.add_node(cpus=3)
        driver.wait(PATIENCE)
    finally:
        driver.kill()
        driver.stdout.close()
    text = "".join(lines)
    assert driver.returncode == 0, text
    assert "the recipe asks for 1 CPU and no GPU in 1 process, and the 1 node there is has" in text
    assert re.search(r"node \S+ at 127\.0\.0\.1 \(\w{8}\) has joined with 3 CPUs and no GPU", text)


def test_the_node_of_a_learner_dies_and_it_goes_on_on_another(
    nodes: LocalCluster, tmp_path: Path
) -> None:
    steps = {"--rl.steps": "60"}
    expected = demo(tmp_path / "here", **steps)
    folder, first = tmp_path / "there", nodes.add_node(cpus=1)
    words = {**SHRUNK, **steps, "--run.folder": str(folder), "--cluster.address": nodes.address}
    driver = posttrain("run", DEMO, *_flat(words))
    metrics = folder / "rl" / "metrics.jsonl"
    until(lambda: driver.poll() is not None or _lines(metrics), why="the first step")
    nodes.remove_node(first)
    nodes.add_node(cpus=1)
    text, _ = driver.communicate(timeout=PATIENCE)
    assert driver.returncode == 0, text
    assert same_weights(expected.stage("rl").model, folder / "rl" / "model")
    assert RunFolder(folder).stage("rl").records()[-1]["cluster/learner_restarts"] >= 1
    assert "all ranks are started anew" in text


def _lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def test_the_status_of_a_cluster(address: str) -> None:
    asked = posttrain("cluster", "status", address)
    text, _ = asked.communicate(timeout=PATIENCE)
    assert asked.returncode == 0, text
    nodes = re.findall(r"at 127\.0\.0\.1 \(\w{8}\): 1 CPU and no GPU", text)
    assert len(nodes) == 2
    assert "free: " in text


def test_its_ports_listen_on_this_machine_only(address: str) -> None:
    """Of all processes below this one, as the kernel knows them."""
    below = {pid for pid, _ in descendants(os.getpid())}
    sockets = {
        link.removeprefix("socket:[").removesuffix("]")
        for pid in below
        for link in _links(pid)
        if link.startswith("socket:[")
    }
    listening = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for row in Path(table).read_text().splitlines()[1:]:
            words = row.split()
            if words[3] == "0A" and words[9] in sockets:
                listening.append(words[1].partition(":")[0])
    assert len(listening) >= 5
    assert {place[-8:] for place in listening} == {"0100007F"}


def _links(pid: int) -> list[str]:
    found = []
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found.append(os.readlink(entry))
    return found
