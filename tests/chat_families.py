"""The chat templates of model families, with a small tokenizer that has their special tokens.

Each file of ``chat_templates`` writes what the template of that family writes. The tokenizer spells
bytes, with a few longer tokens, so that a text has many encodings and sampling may give any.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

FOLDER = Path(__file__).with_name("chat_templates")
MERGES = [("a", "b"), ("Ġ", "a"), ("e", "r"), ("u", "s"), ("us", "er"), ("Ċ", "Ċ"), ("<", "|")]
LONGER = ["".join(pair) for pair in MERGES]


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family: its special tokens, where the assistant's turn begins, and how it writes calls.

    ``plain`` are added tokens that it does not declare as special.
    """

    special: tuple[str, ...]
    end: str
    headers: tuple[str, ...]
    tools: str = "json_tags"
    begin: str | None = None
    other_ends: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()


_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_QWEN = ("<tool_call>", "</tool_call>", "<think>", "</think>")
_GEMMA = Family(
    special=("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>"),
    begin="<bos>",
    end="<end_of_turn>",
    other_ends=("<eos>",),
    headers=("<start_of_turn>model\n",),
)
FAMILIES = {
    "qwen2.5": Family(
        special=_CHATML,
        end="<|im_end|>",
        other_ends=("<|endoftext|>",),
        headers=("<|im_start|>assistant\n",),
        tools="hermes",
        plain=_QWEN[:2],
    ),
    "qwen3": Family(
        special=_CHATML,
        end="<|im_end|>",
        other_ends=("<|endoftext|>",),
        headers=("<|im_start|>assistant\n",),
        tools="hermes",
        plain=_QWEN,
    ),
    "llama3": Family(
        special=(
            "<|begin_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eot_id|>",
            "<|eom_id|>",
            "<|python_tag|>",
            "<|end_of_text|>",
        ),
        begin="<|begin_of_text|>",
        end="<|eot_id|>",
        other_ends=("<|end_of_text|>", "<|eom_id|>"),
        headers=("<|start_header_id|>assistant<|end_header_id|>\n\n",),
        tools="llama",
    ),
    "smollm2": Family(special=_CHATML, end="<|im_end|>", headers=("<|im_start|>assistant\n",)),
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "mistral": Family(
        special=(
            "<s>",
            "</s>",
            "[INST]",
            "[/INST]",
            "[TOOL_CALLS]",
            "[AVAILABLE_TOOLS]",
            "[/AVAILABLE_TOOLS]",
            "[TOOL_RESULTS]",
            "[/TOOL_RESULTS]",
        ),
        begin="<s>",
        end="</s>",
        headers=("[/INST]", "[/TOOL_RESULTS]"),
        tools="mistral",
    ),
}


def family_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer with the chat template and the special tokens of a family."""
    family = FAMILIES[name]
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *LONGER]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True) for t in family.special])
    backend.add_tokens([AddedToken(text, special=False) for text in family.plain])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=family.begin, eos_token=family.end
    )
    tokenizer.chat_template = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    return tokenizer


def end_tokens(name: str, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """The tokens that end a turn of the policy, the template's own first."""
    family = FAMILIES[name]
    return [tokenizer.convert_tokens_to_ids(text) for text in (family.end, *family.other_ends)]
