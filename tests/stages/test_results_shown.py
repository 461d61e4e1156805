"""What a REPL and a notebook show of results: short, and escaped."""

import builtins
import sys
from pathlib import Path
from typing import Any

import pytest
from loop_parts import rollout
from small_runs import recipe, small_run

import posttrain
from posttrain.pipelines.evaluate import Evaluation, share
from posttrain.types import Prompt, Rollout, Score, Turn
from posttrain.types.marks import Marks

EVIL = "<script>alert(1)</script>" + "long " * 2000


@pytest.fixture(scope="module")
def evaluation() -> Evaluation:
    """Of a hundred problems whose texts are long, and want to be more than text."""
    turn = Turn(tokens=(5, 6), text=EVIL, logprobs=(-1.0, -2.0))
    score = Score(value=1.0, parts={"exact": 1.0})
    answers = [
        Rollout(prompt=Prompt(id=str(n), text=EVIL), turns=(turn,), group=n, score=score)
        for n in range(100)
    ]
    return Evaluation(
        marks=Marks(check="exact", weights={"exact": 1.0}),
        estimates={"accuracy": share(100, 100)},
        mean_reward=1.0,
        parts={"exact": 1.0} | {f"reward_{n}": 0.5 for n in range(40)},
        invalid=0.0,
        greedy=answers,
        sampled=answers[:1],
    )


def test_an_evaluation_is_a_line(evaluation: Evaluation) -> None:
    shown = repr(evaluation)
    assert shown == str(evaluation)
    assert len(shown) < 500
    assert shown.startswith("Evaluation of 100 problems: accuracy (exact) 100.0% [96.3%, 100.0%]")
    assert shown.endswith("and 31 more")


def test_what_a_model_wrote_is_escaped_in_a_notebook(evaluation: Evaluation) -> None:
    page = evaluation._repr_html_()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert len(page) < 10_000


def test_an_evaluation_as_rows_and_as_a_frame(
    evaluation: Evaluation, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = evaluation.to_pandas()
    assert len(frame) == 101
    assert not frame["right"].isna().any()
    assert list(frame["drawn"].value_counts().items()) == [("greedy", 100), ("sampled", 1)]
    assert frame["part/exact"].mean() == 1.0
    imported = builtins.__import__

    def without_pandas(name: str, *given: Any, **more: Any) -> Any:
        if name == "pandas":
            raise ModuleNotFoundError("No module named 'pandas'", name="pandas")
        return imported(name, *given, **more)

    monkeypatch.delitem(sys.modules, "pandas", raising=False)
    monkeypatch.setattr(builtins, "__import__", without_pandas)
    with pytest.raises(ModuleNotFoundError, match="pip install pandas"):
        evaluation.to_pandas()
    assert len(evaluation.rows()) == 101


def test_a_run_says_what_came_out(tmp_path: Path) -> None:
    run, _ = small_run(recipe(tmp_path / "<b>run", sft=None, grading={"workers": 0}))
    shown = repr(run)
    assert shown.startswith(f"Run({str(tmp_path / '<b>run')!r}, stages rl+eval, accuracy ")
    assert ", reward " in shown
    assert len(shown) < 300 + len(str(tmp_path))
    assert "<b>" not in run._repr_html_()
    assert len(run.to_pandas()) == 3
    assert "reward/mean" in run.to_pandas().columns
    with posttrain.Policy(run) as policy:  # a run stands where its folder may
        assert policy.name == str(run.model)


def test_rollouts_are_a_line_each() -> None:
    assert repr(rollout(0.5)) == "Rollout('?' → '', 2 tokens, stop, score 0.5)"
    assert repr(rollout(None)) == "Rollout('?' → '', 2 tokens, stop, crashed)"
