"""Every attack on the grader of code is really run, and fails; the weak graders show it is one."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sandbox.attacks import LIMITS, Attack
from sandbox.attacks_forgery import ATTACKS
from sandbox.security_page import PAGE, attack_table

from posttrain.rewards.code import code_tests
from posttrain.sandbox import available
from posttrain.types import Score

WHY_NOT = available()[0].why_not
needs_sandbox = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "there is a sandbox")
SECRET = "a secret in our environment"


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What the attacks are after: a file, a port that answers, a variable of a process of ours."""
    folder = tmp_path_factory.mktemp("ours")
    (folder / "secret").write_text("secret")
    victim = subprocess.Popen(["sleep", "300"], env={"POSTTRAIN_SECRET": SECRET})
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=_accept, args=(server,), daemon=True).start()
        port = str(server.getsockname()[1])
        yield {"@FOLDER@": str(folder), "@PORT@": port, "@HOST@": socket.gethostname()}
        server.shutdown(socket.SHUT_RDWR)
    victim.kill()
    victim.wait()


def _accept(server: socket.socket) -> None:
    while True:
        try:
            server.accept()[0].close()
        except OSError:
            return


def graded(attack: Attack, targets: dict[str, str], **options: Any) -> Score:
    code = attack.code
    for mark, target in targets.items():
        code = code.replace(mark, target)
    # One that hangs is not waited for; the others have time also on a machine under load.
    hangs = attack.happens in ("no answer within", "timeout")
    limits = LIMITS | {"seconds": 1.0 if hangs else 20.0} | options
    return code_tests(code, attack.tests, extract="whole", **limits)


@needs_sandbox
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_scores_nothing(
    name: str, targets: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POSTTRAIN_SECRET", SECRET)
    attack = ATTACKS[name]
    score = graded(attack, targets)
    assert (score.value, score.state) == (0.0, "ok"), score
    assert attack.happens in score.reason
    assert sorted(os.listdir(targets["@FOLDER@"])) == ["secret"]
    assert SECRET not in score.reason


@pytest.mark.parametrize("name", [name for name in ATTACKS if ATTACKS[name].control == "none"])
def test_the_attack_gets_through_without_a_sandbox(name: str, targets: dict[str, str]) -> None:
    if name in ("read /etc/shadow", "read home", "chroot", "setuid") and os.geteuid():
        pytest.skip("only root may do that")
    score = graded(ATTACKS[name], targets, sandbox="none", memory_mb=1024)
    (Path(targets["@FOLDER@"]) / "new").unlink(missing_ok=True)
    assert score.value == 1.0, score


@pytest.mark.parametrize("name", [name for name in ATTACKS if ATTACKS[name].control == "naive"])
def test_the_attack_fools_a_naive_grader(name: str) -> None:
    """One that appends the tests to the code, and takes exit status 0 for a pass."""
    attack = ATTACKS[name]
    text = f"{attack.code}\n{attack.tests}\n"
    result = subprocess.run(
        [sys.executable, "-I", "-c", text], capture_output=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr.decode()


def test_there_are_enough_attacks() -> None:
    assert len(ATTACKS) >= 35
    assert {attack.control for attack in ATTACKS.values()} == {"", "none", "naive"}


def test_the_page_lists_every_attack() -> None:
    """Where this fails: python tests/sandbox/security_page.py."""
    assert attack_table(ATTACKS) in PAGE.read_text(encoding="utf-8")


def test_what_a_worker_sees_of_the_tests() -> None:
    """The requests that reach the solution's process hold arguments, and no expected value."""
    spy = (
        "import posttrain.sandbox.worker as worker\n"
        "seen = []\n"
        "answer = worker.Worker.answer\n"
        "def spying(self, request):\n    seen.append(request)\n    return answer(self, request)\n"
        "worker.Worker.answer = spying\n"
        "def solve(n): return repr(seen)\n"
    )
    told = code_tests(
        spy,
        "assert len(solve(12345)) < 200\nassert 'no' + 'pe' in solve(12345)",
        extract="whole",
        partial=True,
        sandbox="none",
    )
    assert told.value == 0.5, json.dumps(told.reason)
