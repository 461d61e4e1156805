"""The engines on a GPU: the tokens of the CPU, and the learner's log-probs in half precision."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from models.families import build
from rollout.cases import END, drawn, largest_error, ragged, spell
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from posttrain.fast.score import score_tokens
from posttrain.rollout.engines import NativeEngine, TransformersEngine
from posttrain.types import Batch, Rollout, Sampling, Turn

pytestmark = pytest.mark.gpu

PROMPTS = ragged(4, 9, 1, 9)
SAMPLING = Sampling(max_new_tokens=20, temperature=0.8, top_k=9, top_p=0.9)
ENGINES = [NativeEngine, TransformersEngine]


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "mistral", "gemma3"])
def test_the_tokens_of_the_cpu(family: str, kind: type[NativeEngine]) -> None:
    model = build(family)
    expected, answers = (
        kind(model.to(device), end_tokens=(END,), decode=spell).generate(
            PROMPTS, SAMPLING, num_samples=4, seed=0
        )
        for device in ("cpu", "cuda")
    )
    assert drawn(answers) == drawn(expected)
    bound = 1e-9 if kind is NativeEngine else 5e-6
    assert largest_error(model, PROMPTS, answers=answers, sampling=SAMPLING) < bound


@pytest.mark.parametrize("most", [None, 5])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
def test_several_turns_are_those_of_the_cpu(family: str, most: int | None) -> None:
    """Captured steps go on with slots that grow, wait, are dropped and read again."""
    model, short = build(family), Sampling(max_new_tokens=6, temperature=1.2)

    def said(rollout: Rollout, number: int) -> Turn | None:
        long = (2 + len(rollout.tokens) % 5, 3) * (1 + number % 3)
        return None if len(rollout.turns) > 2 * (number % 4) else Turn(tokens=long, text="")

    rounds = NativeEngine(model, end_tokens=(END,), decode=spell, slots=False)
    expected = rounds.generate(PROMPTS, short, num_samples=8, seed=0, reply=said)
    engine = NativeEngine(model.cuda(), end_tokens=(END,), decode=spell, max_sequences=most)
    with ThreadPoolExecutor(4) as pool:
        for reply in (said, lambda rollout, number: pool.submit(said, rollout, number)):
            found = engine.generate(PROMPTS, short, num_samples=8, seed=0, reply=reply)
            assert drawn(found) == drawn(expected)


@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_is_the_learners(autocast: bool) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=500,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.05,
    )
    model = LlamaForCausalLM(config).cuda().eval()
    model.to(torch.float32 if autocast else torch.bfloat16)
    compute = torch.bfloat16 if autocast else None
    engine = NativeEngine(model, end_tokens=(END,), decode=spell, compute=compute)
    prompts = ragged(5, 40, 17, vocabulary=500)
    sampling = Sampling(max_new_tokens=64)
    answers = engine.generate(prompts, sampling, num_samples=8, seed=0)
    errors = []
    for prompt, completions in zip(prompts, answers, strict=True):
        for completion in completions:
            tokens = torch.tensor([[*prompt.tokens, *completion.tokens]], device="cuda")
            mask = torch.arange(tokens.shape[1], device="cuda")[None] >= len(prompt.tokens)
            batch = Batch(tokens=tokens, mask=mask)
            with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
                scores = score_tokens(model, batch).logprobs[mask].cpu()
            errors.append(scores - torch.tensor(completion.logprobs))
    error = torch.cat(errors).abs()
    print(f"autocast={autocast}: mean {error.mean():.1e}, max {error.max():.1e}")
    assert error.mean() < 0.01
    assert error.max() < 0.1


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_biases_are_read_anew(family: str) -> None:
    """What a captured step reads must not be a cast of the batch before."""
    model = build(family, dtype=torch.float32).cuda()
    engine = NativeEngine(model, end_tokens=(END,), decode=spell, compute=torch.bfloat16)
    fresh = NativeEngine(model, end_tokens=(END,), decode=spell, compute=torch.bfloat16)
    engine.generate(PROMPTS, SAMPLING, num_samples=4, seed=0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    garbage = [torch.full((1 << 20,), torch.nan, device="cuda") for _ in range(64)]
    answers, expected = (
        one.generate(PROMPTS, SAMPLING, num_samples=4, seed=1) for one in (engine, fresh)
    )
    assert len(garbage) == 64
    assert drawn(answers) == drawn(expected)


def test_a_model_that_waits_for_the_gpu_is_sampled_step_by_step() -> None:
    """Experts that are asked one by one: the host must know who was chosen."""
    model = build("qwen3_moe")
    expected = native(model).generate(PROMPTS, SAMPLING, num_samples=4, seed=0)
    engine = native(model.cuda())
    assert "CUDA graphs" in engine.way().uses
    with pytest.warns(UserWarning, match="cannot be captured"):
        answers = engine.generate(PROMPTS, SAMPLING, num_samples=4, seed=0)
    assert "CUDA graphs" in [missing.what for missing in engine.way().fell_back]
    assert drawn(answers) == drawn(expected)
    assert drawn(engine.generate(PROMPTS, SAMPLING, num_samples=4, seed=0)) == drawn(expected)


def test_experts_that_wait_for_nothing_are_captured() -> None:
    """A warning, and thus a failure, says if they are not."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=500,
        hidden_size=256,
        moe_intermediate_size=128,
        num_experts=8,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=256,
    )
    model = Qwen3MoeForCausalLM(config).to("cuda", torch.bfloat16).eval()
    answers = native(model).generate(ragged(5, 40, 17), SAMPLING, num_samples=8, seed=0)
    assert all(completion.tokens for group in answers for completion in group)


def native(model: PreTrainedModel) -> NativeEngine:
    """Our engine."""
    return NativeEngine(model, end_tokens=(END,), decode=spell)


def test_many_sequences_fit_by_parts() -> None:
    model = build("llama", dtype=torch.float32).cuda()
    whole, parts = (
        NativeEngine(model, end_tokens=(END,), decode=spell, max_sequences=most).generate(
            PROMPTS, SAMPLING, num_samples=50, seed=0
        )
        for most in (None, 30)
    )
    different = sum(a != b for a, b in zip(drawn(whole), drawn(parts), strict=True))
    assert different <= 1  # float32 sums in another order may cross a boundary, once in 1e5
