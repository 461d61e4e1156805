"""The same on a GPU: half precision, memory, and draws that equal the CPU's."""

import pytest
import torch
from models.families import VOCABULARY, batch, build, naive
from transformers import LlamaConfig, LlamaForCausalLM

from posttrain.fast.kernels import sample
from posttrain.fast.packed_states import states_before
from posttrain.fast.score import score_tokens
from posttrain.models.load import load_policy
from posttrain.models.sampling import filter_logits
from posttrain.types import Batch, Sampling

pytestmark = pytest.mark.gpu


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight.grad.cpu() for name, weight in model.named_parameters()}


def test_float64_equals_the_cpu() -> None:
    model, given = build("llama"), batch()
    expected, _ = naive(model, given)
    found = score_tokens(model.cuda(), given.to("cuda"), chunk_elements=3 * VOCABULARY)
    # Not closer: this model's norms compute in float32, whatever its type.
    torch.testing.assert_close(found.logprobs.cpu(), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_logits_are_not_rounded(autocast: bool) -> None:
    model = build("llama", dtype=torch.float32 if autocast else torch.bfloat16).cuda()
    given = batch().to("cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
        states = states_before(model.get_decoder(), given)
        found = score_tokens(model, given, chunk_elements=3 * VOCABULARY)
    assert found.logprobs.dtype == torch.float32
    weight = model.lm_head.weight.bfloat16().double()
    every = torch.log_softmax(states.bfloat16().double() @ weight.t(), -1)
    exact = every.gather(-1, given.tokens[given.mask][:, None]).squeeze(-1)
    torch.testing.assert_close(found.logprobs[given.mask].double(), exact, rtol=2e-6, atol=2e-6)
    exact.sum().backward()
    wanted = gradients(model)
    model.zero_grad()
    found.logprobs.sum().backward()
    for name, gradient in gradients(model).items():
        assert (gradient - wanted[name]).norm() / wanted[name].norm() < 0.05, name


def test_memory_does_not_hold_the_logits() -> None:
    config = LlamaConfig(
        vocab_size=100_000,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    model = LlamaForCausalLM(config).cuda()
    tokens = torch.randint(0, 100_000, (8, 1024), device="cuda")
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[:, 0] = False
    given = Batch(tokens=tokens, mask=mask)
    options = {"entropy": "gradient", "chunk_elements": 2**24}
    score_tokens(model, given, **options).logprobs.sum().backward()  # whatever is allocated once
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    score_tokens(model, given, **options).logprobs.sum().backward()
    whole = tokens.numel() * 100_000 * 4
    assert torch.cuda.max_memory_allocated() - before < whole / 4


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(top_k=50), Sampling(temperature=0.7, top_p=0.9)]
)
def test_the_same_numbers_draw_the_same_tokens_as_on_the_cpu(sampling: Sampling) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(64, 50_000, generator=generator)
    uniforms = torch.rand(64, generator=generator)
    tokens, logprobs = sample(logits, uniforms, sampling=sampling)
    for _ in range(3):
        found, scores = sample(logits.cuda(), uniforms.cuda(), sampling=sampling)
        assert torch.equal(found.cpu(), tokens)
        torch.testing.assert_close(scores.cpu(), logprobs, rtol=1e-5, atol=1e-5)
    options = {"top_k": sampling.top_k, "top_p": sampling.top_p}
    kept = torch.isfinite(filter_logits(logits.cuda(), **options)).cpu()
    assert torch.equal(kept, torch.isfinite(filter_logits(logits, **options)))


def test_a_policy_loads_on_the_device() -> None:
    policy = load_policy("tiny", device="cuda", dtype="bfloat16")
    assert {weight.device.type for weight in policy.model.parameters()} == {"cuda"}
    assert torch.equal(
        load_policy("tiny", device="cuda").model.lm_head.weight.cpu(),
        load_policy("tiny").model.lm_head.weight,
    )


def test_deterministic_kernels_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    model, given = build("llama", dtype=torch.bfloat16).cuda(), batch().to("cuda")
    sampling = Sampling(top_k=5, top_p=0.9)
    torch.use_deterministic_algorithms(True)
    try:
        found = score_tokens(model, given, top_k=5, top_p=0.9, entropy="gradient")
        (found.logprobs + found.entropy).sum().backward()
        sample(torch.randn(3, 99).cuda(), torch.rand(3).cuda(), sampling=sampling)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.isfinite(gradient).all() for gradient in gradients(model).values())
