"""Models for measuring speed: real shapes, random weights, and completions of a known length.

What is measured must not depend on what a model has learned. So the weights are random, but for one
direction that all hidden states share: the end token's logit lies along it, which makes every token
the last one with a chosen probability, whatever stands before it.
"""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from posttrain.models.tiny import build_tokenizer

SHAPES = {
    "tiny": {"hidden_size": 128, "intermediate_size": 512, "layers": 4, "heads": 4, "kv": 4},
    "smollm2-135m": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "layers": 30,
        "heads": 9,
        "kv": 3,
    },
    "qwen2.5-0.5b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "layers": 24,
        "heads": 14,
        "kv": 2,
    },
    "llama-3.2-1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "layers": 16,
        "heads": 32,
        "kv": 8,
    },
}
VOCABULARY = {
    "tiny": 105,
    "smollm2-135m": 49152,
    "qwen2.5-0.5b": 151936,
    "llama-3.2-1b": 128256,
}
NEVER = 1e-12


def write_model(folder: Path, *, shape: str, end_probability: float = NEVER, seed: int = 0) -> None:
    """Write a model folder of a known shape whose completions end with ``end_probability``."""
    model, tokenizer = build_model(shape, end_probability=end_probability, seed=seed)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def build_model(
    shape: str, *, end_probability: float = NEVER, seed: int = 0
) -> tuple[LlamaForCausalLM, Any]:
    """A model of a known shape whose completions end with ``end_probability``, its tokenizer."""
    size = SHAPES[shape]
    tokenizer = build_tokenizer(max_positions=2048)
    tokenizer.chat_template = None
    config = LlamaConfig(
        vocab_size=max(VOCABULARY[shape], len(tokenizer)),
        hidden_size=size["hidden_size"],
        intermediate_size=size["intermediate_size"],
        num_hidden_layers=size["layers"],
        num_attention_heads=size["heads"],
        num_key_value_heads=size["kv"],
        max_position_embeddings=2048,
        tie_word_embeddings=shape != "tiny",
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).eval()
    set_end(model, tokenizer.eos_token_id, probability=end_probability)
    return model, tokenizer


@torch.no_grad()
def set_end(model: LlamaForCausalLM, end: int, *, probability: float) -> None:
    """Give the end token a fixed probability, by a direction that every hidden state has."""
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings().weight
    direction = torch.nn.functional.normalize(torch.randn(embedding.shape[1]), dim=0)
    embedding += 2.0 * direction  # the same for all: with tied weights all logits move alike
    probe = torch.randint(3, embedding.shape[0], (8, 64))
    states = model.model(probe).last_hidden_state.flatten(0, 1)
    along = float((states @ direction).mean())
    logits = states @ head.t()
    wanted = math.log(probability / (1 - probability)) + float(logits.logsumexp(-1).mean())
    head[end] += (wanted - float(logits[:, end].mean())) / along * direction


def prompts(count: int, *, ragged: bool, seed: int = 0) -> list[str]:
    """Distinct prompts of letters: of 48 characters, or of 16 to 80."""
    generator = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz "
    lengths = [generator.randint(16, 80) if ragged else 48 for _ in range(count)]
    return ["".join(generator.choices(letters, k=length)) for length in lengths]
