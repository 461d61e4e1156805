"""The roomy cache layer against transformers' own, and the cost of a sequence."""

import torch
from models.families import build
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from posttrain.models.cache import (
    PreallocatedLayer,
    bytes_per_sequence,
    context_length,
    new_cache,
    select_rows,
)


def test_equals_transformers_own_layer() -> None:
    generator = torch.Generator().manual_seed(0)
    ours, theirs = PreallocatedLayer(), DynamicLayer()
    rows = 3
    for length in (1, 5, 1, 1, 30, *[1] * 20):
        new = [torch.rand(rows, 2, length, size, generator=generator) for size in (4, 6)]
        found, expected = ours.update(*new), theirs.update(*new)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)
        if length == 5:  # rows may be dropped, repeated and reordered
            keep = torch.tensor([2, 0, 0, 2, 1])
            rows = len(keep)
            ours.batch_select_indices(keep)
            theirs.batch_select_indices(keep)
            assert torch.equal(ours.keys, theirs.keys)
            assert torch.equal(ours.values, theirs.values)
        assert ours.get_seq_length() == theirs.get_seq_length()


def test_a_step_writes_in_place_while_there_is_room() -> None:
    layer = PreallocatedLayer()
    states = torch.rand(2, 1, 40, 4)
    places = {layer.update(states, states)[0].data_ptr()}
    for _ in range(10):
        places.add(layer.update(states[:, :, :1], states[:, :, :1])[0].data_ptr())
    assert len(places) == 1


def test_under_autocast_states_are_kept_as_attention_reads_them() -> None:
    layer, states = PreallocatedLayer(), torch.rand(1, 1, 2, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        keys, values = layer.update(states, states)
    assert keys.dtype == values.dtype == torch.bfloat16


def test_layers_that_attend_in_a_window_keep_their_own() -> None:
    kinds = [type(layer) for layer in new_cache(build("gemma3")).layers]
    assert set(kinds) <= {PreallocatedLayer, DynamicSlidingWindowLayer}
    assert DynamicSlidingWindowLayer in kinds
    assert {type(layer) for layer in new_cache(build("llama")).layers} == {PreallocatedLayer}


def test_selecting_rows_of_an_empty_cache_is_no_error() -> None:
    select_rows(new_cache(build("llama")), torch.tensor([0, 0]))


def test_context_length() -> None:
    assert context_length(build("llama")) == 64
    assert context_length(build("gpt2")) == 64  # which calls it n_positions


def test_the_estimate_covers_the_cache() -> None:
    model = build("llama", dtype=torch.float32)  # 2 layers, 1 head of 8 kept, float32
    kept = 2 * 2 * 8 * 4
    estimate = bytes_per_sequence(model, prompt_tokens=30, new_tokens=20, dtype=torch.float32)
    assert estimate > 50 * kept
    halved = bytes_per_sequence(model, prompt_tokens=30, new_tokens=20, dtype=torch.bfloat16)
    assert halved < estimate
