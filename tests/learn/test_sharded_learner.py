"""A learner over several ranks learns what one process learns, and decides as one."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rank_jobs
import torch
from rank_pool import pool
from safetensors.torch import load_file
from torch import Tensor

from posttrain.learn.ranks import ALONE

ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-6}


def run(size: int, work: Callable[..., Any], *given: Any) -> Any:
    """What the first of so many ranks answers; one alone is this process."""
    return work(ALONE, *given) if size == 1 else pool().run(size, work, *given)[0]


def apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """How far two gradients are apart, in norms of the gradient."""
    assert found.keys() == expected.keys()
    one, other = (
        torch.cat([table[name].flatten().double() for name in expected])
        for table in (found, expected)
    )
    return float((one - other).norm() / other.norm())


@functools.cache
def all_learned(size: int) -> list[Any]:
    return pool().run(size, rank_jobs.all_learned)


def close(found: dict[str, Any], expected: dict[str, Any], *, rounding: float = 1e-6) -> None:
    """What further steps show is the same, to the rounding of what such a model does in float32."""
    assert found["version"] == expected["version"]
    for (one, seen), (other, known) in zip(found["told"], expected["told"], strict=True):
        for name in ("loss", "gradient_norm", "learning_rate"):
            assert getattr(one, name) == pytest.approx(getattr(other, name), rel=rounding), name
        assert one.metrics == pytest.approx(other.metrics, rel=100 * rounding, abs=rounding)
        assert seen.keys() == known.keys()
        for name in seen:
            assert torch.allclose(seen[name], known[name], rtol=0, atol=rounding), name
    for one, other in zip(found["weights"], expected["weights"], strict=True):
        assert torch.allclose(one, other, rtol=0, atol=rounding)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, torch.float32) for kind in rank_jobs.OBJECTIVES),
        *((kind, torch.float64) for kind in rank_jobs.EXACT),
    ],
    ids=str,
)
def test_the_gradient_is_the_same_for_any_number_of_ranks(kind: str, dtype: torch.dtype) -> None:
    rounding = ROUNDING[dtype]
    if kind == "distill" and dtype == torch.float32:
        rounding *= 10  # its advantages are differences of log-probs that were rounded before
    expected = rank_jobs.learned(ALONE, kind, dtype)
    for size in (2, 3) if dtype == torch.float32 else (3,):
        told = [answer[kind, dtype] for answer in all_learned(size)]
        assert [one["results"] for one in told] == [told[0]["results"]] * size
        found = told[0]
        if kind.endswith("adapter"):
            parts = (".adapter.", " score.", " head.")
            assert all(any(p in name for p in parts) for name in found["gradients"][0])
        first, second = map(apart, found["gradients"], expected["gradients"])
        assert first < rounding
        assert second < 10 * rounding  # after a step of AdamW, which rounds as well
        for one, other in zip(found["results"], expected["results"], strict=True):
            assert one.loss == pytest.approx(other.loss, rel=10 * rounding, abs=rounding)
            assert one.gradient_norm == pytest.approx(other.gradient_norm, rel=10 * rounding)
            assert one.metrics == pytest.approx(other.metrics, rel=100 * rounding, abs=rounding)
        for name, inferred in expected["inferred"].items():
            if inferred is not None:
                assert torch.allclose(found["inferred"][name], inferred, rtol=0, atol=10 * rounding)


@pytest.mark.parametrize("kind", ["ppo", "ppo adapter"])
def test_a_checkpoint_continues_at_another_number_of_ranks(kind: str, tmp_path: Path) -> None:
    """Critic and refreshed reference too: to the bit with as many ranks, else to rounding."""
    for writers, readers in ((2, (1, 2, 3)), (1, (2,))):
        folder = tmp_path / f"of-{writers}"
        folder.mkdir()
        wrote = run(writers, rank_jobs.written, kind, str(folder))
        numbers = json.loads(json.dumps(wrote["numbers"]))
        for size in readers:
            found = run(size, rank_jobs.read, kind, str(folder), numbers)
            close(found, wrote)
            if size == writers:
                assert [step for step, _ in found["told"]] == [step for step, _ in wrote["told"]]
                assert all(map(torch.equal, found["weights"], wrote["weights"]))


@pytest.mark.parametrize("kind", ["tied", "reward"])
def test_the_model_of_several_ranks_is_one_ordinary_folder(kind: str, tmp_path: Path) -> None:
    """The same files with the same weights under the same names; a tied one is stored once."""
    for size in (1, 2):
        run(size, rank_jobs.written, kind, str(tmp_path / str(size)))
    one, two = tmp_path / "1" / "model", tmp_path / "2" / "model"
    assert sorted(path.name for path in one.iterdir()) == sorted(p.name for p in two.iterdir())
    assert (one / "config.json").read_text() == (two / "config.json").read_text()
    expected, found = (load_file(folder / "model.safetensors") for folder in (one, two))
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.allclose(found[name], expected[name], rtol=0, atol=1e-6), name
    assert not list((tmp_path / "2").glob("weights*"))  # all of them are in the folder


@pytest.mark.parametrize("kind", ["grpo adapter", "reward adapter"])
def test_several_ranks_write_adapters_alone(kind: str, tmp_path: Path) -> None:
    """The files of one process, in the checkpoint too: nothing of the base is in any of them."""
    for size in (1, 2):
        run(size, rank_jobs.written, kind, str(tmp_path / str(size)))
    one, two = tmp_path / "1" / "model", tmp_path / "2" / "model"
    assert sorted(path.name for path in one.iterdir()) == sorted(p.name for p in two.iterdir())
    name = "adapter_config.json"
    assert (one / name).read_text() == (two / name).read_text()
    expected, found = (load_file(path / "adapter_model.safetensors") for path in (one, two))
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.allclose(found[name], expected[name], rtol=0, atol=1e-6), name
    stored = {key for file in two.parent.rglob("*.safetensors") for key in load_file(file)}
    learned = ("lora_A", "lora_B", ".adapter.", "score.")
    assert not [key for key in stored if not any(part in key for part in learned)]


def test_a_lost_or_damaged_shard_is_found(tmp_path: Path) -> None:
    wrote = run(2, rank_jobs.written, "grpo", str(tmp_path))
    shards = sorted((tmp_path / "optimizer").iterdir())
    assert len(shards) == 2
    kept = shards[0].read_bytes()
    shards[0].unlink()
    with pytest.raises(ValueError, match="is missing; resume from another checkpoint"):
        rank_jobs.read(ALONE, "grpo", str(tmp_path), wrote["numbers"])
    shards[0].write_bytes(kept[:1000])
    with pytest.raises(ValueError, match=r"is damaged .*; resume from another checkpoint"):
        rank_jobs.read(ALONE, "grpo", str(tmp_path), wrote["numbers"])


@pytest.mark.parametrize(
    ("kind", "where", "size"),
    [
        ("sft", "backward", 2),
        ("grpo", "forward", 3),
        ("ppo adapter", "backward", 2),
        ("ppo", "critic", 2),
        ("ppo shared", "backward", 2),
    ],
)
def test_out_of_memory_in_one_rank_makes_all_take_smaller_parts(
    kind: str, where: str, size: int
) -> None:
    answers = pool().run(size, rank_jobs.out_of_memory, kind, where, 24)
    assert [answer["raised"] for answer in answers] == [[]] * (size - 1) + [[where]]
    tokens = {answer["tokens"] for answer in answers}
    assert len(tokens) == 1
    assert max(tokens) < 24
    close(answers[0], rank_jobs.out_of_memory(ALONE, kind, where, max(tokens)))


def test_what_is_not_finite_in_one_rank_is_skipped_by_all() -> None:
    expected = rank_jobs.skipped(ALONE, "ppo")
    assert expected["skipped"]
    for found in pool().run(3, rank_jobs.skipped, "ppo"):
        assert (found["skipped"], found["same"]) == (True, True)
        close(found, expected)
