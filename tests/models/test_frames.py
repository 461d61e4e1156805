"""Packed rows in frames of fixed sizes: padding changes nothing, like batches have one frame."""

import pytest
import torch
from exact_norms import with_exact_norms
from models.families import build
from models.test_states import CASES, batch

from posttrain.models.block_attention import Plain
from posttrain.models.frames import Frame, fit, frame_of
from posttrain.models.packing import Packing, pack
from posttrain.models.recorded_pass import framed_states
from posttrain.models.states import packed_states
from posttrain.types import Batch
from posttrain.types.prompts import spans


def packed(given: Batch) -> Packing:
    return pack(given, spans(given))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_states_and_gradients_are_those_without_padding(name: str, case: str) -> None:
    model = with_exact_norms(build(name))
    trunk, given = model.get_decoder(), batch(CASES[case])
    packing = packed(given)
    framed = fit(packing, frame_of(packing))
    results = []
    for states in (
        packed_states(trunk, given.tokens, packing=packing),
        framed_states(trunk, given.tokens, framed=framed, make=Plain),
    ):
        model.zero_grad()
        (states * torch.arange(states.numel()).view(states.shape).double().sin()).sum().backward()
        results.append((states, {n: p.grad for n, p in trunk.named_parameters()}))
    (expected, slopes), (found, others) = results
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    for name_of, slope in slopes.items():
        torch.testing.assert_close(others[name_of], slope, rtol=1e-10, atol=1e-10, msg=name_of)


def rows(*, prompts: int, siblings: int, asked: int, answered: int) -> Batch:
    """Prompts of ``asked`` tokens, each with ``siblings`` completions of ``answered``."""
    numbers = torch.arange(prompts).repeat_interleave(siblings)
    prompt = (numbers[:, None] * 100 + torch.arange(asked)) % 1000
    count = prompts * siblings
    tokens = torch.cat([prompt, torch.arange(count * answered).view(count, -1) % 1000], 1)
    mask = torch.arange(asked + answered).expand(count, -1) >= asked
    return Batch(tokens=tokens, mask=mask)


def test_the_sizes_of_a_frame() -> None:
    """Multiples of 1,024 tokens and powers of two, with room for the padding as a sequence."""
    packing = packed(rows(prompts=4, siblings=8, asked=40, answered=101))
    assert frame_of(packing) == Frame(
        heads=256,  # 4 × 40 and at least one of padding
        rest=4096,  # 32 × 100, the last token is read by nobody
        num_heads=32,
        num_rest=64,  # 32 completions and up to eight pieces of padding
        num_groups=32,
        longest_head=128,
        longest_rest=128,
        longest_group=1024,
        longest_prompt=256,  # the padding sees all that stands behind the prompts
    )


def test_like_batches_share_a_frame() -> None:
    like = [
        rows(prompts=4, siblings=8, asked=asked, answered=answered)
        for asked, answered in ((40, 101), (36, 120), (50, 99))
    ]
    assert len({frame_of(packed(given)) for given in like}) == 1


def test_all_of_a_frame_is_some_sequence() -> None:
    """So that nothing is left unwritten by a kernel that goes by sequences."""
    packing = packed(rows(prompts=3, siblings=5, asked=7, answered=30))
    frame = frame_of(packing)
    framed = fit(packing, frame)
    assert sum(framed.heads) == sum(framed.prompts) == frame.heads
    assert sum(framed.rest) == sum(framed.groups) == frame.rest
    assert min(frame.heads - 3 * 7, frame.rest - 15 * 29) > 0
    assert len(framed.heads) == frame.num_heads
    assert len(framed.groups) == len(framed.prompts) == frame.num_groups
    assert max(framed.heads) <= frame.longest_head
    assert max(framed.rest) <= frame.longest_rest
    assert max(framed.groups) <= frame.longest_group
    assert max(framed.prompts) <= frame.longest_prompt


def test_nothing_shared_needs_no_second_part() -> None:
    packing = packed(rows(prompts=6, siblings=1, asked=7, answered=30))
    framed = fit(packing, frame_of(packing))
    assert framed.frame.rest == 0
    assert len(framed.blocks()) == 1
