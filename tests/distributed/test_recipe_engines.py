"""What a process makes an engine of a recipe from."""

from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import recipe

from posttrain.build.setup import make_policy
from posttrain.config import recipe_from_dict, resolve
from posttrain.distributed import recipe_engines
from posttrain.distributed.recipe_engines import EngineRequest
from posttrain.models.save import save_policy


def test_the_files_of_an_engine_lie_where_they_go_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each start of an engine has a folder of its own: one that was killed leaves its behind.

    And it is told the temperature of the learner's log-probs, which its own are compared with.
    """
    replicas = {"address": "local", "engines": 2}
    given = recipe(tmp_path, cluster=replicas)
    given["run"]["threads"] = torch.get_num_threads()
    given["rl"]["temperature"] = 0.7
    resolved = resolve(recipe_from_dict(given))
    scratch = tmp_path / ".cluster" / "engines"
    save_policy(make_policy(resolved, "tiny", device="cpu"), scratch / "model")
    places: list[Path] = []

    def made(*_: Any, folder: str | None = None, temperature: float = 1.0, **__: Any) -> Any:
        assert folder is not None
        assert temperature == 0.7
        places.append(Path(folder))

    monkeypatch.setattr(recipe_engines, "make_engine", made)
    request = EngineRequest(recipe=resolved, model=scratch / "model", on_gpu=True)
    request()
    request()
    assert [place.parent for place in places] == [scratch, scratch]
    assert places[0] != places[1]
    assert all(place.is_dir() for place in places)
