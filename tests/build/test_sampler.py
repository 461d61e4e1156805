"""Sampling beside learning: a run with max_lag is exact, repeatable, learns, and ends cleanly."""

import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_model import parameters, small_model
from small_runs import recipe, same_weights, small_run, taught, timeless

from posttrain.algorithms.table import ALGORITHMS
from posttrain.build.algorithm import make_plan
from posttrain.build.learners import make_learner
from posttrain.build.sampler import in_process, make_sampler
from posttrain.build.setup import Supplied, make_policy, make_setup
from posttrain.config import recipe_from_dict, resolve
from posttrain.distributed.recipe_engines import engine_spec
from posttrain.fast import decode
from posttrain.rewards.scorer import RewardScorer
from posttrain.rollout.engines import NativeEngine
from posttrain.rollout.engines.scripted import ScriptedEngine
from posttrain.rollout.engines.weight_sync import CopiedWeights, SharedWeights
from posttrain.stages.results import Run
from posttrain.types import Prompt, Rollout, Sampling


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert "rollouts" not in {thread.name for thread in threading.enumerate()}


def spread(completion: str) -> float:
    """A reward on which the completions of a prompt never agree: every step learns something."""
    return sum(map(ord, completion)) % 11 / 11


def ran(folder: Path, **rl: Any) -> Run:
    given = recipe(folder, rl={"steps": 5, "learning_rate": 1e-2, **rl}, rewards=None)
    return small_run(given, supplied=Supplied(rewards=RewardScorer({spread: 1.0})))[0]


@pytest.mark.parametrize(("max_lag", "partial"), [(1, 1), (2, 1), (1, 2), (3, 2)])
def test_a_run_ahead_is_exact_and_repeats_bit_for_bit(
    tmp_path: Path, max_lag: int, partial: int
) -> None:
    """Staleness 0, 1, 1 …; every number but the clock's and every bit of the weights, twice."""
    rl = {"max_lag": max_lag, "evaluate_every": 2, "evaluate_problems": 5, "audit": True}
    rl["partial"] = partial
    first, again = (ran(tmp_path / name, **rl) for name in ("first", "again"))
    records = [record for record in first.folder.stage("rl").records() if record["step"]]
    assert [record["staleness/mean"] for record in records] == [
        min(step, max_lag) for step in range(5)
    ]
    assert records[0]["mismatch/mean"] < 1e-5
    assert min(record["mismatch/mean"] for record in records[1:]) > 1e-4
    assert {record["mismatch/correction"] == 1.0 for record in records[1:]} == {False}
    assert timeless(records) == timeless(again.folder.stage("rl").records())[1:]
    assert same_weights(first.model, again.model)
    for record in records:
        assert record["time/step"] == record["time/wait"] + record["time/train"]
    for step, record in enumerate(records):
        ages = {name: share for name, share in record.items() if "staleness/tokens" in name}
        oldest = min(step, max_lag)
        since = {oldest, min(oldest, max_lag - partial + 1)} if partial > 1 else set()
        assert ages.keys() <= {f"staleness/tokens_{age}" for age in since}
        assert sum(ages.values()) == pytest.approx(1.0 if partial > 1 else 0.0)
    finding = json.loads((first.folder.path / "config.json").read_text())["rl"]["correction"]
    assert finding == {"name": "truncated", "cap": 2.0, "low": 0.0, "level": "token"}


def test_evaluations_see_the_weights_of_their_step(tmp_path: Path) -> None:
    """The last point of the curve is the evaluation of the finished model."""
    run = ran(tmp_path / "run", max_lag=1, evaluate_every=2, evaluate_problems=10)
    points = {
        record["step"]: record["eval/reward"]
        for record in run.folder.stage("rl").records()
        if "eval/reward" in record
    }
    assert list(points) == [0, 2, 4, 5]
    assert points[0] == pytest.approx(run.folder.stage_record("rl")["before"]["reward"], abs=1e-12)
    assert points[5] == pytest.approx(run.folder.stage_record("eval")["after"]["reward"], abs=1e-12)
    assert points[0] != points[5]


def test_without_a_lag_nothing_is_copied_and_nothing_runs_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """max_lag = 0 is the default, and takes neither the thread nor the copy."""
    plain = ran(tmp_path / "plain")
    monkeypatch.setattr("posttrain.build.sampler.RunAhead", None)
    monkeypatch.setattr("posttrain.rollout.engines.local.CopiedWeights", None)
    zero = ran(tmp_path / "zero", max_lag=0)
    records = zero.folder.stage("rl").records()
    assert timeless(records) == timeless(plain.folder.stage("rl").records())
    assert {record["staleness/mean"] for record in records} == {0.0}
    assert same_weights(plain.model, zero.model)


