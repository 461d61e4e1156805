"""GGUF files, as llama.cpp writes them, read into an ordinary model and tokenizer."""

from __future__ import annotations

import importlib.util
import struct
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.initialization import no_init_weights
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
    load_gguf_checkpoint,
)

from posttrain.models.files.damaged import AGAIN

_MAGIC = b"GGUF"
_HEADER = struct.Struct("<4sIQQ")  # the magic, the version, how many tensors, how many facts
_WEIGHTS_PER_BYTE = 8  # no quantisation takes less than a bit


def read_gguf(
    file: Path, *, dtype: torch.dtype, attn_implementation: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model of a GGUF file with its weights dequantised to ``dtype``, and its tokenizer.

    A plain model is built from the file's configuration and filled: one that transformers loads by
    itself from GGUF cannot be saved, and needs accelerate.
    """
    if importlib.util.find_spec("gguf") is None:
        raise ValueError(
            f"model: reading {file.name!r} needs the package gguf: pip install 'posttrain[gguf]'"
        )
    _check_magic(file)
    from posttrain.models.files.gguf_reader import reading_once

    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    with reading_once():
        config = AutoConfig.from_pretrained(**where)
        # By class: the automatic choice of some versions adds tokens that the file does not have.
        tokenizer = PreTrainedTokenizerFast.from_pretrained(**where)
        _read_head_size(config, file)
        _check_size(config, file)
        with no_init_weights():  # all of them are in the file
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=attn_implementation
            )
        weights = {name: weight.to(dtype) for name, weight in _weights(file, model).items()}
    report = model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    tied = model.all_tied_weights_keys  # filled with the weights that they share
    missing = [name for name in report.missing_keys if name not in tied]
    if missing or report.unexpected_keys:
        raise ValueError(
            f"model: {file.name!r} does not fit a {type(model).__name__}: without "
            f"{missing[:3] or 'nothing'}, with unknown {report.unexpected_keys[:3] or 'nothing'}; "
            "upgrade transformers, or start from the model's safetensors folder"
        )
    return model, tokenizer


def _weights(file: Path, model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights of a file by the model's names, each as the model's family keeps it.

    As ``load_gguf_checkpoint`` with ``return_tensors``, which draws a bar of its own.
    """
    import gguf

    from posttrain.models.files.gguf_reader import dequantised

    reader = gguf.GGUFReader(str(file))
    parsed = {**load_gguf_checkpoint(str(file)), "tensors": {}}
    family = reader.fields["general.architecture"].contents()
    processor = TENSOR_PROCESSORS.get(family, TensorProcessor)(config=parsed["config"])
    names = get_gguf_hf_weights_map(model, processor)
    for tensor in reader.tensors:
        found = processor.process(
            weights=dequantised(tensor),
            name=tensor.name,
            tensor_key_mapping=names,
            parsed_parameters=parsed,
        )
        if found.name in names:
            kept = np.require(found.weights, requirements=("C", "W"))  # not the file's own memory
            parsed["tensors"][names[found.name]] = torch.from_numpy(kept)
    return parsed["tensors"]


def _read_head_size(config: PretrainedConfig, file: Path) -> None:
    """The size of an attention head, which transformers takes for its family's default (Qwen3)."""
    import gguf

    found = gguf.GGUFReader(str(file)).fields.get(f"{config.model_type}.attention.key_length")
    if found is not None and getattr(config, "head_dim", None) is not None:
        config.head_dim = int(found.contents())


def _check_magic(file: Path) -> None:
    with file.open("rb") as opened:
        begins = opened.read(_HEADER.size)
    if not begins.startswith(_MAGIC) or len(begins) < _HEADER.size:
        what = "is empty" if not begins else f"begins with {begins[:8]!r}"
        raise ValueError(
            f"model: {str(file)!r} {what}, so it is not a GGUF file or cut off; {AGAIN}"
        )


def _check_size(config: PretrainedConfig, file: Path) -> None:
    """Raise where the file asks for a model that it cannot hold, before there is memory for it."""
    with file.open("rb") as opened:
        num_tensors = int(_HEADER.unpack(opened.read(_HEADER.size))[2])
    size, layers = file.stat().st_size, config.get_text_config().num_hidden_layers
    if layers <= num_tensors:
        with torch.device("meta"):
            planned = AutoModelForCausalLM.from_config(config)
        if planned.num_parameters() <= _WEIGHTS_PER_BYTE * size:
            return
    raise ValueError(
        f"model: {str(file)!r} is damaged: it describes a model that does not fit into its "
        f"{num_tensors:,} tensors and {size:,} bytes; {AGAIN}"
    )
