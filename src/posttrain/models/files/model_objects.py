"""A model that is an object of Python: written to a folder, and read from there as others are."""

from __future__ import annotations

import copy
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain.models.files.model_folder import replacing_folder
from posttrain.models.quiet import without_bars


@dataclass(frozen=True, kw_only=True)
class ModelObject:
    """A transformers model with its tokenizer; neither is changed."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @property
    def digest(self) -> str:
        """A name for weights, config and tokenizer: another model, another name."""
        config = {k: v for k, v in self.model.config.to_dict().items() if k != "_name_or_path"}
        written = json.dumps(config, sort_keys=True, default=str)
        found = hashlib.sha256(f"{type(self.model).__name__} {written}".encode())
        for name, weight in sorted(self.model.state_dict().items()):
            flat = weight.detach().cpu().contiguous().reshape(-1)
            found.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
            found.update(flat.view(torch.uint8).numpy())
        tokenizer: Any = self.tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        vocabulary = backend.to_str() if backend is not None else sorted(tokenizer.get_vocab())
        known = (vocabulary, tokenizer.chat_template, tokenizer.special_tokens_map)
        found.update(repr(known).encode())
        return found.hexdigest()[:12]

    def save(self, folder: Path) -> None:
        """Write it as an ordinary model folder, whole or not at all."""
        written: Any = copy.copy(self.model)  # saving writes into its configs
        written.config = copy.deepcopy(self.model.config)
        written.generation_config = copy.deepcopy(self.model.generation_config)
        with replacing_folder(folder) as new:
            with without_bars():
                written.save_pretrained(new)
            copy.deepcopy(self.tokenizer).save_pretrained(new)


def model_object(model: object, tokenizer: object) -> ModelObject | None:
    """A model that is one of transformers, with its tokenizer; None for a name or a path."""
    if not isinstance(model, PreTrainedModel):
        if tokenizer is not None:
            raise ValueError(
                "tokenizer: has no effect beside the name of a model, whose folder brings its own; "
                "drop it"
            )
        return None
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        given = "none" if tokenizer is None else f"a {type(tokenizer).__name__}"
        raise ValueError(
            f"tokenizer: a model object ({type(model).__name__}) comes with its tokenizer, and "
            f"{given} was given: tokenizer=AutoTokenizer.from_pretrained(…)"
        )
    return ModelObject(model=model, tokenizer=tokenizer)
