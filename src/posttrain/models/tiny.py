"""A language model that needs no download: about a million weights, and letters for tokens.

The shape is Llama's, so that every code path for real models is exercised; the tokenizer gives each
printable ASCII character a token, and the usual tags of reasoning tasks one each.
"""

from __future__ import annotations

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from posttrain.models.files.size import check_parts, check_size

PAD, END, UNKNOWN = "<|pad|>", "<|end|>", "<|unknown|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
CHARACTERS = ("\n", *map(chr, range(32, 127)))

# <|user|>2+3=<|end|><|assistant|>5<|end|>
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def build_tokenizer(*, max_positions: int = 512) -> PreTrainedTokenizerFast:
    """One token per character of printable ASCII and newline, plus roles, tags and specials.

    Decoding gives back exactly what was encoded; any other character becomes ``<|unknown|>``.

    >>> tokenizer = build_tokenizer()
    >>> tokens = tokenizer("<think>2+3</think>").input_ids
    >>> len(tokens), tokenizer.decode(tokens)
    (5, '<think>2+3</think>')
    """
    specials = (PAD, END, UNKNOWN, *ROLES)
    vocabulary = {token: index for index, token in enumerate((*specials, *TAGS, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in specials])
    # Tags are words, not special tokens: a decoder that drops specials must keep them.
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        model_max_length=max_positions,
        clean_up_tokenization_spaces=False,
        name_or_path="tiny",
        chat_template=CHAT_TEMPLATE,
    )


def build_tiny(
    *,
    seed: int = 0,
    hidden_size: int = 128,
    num_layers: int = 4,
    num_heads: int = 4,
    num_key_value_heads: int | None = None,
    intermediate_size: int | None = None,
    max_positions: int = 512,
    tie_embeddings: bool = False,
    initial_deviation: float = 0.02,
    chat: bool = False,
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """A Llama-shaped model with random weights, decided by ``seed`` alone, and its tokenizer.

    The feed-forward layers are four times as wide as ``hidden_size`` unless told otherwise. The
    weights' ``initial_deviation`` is Llama's, made for wide layers. It has
    a chat template only with ``chat``: it starts from nothing, and plain text is shorter.
    """
    heads = num_heads if num_key_value_heads is None else num_key_value_heads
    wide = 4 * hidden_size if intermediate_size is None else intermediate_size
    sizes = {"hidden_size": hidden_size, "intermediate_size": wide, "num_layers": num_layers}
    sizes |= {"num_heads": num_heads, "num_key_value_heads": heads, "max_positions": max_positions}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"model.options.{name}: must be at least 1, got {size}")
    if num_heads % heads:
        given = f"{heads} does not divide num_heads, {num_heads}"
        raise ValueError(f"model.options.num_key_value_heads: {given}")
    if hidden_size % (2 * num_heads):
        raise ValueError(
            f"model.options.hidden_size: {hidden_size} does not divide into {num_heads} heads of "
            f"an even size; choose a multiple of {2 * num_heads}"
        )
    tokenizer = build_tokenizer(max_positions=max_positions)
    if not chat:
        tokenizer.chat_template = None
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=wide,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=heads,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tie_embeddings,
        initializer_range=float(initial_deviation),
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    check_parts(config.to_dict(), where="model.options")
    check_size(config, where="model.options", dtype=torch.float32)
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers are not ours to move
        torch.manual_seed(seed)
        return LlamaForCausalLM(config), tokenizer
