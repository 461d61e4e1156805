"""Runs that the tests of resuming compare with, or go on with."""

from pathlib import Path
from typing import Any

import pytest
from resumed_runs import GRPO, cut, given, go

from posttrain.runs.folder import RunFolder


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """The run of GRPO, whole."""
    return go(given(tmp_path_factory.mktemp("grpo") / "whole", GRPO))[0].folder


@pytest.fixture
def stopped(tmp_path: Path) -> dict[str, Any]:
    """The values of a run that died at its third checkpoint, after step 6."""
    values = given(tmp_path / "cut", GRPO)
    cut(values, save=3)
    return values
