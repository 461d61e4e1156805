"""A policy from a name: ``"tiny"``, a model folder, a GGUF file, or a name on the model hub.

Nothing that a model folder holds is ever executed: no code of its own, and no pickled weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from posttrain import registry
from posttrain.model_paths import check_gguf_name, check_hub_name
from posttrain.models.adapters import AdapterSettings, load_adapters
from posttrain.models.files.adapter_folder import holds_adapter, read_adapter
from posttrain.models.files.damaged import check_finite, check_fit, explained
from posttrain.models.files.gguf import read_gguf
from posttrain.models.files.hub import why_unreachable
from posttrain.models.files.model_folder import check_folder
from posttrain.models.files.size import check_parts, check_size
from posttrain.models.gpu_memory import limit_memory, parse_size
from posttrain.models.quiet import loading_alone, without_bars, without_reports
from posttrain.models.tiny import build_tiny

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


@dataclass(frozen=True)
class Policy:
    """A causal language model, its tokenizer, and where its sequences end.

    ``end_tokens`` are all tokens that end a completion; the first one is the tokenizer's own, the
    one to teach. ``pad_token`` may be one of them: masks never come from token ids. ``adapter`` is
    what the model's adapters are like, where it has some, and ``base`` where that is without them.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    source: str
    end_tokens: tuple[int, ...]
    pad_token: int
    adapter: AdapterSettings | None = None
    base: str = ""


@loading_alone()
def load_policy(
    source: str,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    seed: int = 0,
    options: Mapping[str, Any] = MappingProxyType({}),
    gpu_memory: str | None = None,
    moved: bool = True,
) -> Policy:
    """Load the policy ``source``: "tiny", a folder, a ``.gguf`` file, or a hub name.

    A folder may hold a whole model, or an adapter in the files of ``peft``.

    ``seed`` decides the weights of "tiny", and its ``options`` are those of
    :func:`posttrain.models.tiny.build_tiny`; the others take ``attention`` (the implementation, as
    transformers names them), a hub name also ``revision``. Dropout is off for good: a policy that
    is trained must give the probabilities it was sampled with. From here on the process takes at
    most ``gpu_memory`` ("8GB") of a GPU. What is not ``moved`` to the device stays in main memory.
    """
    precision = find_dtype(dtype)
    if gpu_memory is not None and _device(device).type == "cuda":
        limit_memory(device, parse_size(gpu_memory))
    path = Path(source).expanduser()
    if path.is_dir() and holds_adapter(path):
        place = device if moved else "cpu"
        return _load_adapted(path, dtype=dtype, device=place, options=options)
    if source == "tiny":
        registry.check_options(build_tiny, options, kind="model 'tiny'")
        model, tokenizer = build_tiny(**{"seed": seed, **options})
    elif path.is_file():
        check_gguf_name(path)
        given = _local_options(path, options)
        with explained(str(path), kind="model"):
            model, tokenizer = read_gguf(path, dtype=precision, **given)
    elif path.is_dir():
        check_folder(path)
        given = {"local_files_only": True, **_local_options(path, options)}
        with without_bars(), explained(str(path), kind="model"):
            model, tokenizer = _from_pretrained(str(path), dtype=precision, options=given)
    else:
        check_hub_name(source, path)
        registry.check_options(_hub_options, options, kind=f"model {source!r}")
        given = _hub_options(**options)
        model, tokenizer = _from_hub(source, dtype=precision, options=given)
    cast(model, precision)
    model = model.to(_device(device if moved else "cpu"))
    check_finite(model, source=source, kind="model")  # there, for a GPU is quick about it
    return _finish(model, tokenizer, source=source)


def _load_adapted(folder: Path, *, dtype: str, device: str, options: Mapping[str, Any]) -> Policy:
    """The base model of an adapter, with the adapter in it."""
    found = read_adapter(folder)
    if Path(found.base).is_dir() and holds_adapter(Path(found.base)):
        raise ValueError(
            f"model: {str(folder)!r} is an adapter of {found.base!r}, an adapter too; merge that "
            f"first: posttrain merge {found.base} NEW"
        )
    policy = load_policy(found.base, dtype=dtype, device=device, options=options)
    tokenizer = policy.tokenizer
    if found.has_tokenizer:
        with explained(str(folder), kind="model"):
            tokenizer = AutoTokenizer.from_pretrained(
                str(folder), trust_remote_code=False, local_files_only=True
            )
    load_adapters(policy.model, found.settings, weights=found.weights, source=str(folder))
    check_finite(policy.model, source=str(folder), kind="model")
    loaded = _finish(policy.model, tokenizer, source=str(folder))
    return replace(loaded, adapter=found.settings, base=found.base)


