"""``posttrain check``: a healthy recipe passes, and every mistake of the gallery is caught."""

import copy
import io
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from check.broken_recipes import (
    BROKEN,
    HEALTHY,
    SMALL,
    Broken,
    page_rows,
    recipe_of,
    write_files,
)
from rich.console import Console
from small_runs import recipe, small_run

from posttrain.build import learners, sampler
from posttrain.build.sampler import make_engine
from posttrain.build.setup import Supplied, make_policy, make_setup
from posttrain.check import (
    CheckFailedError,
    Line,
    Report,
    before_rl,
    check_recipe,
    checklist,
    resources,
)
from posttrain.check.bench import Bench
from posttrain.check.checklist import CHECKS, run_checks
from posttrain.check.trial import LinearCost, saved_bytes
from posttrain.check.verdicts import AREAS, BROKE, MEND, Verdict
from posttrain.cli.app import main
from posttrain.config import recipe_from_dict, resolve, to_toml
from posttrain.fast.score import score_tokens
from posttrain.models.load import Policy, load_policy
from posttrain.protocols import Engine, Learner, Outputs, Sync
from posttrain.rollout.engines.scripted import ScriptedEngine
from posttrain.rollout.engines.weight_sync import SharedWeights
from posttrain.types import Batch, Rollout, Turn

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working directory, with data, rewards and a model that gets some sums right."""
    path = tmp_path_factory.mktemp("check")
    write_files(path)
    sft = {"wrong_share": 0.0, "epochs": 30, "learning_rate": 1e-2}
    task = {"num_train": 80, "num_test": 0}
    given = recipe(path / "run", rl=None, eval=None, rewards=None, sft=sft, task=task)
    done, _ = small_run(given)
    (path / "warm").symlink_to(Path(done.model))
    before, kept = Path.cwd(), [*sys.path]
    os.chdir(path)
    sys.path.insert(0, str(path))
    yield path
    os.chdir(before)
    sys.path[:] = kept
    sys.modules.pop("my_rewards", None)


@pytest.fixture(scope="module")
def healthy(folder: Path) -> Report:
    """The report on the healthy recipe."""
    return check_recipe(HEALTHY)


def told(report: Report) -> str:
    return "\n".join(map(str, report.lines))


def find(report: Report, name: str) -> Line:
    return next(line for line in report.lines if line.name == name)


def test_a_healthy_recipe_passes_every_area(healthy: Report) -> None:
    """Nothing fails, nothing warns, and every area has something to say."""
    assert [line for line in healthy.lines if line.state != "pass"] == [], told(healthy)
    assert list(dict.fromkeys(line.area for line in healthy.lines)) == list(AREAS)
    assert healthy.ok
    assert {row.stage for row in healthy.arithmetic} == {"rl", "eval"}
    assert healthy.enforce("stop") is healthy


def test_the_prompt_is_shown_as_the_model_sees_it(folder: Path) -> None:
    """With its special tokens, and harmless to a terminal."""
    model = {"name": "tiny", "options": {"max_positions": 64, "chat": True}}
    (folder / "odd.jsonl").write_text(json.dumps({"prompt": "a\x1b[2Jb", "answer": "1"}) + "\n")
    changes = {"model": model, "task.path": "odd.jsonl", "run.stages": ["eval"]}
    shown = find(check_recipe(recipe_of(changes), fast=True), "prompt").text
    assert shown.endswith(r"<|user|>a\x1b[2Jb<|end|><|assistant|>")


@pytest.mark.parametrize("row", BROKEN, ids=lambda row: row.mistake)
def test_a_mistake_is_caught(row: Broken, folder: Path) -> None:
    """In its area, in its state, with words that name it, and with something to do about it."""
    report = check_recipe(recipe_of(row.changes), fast=True)
    caught = [line for line in report.lines if (line.area, line.state) == (row.area, row.state)]
    assert any(row.phrase in f"{line.text} {line.fix}" for line in caught), told(report)
    assert all(line.fix for line in report.lines if line.state != "pass")
    assert report.ok == (row.state == "warn") or row.area == "data", told(report)


def test_a_grader_that_breaks_is_not_taken_for_an_engine_that_does(folder: Path) -> None:
    changes = {"rewards": {"my_rewards:broken_now_and_then": 1.0}, "rl.max_invalid": 1.0}
    report = check_recipe(recipe_of(changes), fast=True)
    assert find(report, "broken scores").state != "pass", told(report)
    assert find(report, "engine and learner").state == "pass", told(report)


def test_the_page_is_in_step(healthy: Report) -> None:
    """docs/check.md says what each line means, and holds the gallery as it is here."""
    page = (ROOT / "docs" / "check.md").read_text(encoding="utf-8")
    assert not {line.name for line in healthy.lines if f"| {line.name} |" not in page}
    assert "\n".join(page_rows()) in page, "run: python tests/check/broken_recipes.py"


def test_what_sft_may_still_mend_is_a_warning(folder: Path) -> None:
    """Untrained or not, no right answer is no proof; and sft is not proposed where it is."""
    changes = {"model": {"name": "tiny", "options": {"max_positions": 64}}}
    sft = {**changes, "sft": {}, "run.stages": ["sft", "rl"]}
    line = find(check_recipe(recipe_of(sft), fast=True), "groups with signal")
    assert (line.state, "not trained yet" in line.fix) == ("warn", True)
    assert "raise sft.epochs" in line.fix
    line = find(check_recipe(recipe_of(changes), fast=True), line.name)
    assert (line.state, "not trained yet" in line.fix) == ("warn", False)
    assert "add [sft] before" in line.fix
    constant = {**sft, "rewards": {"my_rewards:always_one": 1.0}}
    line = find(check_recipe(recipe_of(constant), fast=True), line.name)
    assert (line.state, "the reward is constant" in line.text) == ("warn", True)


def test_a_reward_model_still_to_be_trained_is_stood_in_for(folder: Path) -> None:
    """PPO on the reward model of its own run can be checked before that model is there."""
    changes: dict[str, Any] = {
        "run.stages": ["prefer", "reward", "rl"],
        "rewards": {"model": 1.0},
        "prefer": {},
        "reward": {},
        "rl.algorithm": "ppo",
        "rl.critic": {"source": "reward"},
    }
    report = check_recipe(recipe_of(changes), fast=True)
    assert report.ok, told(report)
    assert "numeric stands in" in find(report, "reward model").text


def test_an_engine_that_keeps_its_own_weights_is_found_out(folder: Path) -> None:
    """It would learn from the samples of another policy: whoever made the engine, that fails."""
    engine = ScriptedEngine(
        lambda prompt, sample: str(sample % 10), encode=lambda text: [40], end_token=1
    )
    report = check_recipe(HEALTHY, fast=True, supplied=Supplied(engine=engine))
    assert find(report, "weights to engine").state == "fail"
    assert find(report, "engine and learner").state == "warn"
    for mode in ("stop", "warn"):
        with pytest.raises(CheckFailedError, match=r'run anyway with rl\.check = "off"'):
            report.enforce(mode)


class Jittery:
    """An engine whose log-probs are never twice the same, as batched kernels make them."""

    def __init__(self, engine: Engine, *, by: float) -> None:
        self._engine, self._by, self._calls = engine, by, 0
        self.version = 0

    def generate(self, *given: Any, **options: Any) -> list[list[Rollout]]:
        self._calls += 1
        moved = self._by * self._calls
        return [
            [replace(r, turns=tuple(_moved(turn, moved) for turn in r.turns)) for r in group]
            for group in self._engine.generate(*given, **options)
        ]

    def sync(self, learner: Learner) -> Sync:
        return self._engine.sync(learner)

    def close(self) -> None:
        self._engine.close()


def _moved(turn: Turn, by: float) -> Turn:
    return replace(turn, logprobs=tuple(p - by for p in turn.logprobs))


@pytest.mark.parametrize(("by", "state"), [(1e-6, "pass"), (0.01, "warn")])
def test_an_engine_need_not_be_the_same_to_the_bit(
    by: float, state: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounding is no other answer; what cannot be repeated is said, and is no reason to stop."""

    def jittery(spec: Any, policy: Policy, **options: Any) -> Engine:
        return Jittery(make_engine(spec, policy, **options), by=by)

    monkeypatch.setattr(sampler, "make_engine", jittery)
    assert find(check_recipe(HEALTHY, fast=True), "weights to engine").state == state


