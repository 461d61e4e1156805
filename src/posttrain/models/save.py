"""A policy to an ordinary Hugging Face folder, whole or not at all."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from posttrain.models.adapters import (
    AdapterSettings,
    add_adapters,
    chosen_layers,
    copy_of_trained,
    merge_adapters,
    round_base,
    without_adapters,
)
from posttrain.models.files.adapter_folder import OWN_BASE, write_adapter
from posttrain.models.files.model_folder import replacing_folder
from posttrain.models.head import HALF
from posttrain.models.load import Policy, load_policy
from posttrain.models.outline import find_config, outline
from posttrain.models.quiet import without_bars

if TYPE_CHECKING:
    from posttrain.models.reward import RewardModel


def save_policy(
    policy: Policy, folder: str | Path, *, weights: Mapping[str, Tensor] | None = None
) -> None:
    """Write model, tokenizer, chat template and generation config, for any tool to load.

    They are written beside ``folder`` and moved there at the end, so that a folder that exists is
    complete; an older model in it is replaced. ``weights`` stands in for the model's own, where
    they are spread over several processes. Of a model with adapters these alone are written, as
    ``peft`` does.
    """
    if policy.adapter is not None:
        with replacing_folder(folder) as new:
            write_adapter(
                policy.model, new, settings=policy.adapter, base=policy.base, given=weights
            )
            policy.tokenizer.save_pretrained(new)
        return
    policy.model.generation_config = _generation_config(policy)
    given = None if weights is None else dict(weights)
    with replacing_folder(folder) as new:
        with without_bars():
            policy.model.save_pretrained(new, state_dict=given)
        policy.tokenizer.save_pretrained(new)


def check_targets(source: str, adapter: Mapping[str, Any]) -> None:
    """Raise for targets of adapters that no layer of a model folder has: its weights may wait."""
    wanted, path = AdapterSettings(**adapter), Path(source).expanduser()
    if wanted.rank and wanted.targets and (path / "config.json").is_file():
        with torch.device("meta"):
            chosen_layers(outline(find_config(source)), wanted)


def with_adapters(
    policy: Policy,
    settings: Mapping[str, Any],
    *,
    seed: int,
    folder: Path,
    compute: torch.dtype = torch.float32,
) -> Policy:
    """The policy with adapters in its model: those it has, or new ones if ``settings`` want some.

    Where their base has no folder of its own ("tiny", a GGUF file), it gets one in ``folder``,
    under a name that its weights decide (see :func:`write_base`). The base is kept in the type that
    it is computed in, where that is half precision.
    """
    wanted = AdapterSettings(**settings)
    if policy.adapter is None and wanted.rank:
        path, base = Path(policy.source).expanduser(), policy.source
        if path.is_dir():
            base = str(path.resolve())
        elif policy.source == "tiny" or path.is_file():
            base = str(folder.resolve() / f"{OWN_BASE}{_digest(policy)}")
        add_adapters(policy.model, wanted, seed=seed)
        policy = replace(policy, adapter=wanted, base=base)
    if compute in HALF:
        round_base(policy.model, compute)
    return policy


def check_adapter(policy: Policy | RewardModel, settings: Mapping[str, Any]) -> None:
    """Raise where a model has other adapters than ``settings``, those of a recipe, ask for."""
    known, asked = policy.adapter, AdapterSettings(**settings)
    layers = {target.rpartition(".")[2] for target in asked.targets}
    if known is not None and layers and layers != set(known.targets):
        raise ValueError(
            f"adapter.targets: {', '.join(asked.targets)}, but {policy.source!r} holds an adapter "
            f"of {', '.join(known.targets)}; drop adapter.targets to go on with it"
        )
    if known is not None and replace(known, targets=asked.targets) != asked:
        raise ValueError(
            f"adapter.rank: {asked.rank}, but {policy.source!r} holds an adapter of rank "
            f"{known.rank}, alpha {known.alpha:g}, rslora {str(known.rslora).lower()} and quantize "
            f"{known.quantize}; set [adapter] to that to go on with it, or merge it first: "
            f"posttrain merge {policy.source} NEW"
        )


def _digest(policy: Policy) -> str:
    """A name for the weights: of the beginning of each."""
    found = hashlib.sha256()
    for name, weight in policy.model.named_parameters():
        begins = weight.detach().flatten()[:1024].double().cpu()
        found.update(f"{name} {list(weight.shape)}".encode() + begins.numpy().tobytes())
    return found.hexdigest()[:8]


def write_base(policy: Policy) -> None:
    """Write the base of adapters where it has no folder of its own, and is not there yet."""
    base = Path(policy.base)
    own = base.is_absolute() and base.name.startswith(OWN_BASE)  # not a hub's "name/base-7b"
    if policy.adapter is not None and own and not base.is_dir():
        plain = copy_of_trained(policy.model)
        without_adapters(plain)
        save_policy(replace(policy, model=plain, adapter=None), base)


def merge_folder(source: str | Path, folder: str | Path, *, dtype: str = "float32") -> None:
    """Write an adapter's folder as a new ordinary model: its base, with the adapter added."""
    check_new(folder)
    policy = load_policy(str(source), dtype=dtype)
    if policy.adapter is None:
        raise ValueError(f"{source}: holds no adapter; it is a whole model already")
    merge_adapters(policy.model)
    save_policy(replace(policy, adapter=None), folder)


def check_new(folder: str | Path) -> None:
    """Raise where there is something in a folder that is to be written."""
    path = Path(folder)
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise FileExistsError(f"{folder}: is there already; name another folder, or remove it")


def import_gguf(file: str | Path, folder: str | Path, *, dtype: str = "float32") -> None:
    """Turn a GGUF file into a new ordinary folder, its weights dequantised to ``dtype``."""
    if not isinstance(folder, str | os.PathLike):
        raise ValueError(f"folder: expected the path of the folder to write, got {folder!r}")
    check_new(folder)
    save_policy(load_policy(str(file), dtype=dtype), folder)


def export_gguf(source: str | Path, file: str | Path, *, kind: str = "f16") -> None:
    """Write a model folder as a new GGUF file; an adapter is added to its base first."""
    if importlib.util.find_spec("gguf") is None:
        raise ValueError("model export: needs the package gguf: pip install 'posttrain[gguf]'")
    from posttrain.models.files.gguf_writer import TYPES, write_gguf

    if kind not in TYPES:
        raise ValueError(f"type: {kind!r}; known: {', '.join(TYPES)}")
    path = Path(file).expanduser()
    if path.exists():
        raise FileExistsError(f"{file}: is there already; name another file, or remove it")
    policy = load_policy(str(source))
    if policy.adapter is not None:
        merge_adapters(policy.model)
    write_gguf(policy, path, kind=kind)


def _generation_config(policy: Policy) -> GenerationConfig:
    """The model's generation config with our end and pad tokens.

    Some published ones are contradictory and cannot be saved; of those the tokens alone are kept.
    """
    ends = policy.end_tokens
    tokens = {
        "bos_token_id": policy.tokenizer.bos_token_id,
        "eos_token_id": ends[0] if len(ends) == 1 else list(ends),
        "pad_token_id": policy.pad_token,
    }
    config = GenerationConfig(**{**policy.model.generation_config.to_dict(), **tokens})
    try:
        config.validate(strict=True)
    except ValueError:
        return GenerationConfig(**tokens)
    return config
