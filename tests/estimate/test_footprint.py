"""The memory that is predicted of a run, beside what runs took on an H200."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from posttrain.data.minibatch import micro_batches
from posttrain.estimate.gpus import find_device
from posttrain.estimate.parts import footprint
from posttrain.estimate.work import MicroBatch, Work
from posttrain.fast import token_scores
from posttrain.models.adapters import AdapterSettings
from posttrain.models.frozen import Reference
from posttrain.models.outline import SHAPES, find_config, shape_config
from posttrain.types import Batch

GIB = 2**30
SMOLLM2 = Work(
    config=shape_config(**SHAPES["smollm2-135m"]),
    prompts=64,
    group=8,
    prompt_tokens=48,
    new_tokens=256,
)
TINY = Work(config=find_config("tiny"), prompts=8, group=4, prompt_tokens=32, new_tokens=32)


@pytest.mark.parametrize(
    ("changes", "measured"),
    [
        ({"micro_batch_tokens": 16_384, "samples_here": False}, 16.88),
        ({"micro_batch_tokens": 5120, "compiled": True, "samples_here": False}, 5.86),
        ({"micro_batch_tokens": 16_384, "compiled": True, "samples_here": False}, 11.69),
        ({"micro_batch_tokens": 5120, "compiled": True}, 9.16),
    ],
)
def test_within_a_tenth_of_what_an_h200_took(
    changes: dict[str, Any], measured: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Learning alone, and a whole step with its sampling: the tables of docs/benchmarks.md.

    They were measured when a GPU computed 2**26 logits at once, and kept none.
    """
    monkeypatch.setattr(token_scores, "GPU_SHARE", 0.0)
    monkeypatch.setattr(token_scores, "KEPT_SHARE", 0.0)
    found = footprint(replace(SMOLLM2, **changes), 139 * GIB)
    assert found.peak / GIB == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("size", [14, 16, 18, 24])
def test_a_larger_card_never_fits_less(size: int) -> None:
    """A 7B with QLoRA: the line through two trials says 16,384 tokens from 16 GB on."""
    work = Work(
        config=shape_config(**SHAPES["qwen2.5-7b"]),
        prompts=16,
        group=8,
        prompt_tokens=256,
        new_tokens=256,
        adapter=AdapterSettings(rank=16, quantize="nf4"),
        checkpointed=True,
        compiled=True,
    )
    found = footprint(work, size * GIB)
    assert found.micro_batch_tokens <= found.most_tokens
    assert found.peak <= size * GIB


def test_the_parts_by_hand() -> None:
    """The tiny model has 1,076,864 weights, of which 13,568 are the embedding, 13,568 the head."""
    plain = footprint(TINY, 8 * GIB)
    weights = 1_076_864
    assert plain.weights == plain.trained == weights
    assert plain.stays["weights"] == plain.stays["gradients"] == 4 * weights
    assert plain.stays["AdamW"] == 8 * weights
    # Matrices are cast for sampling: all but the embedding and 9 norms of 128.
    assert plain.stays["engine's cast weights"] == 2 * (weights - 106 * 128 - 9 * 128)
    keys = 2 * 4 * 128 * 2  # of a token: 4 layers, 128 numbers, 2 bytes
    tokens = 8 * 32 + 32 * 32
    assert plain.stays["KV cache"] == tokens * keys + 24 * 32 * 32
    critic = footprint(replace(TINY, critic="separate", reference=Reference()), 8 * GIB)
    assert critic.stays["reference"] == 4 * weights
    assert critic.stays["critic"] == 4 * (weights - 106 * 128)  # it has no head of words
    assert critic.learning["activations"] == 2 * plain.learning["activations"]
    moved = Reference(dtype=torch.bfloat16, offload=True)
    offloaded = footprint(replace(TINY, reference=moved), 8 * GIB)
    assert "reference" not in offloaded.stays
    assert offloaded.asking["reference"] == 2 * weights


def test_adapters_train_little_and_their_base_is_not_copied_where_memory_is_short() -> None:
    adapted = replace(TINY, adapter=AdapterSettings(rank=4), reference=Reference())
    found = footprint(adapted, 8 * GIB)
    each = 4 * (128 + 128) * 4 + 3 * (128 + 512) * 4
    assert found.trained == 4 * each
    assert found.stays["reference"] == found.stays["gradients"] == 4 * found.trained
    short = footprint(replace(adapted, sequences_at_once=1), 0.5 * GIB + 6 * 2**20)
    copied, shared = (each.stays["engine's cast weights"] for each in (found, short))
    assert shared < 0.5 * copied


def test_a_micro_batch_is_cut_as_a_learner_cuts_it() -> None:
    """Groups of 32 + 4 · 32 tokens: three in 500; the last of a completion is not read."""
    assert TINY.fullest(500) == MicroBatch(3 * (32 + 4 * 31), 3 * 4 * 32)
    assert TINY.fullest(10**6) == MicroBatch(8 * (32 + 4 * 31), 8 * 4 * 32)


@pytest.mark.parametrize("max_tokens", [1, 90, 400, 3000])
def test_it_is_cut_from_sizes_alone_as_tensors_are(max_tokens: int) -> None:
    work = replace(TINY, prompts=5, group=7, prompt_tokens=9, new_tokens=40)
    tokens = torch.arange(5)[:, None].expand(-1, 49).repeat_interleave(7, 0)
    mask = (torch.arange(49) >= 9).expand(tokens.shape)
    batch = Batch(tokens=tokens, mask=mask, attention=torch.ones_like(mask), weights=mask.float())
    parts = [rows // 7 for rows, _ in micro_batches(batch, max_tokens, share_prompts=True)]
    sizes = [(9 * len(set(p.tolist())) + 39 * len(p), 40 * len(p)) for p in parts]
    assert work.fullest(max_tokens) == MicroBatch(*max(sizes))
    long = replace(work, prompt_tokens=10**9)  # whose tensors no machine could hold
    assert long.fullest(max_tokens) == MicroBatch(10**9 + 39, 40)


def test_gpus_are_found_by_name_and_by_memory() -> None:
    assert find_device("H200").memory == 139.8 * GIB
    assert find_device("RTX 4090").name == "rtx-4090"
    assert find_device("12 GB").memory == 12 * GIB
    with pytest.raises(ValueError, match=r"--gpu: 'h20' .*h200"):
        find_device("h20")
