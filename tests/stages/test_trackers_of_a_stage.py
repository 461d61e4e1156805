"""The trackers of a stage: those that were made are closed, whatever happens behind them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from posttrain.stages import open_stage
from posttrain.track import Stage


def test_one_that_cannot_be_made_leaves_none_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a server that was told of the run would wait for its end."""
    made: list[str] = []
    closed: list[str] = []

    def resolve(name: str, *_: Any, **__: Any) -> Any:
        def make(stage: Stage) -> Any:
            if name == "absent":
                raise ConnectionError("no server")
            made.append(name)
            return SimpleNamespace(close=lambda: closed.append(name))

        return make

    monkeypatch.setattr(open_stage, "resolve", resolve)
    beside = SimpleNamespace(close=lambda: closed.append("beside"))
    stage = Stage(name="rl", folder=tmp_path, total_steps=1, title="")
    keeper = SimpleNamespace(begins_at=None)
    tracked = open_stage.tracked(
        stage,
        keeper,  # type: ignore[arg-type]
        specs=["one", "two", "absent", "three"],
        background=None,
        used={},
        beside=[beside],  # type: ignore[list-item]
    )
    with pytest.raises(ConnectionError, match="no server"), tracked:
        pass
    assert made == ["one", "two"]
    assert sorted(closed) == ["beside", "one", "two"]
