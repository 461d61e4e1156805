"""Environments that fail in every way, beside those that do not: each is broken alone, by kind."""

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from faults.faulty_env import TURNS, FaultyEnv

from posttrain.envs import env_pool
from posttrain.envs.env_pool import EnvPool
from posttrain.envs.plain_answers import Failure
from posttrain.forked import dies_with_parent
from posttrain.rollout.collect import collect_scored
from posttrain.rollout.engines.scripted import ScriptedEngine, code_points
from posttrain.rollout.environment import Environment
from posttrain.types import Collected, Observation, Prompt, Rollout, Sampling, Score, Turn

# What fails, the kind that it is counted as, and the state of its score.
FAULTS = {
    "raises": ("raised", "invalid"),
    "exits": ("raised", "invalid"),
    "hangs": ("timeout", "timeout"),
    "eats": ("memory", "invalid"),
    "huge": ("too_long", "invalid"),
    "kills": ("crashed", "crashed"),
    "fickle": ("changed", "invalid"),
}
SECONDS = 10.0  # the limit where one hangs: the others have to keep it too
WELL = [f"well/{number}" for number in range(8)]
END = Score(value=1.5, parts={"env": 1.5, "env/earned": 0.5})


class Nothing:
    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [Score(value=0.0) for _ in rollouts]


@contextmanager
def environment(
    env: Any, *, workers: int = 2, seconds: float = 30.0, **limits: Any
) -> Iterator[Environment]:
    pool = EnvPool(env, workers=workers, threads=4, seconds=seconds, memory_mb=512)
    made = Environment(pool=pool, encode=lambda said, turn: code_points(said), **limits)
    try:
        yield made
    finally:
        made.close()


def collected(env: Any, names: Sequence[str], *, num_samples: int = 2, **options: Any) -> Collected:
    return collect_scored(
        [Prompt(id=name, text=name, tokens=(1, 2, 3)) for name in names],
        Sampling(max_new_tokens=8),
        engine=ScriptedEngine(lambda prompt, sample: f"{sample}."),
        scorer=Nothing(),
        num_samples=num_samples,
        seed=5,
        env=env,
        **options,
    )


def states(found: Collected, *kinds: str) -> list[str]:
    """The states of the scores of these prompts."""
    rollouts = [r for r in found.rollouts if r.prompt.id.split("/")[0] in kinds]
    return [r.score.state for r in rollouts if r.score is not None]


def errors(found: Collected) -> dict[str, float]:
    return {name: count for name, count in found.env.items() if name.startswith("errors/")}


HANGS = pytest.param("hangs", marks=pytest.mark.slow)


@pytest.mark.parametrize("fault", [HANGS, *(fault for fault in FAULTS if fault != "hangs")])
def test_one_that_fails_is_broken_alone(tmp_path: Path, fault: str) -> None:
    """The others have their score, and every word that they have without it."""
    kind, state = FAULTS[fault]
    names = [*WELL[:4], f"{fault}/0", *WELL[4:]]
    with environment(FaultyEnv(tmp_path / "sound", fails=False), workers=0) as sound:
        expected = collected(sound, names)
    env = FaultyEnv(tmp_path / "faulty")
    with environment(env, seconds=SECONDS if fault == "hangs" else 60.0) as faulty:
        found = collected(faulty, names)
    assert errors(found) == {f"errors/{kind}": 2.0}
    assert states(found, fault) == [state] * 2
    for rollout, sound_one in zip(found.rollouts, expected.rollouts, strict=True):
        assert sound_one.score == END
        if rollout.prompt.id in WELL:
            assert rollout == sound_one
        elif fault != "fickle":
            assert rollout.turns == sound_one.turns[:3]
    assert (found.env["restarts"] > 0) == (fault in ("hangs", "eats", "kills", "fickle"))
    check_closed(env, found)


def check_closed(env: FaultyEnv, found: Collected) -> None:
    """No state is closed twice, and of every episode that ended well the last one is closed."""
    begun, closed = env.notes("begun"), env.notes("closed")
    assert max(Counter(closed).values()) == 1
    assert set(closed) <= set(begun)
    well = dict(each for each in begun if each[0].startswith("well"))
    assert len(well) == sum(rollout.prompt.id in WELL for rollout in found.rollouts)
    assert well.items() <= set(closed)


