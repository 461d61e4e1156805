"""Packed sequences and shared prompts: the same numbers and gradients as padded rows."""

import pytest
import torch
import transformers
from models.families import FAMILIES, VOCABULARY, build
from torch import Tensor, nn

from posttrain.algorithms import ops
from posttrain.fast import packed_states as states
from posttrain.fast.attention.blockwise import Block, Padded, Plain
from posttrain.fast.packing import pack
from posttrain.fast.score import score_tokens
from posttrain.models import head
from posttrain.models.critic import Critic
from posttrain.types import Batch
from posttrain.types.batch import spans

PACKED = ["llama", "llama tied", "qwen2", "qwen3", "gemma", "granite", "gpt2", "gpt_neox"]
PADDING = 3  # it also ends sequences, and stands in the middle of some

# (name of the prompt, tokens of the prompt, tokens of the completion)
Rows = list[tuple[int, int, int]]
CASES: dict[str, Rows] = {
    "ragged groups": [(0, 5, 6), (0, 5, 1), (1, 2, 4), (0, 5, 3), (1, 2, 9), (2, 7, 2), (2, 7, 2)],
    "even groups": [(0, 4, 5), (0, 4, 5), (1, 4, 5), (1, 4, 5)],
    "same group, other prompts": [(0, 3, 4), (1, 3, 4), (0, 3, 2), (2, 6, 5), (2, 6, 5)],
    "one token each": [(0, 6, 1), (0, 6, 1), (1, 3, 4), (1, 3, 2)],
    "rows without a chosen token": [(0, 5, 0), (0, 5, 3), (0, 5, 4), (1, 4, 0), (2, 1, 5)],
    "one prompt begins with another": [(0, 2, 4), (0, 2, 3), (0, 4, 4), (0, 4, 5), (0, 3, 3)],
}


def batch(rows: Rows, *, gap: bool = False, extra: int = 0) -> Batch:
    """Prompts of one name begin alike; ``gap``: tokens of a tool, in the middle and at the end."""
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(0, VOCABULARY, (9, 9), generator=generator)
    width = max(prompt + rest for _, prompt, rest in rows) + extra
    tokens = torch.full((len(rows), width), PADDING)
    mask, real = torch.zeros(2, len(rows), width, dtype=torch.bool)
    for row, (name, prompt, rest) in enumerate(rows):
        end = prompt + rest
        tokens[row, :prompt] = prompts[name, :prompt]
        tokens[row, prompt:end] = torch.randint(0, VOCABULARY, (rest,), generator=generator)
        tokens[row, end - 1 : end] = PADDING
        mask[row, prompt:end], real[row, :end] = True, True
        if gap and rest > 3:
            mask[row, prompt + 1 : prompt + 3] = False
            mask[row, end - 1] = rest % 2 == 0
    groups = torch.arange(len(rows)) // 3  # wrong on purpose: only tokens decide
    return Batch(tokens=tokens, mask=mask, attention=real, groups=groups)


def padded(trunk: nn.Module, given: Batch) -> Tensor:
    """The states by padded rows."""
    return ops.shift(head.trunk_states(trunk, given.tokens))[given.mask]


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack whatever it costs."""
    monkeypatch.setattr(states, "_WORTHWHILE", 100.0)


def outcome(model: nn.Module, given: Batch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Log-probs, values and every gradient of a sum that weighs each of them differently."""
    generator = torch.Generator().manual_seed(4)
    weight = model.get_input_embeddings().weight
    value_head = nn.Linear(weight.shape[1], 1, dtype=weight.dtype)
    with torch.no_grad():
        for parameter in value_head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    model.zero_grad()
    found = score_tokens(model, given, value_head=value_head)
    factors = torch.randn(2, *given.tokens.shape, generator=generator, dtype=torch.float64)
    (factors[0] * found.logprobs + factors[1] * found.values).sum().backward()
    gradients = {name: part.grad.clone() for name, part in model.named_parameters()}
    gradients |= {f"head {name}": part.grad for name, part in value_head.named_parameters()}
    return found.logprobs.detach(), found.values.detach(), gradients