def test_a_copy_follows_only_when_it_is_synced() -> None:
    """The engine's weights are its own: steps do not reach them, a sync does, in place."""
    model, copied = small_model(), small_model()
    engine = ScriptedEngine({})
    trained, own = dict(model.named_parameters()), dict(copied.named_parameters())
    sync = CopiedWeights(engine, source=trained, target=own)
    places = [weight.data_ptr() for weight in copied.parameters()]
    before = parameters(copied)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.5)
    assert torch.equal(parameters(copied), before)
    sync(3)
    assert torch.equal(parameters(copied), parameters(model))
    assert [weight.data_ptr() for weight in copied.parameters()] == places
    assert engine.version == 3
    half = small_model().to(torch.bfloat16)
    CopiedWeights(engine, source=trained, target=dict(half.named_parameters()))(4)
    assert torch.equal(parameters(half), parameters(model).to(torch.bfloat16))
    with pytest.raises(ValueError, match="not a copy of the one that is trained"):
        CopiedWeights(engine, source=trained, target=dict(copied.get_decoder().named_parameters()))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_corrects_for_the_age_by_default(name: str) -> None:
    """Token by token, truncated; and the learner is asked for π_old before the first step."""
    given = recipe_from_dict(
        {"task": {"name": "sort"}, "rl": {"algorithm": name, "max_lag": 1}, **taught(name)}
    )
    section = resolve(given).rl
    assert section is not None
    assert section.correction == {"name": "truncated", "cap": 2.0, "low": 0.0, "level": "token"}
    assert make_plan(section).needs_inference


def test_an_engine_on_the_learners_own_weights_is_refused(tmp_path: Path) -> None:
    """One that is made by name gets a copy; a scripted one is taken as it is."""
    given = resolve(recipe_from_dict(recipe(tmp_path / "run", rl={"steps": 5, "max_lag": 1})))
    policy = make_policy(given, "tiny", device="cpu")
    setup = make_setup(given, policy, device="cpu")
    try:
        learner = make_learner(given, policy, section=given.rl, device="cpu", total_steps=5)
        own = make_sampler(setup)
        assert isinstance(own.sync(learner), CopiedWeights)
        assert own.model is not policy.model  # type: ignore[attr-defined]
        shared = NativeEngine(policy.model, end_tokens=policy.end_tokens, decode=str)
        with pytest.raises(ValueError, match=r"rl\.max_lag: the engine that was handed over"):
            make_sampler(replace(setup, engine=shared))
        assert isinstance(shared.sync(learner), SharedWeights)
        scripted = ScriptedEngine({})
        assert make_sampler(replace(setup, engine=scripted)) is scripted
    finally:
        setup.close()


@pytest.mark.parametrize("wanted", [True, False])
def test_what_samples_is_compiled_where_the_model_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: bool
) -> None:
    asked: list[torch.nn.Module] = []
    monkeypatch.setattr(decode, "compile_layers", asked.append)
    model = {"name": "tiny", "compile": wanted}
    given = resolve(recipe_from_dict(recipe(tmp_path / "run", model=model, rl={"steps": 5})))
    policy = make_policy(given, "tiny", device="cpu")
    setup = make_setup(given, policy, device="cpu")
    try:
        engine = make_sampler(setup)
        prompt = Prompt(id="0", text="a", tokens=(5, 6))
        engine.generate([prompt], Sampling(max_new_tokens=2), num_samples=1, seed=0)
    finally:
        setup.close()
    assert asked == [policy.model] * wanted


class Failing(ScriptedEngine):
    """Breaks in the middle of the run."""

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, num_samples: int, seed: int
    ) -> list[list[Rollout]]:
        if self.version == 2:
            raise RuntimeError("the engine is gone")
        return super().generate(prompts, sampling, num_samples=num_samples, seed=seed)


def test_an_engine_that_fails_stops_the_run_after_the_steps_before(tmp_path: Path) -> None:
    """Batch 3 is the first of version 2: three steps are learned and written, as without a lag."""
    engine = Failing(lambda prompt, sample: str(sample), encode=lambda text: [5, 6])
    given = recipe(tmp_path / "run", rl={"steps": 5, "max_lag": 1}, sft=None, eval=None)
    with pytest.raises(RuntimeError, match="the engine is gone"):
        small_run(given, supplied=Supplied(engine=engine))
    lines = (tmp_path / "run" / "rl" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


@pytest.mark.parametrize("workers", [0, 2])
def test_broken_rewards_stop_the_run_with_what_the_first_one_said(
    tmp_path: Path, workers: int
) -> None:
    def broken(completion: str) -> float:
        raise ValueError("no grader today")

    given = recipe(
        tmp_path / "run", rewards=None, rl={"max_lag": 1}, eval=None, grading={"workers": workers}
    )
    with pytest.raises(RuntimeError, match="no grader today"):
        small_run(given, supplied=Supplied(rewards=RewardScorer({broken: 1.0})))


def test_an_interrupt_of_the_learner_ends_the_run_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the middle of a step, while the next batch is sampled and graded."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("posttrain.pipelines.rl.optimise", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ran(tmp_path / "run", max_lag=1)


@pytest.mark.parametrize(
    ("engine", "rl", "name"),
    [("vllm", {}, "vllm"), ("vllm", {"engine": {"deadline": 5.0}}, "vllm"), (None, {}, "native")],
)
def test_the_engine_of_the_cluster_is_what_samples(
    tmp_path: Path, engine: str | None, rl: dict[str, Any], name: str
) -> None:
    """In the stage rl, where nothing else is named, and in an evaluation without that stage."""
    replicas = {"address": "local", "engines": 1, **({"engine": engine} if engine else {})}
    sections = recipe(tmp_path, rl={"steps": 5, **rl}, cluster=replicas)
    given = resolve(recipe_from_dict(sections))
    setup = make_setup(given, make_policy(given, "tiny", device="cpu"), device="cpu")
    setup.close()
    assert in_process(setup) == (name == "native")
    sections["run"] = {**sections["run"], "stages": ["eval"]}
    for each in (given, resolve(recipe_from_dict(sections))):
        chosen = dict(engine_spec(each))
        assert chosen["name"] == name
        assert chosen.get("deadline") == 5.0 if rl else True
