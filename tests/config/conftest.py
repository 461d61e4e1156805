"""``pytestmark = pytest.mark.usefixtures("fake_tables")`` puts the tables of fakes.py in place."""

import sys

import pytest
from config.fakes import TABLES, module


@pytest.fixture
def fake_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TABLES:
        monkeypatch.setitem(sys.modules, name, module(name))
