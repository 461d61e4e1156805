"""A run with a teacher: it is resumed to the bit, runs ahead, and comes nearer to the teacher."""

from pathlib import Path
from typing import Any

import pytest
import torch
from resumed_runs import cut, given, go, same
from small_runs import make_teacher, recipe, small_run

from posttrain.models.load import load_policy

WIDER = {"hidden_size": 48}


def distilled(folder: Path, teacher: str, **rl: Any) -> dict[str, Any]:
    changes = {"steps": 6, "save_every": 2, **rl}
    return given(folder, changes, teacher={"model": teacher}, sft=None, eval=None)


@pytest.mark.parametrize(("algorithm", "max_lag"), [("distill", 1), ("gkd", 0)])
def test_a_run_that_was_cut_short_ends_as_if_it_had_not_been(
    algorithm: str, max_lag: int, tmp_path: Path
) -> None:
    teacher = make_teacher(tmp_path / "teacher", **WIDER)
    options = {"algorithm": algorithm, "max_lag": max_lag, "minibatches": 2}
    whole, _ = go(distilled(tmp_path / "whole", teacher, **options))
    values = distilled(tmp_path / "cut", teacher, **options)
    cut(values, save=2)
    resumed, _ = go(values, resume=True)
    same(whole.folder, resumed.folder, stages=("rl",))


@pytest.mark.parametrize(
    ("rl", "metric"),
    [
        ({"algorithm": "distill"}, "teacher/kl"),
        ({"algorithm": "gkd"}, "teacher/divergence"),
        ({"algorithm": "gkd", "loss": {"beta": 0.0}}, "teacher/divergence"),
        ({"algorithm": "gkd", "loss": {"beta": 0.5}}, "teacher/divergence"),
    ],
)
def test_the_policy_comes_nearer_to_the_teacher(
    rl: dict[str, Any], metric: str, tmp_path: Path
) -> None:
    teacher = make_teacher(tmp_path / "teacher", **WIDER)
    sizes = {"steps": 12, "prompts_per_step": 8, "group_size": 4, "learning_rate": 3e-3}
    run, _ = small_run(
        recipe(tmp_path / "r", sft=None, eval=None, teacher={"model": teacher}, rl={**sizes, **rl})
    )
    apart = [record[metric] for record in run.folder.stage("rl").records() if metric in record]
    assert len(apart) == 12
    assert apart[-1] < 0.7 * apart[0]


def test_a_teacher_of_another_vocabulary_is_refused_before_the_first_stage(
    tmp_path: Path,
) -> None:
    folder = Path(make_teacher(tmp_path / "teacher"))
    other = load_policy(str(folder))
    other.tokenizer.add_tokens(["<tool>"])
    other.tokenizer.save_pretrained(folder)
    other.model.resize_token_embeddings(len(other.tokenizer), mean_resizing=False)
    other.model.save_pretrained(folder)
    values = recipe(tmp_path / "r", teacher={"model": str(folder)}, rl={"algorithm": "distill"})
    with pytest.raises(ValueError, match=r"teacher\.model: .* has another vocabulary"):
        small_run(values)
    assert not (tmp_path / "r" / "sft" / "model").exists()


def test_a_teacher_with_rows_of_padding_teaches_the_same(tmp_path: Path) -> None:
    """Equal metrics with rows that no token has, whose logits are as large as any."""
    plain = make_teacher(tmp_path / "teacher")
    padded = Path(make_teacher(tmp_path / "padded"))
    model = load_policy(str(padded)).model
    model.resize_token_embeddings(model.config.vocab_size + 7, mean_resizing=False)
    with torch.no_grad():
        model.lm_head.weight[-7:] = model.lm_head.weight[:7]
    model.save_pretrained(padded)
    told = []
    for name, teacher in (("one", plain), ("other", str(padded))):
        values = distilled(tmp_path / name, teacher, algorithm="gkd", steps=2, save_every=0)
        told.append(go(values)[0].folder.stage("rl").records()[-1]["teacher/divergence"])
    assert told[0] == pytest.approx(told[1], rel=1e-6)
