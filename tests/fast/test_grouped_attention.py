"""Attention of siblings on a CPU: the same as that of each row for itself."""

import pytest
import torch

from posttrain.fast.attention.grouped import GroupedStep, Grouping
from posttrain.fast.kv_slots import plain_decode_attention


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("written", [[1, 4, 0, 2], [3, 3, 3, 3]])
@pytest.mark.parametrize("room", [5, 9, 300])  # more than a page from 64 on
def test_it_says_what_rows_say_whatever_stands_in_the_room_that_is_left(
    room: int, written: list[int], window: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    size, heads, queries = 16, 2, 4

    def states(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, size, generator=generator, dtype=torch.float64)

    prompt, completion = (
        (states(*shape), states(*shape)) for shape in ((2, heads, 7), (6, heads, room))
    )
    own = torch.tensor(written, dtype=torch.int32)
    for kept in completion:  # of sequences that have ended: nobody may see it
        for row, count in enumerate(written):
            kept[row, :, count:] = 1e6
    places, lengths = torch.tensor([0, 0, 1, 1]), torch.tensor([5, 5, 7, 7])
    newest = states(4, queries), states(4, heads), states(4, heads)
    again = [kept.clone() for kept in completion]
    step = GroupedStep(Grouping.of(places, lengths), own)
    found = step.attend(*newest, prompt=prompt, completion=completion, scale=0.3, window=window)
    expected = plain_decode_attention(
        *newest,
        prompt_keys=prompt[0],
        prompt_values=prompt[1],
        keys=again[0],
        values=again[1],
        rows=torch.arange(4),
        prompt=places,
        prompt_length=lengths,
        written=own,
        scale=0.3,
        window=window,
    )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert all(map(torch.equal, completion, again))