def check(model: nn.Module, given: Batch, *, allowed: float) -> None:
    """Both paths, the padded one first."""
    assert states.can_be_packed(model.get_decoder()), "a model that packs wrongly is not packed"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(states, "kernel_for", lambda trunk, batch: None)
        expected = outcome(model, given)
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        real = states.packed_states
        patch.setattr(states, "packed_states", lambda *a, **k: calls.append(1) or real(*a, **k))
        found = outcome(model, given)
    assert calls, "nothing was packed"
    for mine, theirs in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=allowed, atol=allowed)
    for name, gradient in expected[2].items():
        scale = max(1.0, float(gradient.abs().max()))
        torch.testing.assert_close(
            found[2][name],
            gradient,
            rtol=allowed,
            atol=allowed * scale,
            msg=lambda said, name=name: f"{name}: {said}",
        )


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("gap", [False, True])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", PACKED)
def test_packed_equals_padded(name: str, case: str, gap: bool) -> None:
    """Log-probs, values and gradients in float64."""
    check(build(name), batch(CASES[case], gap=gap, extra=2), allowed=1e-10)


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_are_asked_for_packed_tokens_too(name: str, case: str) -> None:
    check(build(name), batch(CASES[case]), allowed=1e-10)


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("case", CASES)
def test_a_window_longer_than_the_sequences_is_none(case: str) -> None:
    options = {**FAMILIES["mistral"][1], "sliding_window": 30}
    torch.manual_seed(0)
    model = transformers.MistralForCausalLM(transformers.MistralConfig(**options)).double().eval()
    check(model, batch(CASES[case]), allowed=1e-10)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("case", CASES)
def test_in_float32(name: str, case: str) -> None:
    check(build(name, dtype=torch.float32), batch(CASES[case]), allowed=1e-4)


