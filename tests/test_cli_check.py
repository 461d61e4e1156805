"""``posttrain check`` in a terminal."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from command_line import command_in

from posttrain.check import Report


def test_the_time_is_that_of_the_whole_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """With what loading takes: the checks themselves were a part of it."""
    clock = SimpleNamespace(monotonic=iter([100.0, 123.0] * 2).__next__)
    monkeypatch.setattr("posttrain.cli.check.time", clock)
    quick = Report(lines=[], seconds=3.4)
    monkeypatch.setattr("posttrain.check.check_file", lambda *_, **__: quick)
    posttrain = command_in(tmp_path, columns=80, monkeypatch=monkeypatch, capsys=capsys)
    assert "in 23.0 s" in posttrain("check", "any.toml").out
    assert '"seconds": 23.0' in posttrain("check", "any.toml", "--json").out
