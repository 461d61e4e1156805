"""Small random models of several families, in float64, and batches for them."""

import torch
import transformers
from torch import Tensor

from posttrain.types import Batch

VOCABULARY = 23
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.5,  # far from the usual 0.02: flat distributions hide mistakes
}
_HEADS = {"num_key_value_heads": 1, "head_dim": 8}
_GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 64,
    "initializer_range": 0.5,
}

# name: (config class, what it wants beside the sizes)
FAMILIES = {
    "llama": ("LlamaConfig", {**_SIZES, **_HEADS}),
    "llama tied": ("LlamaConfig", {**_SIZES, **_HEADS, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", {**_SIZES, "num_key_value_heads": 1}),
    "qwen3": ("Qwen3Config", {**_SIZES, **_HEADS}),
    "gemma": ("GemmaConfig", {**_SIZES, **_HEADS}),
    "gemma2": (
        "Gemma2Config",
        {**_SIZES, **_HEADS, "sliding_window": 4, "final_logit_softcapping": 2.0},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {**_SIZES, **_HEADS, "sliding_window": 4, "final_logit_softcapping": 3.0},
    ),
    "mistral": ("MistralConfig", {**_SIZES, **_HEADS, "sliding_window": 4}),
    "granite": ("GraniteConfig", {**_SIZES, "num_key_value_heads": 1, "logits_scaling": 3.0}),
    "cohere": ("CohereConfig", {**_SIZES, "num_key_value_heads": 1, "logit_scale": 0.3}),
    "mixtral": ("MixtralConfig", {**_SIZES, **_HEADS, "num_local_experts": 4}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            **_SIZES,
            **_HEADS,
            "moe_intermediate_size": 12,
            "num_experts": 6,
            "num_experts_per_tok": 2,
        },
    ),
    "gpt2": ("GPT2Config", _GPT2),
    "gpt_neox": ("GPTNeoXConfig", {**_SIZES, "initializer_range": 0.3}),
}


# Models whose keys are not of one shape, or whose decoder is not the trunk alone.
UNUSUAL = {
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            **_SIZES,
            "num_key_value_heads": 2,
            "moe_intermediate_size": 8,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "kv_lora_rank": 8,
            "q_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 8,
        },
    ),
    "gemma4": (
        "Gemma4TextConfig",
        {
            **_SIZES,
            **_HEADS,
            "global_head_dim": 16,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "llama4": (
        "Llama4TextConfig",
        {**_SIZES, **_HEADS, "intermediate_size_mlp": 24, "num_local_experts": 2},
    ),
}


# Heads of 32, the smallest that vLLM knows; the distributions stay as flat.
_WIDE = {"hidden_size": 64, "n_embd": 64, "head_dim": 32, "initializer_range": 0.25}


def build(
    name: str, *, dtype: torch.dtype = torch.float64, wide: bool = False
) -> transformers.PreTrainedModel:
    """A model of the family with random weights, always the same ones."""
    kind, sizes = (FAMILIES | UNUSUAL)[name]
    if wide:
        sizes = {key: _WIDE.get(key, value) for key, value in sizes.items()}
    # Token ids that a model might take for padding occur in the batches below as ordinary tokens.
    config = getattr(transformers, kind)(**sizes, pad_token_id=3, eos_token_id=3, bos_token_id=None)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = transformers.AutoModelForCausalLM.from_config(config)
    if hasattr(config, "num_experts_per_tok"):
        model.set_experts_implementation("eager")  # others do not know float64
    return model.to(dtype).eval()


def trained_like(
    model: transformers.PreTrainedModel, *, dtype: torch.dtype = torch.float32
) -> transformers.PreTrainedModel:
    """The model with what training leaves, and random weights have not: Qwen 2.5 has both.

    Where keys and queries have biases they are large in the slowest dimension of the rotary
    embedding: scores are large, so that their rounding decides much.
    Elsewhere a few hidden states are so large that they hide the others.
    """
    weights = dict(model.named_parameters())
    with torch.no_grad():
        biases = [name for name in weights if name.endswith(("k_proj.bias", "q_proj.bias"))]
        for name in biases:
            weights[name].view(-1, 8)[:, 3::4] = 10.0 if dtype == torch.bfloat16 else 100.0
        if not biases:
            model.get_input_embeddings().weight[:, 0] = 300.0
    return model.to(dtype).eval()


def batch(*, lengths: tuple[int, ...] = (9, 6, 4), width: int = 9, pad: int = 3) -> Batch:
    """Sequences of these lengths, two prompt tokens each, padded on the right with ``pad``.

    The last real token equals the pad token, and one row has a gap in its mask (a tool's turn).
    """
    generator = torch.Generator().manual_seed(5)
    tokens = torch.full((len(lengths), width), pad)
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    attention = torch.zeros(tokens.shape, dtype=torch.bool)
    for row, length in enumerate(lengths):
        tokens[row, : length - 1] = torch.randint(0, VOCABULARY, (length - 1,), generator=generator)
        mask[row, 2:length] = True
        attention[row, :length] = True
    if lengths[0] > 5:
        mask[0, 4] = False
    return Batch(tokens=tokens, mask=mask, attention=attention)


def naive(model: transformers.PreTrainedModel, given: Batch) -> tuple[Tensor, Tensor]:
    """Log-probs [B, T] and entropies [B, T] from whole logits, one sequence at a time."""
    logprobs = torch.zeros(given.tokens.shape, dtype=torch.float64)
    entropies = torch.zeros_like(logprobs)
    for row, length in enumerate(given.attention.sum(1).tolist()):
        sequence = given.tokens[row, :length]
        logits = model(input_ids=sequence[None], use_cache=False).logits[0].double()
        every = torch.log_softmax(logits, -1)
        for position in range(length):
            if given.mask[row, position]:
                before = every[position - 1]
                logprobs[row, position] = before[sequence[position]]
                entropies[row, position] = -(before.exp() * before).sum()
    return logprobs, entropies
