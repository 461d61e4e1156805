"""What travels as numpy comes back as it was: every field of a batch, every type of a weight."""

import dataclasses
import pickle

import critic_parts
import pytest
import torch

from posttrain.distributed.wire import (
    pack_batch,
    pack_tensor,
    unpack_batch,
    unpack_tensor,
)
from posttrain.types import Batch


def fields(batch: Batch) -> dict[str, torch.Tensor]:
    found = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def test_a_batch_comes_back_as_it_was() -> None:
    batch = critic_parts.batch().replace(
        baseline=torch.tensor(0.25, dtype=torch.float64),
        valid=torch.tensor([True, False, True]),
        versions=torch.tensor([1, 2, 3]),
    )
    back = fields(unpack_batch(pickle.loads(pickle.dumps(pack_batch(batch)))))
    assert back.keys() == fields(batch).keys()
    for name, tensor in fields(batch).items():
        assert back[name].dtype == tensor.dtype, name
        assert torch.equal(back[name], tensor), name


def test_only_what_was_added_travels_back() -> None:
    batch = critic_parts.batch()
    added = batch.replace(old_logprobs=torch.rand(batch.tokens.shape))
    packed = pack_batch(added, beside=batch)
    assert list(packed.fields) == ["old_logprobs"]
    whole = unpack_batch(packed, onto=batch)
    assert torch.equal(whole.need("old_logprobs"), added.need("old_logprobs"))
    assert whole.tokens is batch.tokens


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_weights_of_every_type_keep_their_bits(dtype: torch.dtype) -> None:
    weight = torch.randn(3, 4).to(dtype).T  # not contiguous
    array, name = pickle.loads(pickle.dumps(pack_tensor(weight)))
    array.flags.writeable = False  # as Ray hands it over
    back = unpack_tensor((array, name))
    assert back.dtype == dtype
    assert torch.equal(back, weight)
    back.zero_()  # memory of its own
