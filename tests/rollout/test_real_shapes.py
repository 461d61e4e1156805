"""Models as they are used: large vocabularies, untied heads, biases, long prompts and answers."""

from typing import Any

import pytest
import torch
from models.allocations import peak_bytes
from rollout.cases import drawn, largest_error, ragged, spell
from transformers import Qwen2Config, Qwen2ForCausalLM

from posttrain.fast.score import score_tokens
from posttrain.rollout.engines import NativeEngine
from posttrain.types import Batch, Sampling

LARGE = 151_936  # as Qwen2.5 has
END = 7


def build(*, vocabulary: int, dtype: torch.dtype = torch.float64) -> Any:
    """Qwen2 with a head of its own, and biases that are not zero."""
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=4096,
        initializer_range=0.5,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(config)
        for name, weight in model.named_parameters():
            if name.endswith(".bias"):
                torch.nn.init.normal_(weight)
    return model.to(dtype).eval()


def engine(model: Any, *, slots: bool, **options: Any) -> NativeEngine:
    return NativeEngine(model, end_tokens=(END,), decode=spell, slots=slots, **options)


@pytest.mark.usefixtures("float64_throughout")
def test_short_prompts_beside_long_ones_and_a_large_vocabulary() -> None:
    model, prompts = build(vocabulary=LARGE), ragged(1500, 10, 3, vocabulary=LARGE)
    sampling = Sampling(max_new_tokens=6)
    answers, others = (
        engine(model, slots=slots, max_sequences=2).generate(
            prompts, sampling, num_samples=1, seed=2
        )
        for slots in (True, False)
    )
    assert drawn(answers) == drawn(others)
    assert largest_error(model, prompts, answers=answers, sampling=sampling) < 1e-9


def test_ragged_answers_up_to_2048_tokens() -> None:
    model, prompts = build(vocabulary=997), ragged(1500, 10, 3, vocabulary=997)
    # So hot that the random numbers decide when END comes, however a processor rounds.
    sampling = Sampling(max_new_tokens=2048, temperature=50.0)
    answers = engine(model, slots=True, max_sequences=2).generate(
        prompts, sampling, num_samples=1, seed=1
    )
    assert [len(tokens) for (tokens,) in drawn(answers)] == [2048, 497, 2048]
    assert {c.stop_reason for (c,) in answers} == {"stop", "length"}
    logprobs = torch.tensor([value for (c,) in answers for value in c.logprobs])
    assert logprobs.std() > 0.02  # not so hot that every model would say the same
    assert largest_error(model, prompts, answers=answers, sampling=sampling) < 1e-5


def test_learning_never_holds_the_logits_of_a_large_vocabulary() -> None:
    model = build(vocabulary=LARGE, dtype=torch.float32)
    tokens = torch.arange(256)[None] * 577 % LARGE
    batch = Batch(tokens=tokens, mask=torch.arange(256)[None] > 0)
    weights = sum(weight.nbytes for weight in model.parameters())

    def learn() -> None:
        score_tokens(model, batch, chunk_elements=1 << 22).logprobs.sum().backward()

    logits = tokens.numel() * LARGE * 4
    assert weights < logits / 4  # so that their gradients hide nothing
    assert peak_bytes(learn) < logits / 2
