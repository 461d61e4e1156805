"""Models of the hub without a connection: told at once, and taken from the cache where they are."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_model import OPTIONS

from posttrain.models.files.hub import why_unreachable
from posttrain.models.load import load_policy
from posttrain.models.save import save_policy

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LOADS = "from posttrain.models.load import load_policy\nprint(load_policy({name!r}).source)"
SCORES = "from posttrain.models.reward import load_reward\nload_reward({name!r})"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home of the hub's cache, with one model in it."""
    cached = tmp_path / "hub" / "models--me--tiny"
    save_policy(load_policy("tiny", options=OPTIONS), tmp_path / "tiny")
    shutil.copytree(tmp_path / "tiny", cached / "snapshots" / COMMIT)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(COMMIT)
    return tmp_path


@pytest.fixture
def closed() -> Iterator[str]:
    """An address that refuses every connection."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


def python(code: str, *, home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code where the hub's library sees this home: it reads its settings once, on import."""
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRANSFORMERS_"))}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**keep, "HF_HOME": str(home), "NO_PROXY": "*", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("offline", [True, False], ids=["HF_HUB_OFFLINE", "no connection"])
def test_a_missing_name_is_told_without_a_retry(home: Path, closed: str, offline: bool) -> None:
    given = {"HF_HUB_OFFLINE": "1"} if offline else {"HF_ENDPOINT": closed}
    reason = "HF_HUB_OFFLINE is set" if offline else f"{closed} does not answer"
    for code in (LOADS, SCORES):
        said = python(code.format(name="nobody/nothing"), home=home, **given).stderr
        assert reason in said
        assert "Retry" not in said
        assert "give the folder" in said


@pytest.mark.slow
@pytest.mark.parametrize("offline", [True, False], ids=["HF_HUB_OFFLINE", "no connection"])
def test_what_is_in_the_cache_still_loads(home: Path, closed: str, offline: bool) -> None:
    given = {"HF_HUB_OFFLINE": "1"} if offline else {"HF_ENDPOINT": closed}
    said = python(LOADS.format(name="me/tiny"), home=home, **given)
    assert said.stdout == "me/tiny\n", said.stderr
    assert "Retry" not in said.stderr


def test_whatever_the_hub_answers_it_can_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only silence counts: a 404 or a page that is no HTTP shows that someone is there."""
    import http.server
    import threading

    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    try:
        assert why_unreachable() == ""
    finally:
        server.shutdown()
        server.server_close()
    assert "does not answer" in why_unreachable()
