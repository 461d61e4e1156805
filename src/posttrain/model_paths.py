"""Whether a name can be that of a model or a run, by its files alone: nothing large is loaded.

So a mistyped folder is told at once, and before a run makes a folder of its own.
"""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

from posttrain import registry

ADAPTER = "adapter_config.json"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def check_run(path: Path) -> None:
    """Raise where a path is no run folder."""
    if not path.is_dir():
        near = registry.near_path(path)
        raise ValueError(f"{path}: no such folder{f'; did you mean {near}?' * bool(near)}")
    if not (path / "run.json").is_file():
        above = path.resolve().parent
        hint = f"; {above} is one" if (above / "run.json").is_file() else ""
        raise ValueError(f"{path}: is not a run folder (it has no run.json){hint}")


def check_exists(given: str) -> None:
    """Refuse a name that nothing here has, and that only the hub could know."""
    path = Path(given).expanduser()
    if given == "tiny" or path.exists():
        return
    near = registry.near_path(path)
    hint = f" (did you mean {near}?)" if near is not None else ""
    raise ValueError(
        f"{given}: no such run folder, recipe or model folder here{hint}; a hub id needs --task "
        "NAME"
    )


def check_source(source: str, *, kind: str = "model") -> None:
    """Raise where ``source`` is no folder or file of a model, and no name that a hub could have."""
    path = Path(source).expanduser()
    if source == "tiny" or (path / ADAPTER).is_file():
        return
    if path.is_file():
        check_gguf_name(path, kind=kind)
    elif path.is_dir():
        check_names(path, kind=kind)
    else:
        check_hub_name(source, path, kind=kind)


def gguf_file(name: str) -> Path:
    """A path as it is, or the one GGUF file of an installed package, of which nothing is run."""
    path = Path(name)
    if path.exists():
        return path
    try:
        held = metadata.files(name) or []
    except (metadata.PackageNotFoundError, ValueError):
        return path
    found = [Path(str(file.locate())) for file in held if file.suffix == ".gguf"]
    if len(found) != 1:
        raise ValueError(f"model: the package {name} holds {len(found)} GGUF files; name one file")
    return found[0]


def check_gguf_name(path: Path, *, kind: str = "model") -> None:
    """Raise for a file that is not of the one kind that holds a whole model."""
    if path.suffix.lower() != ".gguf":
        raise ValueError(
            f"{kind}: {str(path)!r} is a file, but not a .gguf file; give the folder that holds "
            "config.json and the weights"
        )


def check_names(folder: Path, *, kind: str = "model") -> None:
    """Raise where a folder holds no model, or one that could only be read by running code."""
    names = {path.name for path in folder.iterdir()}
    if ADAPTER in names:
        raise ValueError(
            f"{kind}: {str(folder)!r} holds an adapter, not a whole model; merge it into its base "
            f"model first: posttrain merge {folder} NEW"
        )
    if "run.json" in names:
        found = sorted({str(path.parent) for path in folder.glob("*/model/*config.json")})
        which = f"; give the model in it: {' or '.join(found)}" if found else ", without a model"
        raise ValueError(f"{kind}: {str(folder)!r} is the folder of a run{which}")
    if "config.json" not in names:
        inside = [path.name for path in folder.iterdir() if (path / "config.json").is_file()]
        models = f"; the models in it: {', '.join(sorted(inside))}" if inside else ""
        raise ValueError(f"{kind}: {str(folder)!r} is not a model folder: no config.json{models}")
    if not any(name.endswith(".safetensors") for name in names):
        raise ValueError(
            f"{kind}: {str(folder)!r} holds no .safetensors weights. Pickled weights (.bin, .pt) "
            "are refused: reading them can run any code. If you trust them, convert them once with "
            "transformers: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW)"
        )
    if not any("token" in name or name.startswith("vocab") for name in names):
        raise ValueError(
            f"{kind}: {str(folder)!r} holds no tokenizer; copy tokenizer.json and "
            "tokenizer_config.json of the model it was made from into it"
        )


def check_hub_name(source: str, path: Path, *, kind: str = "model") -> None:
    """Raise where a name that is no path here is more likely a mistyped path than a hub name."""
    folder, name = path.parent, path.name
    if _HUB_NAME.fullmatch(source) and path.suffix != ".gguf":
        if len(path.parts) == 1 or not folder.is_dir():
            return
        raise ValueError(
            f"{kind}: there is no {name!r} in the folder {str(folder)!r}; {_known(folder, name)}. "
            f"The hub is not asked for {source!r} while a folder of that name is here"
        )
    if not folder.is_dir():
        near = registry.near_path(path)
        hint = f"; did you mean {str(near)!r}?" if near is not None else ""
        raise ValueError(f"{kind}: there is no {name!r}, and no folder {str(folder)!r}{hint}")
    raise ValueError(f"{kind}: there is no {name!r} in {str(folder)!r}; {_known(folder, name)}")


def _known(folder: Path, name: str) -> str:
    beside = [child.name for child in folder.iterdir()]
    return registry.did_you_mean(name, beside, most=registry.FILES)
