"""Several engines that sample as one: the same tokens, whoever serves, dies, hangs or is wrong."""

import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from distributed.replicas import PROBE, InProcess, pool_of
from models.families import build
from rollout.cases import END, drawn, largest_error, ragged, spell
from small_model import small_model

from posttrain.distributed.engine_pool import EnginePool
from posttrain.distributed.pool_member import Probe
from posttrain.learn.learner import LocalLearner
from posttrain.learn.optim import adamw
from posttrain.protocols import Engine
from posttrain.rollout.engines import NativeEngine, ScriptedEngine
from posttrain.rollout.run_ahead import RunAhead
from posttrain.types import Collected, Prompt, Rollout, Sampling, Turn

PROMPTS = ragged(3, 9, 1, 5, 9, 4, 6)
SAMPLING = Sampling(max_new_tokens=6)
ASKED: dict[str, Any] = {"num_samples": 3, "seed": 7}
OPTIONS: dict[str, Any] = {"end_tokens": (END,), "decode": spell}


@pytest.fixture(autouse=True)
def pieces_of_one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small pieces, so that there are several for each engine."""
    monkeypatch.setattr("posttrain.distributed.engine_pool.ROUNDS", 4)


def learner_of(model: torch.nn.Module) -> LocalLearner:
    return LocalLearner(model, adamw(model, learning_rate=1e-3), save=lambda folder: None)


def alone(model: torch.nn.Module) -> list[list[tuple[int, ...]]]:
    return drawn(NativeEngine(model, **OPTIONS).generate(PROMPTS, SAMPLING, **ASKED))


def moved(model: torch.nn.Module, by: float) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(by)


def replicas(count: int, **faults: Callable[[str, int], str]) -> list[InProcess]:
    """Replicas; that of the name ``engine_1`` has its fault."""
    found = [InProcess(f"engine {number}") for number in range(count)]
    for name, fault in faults.items():
        found[int(name.removeprefix("engine_"))].fault = fault
    return found


def decodes(*numbers: int) -> Callable[[str, int], str]:
    """Dies in these calls of decode."""
    return lambda method, number: "killed" if method == "decode" and number in numbers else ""


def test_the_number_of_engines_changes_nothing() -> None:
    """Tokens are those of one engine alone, and log-probs do not depend on who served."""
    model = small_model()
    found = []
    for count in (1, 2, 5):
        pool = pool_of(NativeEngine, model, replicas=replicas(count), **OPTIONS)
        found.append(pool.generate(PROMPTS, SAMPLING, **ASKED))
        pool.close()
    assert drawn(found[0]) == alone(model)
    assert found[0] == found[1] == found[2]
    served = {rollout.engine for group in found[2] for rollout in group}
    assert served <= {f"engine {number}" for number in range(5)}


def test_who_dies_hands_its_pieces_to_others_and_comes_back() -> None:
    model, found = small_model(), replicas(2, engine_1=decodes(1, 2, 5))
    pool = pool_of(NativeEngine, model, replicas=found, **OPTIONS)
    for _ in range(4):
        assert drawn(pool.generate(PROMPTS, SAMPLING, **ASKED)) == alone(model)
    metrics = pool.metrics()
    pool.close()
    deaths = found[1].starts - 1
    assert metrics["cluster/engine_restarts"] == deaths > 0
    assert metrics["cluster/retried_groups"] == deaths  # a piece is a group here
    assert pool.metrics()["cluster/engine_0/tokens_per_second"] == 0.0  # nothing since


def test_who_comes_back_has_the_weights_and_proves_it_before_it_serves() -> None:
    """Its process knows those of the model folder alone; it dies behind the first push."""
    model = small_model()
    order: list[str] = []

    def fault(method: str, number: int) -> str:
        order.append(method)
        return "killed" if (method, number) == ("decode", 1) else ""  # 0 is the probe

    found = replicas(1, engine_0=fault)
    pool = pool_of(NativeEngine, model, replicas=found, **OPTIONS)
    learner = learner_of(model)
    sync = pool.sync(learner)
    order.clear()
    moved(model, 1.3)
    answers = pool.generate(PROMPTS, SAMPLING, **ASKED)
    assert order[:4] == ["decode", "build", "load", "decode"]  # killed, and then in this order
    assert {rollout.version for group in answers for rollout in group} == {0}
    assert drawn(answers) != alone(model)  # what was pushed last, not what the learner has now
    sync(1)
    assert drawn(pool.generate(PROMPTS, SAMPLING, **ASKED)) == alone(model)
    pool.close()


def test_a_restart_that_loads_wrong_weights_is_not_served_from() -> None:
    model = small_model()

    class Stuck(NativeEngine):
        """Takes no weights, and says that it has."""

        def sync(self, learner: Any) -> Any:
            return lambda version: setattr(self, "version", version)

    starts: list[type[NativeEngine]] = [NativeEngine, Stuck]
    found = replicas(1, engine_0=decodes(2))
    pool = pool_of(lambda *a, **k: starts.pop(0)(*a, **k), model, replicas=found, **OPTIONS)
    sync = pool.sync(learner_of(model))
    moved(model, 1.3)
    sync(1)
    with pytest.raises(
        RuntimeError, match=r"engine 0: after the weights of version 1 .*(apart|ot)"
    ):
        pool.generate(PROMPTS, SAMPLING, **ASKED)
    pool.close()


@pytest.mark.parametrize("wrong", ["stuck", "scaled"])
def test_a_wrong_weight_load_is_caught_and_named(wrong: str) -> None:
    """Engine 1 of two keeps the old weights, or scales one tensor of the new ones."""
    model = small_model()

    class Wrong(NativeEngine):
        def sync(self, learner: Any) -> Any:
            real = super().sync(learner)

            def load(version: int) -> None:
                if wrong != "stuck" or not version:
                    real(version)
                if wrong == "scaled" and version:
                    moved(self.model.get_output_embeddings(), 1.1)
                self.version = version

            return load

    def make(*given: Any, **options: Any) -> Engine:
        kind = Wrong if threading.current_thread().name == "engine 1" else NativeEngine
        return kind(*given, **options)

    pool = pool_of(make, model, **OPTIONS)
    sync = pool.sync(learner_of(model))
    moved(model, 1.3)
    with pytest.raises(RuntimeError, match="engine 1: after the weights of version 1"):
        sync(1)
    pool.close()


def test_an_engine_of_another_model_is_refused_before_anything_is_sampled() -> None:
    """One that takes no weights by its log-probs, one of another size by its shapes."""
    pool = pool_of(Fixed, small_model(sharpness=3.0), **OPTIONS)
    with pytest.raises(RuntimeError, match=r"engine \d: .*apart from the learner"):
        pool.sync(learner_of(small_model()))
    pool.close()
    pool = pool_of(NativeEngine, build("llama"), **OPTIONS)
    with pytest.raises(ValueError, match="not a copy of the one that is trained"):
        pool.sync(learner_of(small_model()))
    pool.close()


class Fixed(NativeEngine):
    """Has the weights that it was made with, whatever it is given."""

    def sync(self, learner: Any) -> Any:
        return lambda version: None


def test_all_dead_for_too_long_is_an_error_that_names_them() -> None:
    dead = {f"engine_{n}": lambda method, number: "the machine is gone" for n in range(2)}
    pool = pool_of(
        NativeEngine, small_model(), replicas=replicas(2, **dead), deadline=0.3, **OPTIONS
    )
    with pytest.raises(RuntimeError, match=r"0\.3 s.*engine 0: the machine is gone; engine 1: the"):
        pool.generate(PROMPTS, SAMPLING, **ASKED)
    with pytest.raises(RuntimeError, match="engine 0: the machine is gone"):
        pool.sync(learner_of(small_model()))
    pool.close()


def test_engines_that_die_of_the_weights_again_and_again_are_an_error() -> None:
    """They are built every time, and are never up."""

    def fault(method: str, number: int) -> str:
        return "out of memory" if method == "load" else ""

    said: list[str] = []
    found = replicas(2, engine_0=fault, engine_1=fault)
    pool = pool_of(
        NativeEngine, small_model(), replicas=found, deadline=0.3, say=said.append, **OPTIONS
    )
    errors: list[BaseException] = []

    def push() -> None:
        try:
            pool.sync(learner_of(small_model()))
        except RuntimeError as error:
            errors.append(error)

    pushing = threading.Thread(target=push, daemon=True)
    pushing.start()
    pushing.join(60)
    pool.close()
    assert [re.search(r"0\.3 s.*engine 0: out of memory", str(error)) for error in errors] != []
    assert min(replica.starts for replica in found) > 2
    told = [line for line in said if line.startswith("cluster: engine 1: out of memory; it is")]
    assert 1 <= len(told) <= 2  # when it was up, and when it came up no more


def test_what_kills_every_engine_is_not_tried_for_ever() -> None:
    def fault(method: str, number: int) -> str:
        return "out of memory" if method == "decode" else ""

    both = replicas(2, engine_0=fault, engine_1=fault)
    pool = pool_of(NativeEngine, small_model(), replicas=both, **OPTIONS)
    with pytest.raises(RuntimeError, match=r"5 engines died over the same 1 prompt.*out of memory"):
        pool.generate(PROMPTS, SAMPLING, **ASKED)
    pool.close()


def test_an_error_of_the_engine_is_raised_and_the_pool_goes_on() -> None:
    pool = pool_of(lambda model, **_: ScriptedEngine({"x": ["a"]}), small_model())
    with pytest.raises(ValueError, match="the script has no answer to 'y'"):
        pool.generate([Prompt(id="0", text="y", tokens=(1,))], SAMPLING, **ASKED)
    ((first, *_),) = pool.generate([Prompt(id="0", text="x", tokens=(1,))], SAMPLING, **ASKED)
    assert first.text == "a"
    pool.close()


def test_an_engine_that_cannot_be_made_ends_the_pool_with_its_reason() -> None:
    def broken(model: Any, **_: Any) -> Engine:
        raise ValueError("model: no such folder")

    pool = pool_of(broken, small_model())
    with pytest.raises(ValueError, match="no such folder"):
        pool.generate(PROMPTS, SAMPLING, **ASKED)
    pool.close()


def test_an_environment_is_asked_once_for_each_turn_although_engines_die() -> None:
    asked: list[tuple[int, int]] = []

    def reply(rollout: Rollout, number: int) -> Turn | None:
        asked.append((number, len(rollout.turns)))
        return (
            None if len(rollout.turns) > 2 + number % 2 else Turn(tokens=(2, number % 7), text="")
        )

    model = small_model()
    engine = NativeEngine(model, **OPTIONS)
    expected = engine.generate(PROMPTS, SAMPLING, **ASKED, reply=reply)
    whole = sorted(asked)
    asked.clear()
    found = replicas(2, engine_0=decodes(2, 4), engine_1=decodes(1, 5))
    pool = pool_of(NativeEngine, model, replicas=found, **OPTIONS)
    answers = pool.generate(PROMPTS, SAMPLING, **ASKED, reply=reply)
    pool.close()
    assert drawn(answers) == drawn(expected)
    assert [[r.mask for r in group] for group in answers] == [
        [r.mask for r in group] for group in expected
    ]
    assert sorted(asked) == whole


def test_others_go_on_while_one_waits_for_its_reply() -> None:
    """The first sequence is replied to when all others are over: were it waited for, never."""
    over = threading.Semaphore(0)
    late: Future[Turn | None] = Future()

    def plain(rollout: Rollout, number: int) -> Turn | None:
        return None if len(rollout.turns) > 1 else Turn(tokens=(2, number % 7), text="")

    def reply(rollout: Rollout, number: int) -> Turn | Future[Turn | None] | None:
        if number == 0 and len(rollout.turns) == 1:
            return late
        answer = plain(rollout, number)
        if answer is None:
            over.release()
        return answer

    def answer() -> None:
        others = len(PROMPTS) * ASKED["num_samples"] - 1
        if all(over.acquire(timeout=120) for _ in range(others)):
            late.set_result(Turn(tokens=(2, 0), text=""))
        else:
            late.set_exception(RuntimeError("the others have waited"))

    model = small_model()
    expected = NativeEngine(model, **OPTIONS).generate(PROMPTS, SAMPLING, **ASKED, reply=plain)
    pool = pool_of(NativeEngine, model, replicas=replicas(2), **OPTIONS)
    thread = threading.Thread(target=answer)
    thread.start()
    answers = pool.generate(PROMPTS, SAMPLING, **ASKED, reply=reply)
    thread.join()
    pool.close()
    assert drawn(answers) == drawn(expected)


def test_weights_pushed_in_the_middle_of_a_call_reach_the_pieces_that_come_after() -> None:
    """Nobody stops: each rollout carries the version that sampled it."""
    model, gate, begun = small_model(), threading.Event(), threading.Event()

    def wait(method: str, number: int) -> str:
        if (method, number) == ("decode", 2):  # 0 is the probe
            begun.set()
            gate.wait(20)
        return ""

    pool = pool_of(NativeEngine, model, replicas=replicas(1, engine_0=wait), **OPTIONS)
    sync = pool.sync(learner_of(model))
    answers: list[Any] = []
    sampling = threading.Thread(
        target=lambda: answers.append(pool.generate(PROMPTS, SAMPLING, **ASKED))
    )
    sampling.start()
    begun.wait(20)
    moved(model, 1.3)
    pushing = threading.Thread(target=lambda: sync(1))
    pushing.start()
    while pool.version == 0:
        pass
    gate.set()
    sampling.join()
    pushing.join()
    pool.close()
    versions = [[r.version for r in group] for group in answers[0]]
    assert versions[:2] == [[0] * 3] * 2
    assert versions[2:] == [[1] * 3] * 5
    late = answers[0][2:]
    assert largest_error(model, PROMPTS[2:], answers=late, sampling=SAMPLING) < 5e-6


def test_run_ahead_works_over_a_pool_and_leaves_it_usable_when_it_is_cut_short() -> None:
    """Every group is of the version that is due, though engines die and others repeat it later."""
    model = small_model()
    found = replicas(2, engine_0=decodes(2, 7), engine_1=decodes(5, 11))
    pool = pool_of(NativeEngine, model, replicas=found, **OPTIONS)

    def batches() -> Any:
        for seed in range(9):
            answers = pool.generate(PROMPTS, SAMPLING, num_samples=2, seed=seed)
            yield Collected(rollouts=[rollout for group in answers for rollout in group])

    with RunAhead(batches(), pool.sync(learner_of(model)), max_lag=1) as ahead:
        for version in range(1, 5):
            batch = next(ahead)
            assert {r.version for r in batch.rollouts} == {max(0, version - 2)}
            moved(model, 1.1)
            ahead.sync(version)
    assert pool.metrics()["cluster/engine_restarts"] > 0
    assert drawn(pool.generate(PROMPTS, SAMPLING, **ASKED)) == alone(model)
    pool.close()


def test_a_closed_pool_says_so() -> None:
    found = replicas(2)
    pool: EnginePool = pool_of(NativeEngine, small_model(), replicas=found, **OPTIONS)
    pool.generate(PROMPTS, SAMPLING, **ASKED)
    pool.close()
    pool.close()
    assert sum(each.calls.get("close", 0) for each in found) >= 1  # the engines are closed too
    with pytest.raises(RuntimeError, match="closed"):
        pool.generate(PROMPTS, SAMPLING, **ASKED)


def test_a_probe_compares_what_can_be_compared() -> None:
    known = [Turn(tokens=(1, 2, 3, 4), text="", logprobs=(-1.0, -2.0, -1.0, -1.0))] * 4
    assert PROBE.problem(known, known) == ""
    near = [Turn(tokens=(1, 2, 3, 9), text="", logprobs=(-1.0, -2.0, -1.0, -5.0))] * 4
    assert PROBE.problem(near, known) == ""  # another token, and what it draws after it
    far = [Turn(tokens=(1, 9, 3, 4), text="", logprobs=(-1.0, -2.0, -1.0, -1.0))] * 4
    assert "draws other tokens, 12 of 16" in PROBE.problem(far, known)
    off = [Turn(tokens=(1, 2, 3, 4), text="", logprobs=(-1.0, -2.01, -1.0, -1.0))] * 4
    assert "0.0025 nats a token apart" in PROBE.problem(off, known)
    broken = [Turn(tokens=(1, 2, 3, 4), text="", logprobs=(float("nan"),) * 4)] * 4
    assert PROBE.problem(broken, known)
    assert Probe(prompt=PROBE.prompt, tolerance=0.01).problem(off, known) == ""