def test_a_low_temperature_is_not_taken_for_an_engine_that_keeps_its_weights(folder: Path) -> None:
    """At 0.001 every log-prob is 0 to the last bit, with halved weights too."""
    report = check_recipe(recipe_of({"rl.temperature": 1e-3}), fast=True)
    assert find(report, "weights to engine").state == "pass", told(report)


OWN_ENGINE = """
from dataclasses import replace

from posttrain.rollout.engines import NativeEngine
from posttrain.types import Sampling


class Deaf(NativeEngine):
    to = ""

    def generate(self, prompts, sampling, **options):
        if self.to in vars(sampling):
            sampling = replace(sampling, **{self.to: getattr(Sampling(), self.to)})
        drawn = super().generate(prompts, sampling, **options)
        if self.to == "claims" and (sampling.top_k or sampling.top_p < 1):
            drawn = [[replace(r, turns=tuple(map(whole, r.turns))) for r in one] for one in drawn]
        return drawn


def whole(turn):
    return replace(turn, logprobs=tuple(p - 0.5 for p in turn.logprobs))


def make(policy, decode, *, to: str = ""):
    engine = Deaf(policy.model, end_tokens=policy.end_tokens, decode=decode)
    engine.to = to
    return engine
"""


@pytest.mark.parametrize(
    ("to", "said"),
    [
        ("", "temperature, top_k, top_p: obeyed"),
        ("top_k", "top_k is ignored: only "),
        ("top_p", "top_p is ignored: only "),
        ("temperature", "temperature is ignored: only "),
        ("claims", "log-probs are of the whole distribution, not of what top_k leaves of it"),
    ],
)
def test_an_engine_that_ignores_a_setting_of_sampling_is_found_out(
    to: str, said: str, folder: Path
) -> None:
    """Its samples or their log-probs are of another distribution than the recipe asks for."""
    (folder / "my_deaf_engine.py").write_text(OWN_ENGINE, encoding="utf-8")
    engine = {"name": "my_deaf_engine:make", "to": to}
    changes = {"rl.engine": engine, "rl.top_k": 5, "rl.top_p": 0.9}
    # An untrained model: a sure one gives the same answer whatever the temperature.
    changes["model"] = {"name": "tiny", "options": {"max_positions": 64}}
    line = find(check_recipe(recipe_of(changes), fast=True), "sampling settings")
    assert (line.state, said in line.text) == ("fail" if to else "pass", True), line
    assert "sampling settings" not in {one.name for one in check_recipe(HEALTHY, fast=True).lines}


