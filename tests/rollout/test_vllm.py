"""What goes wrong with vLLM's servers, played by one of ours: test_real_vllm.py has the others."""

import copy
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout.cases import drawn, largest_error, ragged, spell
from small_model import OPTIONS
from vllm_fake import FakeServer

from posttrain.distributed.engine_host import EngineHost, Sequences
from posttrain.learn.learner import LocalLearner
from posttrain.learn.optim import adamw
from posttrain.models.load import Policy, load_policy
from posttrain.models.save import save_policy, with_adapters
from posttrain.rollout.engines import vllm, vllm_server
from posttrain.rollout.engines.vllm import VllmEngine, vllm_engine
from posttrain.rollout.engines.vllm_server import ServerLostError
from posttrain.types import Part, Rollout, Sampling, Turn

PROMPTS = ragged(3, 5, vocabulary=100)
SAMPLING = Sampling(max_new_tokens=6)
Serve = Callable[..., FakeServer]
Connect = Callable[..., VllmEngine]


@pytest.fixture
def policy() -> Policy:
    return load_policy("tiny", seed=4, options=OPTIONS)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for a server that is not there; one that is there has all the time it needs."""
    monkeypatch.setattr(vllm, "HEALTH_DEADLINE", 0.0)
    monkeypatch.setattr(vllm_server, "HEALTH_DEADLINE", 600.0)


@pytest.fixture
def serve(policy: Policy, tmp_path: Path) -> Iterator[Serve]:
    """Starts servers on the policy's model."""
    save_policy(policy, tmp_path / "model")
    running: list[FakeServer] = []

    def start(**told: Any) -> FakeServer:
        running.append(FakeServer(str(tmp_path / "model"), **told))
        return running[-1]

    yield start
    for server in running:
        server.stop()


