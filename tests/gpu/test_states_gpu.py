"""Packed sequences on a GPU: FlashAttention beside the plain equations, and whole models."""

import pytest
import torch
from fast.test_packed_states import CASES, batch, padded
from models.families import build
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from posttrain.fast import packed_states as states
from posttrain.fast.attention import gathered as gathered_attention
from posttrain.fast.attention.blockwise import Block, Flash, Plain
from posttrain.fast.attention.gather_kv import KeyLayout, gather_kv, scatter_grads
from posttrain.fast.score import score_tokens
from posttrain.types import Batch

pytestmark = pytest.mark.gpu

BLOCKS = [
    Block(queries=[3, 1, 70], keys=[3, 1, 70], causal=True),
    Block(queries=[200, 130], keys=[200, 130], causal=True),
    Block(queries=[1, 1, 1], keys=[1, 1, 1], causal=True),
    Block(queries=[700, 2, 33], keys=[20, 150, 1], causal=False),
    Block(queries=[70, 5, 300], keys=[90, 133, 340], causal=True),
]


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


@pytest.mark.parametrize("heads", [4, 2, 1])
@pytest.mark.parametrize("size", [8, 64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block", BLOCKS)
def test_flash_is_the_plain_kernel(block: Block, dtype: torch.dtype, size: int, heads: int) -> None:
    """Output, log-sum-exp and gradients, with as many heads of keys as of queries and fewer."""
    torch.manual_seed(0)
    count, others, repeats = sum(block.queries), sum(block.keys), 4 // heads
    query, gradients = torch.randn(2, count, 4, size, device="cuda", dtype=dtype)
    key, value = torch.randn(2, others, heads, size, device="cuda", dtype=dtype)
    wide = [part.double() for part in (query, key, value)]
    wide[1:] = (part.repeat_interleave(repeats, dim=1) for part in wide[1:])
    plain, flash = Plain(block, like=wide[0]), Flash(block, like=query)
    exact, sums = plain.forward(wide[0], wide[1], value=wide[2], scale=0.2)
    mixed, logsumexp = flash.forward(query, key, value=value, scale=0.2)
    assert logsumexp.shape == sums.shape == (4, count)
    assert error(mixed, exact) < 0.01
    torch.testing.assert_close(logsumexp.double(), sums, rtol=1e-3, atol=1e-3)
    # As a part of a larger softmax: another output and a larger log-sum-exp than its own.
    whole = {"mixed": exact + 0.1, "logsumexp": sums + 0.5}
    wanted = list(plain.backward(gradients.double(), tuple(wide), scale=0.2, **whole))
    wanted[1:] = (part.unflatten(1, (heads, repeats)).sum(2) for part in wanted[1:])
    found = flash.backward(
        gradients,
        (query, key, value),
        mixed=whole["mixed"].to(dtype),
        logsumexp=whole["logsumexp"].float(),
        scale=0.2,
    )
    # dS = P·(dP − D): where a token sees itself alone the two nearly cancel, and D is rounded.
    for mine, theirs in zip(found, wanted, strict=True):
        assert error(mine, theirs) < 0.05


@pytest.mark.parametrize("heads", [1, 3, 40])
@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_layout_kernels(dtype: torch.dtype, repeats: int, heads: int) -> None:
    """Keys are laid out as without them; gradients are the exact sums, the same every time."""
    torch.manual_seed(0)
    tokens, size = 300, 64
    at = torch.randint(0, tokens + 1, (1001,))
    at[:400] = 7  # a prompt with many siblings
    plain = KeyLayout.of(at, tokens=tokens)
    layout = plain.to(torch.device("cuda"))
    key = torch.randn(heads, tokens, size, device="cuda", dtype=dtype).transpose(0, 1)
    value = torch.randn(tokens, heads, size, device="cuda", dtype=dtype)
    expected = gather_kv((key.cpu(), value.cpu()), plain, repeats=repeats)
    found = gather_kv((key, value), layout, repeats=repeats)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine.cpu(), theirs)
    gradients = torch.randn(2, len(at), heads * repeats, size, device="cuda", dtype=dtype)
    exact = scatter_grads(tuple(gradients.double().cpu()), plain, repeats=repeats)
    gradients[:, (at == tokens).cuda()] = torch.nan
    sums, again = (scatter_grads(tuple(gradients), layout, repeats=repeats) for _ in range(2))
    for mine, other, theirs in zip(sums, again, exact, strict=True):
        assert torch.equal(mine, other)
        assert mine.dtype == dtype
        unit = 2**-8 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(mine.double().cpu(), theirs, rtol=unit, atol=1e-4)


@pytest.mark.parametrize("most_keys", [8, 0], ids=["gathered", "in place"])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma", "gpt2"])
def test_packed_is_as_near_to_float64_as_padded_rows(
    name: str, case: str, autocast: bool, most_keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probs and gradients in bfloat16: rounding differs, by no more than always."""
    monkeypatch.setattr(gathered_attention, "MOST_KEYS", most_keys)
    given = batch(CASES[case], gap=True)

    def outcome(model: torch.nn.Module, rows: Batch) -> list[Tensor]:
        model.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast and rows.tokens.is_cuda):
            logprobs = score_tokens(model, rows).logprobs
        logprobs.sum().backward()
        gradients = [part.grad.flatten().double().cpu() for part in model.parameters()]
        return [logprobs.detach().double().cpu(), torch.cat(gradients)]

    exact = outcome(build(name), given)
    model = build(name, dtype=torch.float32 if autocast else torch.bfloat16).cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
        assert states.kernel_for(model.get_decoder(), given) is Flash
    packed = outcome(model, given.to("cuda"))
    monkeypatch.setattr(states, "kernel_for", lambda trunk, batch: None)
    rows = outcome(model, given.to("cuda"))
    for mine, theirs, right in zip(packed, rows, exact, strict=True):
        assert error(mine, right) < 2 * error(theirs, right) + 0.01


def test_float32_keeps_padded_rows() -> None:
    model, given = build("llama", dtype=torch.float32).cuda(), batch(CASES["ragged groups"])
    assert states.kernel_for(model.get_decoder(), given) is None


def test_long_groups_in_bfloat16() -> None:
    """Prompts of 300 tokens, completions of up to 500, heads of 64: the states themselves."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=200,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config).double().cuda().eval()
    rows, width = 24, 800
    tokens = torch.randint(0, 200, (rows, width), device="cuda")
    tokens[:, :300] = tokens[::8, :300].repeat_interleave(8, dim=0)
    ends = torch.randint(310, width + 1, (rows, 1), device="cuda")
    place = torch.arange(width, device="cuda")
    given = Batch(tokens=tokens, mask=(place >= 300) & (place < ends))
    with torch.no_grad():
        exact = padded(model.get_decoder(), given)
        trunk = model.bfloat16().get_decoder()
        found, rounded = states.states_before(trunk, given), padded(trunk, given)
    assert error(found, exact) < 1.5 * error(rounded, exact) < 0.1