def _local_options(path: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    def local_options(*, attention: str | None = None) -> dict[str, Any]:
        return {"attn_implementation": attention}

    registry.check_options(local_options, options, kind=f"model {str(path)!r}")
    return local_options(**options)


def _hub_options(*, attention: str | None = None, revision: str = "main") -> dict[str, Any]:
    return {"attn_implementation": attention, "revision": revision}


def find_dtype(name: str) -> torch.dtype:
    """The type of weights by its name."""
    if name not in _DTYPES:
        raise ValueError(f"dtype: unknown {name!r}; {registry.did_you_mean(name, _DTYPES)}")
    return _DTYPES[name]


def cast(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast the weights alone: ``model.to(dtype)`` would also round the frequencies of the rotary
    position embedding, which every reader of the saved folder computes in float32.
    """
    for weight in model.parameters():
        weight.data = weight.data.to(dtype)


def _device(name: str) -> torch.device:
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(
            f'device: {name!r} was asked for, but torch sees no CUDA device; use device = "cpu", '
            "or install a CUDA build of torch on a machine with a GPU"
        )
    return torch.device(name)


def _from_hub(
    name: str, *, dtype: torch.dtype, options: Mapping[str, Any]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model of a hub name; where the hub cannot be asked, the one in its cache here, if any."""
    unreachable = why_unreachable()
    try:
        local = {"local_files_only": bool(unreachable)}
        with explained(name, kind="model", local=False):
            return _from_pretrained(name, dtype=dtype, options={**options, **local})
    except OSError as error:
        near = _near(name)
        download = f"(hf download {name} --local-dir FOLDER) and give the folder"
        if unreachable:
            raise ValueError(
                f"model: {name!r} is not a folder here ({Path.cwd()}), nor in the hub's cache, "
                f"and the hub cannot be asked ({unreachable}). {near}If it is a folder, check the "
                f"path; if it is on the hub, download it where there is a connection {download}"
            ) from None
        raise ValueError(
            f"model: {name!r} is not a folder here, and the hub did not give it: {near}"
            f"Check the name; or download it where there is a connection {download}. "
            f"The hub's answer: {str(error).splitlines()[0]}"
        ) from error


def _near(name: str) -> str:
    """What a name that nobody knows may have been meant for."""
    path = registry.near_path(Path(name).expanduser())
    if path is not None:
        return f"did you mean {str(path)!r}? "
    folders = [path.name for path in Path().iterdir() if path.is_dir()]
    near = registry.nearest(name, ["tiny", *folders], cutoff=0.5)
    return f"did you mean {near!r}? " if near else ""


def _from_pretrained(
    source: str, *, dtype: torch.dtype, options: Mapping[str, Any]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    shared = {key: value for key, value in options.items() if key != "attn_implementation"}
    where = f"{source}/config.json"
    check_parts(PretrainedConfig.get_config_dict(source, **shared)[0], where=where)
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False, **shared)
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False, **shared)
    except ValueError as error:
        raise ValueError(
            f"model: {source!r} needs code or a format that this version of transformers does not "
            "have; a model's own code is never run. Upgrade transformers (pip install --upgrade "
            f"transformers) or choose another model. {str(error).splitlines()[0]}"
        ) from error
    check_size(config, where=where, dtype=dtype)
    switch_off_dropout(config)
    with without_reports():
        model, report = AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are named below
            **options,
        )
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise ValueError(
            f"model: {source!r} lacks {len(missing)} weights of a {type(model).__name__} "
            f"({', '.join(missing[:3])} …): it is not a causal language model, or "
            "not all of it; give the folder of a whole one"
        )
    check_fit(report, source=source, kind="model")
    return model, tokenizer


def switch_off_dropout(config: Any) -> None:
    """Whatever a model draws at random in training: dropout, dropped layers, router jitter."""
    for part in (config, config.get_text_config()):
        for name, value in list(vars(part).items()):
            if isinstance(value, float) and ("drop" in name or "jitter" in name):
                setattr(part, name, 0.0)


def _finish(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, source: str) -> Policy:
    """Agree on where sequences end, and check that tokenizer and model speak of the same tokens."""
    end_tokens = _end_tokens(model, tokenizer, source=source)
    embedding = model.get_input_embeddings()
    largest = max(*tokenizer.get_vocab().values(), *end_tokens)
    if largest >= embedding.num_embeddings:
        raise ValueError(
            f"model: {source!r} knows {embedding.num_embeddings} tokens, its tokenizer has ids up "
            f"to {largest}; use the tokenizer that belongs to the model"
        )
    # An embedding with a padding index drops that token's gradient, and pad is often an end token.
    embedding.padding_idx = None
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(end_tokens[0])
    return Policy(
        model=model.eval(),
        tokenizer=tokenizer,
        source=source,
        end_tokens=end_tokens,
        pad_token=tokenizer.pad_token_id,
    )


def _end_tokens(model: Any, tokenizer: PreTrainedTokenizerBase, *, source: str) -> tuple[int, ...]:
    generation = getattr(model, "generation_config", None)
    listed = getattr(generation, "eos_token_id", None)
    listed = [listed] if isinstance(listed, int) else list(listed or [])
    found = [token for token in (tokenizer.eos_token_id, *listed) if token is not None]
    if not found:
        raise ValueError(
            f"model: {source!r} names no end token, so no completion could ever end; set eos_token "
            "in its tokenizer_config.json or eos_token_id in its generation_config.json"
        )
    return tuple(dict.fromkeys(found))
