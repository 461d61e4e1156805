"""Models that are damaged: what is wrong with a file is found, and told with its name."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

AGAIN = "copy it again from where it came"
INDEX = "model.safetensors.index.json"
# Files that hold an object in JSON, and the table that must be in it.
_OBJECTS = {
    "config.json": "",
    "adapter_config.json": "",
    "generation_config.json": "",
    "tokenizer.json": "model",
    "tokenizer_config.json": "",
    "special_tokens_map.json": "",
    "added_tokens.json": "",
    "vocab.json": "",
    INDEX: "weight_map",
}
_MOST_SAID = 300  # characters of what a library says


def check_files(folder: Path, *, kind: str) -> None:
    """Raise where a file of a model folder is not what its name says."""
    for name, table in _OBJECTS.items():
        if (folder / name).is_file():
            found = read_object(folder / name, kind=kind)
            if table and not isinstance(found.get(table), dict):
                raise ValueError(
                    f"{kind}: {str(folder / name)!r} has no table {table!r}, so it is of another "
                    f"kind; {AGAIN}"
                )
    held = {path.name: _names(path, kind=kind) for path in folder.glob("*.safetensors")}
    if (folder / INDEX).is_file() and "model.safetensors" not in held:
        _check_index(folder / INDEX, held, kind=kind)


def check_fit(report: Mapping[str, Any], *, source: str, kind: str, leave: str = "") -> None:
    """Raise where weights have other shapes than config.json says, or are not in it at all.

    ``report`` is what transformers says of a loading; names that begin with ``leave`` may be over.
    """
    wrong = sorted(report["mismatched_keys"])
    if wrong:
        name, found, expected = wrong[0]
        raise ValueError(
            f"{kind}: {source!r}: {len(wrong)} weights have another shape than its config.json "
            f"says ({name}: {list(found)}, not {list(expected)}); put the config.json and the "
            ".safetensors files of one and the same model there"
        )
    over = sorted(n for n in report["unexpected_keys"] if not (leave and n.startswith(leave)))
    if over:
        raise ValueError(
            f"{kind}: {source!r} holds {len(over)} weights that its config.json knows nothing of "
            f"({', '.join(over[:3])}), so another model would be made than was saved; put its own "
            "config.json back, or, if they are to be left out, load it once with transformers and "
            "save_pretrained it to a new folder"
        )


def check_finite(model: PreTrainedModel, *, source: str, kind: str) -> None:
    """Raise where a weight is no number."""
    for name, weight in model.named_parameters():
        # Of a finite sum, which is quick, every term is; of another one, each is looked at.
        if not bool(torch.isfinite(weight.sum())) and not bool(torch.isfinite(weight).all()):
            raise ValueError(
                f"{kind}: {source!r}: {name} holds NaN or infinity: the file is damaged, or the "
                f"training that wrote it broke down; {AGAIN}, or take an earlier checkpoint"
            )


@contextlib.contextmanager
def explained(source: str, *, kind: str, local: bool = True) -> Iterator[None]:
    """Inside, what a library raises over a model is told with the model's name and what to do.

    What the hub's library says of a name that is not ``local`` is left to the caller.
    """
    try:
        yield
    except Exception as error:
        said = " ".join(str(error).split())
        ours = isinstance(error, ValueError) and said.startswith(f"{kind}: ")
        system = isinstance(error, OSError) and (error.errno is not None or not local)
        if ours or system or "memory" in said:
            raise
        raise ValueError(
            f"{kind}: {source!r} cannot be read: it is damaged, or its files are of different "
            f"models; {AGAIN}. What transformers says: {type(error).__name__}: {said[:_MOST_SAID]}"
        ) from error


def read_object(path: Path, *, kind: str) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is one
        what = "is empty" if not path.stat().st_size else f"is not JSON ({error})"
        raise ValueError(f"{kind}: {str(path)!r} {what}; {AGAIN}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{kind}: {str(path)!r} holds no JSON object, {{…}}; {AGAIN}")
    return value


def _names(path: Path, *, kind: str) -> set[str]:
    """The tensors of a file by name; raises where it is damaged, or holds no floats."""
    try:
        with safe_open(path, framework="pt") as opened:  # reads what it holds, not the weights
            names = set(opened.keys())
            types = {name: opened.get_slice(name).get_dtype() for name in names}
    except SafetensorError as error:
        raise ValueError(f"{kind}: {str(path)!r} is damaged ({error}); copy it again") from error
    # Masks and positions may be whole numbers, and are not called weights.
    whole = sorted(n for n in names if n.endswith(".weight") and "F" not in types[n])
    if whole:
        raise ValueError(
            f"{kind}: {str(path)!r} keeps {whole[0]} as {types[whole[0]]}: the model is quantised, "
            "or the file damaged; give the model in float32, bfloat16 or float16"
        )
    return names


def _check_index(index: Path, held: Mapping[str, set[str]], *, kind: str) -> None:
    """Every weight that an index names is in the file that it names, and that is in the folder."""
    places = {n: str(p) for n, p in read_object(index, kind=kind)["weight_map"].items()}
    absent = sorted(set(places.values()) - held.keys())
    if absent:
        raise ValueError(
            f"{kind}: {str(index)!r} names {len(absent)} files that are not in the folder "
            f"({', '.join(absent[:3])}); copy those, too"
        )
    lost = sorted(name for name, place in places.items() if name not in held[place])
    if lost:
        raise ValueError(
            f"{kind}: {str(index)!r}: {len(lost)} weights are not in the files where it says "
            f"({lost[0]} in {places[lost[0]]}); {AGAIN}"
        )
