"""Keys laid out where they are seen, and their gradients taken back."""

import pytest
import torch

from posttrain.fast.attention.gather_kv import KeyLayout, gather_kv, scatter_grads

AT = torch.tensor([0, 1, 2, 0, 1, 3, 0, 1, 4, 5, 5])  # 5: nobody sees it


@pytest.mark.parametrize("repeats", [1, 3])
def test_what_is_taken_back_is_the_gradient_of_what_was_laid_out(repeats: int) -> None:
    torch.manual_seed(0)
    layout = KeyLayout.of(AT, tokens=5)
    key, value = (torch.randn(5, 2, 4).double().requires_grad_() for _ in range(2))
    gradients = torch.randn(2, len(AT), 2 * repeats, 4).double()
    seen = AT < 5
    laid_out = gather_kv((key, value), layout, repeats=repeats)
    for states, copies in zip((key, value), laid_out, strict=True):
        for place, token in enumerate(AT[seen].tolist()):
            expected = states[token].repeat_interleave(repeats, 0)
            assert torch.equal(copies[place], expected)
    sum(
        (part[seen] * gradient[seen]).sum()
        for part, gradient in zip(laid_out, gradients, strict=True)
    ).backward()
    gradients[:, ~seen] = torch.nan
    found = scatter_grads(tuple(gradients), layout, repeats=repeats)
    torch.testing.assert_close(found, (key.grad, value.grad), rtol=0, atol=1e-12)


def test_every_copy_of_a_token_is_listed_in_order() -> None:
    layout = KeyLayout.of(AT, tokens=5)
    lists = [
        layout.order[begin:end].tolist()
        for begin, end in zip(layout.begins[:-1], layout.begins[1:], strict=True)
    ]
    assert lists == [[0, 3, 6], [1, 4, 7], [2], [5], [8]]


def test_sums_of_half_precision_are_rounded_once() -> None:
    layout = KeyLayout.of(torch.zeros(512, dtype=torch.long), tokens=1)
    gradients = torch.full(
        (512, 1, 1), 1.0, dtype=torch.bfloat16
    )  # one by one it would stop at 256
    key, value = scatter_grads((gradients, gradients), layout)
    assert key.item() == value.item() == 512
    assert key.dtype == torch.bfloat16


def test_another_layout_takes_the_place_of_one() -> None:
    layout, other = KeyLayout.of(AT, tokens=5), KeyLayout.of(AT.flip(0), tokens=5)
    addresses = [part.data_ptr() for part in vars(layout).values()]
    layout.copy_(other)
    assert [part.data_ptr() for part in vars(layout).values()] == addresses
    for mine, theirs in zip(vars(layout).values(), vars(other).values(), strict=True):
        assert torch.equal(mine, theirs)