@pytest.mark.parametrize("name", ["wandb", "tensorboard"])
def test_a_tracker_without_its_package_fails(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, name, None)
    report = check_recipe(recipe_of({"run.trackers": [name]}), fast=True)
    line = find(report, "run.trackers")
    assert (line.state, line.area) == ("fail", "config")
    assert f"{name} is not installed" in line.text


def test_a_reward_of_form_alone_is_a_fine_job(folder: Path) -> None:
    """It claims nothing of right and wrong: gold answers need not earn more than others."""
    report = check_recipe(recipe_of({"rewards": {"my_rewards:digits": 1.0}}), fast=True)
    assert report.ok, told(report)
    line = find(report, "tells answers apart")
    assert line.state == "pass"
    assert line.text.startswith("not asked to, no reward learned from reads the answer: gold 1.00")
    assert find(report, "gold answers").state == "pass"


def test_a_check_that_is_not_learned_from_says_nothing_of_the_signal(folder: Path) -> None:
    """Some answers are right, by a check of weight 0: that is not why no reward differs."""
    rewards = {"my_rewards:always_zero": 1.0, "numeric": {"weight": 0.0, "extract": "whole"}}
    report = check_recipe({**HEALTHY, "rewards": rewards}, fast=True)
    line = find(report, "groups with signal")
    assert "right" in find(report, "accuracy").text
    assert "all right" not in line.text
    assert "all wrong" not in line.text
    assert "every completion gets 0, though " in line.text
    assert "'numeric', whose weight is 0, accepts " in line.text
    assert (line.state, "the reward is constant" in line.text) == ("fail", True)
    assert "give 'numeric' a weight" in line.fix


