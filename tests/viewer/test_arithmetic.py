"""The arithmetic page agrees with the library's own loss, for every row of the table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_runs import TINY, make_teacher, recipe, small_run, taught

from posttrain.algorithms.losses import POLICY_LOSSES
from posttrain.algorithms.pieces import facts
from posttrain.algorithms.table import ALGORITHMS
from posttrain.runs import Filter
from posttrain.viewer.recomputed import (
    COLUMNS,
    Computed,
    compute,
    section_of,
)
from posttrain.viewer.rollout import explain_rollout
from posttrain.viewer.shelf import NotRecordedError, Shelf, ShownRun

SEVERAL = {"minibatches": 2, "epochs": 2, "learning_rate": 3e-2}  # so that ratios leave 1


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose answers have different lengths, so that groups have something to compare."""
    given = recipe(tmp_path_factory.mktemp("warm") / "run", rl=None, eval=None, rewards=None)
    return str(small_run(given)[0].model)


def moved(found: Computed) -> bool:
    """Whether there is something to agree on: advantages, and ratios beside 1."""
    assert found.outputs.logprobs is not None
    log_ratio = (found.outputs.logprobs - found.batch.need("old_logprobs"))[found.batch.active]
    advantages = found.batch.need("advantages")
    return bool(advantages.abs().max() > 0.01) and bool(log_ratio.abs().max() > 1e-3)


def shown(folder: Path, *, steps: int = 2, **sections: Any) -> ShownRun:
    given = recipe(folder, sft=None, eval=None, grading={"workers": 0}, **sections)
    given["rl"]["steps"] = steps
    small_run(given)
    return Shelf([folder]).look()[0]


def computed(run: ShownRun, step: int) -> Computed:
    store, numbers = run.rollouts(), run.tokens(step)
    rows = store.read(store.find(Filter(first_step=step, last_step=step)), COLUMNS)
    assert numbers is not None
    return compute(rows, numbers, section=section_of(run.run.config))


def agrees(run: ShownRun, step: int) -> Computed:
    """Every number of a step, against what the learner recorded; and its loss against its sum."""
    found = computed(run, step)
    assert found.whole
    assert found.loss is not None
    assert found.weights is not None
    for row in range(len(found.keys)):
        for name, value in found.differs_by(row).items():
            assert value <= 1e-6, (name, found.keys[row], value)
    # The sequences of the last optimiser step add up to the loss that it reported.
    last = len(found.facts["losses"])
    own = [row for row, taken in enumerate(found.optimiser_steps) if taken == last]
    assert own
    total = sum(
        float((found.weights[row] * found.terms.loss[row])[found.batch.active[row]].double().sum())
        for row in own
    )
    assert total == pytest.approx(found.facts["losses"][-1], rel=1e-5, abs=1e-6)
    return found


QUICKLY = ("grpo", "ppo", "reinforce_pp", "clip_cov", "gkd")  # the others with `make slow-test`


@pytest.mark.parametrize(
    "algorithm",
    [
        name if name in QUICKLY else pytest.param(name, marks=pytest.mark.slow)
        for name in ALGORITHMS
    ],
)
def test_it_agrees_with_the_loss_of_every_algorithm(
    algorithm: str, warm: str, tmp_path: Path
) -> None:
    row = ALGORITHMS[algorithm]
    teacher = taught(algorithm, make_teacher(tmp_path / "teacher"))
    rl = {"algorithm": algorithm, "group_size": max(row.group_size, 4), "max_resamples": 2}
    if not row.dynamic_sampling:
        del rl["max_resamples"]
    if facts(POLICY_LOSSES[row.loss["name"]]).optimiser_steps != "one":
        rl |= SEVERAL
    run = shown(tmp_path / "run", rl=rl, model={"name": warm, "options": {}}, **teacher)
    found = agrees(run, 2)
    assert float(found.batch.need("advantages").abs().max()) > 0.01
    assert "epochs" not in rl or moved(found)
    page = explain_rollout(run, step=2, group=found.keys[0][0], sample=found.keys[0][1])
    assert page["agrees"], page["differs"]
    assert [part["title"] for part in page["parts"]][:3] == ["Reward", "Baseline", "Advantage"]
    assert page["text"].startswith(f"{algorithm}: ")


