"""Adapters in the files of ``peft``: read, whoever wrote them, and written for any tool to load.

::

    adapter_config.json             rank, alpha, layers, and the name of the base model
    adapter_model.safetensors       A and B of every layer
    tokenizer.json …                where there is one; else that of the base
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from posttrain.models.adapters import AdapterSettings, adapted_layers
from posttrain.models.files.damaged import check_files, read_object

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
OWN_BASE = "base-"  # how a run calls the folder of a base that has no folder of its own
MERGE = "merge it with peft (merge_and_unload, then save_pretrained), and give the merged folder"
QUANTIZE = "posttrain_quantize"  # a key of our own: how the base was kept; peft leaves it out
_PREFIX = "base_model.model."
_NAMES = {".lora_A.weight": ".adapter.A", ".lora_B.weight": ".adapter.B"}
# Keys that say nothing about what is computed, and values of others that change nothing. Any other
# key must be off, so that what a newer peft adds is refused and not left out.
_NEUTRAL = {
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_type", "peft_version"),
    *("task_type", "r", "lora_alpha", "use_rslora", "target_modules", "lora_dropout"),
    *("exclude_modules", "layers_pattern", "layers_to_transform", "ensure_weight_tying"),
    *("runtime_config", "loftq_config", "megatron_core", "qalora_group_size", "eva_config"),
}
_OFF: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "revision": ("main",),
    "init_lora_weights": (True, "gaussian", "orthogonal", "eva"),
    QUANTIZE: ("nf4",),
}


@dataclass(frozen=True, kw_only=True)
class AdapterFolder:
    """An adapter as it was read: its weights are by our names, its base as it is named."""

    settings: AdapterSettings
    weights: dict[str, Tensor]
    base: str
    has_tokenizer: bool


def holds_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter and not a whole model."""
    return (folder / CONFIG).is_file()


def read_adapter(folder: Path, *, whole: tuple[str, ...] = ()) -> AdapterFolder:
    """The adapter in a folder of ``peft``; what is not supported here is refused by its name.

    ``whole`` are layers that may be in it as they are, beside the adapters.
    """
    check_files(folder, kind="model")
    where = str(folder / CONFIG)
    config = read_object(folder / CONFIG, kind="model")
    if config.get("peft_type") != "LORA":
        raise ValueError(
            f"model: {where!r} says peft_type {config.get('peft_type')!r}, and only LORA is read "
            f"here; {MERGE}"
        )
    for key, value in config.items():
        known = _OFF.get(key, ())
        if key == "modules_to_save" and isinstance(value, list) and all(v in whole for v in value):
            continue
        if key not in _NEUTRAL and value and value not in known:
            raise ValueError(
                f"model: {where!r} has {key} = {json.dumps(value)}, which is not supported; {MERGE}"
            )
    if not (folder / WEIGHTS).is_file():
        raise ValueError(f"model: {str(folder)!r} holds no {WEIGHTS}; pickled weights are refused")
    named = {own_name(name): value for name, value in load_file(folder / WEIGHTS).items()}
    kept = {f"{name}.{part}" for name in whole for part in ("weight", "bias")}
    adapters = [name for name in named if name.endswith((".adapter.A", ".adapter.B"))]
    if odd := sorted(named.keys() - kept - set(adapters)):
        raise ValueError(f"model: {str(folder / WEIGHTS)!r} holds {odd[0]}: not supported; {MERGE}")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    ranks = {named[name].shape[0] for name in adapters if name.endswith(".A")}
    if type(rank) is not int or rank < 1 or ranks != {rank}:
        raise ValueError(
            f"model: {where!r} says r = {json.dumps(rank)}, and the adapters in {WEIGHTS} have the "
            f"ranks {sorted(ranks)}; one rank for all of them is read here; {MERGE}"
        )
    if not isinstance(alpha, int | float) or not 0 < alpha < math.inf:
        raise ValueError(
            f"model: {where!r} says lora_alpha = {json.dumps(alpha)}, which is not a number above "
            "0; copy the file again"
        )
    settings = AdapterSettings(
        rank=rank,
        alpha=float(alpha),
        targets=tuple(sorted({_last(name.rpartition(".adapter.")[0]) for name in adapters})),
        rslora=bool(config.get("use_rslora")),
        quantize="none" if config.get(QUANTIZE) is None else "nf4",
    )
    return AdapterFolder(
        settings=settings,
        weights=named,
        base=find_base(folder, str(config.get("base_model_name_or_path") or "")),
        has_tokenizer=(folder / "tokenizer_config.json").is_file(),
    )


def find_base(folder: Path, name: str) -> str:
    """The base model of an adapter: as it is named, or in the run that the folder was moved with.

    A name that is no path stays for the hub.
    """
    path = Path(name).expanduser()
    if not name:
        raise ValueError(f"model: {str(folder / CONFIG)!r} names no base_model_name_or_path")
    if path.exists():
        return str(path.resolve())
    if path.name.startswith(OWN_BASE):
        for parent in folder.resolve().parents:
            if (parent / path.name / "config.json").is_file():
                return str(parent / path.name)
    if path.is_absolute() or len(path.parts) > 2 or name.startswith((".", "~")):
        raise ValueError(
            f"model: {str(folder)!r} is an adapter of {name!r}, which is not here; put the base "
            f"model there, or its new place into base_model_name_or_path of {CONFIG}"
        )
    return name


def write_adapter(
    model: nn.Module,
    folder: Path,
    *,
    settings: AdapterSettings,
    base: str,
    head: str = "",
    given: Mapping[str, Tensor] | None = None,
) -> None:
    """Write the adapters of a model as ``peft`` does; ``base`` is where their base is found.

    The ``head`` of a classifier has learned beside them, and is written whole. The weights are
    those ``given``, by our names, or else the model's own.
    """
    layers = adapted_layers(model)
    own = given or dict(model.named_parameters())
    config = {
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": settings.alpha,
        "lora_dropout": 0.0,
        "modules_to_save": [head] if head else None,
        "peft_type": "LORA",
        "r": settings.rank,
        "target_modules": _targets(model, layers),
        "task_type": "SEQ_CLS" if head else "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": settings.rslora,
    }
    if settings.quantize != "none":
        config[QUANTIZE] = settings.quantize
    weights = {
        f"{_PREFIX}{name}.lora_{part}.weight": own[f"{name}.adapter.{part}"].detach().cpu()
        for name in layers
        for part in ("A", "B")
    }
    if head:
        for name, _ in model.get_submodule(head).named_parameters():
            weights[f"{_PREFIX}{head}.{name}"] = own[f"{head}.{name}"].detach().cpu()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def own_name(name: str) -> str:
    """A tensor of ``adapter_model.safetensors`` by the name of our parameter; others stay.

    >>> own_name("base_model.model.model.layers.0.mlp.up_proj.lora_A.weight")
    'model.layers.0.mlp.up_proj.adapter.A'
    """
    for theirs, ours in _NAMES.items():
        if name.endswith(theirs):
            name = name.removesuffix(theirs) + ours
    return name.removeprefix(_PREFIX)


def _targets(model: nn.Module, layers: Mapping[str, nn.Module]) -> list[str]:
    """The last parts of the layers' names where they choose just these, else the whole names."""
    short = {_last(name) for name in layers}
    meant = {name for name, _ in model.named_modules() if _last(name) in short}
    return sorted(short if meant == layers.keys() else layers)


def _last(name: str) -> str:
    return name.rpartition(".")[2]
