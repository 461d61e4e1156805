"""A finished run on the hub: its model, and a card that says how it was made and what it can do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.build.model_source import config_of, policy_of
from posttrain.config.toml import write_toml
from posttrain.data.hub_rows import is_hub_id, split_hub_id
from posttrain.models.files.hub import Upload, plan_upload, upload
from posttrain.report.facts import RunFacts
from posttrain.report.model_card import CardSource, model_card
from posttrain.runs import RunFolder
from posttrain.runs.finished import check_model, run_of
from posttrain.runs.resume import BESIDE_RECIPE
from posttrain.track.local_paths import settings_without_folders

_KEPT_OF_RUN = ("seed", "stages", "deterministic")
_OF_MACHINE = ("cluster", "grading", "environment", "code", "contents", *BESIDE_RECIPE)
_GENERATIONS = 10  # runs that began from each other's models


@dataclass(frozen=True, kw_only=True)
class Publication:
    """What is to be pushed: the files and the card."""

    upload: Upload
    card: str

    def told(self) -> list[str]:
        """What would be uploaded, in lines."""
        sizes = self.upload.sizes()
        lines = [f"{name}  {size:,} bytes" for name, size in sizes.items()]
        if self.upload.left_out:
            lines.append(f"not uploaded: {', '.join(self.upload.left_out)}")
        return [f"to {self.upload.repo}, {sum(sizes.values()) / 1e6:,.1f} MB:", *lines]


def prepare_publication(
    run: str | Path, repo: str, *, base_model: str = "", license: str = ""
) -> Publication:
    """The files and the card of a finished run; ``base_model`` names its base on the hub."""
    folder = RunFolder(run)
    if not folder.finished:
        raise ValueError(
            f"{folder.path}: is not finished, so it has no results to tell of; go on with it "
            f"(posttrain resume {folder.path}), or upload a model folder with hf upload"
        )
    model = policy_of(folder)
    check_model(str(model))
    config = config_of(folder)
    adapter = (
        _read(model / "adapter_config.json") if (model / "adapter_config.json").exists() else {}
    )
    began = str(adapter.get("base_model_name_or_path") or config["model"]["name"])
    base = base_model or _origin(began)
    if adapter and not base:
        raise ValueError(
            f"push: the adapter's base is the folder {Path(began).name!r} of this machine, which "
            "no one else has; name it on the hub (--base-model ORG/NAME), or push the merged "
            "model: posttrain merge"
        )
    data = _data(config)
    known = {name: text for name, text in config.get("code", {}).items() if name != "source"}
    source = CardSource(
        repo=repo,
        recipe=write_toml(_public(config)),
        base=base,
        began=Path(began).name,
        data=data,
        datasets=sorted({_dataset(text) for text in data.values()} - {""}),
        license=license,
        adapter=bool(adapter),
        versions=known,
    )
    card = model_card(RunFacts(folder), source)
    texts = {"README.md": card}
    if adapter:
        named = {**adapter, "base_model_name_or_path": base}
        texts["adapter_config.json"] = json.dumps(named, indent=2, sort_keys=True) + "\n"
    return Publication(upload=plan_upload(model, repo, texts=texts), card=card)


def push(
    run: str | Path,
    repo: str,
    *,
    private: bool = False,
    update: bool = False,
    base_model: str = "",
    license: str = "",
) -> str:
    """Upload the model of a finished run, with a card written from it; returns its address.

    Only the files of the model folder and the card go there. ``update`` adds a commit to a
    repository that is there already.
    """
    ready = prepare_publication(run, repo, base_model=base_model, license=license)
    return upload(ready.upload, private=private, update=update)


def _origin(name: str) -> str:
    """The hub id that a model began as, through the runs that it went through; "" without one."""
    for _ in range(_GENERATIONS):
        path = Path(name).expanduser()
        if not path.exists():
            return name if is_hub_id(name) and not path.is_absolute() else ""
        run = run_of(path)
        if run is None or not (run / "config.json").exists():
            return ""
        name = str(RunFolder(run).config["model"]["name"])
    return ""


def _data(config: Mapping[str, Any]) -> dict[str, str]:
    """The data of the stages, by the key that names it; of a file its name alone."""
    found: dict[str, str] = {}
    task = config.get("task") or {}
    if task:
        found["task"] = str(task.get("name", ""))
    keys = [("task", "path"), ("task", "test_path")]
    keys += [(stage, name) for stage in ("sft", "reward", "dpo") for name in ("data", "test_data")]
    for section, name in keys:
        value = (config.get(section) or {}).get(name)
        if isinstance(value, str) and value not in ("task", "prefer"):
            found[f"{section}.{name}"] = settings_without_folders(value)
    return found


def _dataset(text: str) -> str:
    return str(split_hub_id(text)["name"]) if is_hub_id(text) else ""


def _public(config: Mapping[str, Any]) -> dict[str, Any]:
    """The resolved recipe without what is of a machine: folders, workers, a cluster."""
    kept = {name: table for name, table in config.items() if name not in _OF_MACHINE}
    kept["run"] = {name: config["run"][name] for name in _KEPT_OF_RUN if name in config["run"]}
    return {name: settings_without_folders(value) for name, value in kept.items()}


def _read(file: Path) -> dict[str, Any]:
    found = json.loads(file.read_text(encoding="utf-8"))
    return found if isinstance(found, dict) else {}