@pytest.mark.slow
def test_all_at_once(tmp_path: Path) -> None:
    """Every fault among many that are well and one that is slow."""
    names = [*WELL[:4], *(f"{fault}/0" for fault in FAULTS), "slow/0", *WELL[4:]]
    with environment(FaultyEnv(tmp_path / "sound", fails=False), workers=0) as sound:
        expected = collected(sound, names, num_samples=1)
    env = FaultyEnv(tmp_path / "faulty")
    with environment(env, seconds=SECONDS) as faulty:
        found = collected(faulty, names, num_samples=1)
    counted = Counter(f"errors/{kind}" for kind, _ in FAULTS.values())
    assert errors(found) == {name: float(count) for name, count in counted.items()}
    for fault, (_, state) in FAULTS.items():
        assert states(found, fault) == [state]
    pairs = zip(found.rollouts, expected.rollouts, strict=True)
    kept = [(one, other) for one, other in pairs if one.prompt.id.startswith(("well", "slow"))]
    assert len(kept) == 9
    assert all(one == other for one, other in kept)
    check_closed(env, found)


def test_an_episode_is_closed_once_in_the_worker_where_it_was_played(tmp_path: Path) -> None:
    env = FaultyEnv(tmp_path / "env")
    with environment(env) as sound:
        found = collected(sound, [*WELL, "raises/0", "huge/0", "unclosed/0"])
    assert sorted(env.notes("begun")) == sorted(env.notes("closed"))
    assert len(env.notes("begun")) == 2 * 11
    assert {len(rollout.turns) for rollout in found.rollouts[:16]} == {2 * TURNS - 1}


@pytest.mark.parametrize("fault", ["raises_behind", "unclosed"])
def test_a_call_that_is_tried_alone_is_closed_behind_it_however_it_went(
    tmp_path: Path, fault: str
) -> None:
    """It was under way when another one killed its worker; what closing does changes no answer."""
    env = FaultyEnv(tmp_path / "env")
    pool = EnvPool(env, workers=1, threads=2, seconds=30.0, memory_mb=512)
    turn = Turn(tokens=(1,), text="a")
    episodes = [pool.open(Prompt(id=f"{name}/0", text="?"), seed=1) for name in (fault, "kills")]
    for episode in episodes:
        assert isinstance(pool.ask(episode, turn).result(), Observation)
    answers = [pool.ask(episode, turn) for episode in episodes]
    first, killed = (answer.result() for answer in answers)
    if fault == "unclosed":
        assert isinstance(first, Observation)
    else:
        assert isinstance(first, Failure)
        assert first.kind == "raised"
    assert isinstance(killed, Failure)
    assert killed.kind == "crashed"
    for episode in episodes:
        pool.close(episode)
    pool.shutdown()
    last = [each for each in env.notes("begun") if each[0].startswith(fault)][-1]
    assert env.notes("closed").count(last) == 1
    assert pool.close_failures == (fault == "unclosed")