@pytest.fixture
def connect(policy: Policy, tmp_path: Path) -> Iterator[Connect]:
    """Makes engines that ask these servers."""
    made: list[VllmEngine] = []

    def make(*servers: FakeServer, deadline: float = 600.0, **options: Any) -> VllmEngine:
        address = [server.address for server in servers]
        options = {"address": address, "folder": str(tmp_path), "deadline": deadline, **options}
        made.append(vllm_engine(policy, spell, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def learner_of(policy: Policy) -> LocalLearner:
    return LocalLearner(policy.model, adamw(policy.model, learning_rate=1e-3), save=lambda _: None)


def moved(policy: Policy, by: float = 1.5) -> None:
    with torch.no_grad():
        for weight in policy.model.parameters():
            weight.mul_(by)


def test_tokens_do_not_depend_on_how_many_servers_there_are(
    policy: Policy, serve: Serve, connect: Connect
) -> None:
    """One server or three, which are all used: sequence p·G + g draws by a seed of its own."""
    three = [serve() for _ in range(3)]
    engines = [connect(serve()), connect(*three)]
    one, many = (e.generate(PROMPTS, SAMPLING, num_samples=4, seed=3) for e in engines)
    assert drawn(one) == drawn(many)
    assert largest_error(policy.model, PROMPTS, answers=many, sampling=SAMPLING) < 1e-4
    assert all(server.asked.count("/v1/completions") > 4 for server in three)  # 4 are the probe


def test_every_server_gets_the_weights_and_proves_it(
    policy: Policy, serve: Serve, connect: Connect
) -> None:
    servers = [serve(), serve()]
    engine = connect(*servers)
    sync = engine.sync(learner_of(policy))
    moved(policy)
    sync(1)
    after = engine.generate(PROMPTS, SAMPLING, num_samples=2, seed=0)
    assert {rollout.version for group in after for rollout in group} == {1}
    assert largest_error(policy.model, PROMPTS, answers=after, sampling=SAMPLING) < 1e-4
    for server in servers:
        assert server.asked.index("/pause") < server.asked.index("/resume")
        assert Path(server.folder).is_dir()
    assert len(list(Path(servers[0].folder).parent.glob("[0-9]*"))) == 1  # older ones are gone


def test_weights_that_come_without_their_learner_are_proven_too(
    policy: Policy, serve: Serve, connect: Connect
) -> None:
    """As in the host of a cluster's engine, whose own model takes them and is asked instead."""
    trained = copy.deepcopy(policy)
    host = EngineHost()
    host.build(lambda: connect(serve(), temperature=0.7))
    moved(trained)
    host.load(1, {n: (w.detach().numpy(), "float32") for n, w in trained.model.named_parameters()})
    asked = Sequences(prompts=PROMPTS, sampling=SAMPLING, seed=3, part=Part(numbers=(4, 7), turn=0))
    turns = host.decode(asked)
    answers = [
        [Rollout(prompt=prompt, turns=(turn,), group=0)]
        for prompt, turn in zip(PROMPTS, turns, strict=True)
    ]
    assert {turn.version for turn in turns} == {1}
    assert largest_error(trained.model, PROMPTS, answers=answers, sampling=SAMPLING) < 1e-4


@pytest.fixture
def lora(tmp_path: Path) -> Policy:
    """A policy with an adapter that says something; its base is in a folder beside."""
    save_policy(load_policy("tiny", seed=4, options=OPTIONS), tmp_path / "model")
    plain = load_policy(str(tmp_path / "model"))
    made = with_adapters(plain, {"rank": 4}, seed=0, folder=tmp_path)
    adapted(made, by=0.05)
    return made


def adapted(policy: Policy, *, by: float) -> None:
    """Move the adapters alone, as a step does."""
    generator = torch.Generator().manual_seed(round(1000 * by))
    with torch.no_grad():
        for name, weight in policy.model.named_parameters():
            if name.endswith(".adapter.B"):
                weight.copy_(by * torch.randn(weight.shape, generator=generator))


def test_adapters_are_pushed_as_such_and_proven(lora: Policy, tmp_path: Path) -> None:
    """A folder of peft beside the base, under a name of its own; the one before is unloaded."""
    server = FakeServer(str(tmp_path / "model"))
    engine = vllm_engine(lora, spell, address=server.address, folder=str(tmp_path))
    try:
        sync = engine.sync(learner_of(lora))
        for version in (1, 2):
            adapted(lora, by=0.1 * version)
            sync(version)
            after = engine.generate(PROMPTS, SAMPLING, num_samples=2, seed=0)
            assert {rollout.version for group in after for rollout in group} == {version}
            assert largest_error(lora.model, PROMPTS, answers=after, sampling=SAMPLING) < 1e-4
            assert list(server.adapters) == [server.folder]
        files = {path.name for path in Path(server.folder).iterdir()}
        assert {"adapter_config.json", "adapter_model.safetensors"} <= files
        assert "model.safetensors" not in files
        assert "/pause" not in server.asked
    finally:
        engine.close()
        server.stop()


@pytest.mark.parametrize("lost", ["unapplied", "stale"])
def test_an_adapter_that_does_not_arrive_is_refused(
    lost: str, lora: Policy, tmp_path: Path
) -> None:
    """A server that says it took it, and samples from its base, or from the adapter before."""
    server = FakeServer(str(tmp_path / "model"))
    engine = vllm_engine(lora, spell, address=server.address, folder=str(tmp_path))
    kept = server.model if lost == "unapplied" else next(iter(server.adapters.values()))
    try:
        sync = engine.sync(learner_of(lora))
        adapted(lora, by=0.3)
        server.adapters = _Kept(kept)
        with pytest.raises(ValueError, match="does not sample from the weights it was sent"):
            sync(1)
    finally:
        engine.close()
        server.stop()


class _Kept(dict[str, Any]):
    """Answers with the same model whatever is asked for."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._model = model

    def __getitem__(self, name: str) -> Any:
        return self._model

    def pop(self, *given: Any) -> Any:
        return self._model


def test_a_server_that_takes_no_adapters_is_told_so(lora: Policy, tmp_path: Path) -> None:
    server = FakeServer(str(tmp_path / "model"))
    server.faults["/v1/load_lora_adapter"] = lambda: (404, {"detail": "Not Found"})
    try:
        with pytest.raises(ValueError, match=r"It takes no adapters: start it .* --enable-lora"):
            vllm_engine(lora, spell, address=server.address, folder=str(tmp_path))
    finally:
        server.stop()


def test_an_update_that_fails_in_silence_is_an_error(
    policy: Policy, serve: Serve, connect: Connect
) -> None:
    """The server says that it took the weights, and samples from the old ones."""
    server = serve()
    sync = connect(server).sync(learner_of(policy))
    moved(policy)
    server.model = load_policy(server.folder).model
    server.call = lambda method, *given: (  # type: ignore[method-assign]
        setattr(server, "folder", given[0])
        if method == "posttrain_load"
        else FakeServer.call(server, method)
    )
    with pytest.raises(ValueError, match=r"does not sample from the weights.*nats a token apart"):
        sync(1)


def test_large_logits_in_half_precision_are_rounding(
    policy: Policy, serve: Serve, connect: Connect
) -> None:
    """Where log-probs lie far apart, the model's own in half precision decide; others fail."""
    with torch.no_grad():
        shared = torch.full((policy.model.config.hidden_size,), 3.0)
        policy.model.get_input_embeddings().weight.add_(shared)
        policy.model.lm_head.weight.add_(shared)
        logits = policy.model(torch.tensor([[5, 9, 3]])).logits
    assert logits.mean() > 40
    assert logits.std(-1).max() < 5
    server = serve(dtype="bfloat16")
    sync = connect(server).sync(learner_of(policy))
    server.call = lambda method, *given: (  # type: ignore[method-assign]
        setattr(server, "folder", given[0])
        if method == "posttrain_load"
        else FakeServer.call(server, method)
    )
    with torch.no_grad():
        policy.model.lm_head.weight.add_(torch.randn_like(policy.model.lm_head.weight))
    with pytest.raises(ValueError, match=r"does not sample from the weights.*(nats|other tokens)"):
        sync(1)


def test_what_was_written_wrongly_is_no_rounding(
    policy: Policy, serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The servers have what the folder has, in half precision, and it is not the learner's."""
    sync = connect(serve(dtype="bfloat16")).sync(learner_of(policy))

    def written(policy: Policy, folder: Path, *, weights: dict[str, torch.Tensor]) -> None:
        changed = {name: 3 * weight.roll(1, 0) for name, weight in weights.items()}
        save_policy(policy, folder, weights=changed)

    monkeypatch.setattr(vllm, "save_policy", written)
    with pytest.raises(ValueError, match=r"does not sample from the weights.*(nats|other tokens)"):
        sync(1)


def test_weights_that_are_no_numbers_are_not_sampled_from(
    policy: Policy, serve: Serve, connect: Connect
) -> None:
    server = serve()
    sync = connect(server).sync(learner_of(policy))
    with torch.no_grad():
        policy.model.lm_head.weight[0] = torch.nan
    with pytest.raises(ValueError, match=r"lm_head.weight has NaN.*learning rate"):
        sync(1)


@pytest.mark.parametrize("fault", ["closed", "failed", "hung"])
def test_a_server_that_is_lost_has_its_requests_sent_elsewhere(
    fault: str, serve: Serve, connect: Connect
) -> None:
    """No sequence is lost, and it comes back once it has the current weights and has proven it."""
    over = threading.Event()
    good, bad = serve(), serve()
    engine = connect(good, bad)
    expected = engine.generate(PROMPTS, SAMPLING, num_samples=4, seed=3)

    def fail() -> Any:
        if fault == "closed":
            raise ConnectionAbortedError
        if fault == "hung":
            over.wait()
        return 500, {"error": "EngineCore encountered an issue"}

    bad.faults["/v1/completions"] = fail
    asked = engine._fleet.servers[1]
    patience, asked.deadline = asked.deadline, 0.5 if fault == "hung" else asked.deadline
    with pytest.warns(UserWarning, match=rf"{bad.address}.*its requests went elsewhere"):
        again = engine.generate(PROMPTS, SAMPLING, num_samples=4, seed=3)
    assert drawn(again) == drawn(expected)
    asked.deadline = patience
    over.set()
    before = len(bad.asked)
    engine.generate(PROMPTS, SAMPLING, num_samples=4, seed=3)  # it still fails: nothing is sent
    assert bad.asked[before:].count("/v1/completions") == 1  # the probe's
    del bad.faults["/v1/completions"]
    bad.folder = "weights of somebody else"
    before = len(bad.asked)
    assert drawn(engine.generate(PROMPTS, SAMPLING, num_samples=4, seed=3)) == drawn(expected)
    back = [path for path in bad.asked[before:] if path in ("/pause", "/v1/completions")]
    assert back[0] == "/pause"  # the weights first
    assert len(back) > 1 + 4  # then the probe, then requests


def test_a_server_that_was_started_anew_is_given_the_weights_before_it_samples(
    policy: Policy, serve: Serve, connect: Connect, tmp_path: Path
) -> None:
    """Nothing failed meanwhile: that it has other weights is seen by asking."""
    server = serve()
    engine = connect(server)
    sync = engine.sync(learner_of(policy))
    moved(policy)
    sync(1)
    expected = engine.generate(PROMPTS, SAMPLING, num_samples=2, seed=0)
    server.folder = str(tmp_path / "model")
    server.model = load_policy(server.folder).model
    assert drawn(engine.generate(PROMPTS, SAMPLING, num_samples=2, seed=0)) == drawn(expected)


def test_a_server_that_two_runs_use_at_once_is_found_out(serve: Serve, connect: Connect) -> None:
    """Else one would train on what the other's weights have sampled."""
    server = serve()
    engine = connect(server)

    def reply(rollout: Rollout, number: int) -> None:
        server.folder = "weights of another run"

    with pytest.raises(ValueError, match=r"another run uses it at the same time"):
        engine.generate(PROMPTS, SAMPLING, num_samples=1, seed=0, reply=reply)


def test_others_go_on_while_one_waits_for_its_reply(serve: Serve, connect: Connect) -> None:
    """The first sequence is replied to when all others are over: were it waited for, never."""
    engine, over = connect(serve()), threading.Semaphore(0)
    late: Future[Turn | None] = Future()
    others = 3

    def reply(rollout: Rollout, number: int) -> Turn | Future[Turn | None] | None:
        if number == 0 and len(rollout.turns) == 1:
            return late
        if len(rollout.turns) == 1:
            return Turn(tokens=(5, 6), text="")
        over.release()
        return None

    def answer() -> None:
        if all(over.acquire(timeout=120) for _ in range(others)):
            late.set_result(Turn(tokens=(5, 6), text=""))
        else:
            late.set_exception(RuntimeError("the others have waited"))

    thread = threading.Thread(target=answer)
    thread.start()
    asked = {"num_samples": 2, "seed": 0}
    found = engine.generate(PROMPTS, SAMPLING, **asked, reply=reply)
    thread.join()
    expected = engine.generate(
        PROMPTS,
        SAMPLING,
        **asked,
        reply=lambda rollout, _: Turn(tokens=(5, 6), text="") if len(rollout.turns) < 2 else None,
    )
    assert drawn(found) == drawn(expected)


def test_where_all_are_lost_the_run_ends_with_their_names(serve: Serve, connect: Connect) -> None:
    servers = [serve(), serve()]
    engine = connect(*servers)
    for server in servers:
        server.stop()
    engine._fleet._deadline = 0.0
    with pytest.raises(ServerLostError, match=rf"(?s){servers[0].address}.*{servers[1].address}"):
        engine.generate(PROMPTS, SAMPLING, num_samples=1, seed=0)


def test_an_update_waits_for_completions_under_way_and_loses_none(
    policy: Policy, serve: Serve, connect: Connect
) -> None:
    """The first turn is of the old weights, and the second, begun behind the update, of the new."""
    server = serve()
    engine = connect(server)
    sync = engine.sync(learner_of(policy))
    all_sampling, updated = threading.Barrier(4), threading.Event()

    def slow() -> None:
        all_sampling.wait()
        time.sleep(0.3)

    def update() -> None:
        all_sampling.wait()
        moved(policy)
        del server.faults["/v1/completions"]
        sync(1)
        updated.set()

    def reply(rollout: Rollout, number: int) -> Turn | None:
        updated.wait()
        return Turn(tokens=(5, 6), text="") if len(rollout.turns) == 1 else None

    server.faults["/v1/completions"] = slow
    thread = threading.Thread(target=update)
    thread.start()
    answers = engine.generate(PROMPTS[:1], SAMPLING, num_samples=3, seed=0, reply=reply)
    thread.join()
    for rollout in answers[0]:
        assert [turn.version for turn in rollout.turns if turn.sampled] == [0, 1]
        last = Rollout(
            prompt=type(rollout.prompt)(
                id="", text="", tokens=(*rollout.prompt.tokens, *rollout.turns[0].tokens, 5, 6)
            ),
            turns=rollout.turns[2:],
            group=0,
        )
        error = largest_error(policy.model, [last.prompt], answers=[[last]], sampling=SAMPLING)
        assert error < 1e-4


def test_a_generation_that_begins_in_an_update_leaves_the_servers_to_it(
    policy: Policy, serve: Serve, connect: Connect
) -> None:
    """It would find the weights before, and give the server the new ones a second time."""
    server = serve()
    engine = connect(server)
    sync = engine.sync(learner_of(policy))
    answers: list[list[Rollout]] = []

    def generate() -> None:
        answers.extend(engine.generate(PROMPTS, SAMPLING, num_samples=1, seed=0))

    thread = threading.Thread(target=generate)

    def slow() -> None:
        del server.faults["/pause"]
        thread.start()
        time.sleep(0.3)

    server.faults["/pause"] = slow
    before = server.asked.count("/pause")
    moved(policy)
    sync(1)
    thread.join()
    assert {rollout.version for group in answers for rollout in group} == {1}
    assert server.asked.count("/pause") == before + 1


def test_a_server_of_ours_that_cannot_come_back_is_started_once_for_all_requests(
    serve: Serve, connect: Connect
) -> None:
    fake = serve()
    engine = connect(fake)
    (server,) = engine._fleet.servers
    started: list[Path] = []
    server.ours, server.start = True, started.append  # type: ignore[method-assign]
    fake.stop()
    with pytest.raises(ServerLostError, match="does not answer"):
        engine.generate(PROMPTS, SAMPLING, num_samples=16, seed=0)
    assert len(started) == 1
    with pytest.raises(ServerLostError, match="does not answer"):
        engine.generate(PROMPTS, SAMPLING, num_samples=16, seed=0)
    assert len(started) == 1 + 2  # at the beginning of a generation it is tried anew


def test_a_server_that_is_asked_no_more_stays_so_whoever_else_is_done(
    serve: Serve, connect: Connect
) -> None:
    engine = connect(serve())
    (server,) = engine._fleet.servers
    engine.close()
    with engine._fleet.threads(1):
        pass
    with pytest.raises(InterruptedError, match="asked no more"):
        server.model()


def test_a_generation_can_be_broken_off(serve: Serve, connect: Connect) -> None:
    server = serve()
    engine = connect(server)
    over = threading.Event()
    number = iter(range(100))
    server.faults["/v1/completions"] = lambda: over.wait() and None if next(number) else None

    def reply(rollout: Rollout, number: int) -> Turn | None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # the deadline is not waited for
        engine.generate(PROMPTS, SAMPLING, num_samples=4, seed=0, reply=reply)
    over.set()
    del server.faults["/v1/completions"]
    assert engine.generate(PROMPTS, SAMPLING, num_samples=1, seed=0)


def test_a_dead_port_is_named(connect: Connect, serve: Serve) -> None:
    server = serve()
    server.stop()
    with pytest.raises(ServerLostError, match=rf"{server.address} does not answer.*refused"):
        connect(server)


@pytest.mark.parametrize("wrong", ["localhost", "https://localhost:1", "localhost:80/v1", "a:b"])
def test_an_address_is_a_host_and_a_port(wrong: str, connect: Connect) -> None:
    with pytest.raises(ValueError, match=r"address .*: expected host:port"):
        connect(address=wrong)


@pytest.mark.parametrize(
    ("path", "answer", "message"),
    [
        ("/health", (404, "Not Found"), "answers /health with 404.*is it vLLM"),
        ("/collective_rpc", (200, None), "with no JSON; is it vLLM"),
        ("/collective_rpc", (404, "Not Found"), "takes no weights.*VLLM_SERVER_DEV_MODE=1"),
        (
            "/collective_rpc",
            (500, "'CPUWorker' object has no attribute 'posttrain_model'"),
            r"takes no weights.*vllm_worker.py.*--worker-extension-cls",
        ),
    ],
)
def test_a_server_of_another_kind_is_told_so(
    path: str, answer: tuple[int, str], message: str, serve: Serve, connect: Connect
) -> None:
    server = serve()
    server.faults[path] = lambda: answer
    with pytest.raises(ValueError, match=message):
        connect(server)


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"shape": {"vocab_size": 32000}}, r"another model: its vocab_size is 32000.*policy \d+"),
        ({"shape": {"hidden_size": 32}}, r"its hidden_size is 32, that of the policy 16"),
        ({"logprobs": "raw_logprobs"}, r"start it with --logprobs-mode processed_logprobs"),
    ],
)
def test_a_server_of_another_model_is_refused(
    told: dict[str, Any], message: str, serve: Serve, connect: Connect
) -> None:
    with pytest.raises(ValueError, match=message):
        connect(serve(**told))


