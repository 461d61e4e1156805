"""A learner over two ranks that share one GPU, by gloo: what one process learns there."""

import pytest
import rank_jobs
import torch
from learn.test_sharded_learner import apart
from rank_pool import pool

from posttrain.learn.ranks import ALONE

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("compute", "rounding"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)], ids=str
)
@pytest.mark.parametrize("kind", ["sft", "reward", "grpo", "grpo offloaded", "ppo", "ppo shared"])
def test_the_gradient_is_that_of_one_process(
    kind: str, compute: torch.dtype, rounding: float
) -> None:
    """In float32 to its rounding; in bfloat16 other micro-batches round another way."""
    expected = rank_jobs.on_gpu(ALONE, kind, compute)
    one, other = pool().run(2, rank_jobs.on_gpu, kind, compute)
    assert one["results"] == other["results"]
    for found, known in zip(one["gradients"], expected["gradients"], strict=True):
        assert apart(found, known) < rounding
    for found, known in zip(one["results"], expected["results"], strict=True):
        assert found.loss == pytest.approx(known.loss, rel=rounding, abs=rounding)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_out_of_memory_in_one_rank_makes_both_take_smaller_parts(where: str) -> None:
    answers = pool().run(2, rank_jobs.out_of_memory_on_gpu, "grpo", where, 24)
    assert [answer["raised"] for answer in answers] == [[], [where]]
    assert answers[0]["tokens"] == answers[1]["tokens"] < 24
    assert [step for step, _ in answers[0]["told"]] == [step for step, _ in answers[1]["told"]]