def test_a_reward_that_reads_another_column_need_not_know_the_answer(folder: Path) -> None:
    """Though the file has answers, and gold ones get less than wrong ones."""
    rows = [json.loads(line) for line in Path("train.jsonl").read_text().splitlines()]
    keyed = [json.dumps({**row, "keyword": row["answer"]}) + "\n" for row in rows]
    Path("keyed.jsonl").write_text("".join(keyed))
    changes = {"rewards": {"my_rewards:without": 1.0}, "task.path": "keyed.jsonl"}
    changes |= {"task.test_path": None, "run.stages": ["rl"]}
    line = find(check_recipe(recipe_of(changes), fast=True), "tells answers apart")
    assert line.state == "pass", line
    assert "gold 0.00, wrong 1.00" in line.text


def test_what_chance_explains_is_not_the_wrong_way_round(folder: Path) -> None:
    """A reward that reads the answer, and gives some points at random."""
    changes = {"rewards": {"my_rewards:noisy": 1.0}}
    line = find(check_recipe(recipe_of(changes), fast=True), "tells answers apart")
    assert line.state == "warn", line
    assert line.text.startswith("not on these 8 prompts: on average gold 0.")
    assert line.text.endswith("perhaps by chance")


def test_what_sft_has_shown_is_a_note(folder: Path) -> None:
    """Normal where data is small, and worth knowing; so are the passes, in the arithmetic too."""
    report = check_recipe(recipe_of({"sft": {}, "run.stages": ["sft", "rl"]}), fast=True)
    assert find(report, "sft and rl prompts").text.startswith("90 of the 90 prompts of rl have")
    assert find(report, "passes").text == "0.9 epochs (20 steps × 4 prompts ÷ 90)"
    (row,) = [row for row in report.arithmetic if row.name == "passes over the prompts"]
    assert (row.value, row.how) == (0.9, "20 steps × 4 prompts ÷ 90")
    rows = [{"prompt": "1+2=", "completion": "3"}, {"prompt": "else", "completion": "3"}]
    (folder / "shown.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"sft": {"data": "shown.jsonl"}, "run.stages": ["sft", "rl"]}
    line = find(check_recipe(recipe_of(given), fast=True), "sft and rl prompts")
    assert line.text.startswith("1 of the 90 prompts")


def test_demonstrations_that_do_not_fit_are_left_out_not_refused(folder: Path) -> None:
    """As the run does; only where none fits there is nothing to learn from."""
    rows = [{"prompt": "1+2=", "completion": "3"}, {"prompt": "1+" * 40, "completion": "3"}]
    for count, state in ((2, "warn"), (1, "fail")):
        (folder / "demos.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows[-count:]))
        given = {"sft": {"data": "demos.jsonl"}, "run.stages": ["sft", "rl"]}
        line = find(check_recipe(recipe_of(given), fast=True), "demonstrations")
        assert (line.state, "left out" in line.text) == (state, True)


@pytest.mark.parametrize("copies", [False, True])
def test_an_engine_on_old_weights_fails(
    copies: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine was built on a copy: only a sync that copies brings updates there."""

    def on_a_copy(spec: Any, policy: Policy, **options: Any) -> Engine:
        model = copy.deepcopy(policy.model)
        engine = make_engine(spec, replace(policy, model=model), **options)
        if not copies:
            monkeypatch.setattr(engine, "sync", lambda learner: SharedWeights(engine))
        return engine

    monkeypatch.setattr(sampler, "make_engine", on_a_copy)
    report = check_recipe(HEALTHY, fast=True)
    failed = [] if copies else ["weights to engine"]
    assert [line.name for line in report.of("fail")] == failed, told(report)


def test_a_trainer_that_sees_something_else_fails(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise breaks the ratio; what depends on the company of others breaks micro-batches."""

    def noisy(model: Any, batch: Batch, **options: Any) -> Outputs:
        outputs = score_tokens(model, batch, **options)
        noise = 0.1 * torch.randn(batch.tokens.shape) * batch.mask
        return replace(outputs, logprobs=outputs.need("logprobs") + noise)

    def crowded(model: Any, batch: Batch, **options: Any) -> Outputs:
        outputs = score_tokens(model, batch, **options)
        logprobs = outputs.need("logprobs")
        return replace(outputs, logprobs=logprobs * (1 + 0.05 * len(logprobs)))

    monkeypatch.setattr(learners, "score_tokens", noisy)
    report = check_recipe(HEALTHY)
    assert find(report, "first ratio").state == "fail", told(report)
    assert find(report, "engine and learner").state == "fail"
    monkeypatch.setattr(learners, "score_tokens", crowded)
    assert find(check_recipe(HEALTHY), "micro-batches").state == "fail"


def test_too_little_memory_fails_before_anything_is_tried(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that cannot fit is not taken."""
    monkeypatch.setattr(resources, "free_memory", lambda device: 10_000)
    report = check_recipe(HEALTHY, fast=True)
    assert [line.name for line in report.of("fail")] == ["memory"], told(report)
    assert "numerics" not in {line.area for line in report.lines}


def test_before_rl_changes_nothing(folder: Path, tmp_path: Path) -> None:
    """Weights, gradients and random numbers are afterwards what they were, bit by bit."""
    resolved = resolve(recipe_from_dict(HEALTHY))
    policy = make_policy(resolved, "warm", device="cpu")
    setup = make_setup(resolved, policy, device="cpu")
    state = torch.get_rng_state()
    try:
        report = before_rl(setup)
    finally:
        setup.close()
    assert report.ok, told(report)
    assert {line.area for line in report.lines} == set(AREAS) - {"config"}
    assert torch.equal(torch.get_rng_state(), state)
    fresh, now = load_policy("warm").model.state_dict(), policy.model.state_dict()
    assert all(torch.equal(now[name], fresh[name]) for name in fresh)
    assert all(weight.grad is None and weight.requires_grad for weight in policy.model.parameters())


def test_a_report_announces_and_refuses(folder: Path) -> None:
    """In plain text: what a prompt or an error holds is never markup."""
    console = Console(file=io.StringIO(), width=200)
    report = check_recipe(recipe_of({"rl.temperature": 0.0, "rl.minibatches": 3}))
    shown = report.announce(console) and console.file.getvalue()
    assert "✗ check: config: rl.temperature: 0 is greedy" in shown
    assert "→ set it higher (1.0 is" in shown
    assert report.enforce("warn") is report
    says = r"\(config: rl.minibatches; config: rl.temperature: see ✗ above\)\n.* --check warn"
    with pytest.raises(CheckFailedError, match=says) as failed:
        report.enforce("stop")
    assert "0 is greedy" not in str(failed.value)  # the report has said it


def test_bytes_kept_for_the_gradient_are_counted_once() -> None:
    """x · x keeps x, whatever its views; a weight is there anyway; backward gives it all back."""
    model = torch.nn.Linear(3, 5, bias=False)
    x = torch.ones(7, 3, requires_grad=True)
    with saved_bytes(model) as saved:
        loss = (model(x) * x.view(7, 3)[:, :1]).sum()
        first = saved.most
        loss.backward()
        again = (model(x) * x[:, :1]).sum()
    assert first == 7 * 3 * 4 + 7 * 5 * 4
    assert saved.most == first
    assert again.isfinite()


def test_what_a_run_would_raise_fails_and_the_kind_of_error_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the text alone would not do; what was said before is kept."""

    def missing(bench: Bench) -> Iterator[Verdict]:
        yield Verdict("pass", "so far")
        raise KeyError("x")

    def refused(bench: Bench) -> None:
        raise ValueError("rows: none; give some")

    rows = [checklist.Check("data", "task", row, "moment", runs=True) for row in (missing, refused)]
    monkeypatch.setattr(checklist, "CHECKS", [row._replace(at=checklist.ALWAYS) for row in rows])
    assert run_checks(Bench("check")) == [
        Line("data", "task", "pass", "so far"),
        Line("data", "task", "fail", "KeyError: 'x'", "fix this, then check again"),
        Line("data", "task", "fail", "rows: none", "give some"),
    ]
    with pytest.raises(KeyError):
        run_checks(Bench("start"))  # as it would end the run


def raising(bench: Bench) -> None:
    raise KeyError("inside")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.function.__name__)
def test_a_check_that_breaks_holds_up_a_run_only_where_that_would_break(
    check: checklist.Check, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it is a warning with its exception; either way the other checks are made."""
    if "check" not in check.at:
        pytest.skip("looked at in a run alone")
    broken = [row._replace(function=raising) if row is check else row for row in CHECKS]
    monkeypatch.setattr(checklist, "CHECKS", broken)
    pairs = {"data": "pairs.jsonl"}
    sections = {"sft": {}, "reward": pairs, "dpo": pairs}
    changes = {**sections, "run.stages": [*sections, "rl", "eval"]}
    rare = {"sft", "reward", "dpo", "backbone"} & {*check.needs.split()}
    report = check_recipe(recipe_of(changes) if rare else HEALTHY, fast=True)
    lines = [line for line in report.lines if (line.area, line.name) == (check.area, check.name)]
    if check.runs:
        assert Line(check.area, check.name, "fail", "KeyError: 'inside'", MEND) in lines
    else:
        said = "the check itself broke, so nothing is known: KeyError: 'inside'"
        assert Line(check.area, check.name, "warn", said, BROKE) in lines
        assert report.enforce("stop") is report
        assert len(report.lines) > 20


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({"run.stages": ["rl"]}, "warn"),
        ({"run.stages": ["rl"], "rl.evaluate_every": 5}, "fail"),
        ({}, "fail"),
    ],
)
def test_an_overlap_stops_only_a_run_that_asks_test_prompts(
    changes: dict[str, Any], state: str, folder: Path
) -> None:
    given = {"task.test_path": "spaced.jsonl", **changes}
    line = find(check_recipe(recipe_of(given), fast=True), "train/test overlap")
    assert line.state == state


def test_linear_cost() -> None:
    """Two sizes give a fixed part and a slope, neither of them negative."""
    through = LinearCost.through
    assert through((1, 3.0), (3, 7.0)) == LinearCost(1.0, 2.0)
    assert through((1, 5.0), (3, 4.0)) == LinearCost(4.0, 0.0)  # slower for less: all is fixed
    assert through((1, 1.0), (2, 4.0)) == LinearCost(0.0, 2.0)  # never less than nothing at 0
    assert through((2, 4.0), (2, 4.0)) == LinearCost(0.0, 2.0)  # one size alone: in proportion


def command(*arguments: object, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["posttrain", "check", *map(str, arguments)])
    monkeypatch.setattr(sys, "path", [*sys.path])
    try:
        main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def test_the_command(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit codes 0, 1 and 2; a table, or JSON that parses; nothing is written."""
    monkeypatch.setenv("COLUMNS", "200")
    path = folder / "healthy.toml"
    path.write_text(to_toml(recipe_from_dict(HEALTHY)))
    files = sorted(folder.iterdir())
    assert command(path, "--fast", "--json", monkeypatch=monkeypatch) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["ok"] is True
    assert {line["state"] for line in shown["lines"]} == {"pass"}
    assert set(shown["lines"][0]) == {"area", "name", "state", "text", "fix"}
    assert shown["arithmetic"][0]["value"] == 32

    assert command(path, "--rl.minibatches", "3", monkeypatch=monkeypatch) == 1
    assert "✗ config rl.minibatches 3 does not divide" in capsys.readouterr().out
    assert command(path, "--rl.stepz", "3", "--json", monkeypatch=monkeypatch) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False

    (folder / "bad.toml").write_text("[rl\n")
    mistakes = {
        ("nothing.toml",): "no such recipe",
        ("bad.toml",): "bad.toml:1",
        (): "name the recipe first",
        (str(path), "--rl.steps"): "needs a value",
    }
    for arguments, words in mistakes.items():
        assert command(*arguments, monkeypatch=monkeypatch) == 2
        assert words in capsys.readouterr().err
    (folder / "bad.toml").unlink()
    assert sorted(folder.iterdir()) == files


def test_cut_answers_that_earn_as_much_as_others_are_no_warning(folder: Path) -> None:
    """A reward may ask for all the tokens there are; one that finished answers earn does not."""
    rows = [{"prompt": f"{n}+1="} for n in range(40)]
    Path("plain.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {"model": {"name": "tiny", "options": SMALL}, "rl.max_new_tokens": 2}
    changes |= {"task.path": "plain.jsonl", "task.test_path": None, "run.stages": ["rl"]}
    report = check_recipe(recipe_of({**changes, "rewards": {"my_rewards:longer": 1.0}}), fast=True)
    line = find(report, "length")
    assert (line.state, "% truncated" in line.text) == ("pass", True)
    report = check_recipe(recipe_of({**changes, "rewards": {"my_rewards:shorter": 1.0}}), fast=True)
    assert find(report, "length").state == "warn"