@pytest.mark.usefixtures("always")
def test_autocast_rounds_as_it_does_for_padded_rows() -> None:
    model, given = build("llama", dtype=torch.float32), batch(CASES["ragged groups"])
    trunk = model.get_decoder().requires_grad_(False)
    exact = padded(trunk, given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded, found = padded(trunk, given), states.states_before(trunk, given)
    allowed = 2 * float((rounded - exact).norm())
    assert 0 < float((found - exact).norm()) < allowed


@pytest.mark.usefixtures("float64_throughout")
def test_a_critic_of_its_own_shares_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    trunk, given = build("qwen3").get_decoder(), batch(CASES["ragged groups"], gap=True)
    value_head = nn.Linear(16, 1, dtype=torch.float64)
    assert states.can_be_packed(trunk)
    found = Critic(trunk, value_head)(given)
    monkeypatch.setattr(states, "kernel_for", lambda trunk, batch: None)
    torch.testing.assert_close(Critic(trunk, value_head)(given), found, rtol=1e-10, atol=1e-10)


def count_rows(model: nn.Module, given: Batch) -> int:
    """How many rows the trunk was shown: 1 where the batch was packed."""
    trunk = model.get_decoder()
    states.shares_prompts(model, given.tokens.shape[1])  # the comparison is not to be counted
    seen = []
    hook = trunk.register_forward_pre_hook(
        lambda module, args, given: seen.append(len(given["input_ids"])), with_kwargs=True
    )
    found = states.states_before(trunk, given)
    hook.remove()
    assert torch.equal(found, padded(trunk, given)) or seen == [1]
    return seen[0]


def test_only_what_can_be_packed_and_saves_work_is() -> None:
    """Soft-capped scores, short windows, nothing to share, a chosen first token: padded rows."""
    shared, alone = batch(CASES["even groups"]), batch([(0, 4, 9), (1, 4, 9), (2, 4, 9)])
    assert count_rows(build("llama"), shared) == 1
    assert count_rows(build("llama"), alone) == 3
    assert count_rows(build("gemma2"), shared) == 4
    assert count_rows(build("mistral"), shared) == 4
    assert count_rows(build("llama"), batch([(0, 0, 4), (0, 0, 4)])) == 2
    nothing = shared.replace(mask=torch.zeros_like(shared.mask))
    assert count_rows(build("llama"), nothing) == 4
    checkpointed = build("llama")
    checkpointed.gradient_checkpointing_enable()
    assert count_rows(checkpointed, shared) == 4


def test_a_model_that_carries_more_than_attention_is_not_packed() -> None:
    """A running mean of the embeddings would run from one sequence into the next."""
    model = build("llama")
    embedding = model.get_input_embeddings()
    places = torch.arange(1, 200, dtype=torch.float64)[:, None]
    embedding.register_forward_hook(
        lambda module, args, output: output + output.cumsum(1) / places[: output.shape[1]]
    )
    assert not states.can_be_packed(model.get_decoder())
    assert states.can_be_packed(build("llama").get_decoder())


def test_the_packed_row_by_hand() -> None:
    """Shared prompts, whole sequences, completions without their last token."""
    given = Batch(
        tokens=torch.tensor([[7, 8, 1, 2, 3], [9, 4, 5, 0, 0], [7, 8, 6, 0, 0], [7, 8, 5, 4, 0]]),
        mask=torch.tensor([[0, 0, 1, 0, 1], [0, 1, 1, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0]]) > 0,
    )
    packing = pack(given, spans(given))
    assert given.tokens.flatten()[packing.source].tolist() == [7, 8, 9, 4, 1, 2, 5]
    assert packing.positions.tolist() == [0, 1, 0, 1, 2, 3, 2]
    assert packing.before.tolist() == [1, 5, 2, 3, 1, 1, 6]
    assert (packing.prompts, packing.wholes, packing.completions) == ([2], [2], [[2, 1]])
    assert packing.longest == 4


@pytest.mark.parametrize("make", [Plain, Padded])
@pytest.mark.parametrize(
    "block",
    [
        Block(queries=[3, 1, 5], keys=[3, 1, 5], causal=True),
        Block(queries=[4, 4], keys=[4, 4], causal=True),
        Block(queries=[7, 2, 3], keys=[2, 5, 1], causal=False),
        Block(queries=[3, 6], keys=[4, 4], causal=False),
    ],
)
def test_kernels_are_attention_and_its_gradient(make: type, block: Block) -> None:
    """Each pair of sequences alone, by torch's own attention and its autograd."""
    generator = torch.Generator().manual_seed(2)
    count, others = sum(block.queries), sum(block.keys)
    given = [
        torch.randn(size, 2, 8, dtype=torch.float64, generator=generator, requires_grad=True)
        for size in (count, others, others)
    ]
    pieces, sums = [], []
    lengths = (block.queries, block.keys, block.keys)
    for parts in zip(*(part.split(n) for part, n in zip(given, lengths, strict=True)), strict=True):
        query, key, value = (part.transpose(0, 1) for part in parts)
        pieces.append(
            nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=block.causal, scale=0.3
            ).transpose(0, 1)
        )
        scores = 0.3 * query @ key.transpose(1, 2)
        if block.causal:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1) > 0, -torch.inf)
        sums.append(scores.logsumexp(-1))
    expected, gradients = torch.cat(pieces), torch.randn(count, 2, 8, generator=generator).double()
    wanted = torch.autograd.grad(expected, given, gradients)
    kernel = make(block, like=given[0])
    with torch.no_grad():
        query, key, value = given
        mixed, logsumexp = kernel.forward(query, key, value=value, scale=0.3)
        found = kernel.backward(
            gradients, (query, key, value), mixed=mixed, logsumexp=logsumexp, scale=0.3
        )
    torch.testing.assert_close(mixed, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(logsumexp, torch.cat(sums, dim=1).detach(), rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("name", "suits"), [("llama", True), ("deepseek_v3", False)])
def test_values_unlike_keys_do_not_suit_flash(
    name: str, suits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernel wants one size of head; the layout of keys and values goes by it, too."""
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    trunk = build(name, dtype=torch.bfloat16).get_decoder()
    assert bool(states._suits_flash(trunk, trunk.config)) is suits


def test_a_trunk_without_weights_is_not_packed() -> None:
    """Nor is any other that is no model of transformers."""
    assert states.kernel_for(nn.Identity(), batch(CASES["even groups"])) is None
