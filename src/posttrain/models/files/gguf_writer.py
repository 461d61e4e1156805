"""A model and its tokenizer as one GGUF file, for llama.cpp and what is built on it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from posttrain.disk import writing

if TYPE_CHECKING:
    from gguf import GGUFWriter

    from posttrain.models.load import Policy

TYPES = ("f32", "f16", "q8_0")
ARCHITECTURES = ("llama", "qwen2", "qwen3")
_BLOCK = 32  # weights that share a scale in Q8_0
# How a byte-level tokenizer parts text into words, and what llama.cpp calls that.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {_WORDS % r"\p{N}": "qwen2", _WORDS % r"\p{N}{1,3}": "llama-bpe"}


def write_gguf(policy: Policy, file: Path, *, kind: str = "f16") -> None:
    """Write a policy as a new GGUF file: matrices as ``kind``, norms and biases in float32.

    Q8_0 keeps rows that are no whole blocks of 32 weights in float16, as llama.cpp does. What
    llama.cpp would read differently from us is refused, with the command that converts it.
    """
    import gguf

    config = policy.model.config
    source = policy.source
    if config.model_type not in ARCHITECTURES:
        raise _refused(source, f"the architecture {config.model_type!r}", kind=kind)
    rope = dict(getattr(config, "rope_parameters", None) or {})
    if rope.get("rope_type", "default") != "default":
        raise _refused(source, f"rotary positions of the type {rope['rope_type']!r}", kind=kind)
    vocabulary = _vocabulary(policy, kind)
    scratch = file.with_name(f".{file.name}.part")
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            writer = gguf.GGUFWriter(scratch, config.model_type)
            _add_sizes(writer, config, theta=rope.get("rope_theta", 10_000.0), kind=kind)
            _add_tokenizer(writer, policy, vocabulary=vocabulary)
            for name, weight in _tensors(policy, kind):
                quantised = gguf.GGMLQuantizationType.Q8_0 if weight.dtype == np.uint8 else None
                writer.add_tensor(name, weight, raw_dtype=quantised)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
            os.replace(scratch, file)
        finally:
            scratch.unlink(missing_ok=True)


def _refused(source: str, what: str, *, kind: str) -> ValueError:
    return ValueError(
        f"model export: {source!r}: cannot write {what}; llama.cpp's own converter may support "
        "it: git clone https://github.com/ggml-org/llama.cpp && pip install -r "
        "llama.cpp/requirements.txt && python llama.cpp/convert_hf_to_gguf.py "
        f"{source} --outfile OUT.gguf --outtype {kind}"
    )


def _add_sizes(writer: GGUFWriter, config: Any, *, theta: float, kind: str) -> None:
    import gguf

    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(float(theta))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    types = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "q8_0": "MOSTLY_Q8_0"}
    writer.add_file_type(gguf.LlamaFileType[types[kind]])


def _vocabulary(policy: Policy, kind: str) -> dict[str, Any]:
    """The parts of a byte-level BPE tokenizer as GGUF has them; others are refused."""
    backend = getattr(policy.tokenizer, "backend_tokenizer", None)
    parts = json.loads(backend.to_str()) if backend is not None else {}
    model, before = parts.get("model", {}), parts.get("pre_tokenizer") or {}
    steps = before.get("pretokenizers", [before])
    byte_level = [step for step in steps if step.get("type") == "ByteLevel"]
    if (
        model.get("type") != "BPE"
        or not byte_level
        or parts.get("normalizer", {}) not in (None, {}, {"type": "NFC"})
    ):
        raise _refused(policy.source, "a tokenizer other than byte-level BPE", kind=kind)
    split = [step["pattern"].get("Regex") for step in steps if step.get("type") == "Split"]
    digits = any(step.get("type") == "Digits" and step["individual_digits"] for step in steps)
    known = "gpt-2" if byte_level[0].get("use_regex", True) else None
    if split:
        known = _SPLITS.get(split[0]) if len(split) == 1 else None
    elif digits and known:
        known = "smollm"
    if known is None:
        raise _refused(policy.source, "the way in which its tokenizer splits words", kind=kind)
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    return {"vocab": model["vocab"], "merges": merges, "pre": known}


def _add_tokenizer(writer: GGUFWriter, policy: Policy, *, vocabulary: dict[str, Any]) -> None:
    import gguf

    tokenizer, kinds = policy.tokenizer, gguf.TokenType
    texts = {number: text for text, number in vocabulary["vocab"].items()}
    types = dict.fromkeys(texts, kinds.NORMAL)
    for number, token in tokenizer.added_tokens_decoder.items():
        texts[number] = token.content
        types[number] = kinds.CONTROL if token.special else kinds.USER_DEFINED
    size = policy.model.config.vocab_size
    if max(texts) >= size:
        raise ValueError(
            f"model export: the tokenizer of {policy.source!r} has the token {max(texts)}, and the "
            f"model knows {size}; it is the tokenizer of another model"
        )
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(vocabulary["pre"])
    writer.add_token_list([texts.get(number, f"[PAD{number}]") for number in range(size)])
    writer.add_token_types([types.get(number, kinds.UNUSED) for number in range(size)])
    writer.add_token_merges(vocabulary["merges"])
    ends = [number for number in policy.end_tokens if number != tokenizer.eos_token_id]
    writer.add_eos_token_id(policy.end_tokens[0])
    if ends:
        writer.add_eot_token_id(ends[0])
    for number, add in (
        (tokenizer.bos_token_id, writer.add_bos_token_id),
        (tokenizer.unk_token_id, writer.add_unk_token_id),
        (policy.pad_token, writer.add_pad_token_id),
    ):
        if number is not None:
            add(number)
    starts = tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]
    writer.add_add_bos_token(starts)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def _tensors(policy: Policy, kind: str) -> Iterator[tuple[str, NDArray[Any]]]:
    """The weights by llama.cpp's names, in its order of rows, as they are stored."""
    import gguf

    config = policy.model.config
    architecture = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == config.model_type)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, weight in policy.model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        given = weight.detach().to("cpu", torch.float32)
        if config.model_type == "llama" and ".q_proj." in name:
            given = _interleaved(given, config.num_attention_heads)
        elif config.model_type == "llama" and ".k_proj." in name:
            given = _interleaved(given, config.num_key_value_heads)
        known = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if known is None:
            raise _refused(policy.source, f"the weight {name!r}", kind=kind)
        yield known, _stored(given.contiguous().numpy(), kind, name=name)


def _interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The rows of a projection as llama.cpp rotates them: neighbours, not the two halves."""
    shape = weight.shape
    return weight.view(heads, 2, shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(shape)


def _stored(weight: NDArray[Any], kind: str, *, name: str) -> NDArray[Any]:
    if weight.ndim == 1 or kind == "f32":
        return weight
    if kind == "q8_0" and weight.shape[-1] % _BLOCK == 0:
        import gguf
        from gguf.quants import quantize

        return quantize(weight, gguf.GGMLQuantizationType.Q8_0)
    if float(np.abs(weight).max(initial=0.0)) > float(np.finfo(np.float16).max):
        raise ValueError(
            f"model export: {name} holds weights over 65504, too large for {kind}; write f32"
        )
    return weight.astype(np.float16)