def test_without_an_environment_the_error_says_how_to_make_one(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(vllm.PYTHON, raising=False)
    with pytest.raises(ValueError, match=r"not installed here; name the Python.*docs/engines"):
        connect(address=None)
    with pytest.raises(ValueError, match=r"no Python '/nowhere/python'; name the Python"):
        connect(address=None, python="/nowhere/python")


def test_a_server_that_ends_while_it_starts_shows_its_log(connect: Connect) -> None:
    with pytest.raises(ServerLostError, match=r"(?s)has ended.*its log:.*No module named '?vllm"):
        connect(address=None, python=sys.executable)


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of our own is the fake one, as a program."""
    start = vllm_server.OwnServer.start

    def begin(self: Any, model: Path) -> None:
        self._command = [sys.executable, str(Path(__file__).parent.parent / "vllm_fake.py")]
        start(self, model)

    monkeypatch.setattr(vllm_server.OwnServer, "start", begin)


def server_process(engine: VllmEngine) -> int:
    (server,) = engine._fleet.servers
    beside = server._process.pid  # type: ignore[attr-defined]
    return int(Path(f"/proc/{beside}/task/{beside}/children").read_text().split()[0])


@pytest.mark.slow
@pytest.mark.usefixtures("played")
def test_our_own_server_is_started_again_when_it_is_killed(
    policy: Policy, connect: Connect
) -> None:
    """With the weights of the last update; and it ends with the engine."""
    engine = connect(address=None, python=sys.executable)
    sync = engine.sync(learner_of(policy))
    moved(policy)
    sync(1)
    expected = engine.generate(PROMPTS, SAMPLING, num_samples=2, seed=0)
    first = server_process(engine)
    os.kill(first, signal.SIGKILL)
    while Path(f"/proc/{first}").exists():
        time.sleep(0.05)
    with pytest.warns(UserWarning, match="its requests went elsewhere"):
        assert drawn(engine.generate(PROMPTS, SAMPLING, num_samples=2, seed=0)) == drawn(expected)
    second = server_process(engine)
    engine.close()
    assert second != first
    assert not Path(f"/proc/{second}").exists()


PLAYED = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"


def test_a_server_of_ours_that_is_asked_no_more_is_not_started(tmp_path: Path) -> None:
    server = vllm_server.OwnServer(
        sys.executable, arguments=[], folder=tmp_path, log=tmp_path / "log", deadline=600
    )
    server.interrupt(by=tmp_path)
    with pytest.raises(InterruptedError, match="asked no more"):
        server.start(tmp_path)
    assert server._process is None


def test_our_own_server_ends_with_a_supervisor_that_is_ended_while_it_starts_it(
    tmp_path: Path,
) -> None:
    """The signal comes before the new process is known; the weights stay for the next start."""
    early = """
        import os, signal, subprocess
        class Popen(subprocess.Popen):
            def __init__(self, *given, **options):
                super().__init__(*given, **options)
                print(self.pid, flush=True)
                os.kill(os.getpid(), signal.SIGTERM)
        subprocess.Popen = Popen
    """
    program = textwrap.dedent(early) + vllm_server._BESIDE
    server = [sys.executable, "-c", "import time; time.sleep(600)"]
    words = [sys.executable, "-c", program, str(os.getpid()), str(tmp_path), *server]
    with (tmp_path / "pid").open("wb") as output:
        subprocess.run(words, stdout=output, check=False)
    assert not Path("/proc", (tmp_path / "pid").read_text().strip()).exists()
    assert tmp_path.is_dir()


def test_our_own_server_ends_with_us_however_we_end(policy: Policy, tmp_path: Path) -> None:
    """A process that starts one is killed with -9; the weights are gone too."""
    log, folder = tmp_path / "log", tmp_path / "vllm-own"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.safetensors").touch()
    program = f"""
        import runpy, sys, time
        from pathlib import Path
        module = runpy.run_path({vllm_server.__file__!r})  # without torch, which takes seconds
        server = module["OwnServer"](sys.executable, arguments=[], folder=Path({str(folder)!r}),
                           log=Path({str(log)!r}), deadline=60)
        server._command = [sys.executable, "-c", {PLAYED!r}]
        server.start(Path("model"))
        time.sleep(600)
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)])
    while not (log.exists() and log.read_text().strip()):
        assert parent.poll() is None
        time.sleep(0.05)
    server = int(log.read_text())
    parent.kill()
    parent.wait()
    # the suite's timeout ends a test that would hang here
    while Path(f"/proc/{server}").exists() or folder.exists():
        time.sleep(0.05)