def test_one_that_cannot_be_closed_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where closing hangs, and its worker is replaced for it."""
    monkeypatch.setattr(env_pool, "CLOSING", 600.0)  # all the time that it takes
    env = FaultyEnv(tmp_path / "env")
    pool = EnvPool(env, workers=1, threads=4, seconds=2.0, memory_mb=512)
    turn = Turn(tokens=(1,), text="a")
    for name in ("well", "unclosed", "closes_never"):
        episode = pool.open(Prompt(id=f"{name}/0", text="?"), seed=1)
        pool.ask(episode, turn).result()
        pool.close(episode)
    pool.shutdown()
    assert pool.close_failures == 2


def test_several_that_hang_in_one_worker_have_one_limit_together(tmp_path: Path) -> None:
    """None is asked anew to hang again; who was under way beside them ends where it was."""
    env = FaultyEnv(tmp_path / "env")
    pool = EnvPool(env, workers=1, threads=4, seconds=3.0, memory_mb=512)
    turn = Turn(tokens=(1,), text="a")
    names = ("hangs/0", "hangs/1", "hangs/2", "well/0")
    episodes = [pool.open(Prompt(id=name, text="?"), seed=1) for name in names]
    for episode in episodes:
        pool.ask(episode, turn).result()
    *hung, well = [pool.ask(episode, turn) for episode in episodes]
    for answer in hung:
        failure = answer.result()
        assert isinstance(failure, Failure)
        assert failure.kind == "timeout"
    assert isinstance(well.result(), Observation)
    assert pool.ask(episodes[-1], turn).result() == 1.0
    for episode in episodes:
        pool.close(episode)
    pool.shutdown()
    assert pool.restarts == 1
    begun = Counter(name.split(":")[0] for name, _ in env.notes("begun"))
    assert begun == {"hangs/0": 1, "hangs/1": 1, "hangs/2": 1, "well/0": 2}


def test_answers_that_take_long_are_spoken_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait for a file, which is made when it is told that they are waited for."""
    monkeypatch.setattr(env_pool, "LONG", 0.1)
    env, told = FaultyEnv(tmp_path / "env"), []

    def tell(line: str) -> None:
        told.append(line)
        (env.folder / "enough").touch()

    pool = EnvPool(env, workers=1, threads=4, seconds=30.0, memory_mb=512, tell=tell)
    turn = Turn(tokens=(1,), text="a")
    episodes = [pool.open(Prompt(id=f"waits/{n}", text="?"), seed=1) for n in range(2)]
    for episode in episodes:
        pool.ask(episode, turn).result()
    for answer in [pool.ask(episode, turn) for episode in episodes]:
        assert isinstance(answer.result(), Observation)
    pool.shutdown()
    assert "waited for, the reply to prompt 'waits/" in told[0]
    assert told[0].startswith("environments: ")
    assert told[0].endswith("environment.seconds = 30 is the limit of each")


class Starts:
    """Starts a process with a session of its own, as a library may, and says which."""

    def start(self, prompt: Prompt) -> None: ...

    def reply(self, state: None, turn: Turn) -> str:
        sleeps = [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"]
        started = subprocess.Popen(
            dies_with_parent(sleeps), start_new_session=True, stdout=subprocess.PIPE
        )
        assert started.stdout is not None
        started.stdout.readline()  # it runs
        return str(started.pid)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_what_a_worker_started_in_a_session_of_its_own_ends_with_it() -> None:
    pool = EnvPool(Starts, workers=1, threads=1, seconds=60.0, memory_mb=512)
    episode = pool.open(Prompt(id="0", text="?"), seed=1)
    said = pool.ask(episode, Turn(tokens=(), text="")).result()
    place = Path("/proc") / str(said)
    assert place.exists()
    pool.shutdown()
    for _ in range(3000):
        try:
            if place.joinpath("stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except OSError:
            return
        time.sleep(0.01)
    raise AssertionError("it is still there")


@pytest.mark.slow
def test_one_that_lets_no_other_thread_run_is_tried_again_last(tmp_path: Path) -> None:
    """Nobody who waits behind it in its worker waits for it a second time."""
    pool = EnvPool(FaultyEnv(tmp_path / "env"), workers=1, threads=4, seconds=5.0, memory_mb=512)
    turn, ended = Turn(tokens=(1,), text="a"), []
    names = ("holds", "well", "raises")
    episodes = {name: pool.open(Prompt(id=f"{name}/0", text="?"), seed=1) for name in names}
    for episode in episodes.values():
        pool.ask(episode, turn).result()
    asked = {name: pool.ask(episode, turn) for name, episode in episodes.items()}
    for name, future in asked.items():
        future.add_done_callback(lambda _, name=name: ended.append(name))
    answers = {name: future.result() for name, future in asked.items()}
    pool.shutdown()
    assert isinstance(answers["well"], Observation)
    kinds = {name: said.kind for name, said in answers.items() if isinstance(said, Failure)}
    assert kinds == {"holds": "timeout", "raises": "raised"}
    assert ended[-1] == "holds"
