"""A model without its weights: shapes from a configuration, on the meta device."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from posttrain import registry
from posttrain.models.files.size import check_parts
from posttrain.models.load import cast, find_dtype, switch_off_dropout
from posttrain.models.tiny import build_tiny


def _shape(*sizes: int, **more: Any) -> Mapping[str, Any]:
    names = ("hidden", "layers", "heads", "kv_heads", "intermediate", "vocabulary")
    return {**dict(zip(names, sizes, strict=True)), **more}


# Sizes of well-known models, so that a plan needs no download.
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "smollm2-135m": _shape(576, 30, 9, 3, 1536, 49_152),
    "smollm2-360m": _shape(960, 32, 15, 5, 2560, 49_152),
    "qwen2.5-0.5b": _shape(896, 24, 14, 2, 4864, 151_936, family="qwen2"),
    "qwen2.5-1.5b": _shape(1536, 28, 12, 2, 8960, 151_936, family="qwen2"),
    "qwen2.5-7b": _shape(3584, 28, 28, 4, 18_944, 152_064, family="qwen2", tied=False),
    "llama-3.2-1b": _shape(2048, 16, 32, 8, 8192, 128_256),
    "llama-3.2-3b": _shape(3072, 28, 24, 8, 8192, 128_256, head_size=128),
    "llama-3.1-8b": _shape(4096, 32, 32, 8, 14_336, 128_256, tied=False),
}


def shape_config(
    *,
    hidden: int,
    layers: int,
    heads: int,
    intermediate: int,
    vocabulary: int,
    kv_heads: int | None = None,
    head_size: int | None = None,
    tied: bool = True,
    family: str = "llama",
    context: int = 32_768,
) -> Any:
    """The configuration of a decoder of these sizes: ``family`` is transformers' name for it."""
    given = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads or heads,
        "intermediate_size": intermediate,
        "vocab_size": vocabulary,
        "max_position_embeddings": context,
        "tie_word_embeddings": tied,
    }
    given |= {"head_dim": head_size} if head_size else {}
    return LlamaConfig(**given) if family == "llama" else AutoConfig.for_model(family, **given)


def find_config(
    source: str,
    *,
    options: Mapping[str, Any] = MappingProxyType({}),
    shape: Mapping[str, Any] | None = None,
) -> Any:
    """The configuration of a model, without its weights and without a download.

    ``source`` is "tiny" with its ``options``, a known shape, a folder, a GGUF file, or the hub id
    of a model in the cache; ``shape`` are the sizes of one that is none of these.
    """
    path, known = Path(source).expanduser(), source.rpartition("/")[2].lower()
    if shape is not None:
        registry.check_options(shape_config, shape, kind="--shape")
        return shape_config(**shape)
    if source == "tiny":
        registry.check_options(build_tiny, options, kind="model 'tiny'")
        with torch.device("meta"):
            return build_tiny(**options)[0].config
    if path.is_file():
        return _gguf_config(path)
    try:
        found = AutoConfig.from_pretrained(
            str(path) if path.is_dir() else source, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        stem = next((n for n in SHAPES if known == n or known.startswith(f"{n}-")), None)
        if stem is not None and not path.exists():
            return shape_config(**SHAPES[stem])
        where = "holds no config.json that can be read" if path.is_dir() else "is not here"
        raise ValueError(
            f"model: {source!r} {where}, and nothing is downloaded for a plan; give a folder, a "
            f"GGUF file, a hub id that is in the cache, a known shape ({', '.join(SHAPES)}), or "
            "--shape hidden=2048,layers=16,heads=32,kv_heads=8,intermediate=8192,vocabulary=128256 "
            f"({str(error).splitlines()[0]})"
        ) from error
    check_parts(found.to_dict(), where=f"{source}/config.json")
    return found


def _gguf_config(path: Path) -> Any:
    if path.suffix.lower() != ".gguf" or importlib.util.find_spec("gguf") is None:
        raise ValueError(
            f"model: {str(path)!r} is a file; a plan reads the header of a .gguf file, with the "
            "package gguf: pip install 'posttrain[gguf]'"
        )
    from posttrain.models.files.gguf_reader import reading_once

    with reading_once():
        return AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)


def outline(config: Any, *, dtype: str = "float32", layers: int | None = None) -> PreTrainedModel:
    """A model of this configuration on the current device, or of the first layers alone.

    Inside ``torch.device("meta")`` or a fake tensor mode it takes no memory.
    """
    config = copy.deepcopy(config)
    part = config.get_text_config()
    if layers is not None:
        part.num_hidden_layers = layers
        if getattr(part, "layer_types", None):
            part.layer_types = (part.layer_types * layers)[:layers]
    switch_off_dropout(config)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    cast(model, find_dtype(dtype))
    return model