@pytest.mark.parametrize("algorithm", ["turn_grpo", "ppo", "grpo"])
def test_it_agrees_for_episodes_of_several_turns(algorithm: str, tmp_path: Path) -> None:
    """Turns of an environment are in no loss, and what turns earn is in the right place."""
    task = {"name": "guess_number", "env": "guess_number", "maximum": 9, "smallest": 3}
    task |= {"template": "{low}-{high}", "num_train": 40, "num_test": 10}
    options = {**TINY, "max_positions": 128, "chat": True}
    rl = {"algorithm": algorithm, "max_new_tokens": 3, "group_size": 4, **SEVERAL}
    given = recipe(tmp_path / "run", eval=None, rl=rl, model={"options": options})
    given |= {"task": task, "environment": {"workers": 0}, "grading": {"workers": 0}}
    given["sft"] = {"num_demonstrations": 60, "epochs": 2, "batch_size": 20, "learning_rate": 3e-3}
    given["rl"]["steps"] = 2
    del given["rewards"]
    small_run(given)
    run = Shelf([tmp_path / "run"]).look()[0]
    found = agrees(run, 2)
    assert found.batch.turns is not None
    row = int(found.batch.turns.max(dim=1).values.argmax())
    group, sample = found.keys[row]
    page = explain_rollout(run, step=2, group=group, sample=sample)
    assert page["agrees"], page["differs"]
    environment = [token for token in page["tokens"] if not token["active"]]
    assert environment
    assert all(token.keys() == {"text", "active"} for token in environment)
    earned = [fact for fact in page["parts"][0]["facts"] if fact["label"].startswith("earned by")]
    assert len(earned) >= 2
    reward = next(
        fact["value"] for fact in page["parts"][0]["facts"] if fact["label"] == "reward R"
    )
    assert sum(fact["value"] for fact in earned) == pytest.approx(reward)
    labels = {fact["label"]: fact["value"] for fact in page["parts"][0]["facts"]}
    assert labels["env, weight 1"] == pytest.approx(reward)  # the environment scores,
    assert "exact, weight 0" in labels  # and what checks answers is shown beside it


def test_only_some_groups_are_recorded_where_a_step_has_many_tokens(tmp_path: Path) -> None:
    run = shown(tmp_path / "run", run={"token_numbers": 1}, rl={"algorithm": "grpo"})
    found = computed(run, 2)
    assert not found.whole
    assert {group for group, _ in found.keys} == {0}
    assert max(found.differs_by(0).values()) <= 1e-6  # its group is all that it compares with
    with pytest.raises(NotRecordedError, match="keeps the first groups of a step, here 4 of 16"):
        explain_rollout(run, step=2, group=1, sample=0)


def test_a_run_that_records_nothing_says_so(tmp_path: Path) -> None:
    run = shown(tmp_path / "run", run={"token_numbers": 0})
    assert not (tmp_path / "run" / "rl" / "tokens").exists()
    with pytest.raises(NotRecordedError, match=r"run\.token_numbers"):
        explain_rollout(run, step=1, group=0, sample=0)


def test_code_of_a_run_folder_is_not_loaded() -> None:
    with pytest.raises(NotRecordedError, match="which this page does not run"):
        section_of({"rl": {"advantage": {"name": "evil:function"}}})
    for inside in ({"critic": {"loss": {"name": "evil:f"}}}, {"engine": "evil:f"}):
        with pytest.raises(NotRecordedError, match="evil:f"):
            section_of({"rl": {"algorithm": "ppo", **inside}})


def test_what_a_learner_records_is_in_the_order_of_its_sequences(tmp_path: Path) -> None:
    """Micro-batches of a few tokens reorder sequences by length: each keeps its own numbers."""
    rl = {"algorithm": "ppo", "micro_batch_tokens": 8, **SEVERAL}
    agrees(shown(tmp_path / "run", rl=rl), 2)
