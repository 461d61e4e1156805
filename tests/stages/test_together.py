"""Several adapters in one run: each is what it would have been alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from resumed_runs import Killed, go, same
from small_runs import recipe, timeless, weights

from posttrain.config import ConfigError
from posttrain.learn import learner as learner_module
from posttrain.runs import read_rollouts
from posttrain.runs.folder import RunFolder

# To the float32 rounding of a product with more rows; learning itself is the same to the bit.
CLOSE = 1e-6


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that gets some sums right: its groups have something to compare."""
    folder = tmp_path_factory.mktemp("base")
    sft = {"epochs": 12, "wrong_share": 0.5}
    done, _ = go(recipe(folder / "run", sft=sft, rl=None, eval=None))
    return str(done.model)


def given(folder: Path, base: str, **sections: Any) -> dict[str, Any]:
    """A short run on the base."""
    rl = {"learning_rate": 1e-2, "save_every": 1, **sections.pop("rl", {})}
    values = recipe(
        folder,
        sft=None,
        adapter={"rank": 4, **sections.pop("adapter", {})},
        grading={"workers": 0},
        rl=rl,
        **{name: table for name, table in sections.items() if name != "sweep"},
    )
    values["model"] = {"name": base}
    values["run"] |= {"save_minutes": 0.0, "threads": 1}
    return values | ({"sweep": sections["sweep"]} if "sweep" in sections else {})


def alike(found: RunFolder, alone: RunFolder) -> None:
    """The same tokens; and numbers and weights to the last digits of float32."""
    one, other = found.stage("rl"), alone.stage("rl")
    rows = [list(read_rollouts(stage.rollouts)) for stage in (one, other)]
    texts = [[(row["step"], row["prompt"], row["completion"]) for row in some] for some in rows]
    assert texts[0] == texts[1]
    for mine, theirs in zip(timeless(one.records()), timeless(other.records()), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=CLOSE)
    mine, theirs = weights(one.model), weights(other.model)
    assert mine.keys() == theirs.keys()
    for name, weight in mine.items():
        torch.testing.assert_close(weight, theirs[name], rtol=CLOSE, atol=CLOSE)


def test_each_adapter_is_what_it_would_have_been_alone(base: str, tmp_path: Path) -> None:
    rows = [
        {"rl": {"algorithm": "grpo", "kl": {"coefficient": 0.05}}},
        {"rl": {"algorithm": "rloo", "learning_rate": 2e-2}, "adapter": {"alpha": 12.0}},
    ]
    # The check changes weights that all share, and puts them back before another has its turn.
    done, said = go(given(tmp_path / "all", base, rl={"adapters": 2, "check": "warn"}, sweep=rows))
    for number, row, seed in ((1, rows[0], 2), (2, rows[1], 1)):
        single = given(tmp_path / f"alone-{number}", base, **row)
        single["run"]["seed"] = seed
        alone, _ = go(single)
        member = RunFolder(tmp_path / "all" / "adapters" / str(number))
        alike(member, alone.folder)
        assert alone.summary["accuracy_after"] == member.summary["accuracy_after"]
    assert [row["number"] for row in done.summary["settings"]] == [2, 2]
    assert "rl.learning_rate" in said
    assert "±" in said


def of(folder: Path, number: int) -> RunFolder:
    return RunFolder(folder / "adapters" / str(number))


@pytest.mark.parametrize(
    "saves",
    [
        pytest.param(2, id="in step"),
        pytest.param(3, id="one step apart", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_was_cut_goes_on_as_if_it_had_not_been(
    base: str, tmp_path: Path, saves: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two adapters save in turns; where all were cut at one step, all goes on bit for bit."""
    changes: dict[str, Any] = {"rl": {"adapters": 2}}
    go(given(tmp_path / "whole", base, **changes))
    values, whole, calls = given(tmp_path / "cut", base, **changes), learner_module.save_learner, 0

    def dies(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > saves:
            raise Killed
        return whole(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(learner_module, "save_learner", dies)
        with pytest.raises(Killed):
            go(values)
    _, said = go(values, resume=True)
    assert f"rl: goes on from step {saves - 1}" in said
    for number in range(2):
        if saves == 2:
            same(of(tmp_path / "cut", number), of(tmp_path / "whole", number), stages=("rl",))
        else:
            alike(of(tmp_path / "cut", number), of(tmp_path / "whole", number))
    _, said = go(values, resume=True)
    assert "finished already" in said


def test_what_befalls_one_adapter_befalls_no_other(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One has a gradient of NaN in its second step, and skips it; another raises and ends."""
    sweep = [{"rl": {"learning_rate": rate}} for rate in (1e-2, 2e-2, 3e-2)]
    rl = {"save_every": 0}
    norm, steps = learner_module.Trained.norm, {1e-2: 0, 2e-2: 0, 3e-2: 0}

    def broken(part: Any) -> torch.Tensor:
        rate = part.learning_rate
        steps[rate] += 1
        if rate == 3e-2 and steps[rate] == 2:
            raise ValueError("a fault of its own")
        found = norm(part)
        return found * float("nan") if rate == 2e-2 and steps[rate] == 2 else found

    values = given(tmp_path / "all", base, sweep=sweep, rl=rl)
    with monkeypatch.context() as patch:
        patch.setattr(learner_module.Trained, "norm", broken)
        with pytest.raises(ValueError, match="fault") as raised:
            go(values)
    assert "2 of 3 adapters came to their end" in raised.value.__notes__[0]
    alone, _ = go(given(tmp_path / "alone", base, rl={**rl, "learning_rate": 1e-2}))
    alike(of(tmp_path / "all", 0), alone.folder)
    records = [of(tmp_path / "all", number).stage("rl").records() for number in range(3)]
    skipped = [[int(row["train/skipped_total"]) for row in rows] for rows in records]
    assert skipped == [[0, 0, 0], [0, 1, 1], [0]]
    assert (tmp_path / "all/adapters/1/rl/skipped/step-000002").is_dir()
    assert not of(tmp_path / "all", 2).finished


def test_a_row_that_is_wrong_is_named_and_another_engine_refused(tmp_path: Path) -> None:
    rl = {"adapters": 2, "engine": "transformers"}
    with pytest.raises(ConfigError, match="sampled together by the engine native alone"):
        go(given(tmp_path / "run", "tiny", rl=rl))
    values = given(tmp_path / "run", "tiny", sweep=[{"rl": {"rate": 1.0}, "run": {"seed": "x"}}])
    with pytest.raises(ConfigError, match=r"run.seed: must be .*\n.*rl.rate: .*row { rl = .* of"):
        go(values)
    assert not (tmp_path / "run" / "run.json").exists()
