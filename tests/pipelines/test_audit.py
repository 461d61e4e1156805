"""The audit: each line of the checklist is seen broken, and an honest run breaks none."""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from audit_cases import BROKEN, IN_REWARD, ONE_STEP, Case, audited
from loop_parts import plan
from slow_cases import slow_but
from small_runs import RECIPE, make_teacher, recipe, small_run, taught

from posttrain.algorithms.advantages import ADVANTAGES, batch_whitened
from posttrain.algorithms.pieces import facts, piece
from posttrain.algorithms.table import ALGORITHMS
from posttrain.cli.app import main
from posttrain.config import recipe_from_dict, to_toml
from posttrain.pipelines.audit import CHECKLIST, Audit, AuditFailed
from posttrain.types import Batch


def test_every_line_is_broken_here() -> None:
    """A line without a violation would be a line that nobody has seen at work."""
    assert BROKEN.keys() == CHECKLIST.keys()


@pytest.mark.parametrize(
    ("line", "case"), [(line, case) for line, cases in BROKEN.items() for case in cases]
)
def test_a_violation_stops_the_run(line: str, case: Case) -> None:
    """At the step where it can first be seen, by the name of its line and with what was found."""
    message = f"audit: step {case.step}: broken: {CHECKLIST[line]}. Found: .*{case.found}"
    with pytest.raises(AuditFailed, match=message):
        audited(case)


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(loop=ONE_STEP),
        Case(loop=plan(minibatches=4, **IN_REWARD)),
        Case(loop=plan(epochs=4, kl_stop=1e-9, **IN_REWARD)),
        Case(loop=plan(epochs=2, advantage=batch_whitened), normalised="batch"),
        *(
            Case(loop=plan(**{**IN_REWARD, "kl_estimator": estimator, "kl_direction": direction}))
            for estimator in ("k1", "k2", "k3")
            for direction in ("reverse", "forward")
        ),
    ],
)
def test_the_same_loop_without_a_violation(case: Case) -> None:
    """What stops a run above is the one thing that was changed."""
    assert audited(case) == 3


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of the audit, as they are made."""
    calls: list[str] = []
    for name in ("_prepared", "_learned"):

        def counted(
            *arguments: Any, _name: str, _real: Callable[..., None], **options: Any
        ) -> None:
            _real(*arguments, **options)
            calls.append(_name)

        wrapped = functools.partialmethod(counted, _name=name, _real=getattr(Audit, name))
        monkeypatch.setattr(Audit, name, wrapped)
    return calls


VARIANTS: dict[str, dict[str, Any]] = {
    **{name: {"algorithm": name} for name in ALGORITHMS},
    "ppo, shared": {"algorithm": "ppo", "critic": {"kind": "shared"}, "minibatches": 2},
    "ppo, warm": {"algorithm": "ppo", "critic": {"warmup_steps": 1}, "whiten_rewards": True},
    "pkpo": {"algorithm": "pkpo", "group_size": 6},
    "ppo, sample": {"algorithm": "ppo", "advantage": {"deviation": "sample"}},
    "reinforce_pp, sample": {"algorithm": "reinforce_pp", "advantage": {"deviation": "sample"}},
    "grpo, entropy": {"algorithm": "grpo", "entropy_coefficient": 0.01, "epochs": 2},
}


@pytest.mark.parametrize("name", slow_but(VARIANTS, "grpo", "ppo, sample"))
def test_every_algorithm_passes(tmp_path: Path, checks: list[str], name: str) -> None:
    """Three steps through a whole run, and both halves of the audit at each."""
    others = taught(VARIANTS[name]["algorithm"], make_teacher(tmp_path / "teacher"))
    run, _ = small_run(
        recipe(tmp_path / "r", sft=None, eval=None, rl={**VARIANTS[name], "audit": True}, **others)
    )
    assert checks == ["_prepared", "_learned"] * 3
    assert len(run.folder.stage("rl").records()) == 3


def shifted(monkeypatch: pytest.MonkeyPatch, algorithm: str) -> None:
    """Give every token of an algorithm's advantage a little more."""
    name = ALGORITHMS[algorithm].advantage["name"]
    honest = ADVANTAGES[name]

    @functools.wraps(honest)
    def doctored(batch: Batch, **options: Any) -> Batch:
        batch = honest(batch, **options)
        return batch.replace(advantages=batch.advantages + 0.1 * batch.active)

    declared = facts(honest)
    piece(
        needs=declared.needs,
        smallest_group=declared.smallest_group,
        centred=declared.centred,
    )(doctored)
    monkeypatch.setitem(ADVANTAGES, name, doctored)


@pytest.mark.parametrize(
    "algorithm", ["ppo", "reinforce_pp", "grpo", "turn_grpo", "dr_grpo", "rloo", "pkpo"]
)
def test_a_run_knows_how_its_advantages_are_normalised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    """Over the batch or over each group: a recipe's audit is told which."""
    shifted(monkeypatch, algorithm)
    rl = {"algorithm": algorithm, "audit": True, "group_size": 6}
    with pytest.raises(AuditFailed, match=f"step 1: broken: {CHECKLIST['normalised']}"):
        small_run(recipe(tmp_path / "r", sft=None, eval=None, rl=rl))


def test_the_command_line_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--audit`` stops a doctored run with the line's own words; without it nothing is checked."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    shifted(monkeypatch, "grpo")
    (tmp_path / "small.toml").write_text(to_toml(recipe_from_dict(RECIPE)))

    def command(*options: str) -> None:
        monkeypatch.setattr(sys, "argv", ["posttrain", "rl", "small.toml", *options])
        main()

    with pytest.raises(SystemExit) as stopped:
        command("--audit", "--run.folder", "a")
    assert stopped.value.code == 2
    assert f"audit: step 1: broken: {CHECKLIST['normalised']}" in capsys.readouterr().err
    with pytest.raises(SystemExit) as done:
        command("--run.folder", "b")
    assert not done.value.code
