"""An environment that fails as its prompt says, and notes down what was begun and closed."""

from __future__ import annotations

import ctypes
import itertools
import os
import random
import time
from pathlib import Path
from typing import Any

from posttrain.types import Observation, Prompt, Turn

TURNS = 3  # of the policy; the environment fails in the second
_NUMBERS = itertools.count()


class FaultyEnv:
    """Says what it draws from its seed; "well" ends with a score, other prompts fail by name.

    Prompts are named KIND/NUMBER; ``fails=False`` makes all of them well.
    """

    def __init__(self, folder: Path, *, fails: bool = True) -> None:
        self.folder, self.fails = folder, fails
        self.folder.mkdir(exist_ok=True)

    def start(self, prompt: Prompt, *, seed: int) -> dict[str, Any]:
        state = {
            "uid": f"{os.getpid()}-{next(_NUMBERS)}",
            "episode": f"{prompt.id}:{seed}",
            "kind": prompt.id.split("/")[0] if self.fails else "well",
            "draws": random.Random(seed),
            "turns": 0,
        }
        self.note("begun", state)
        return state

    def reply(self, state: dict[str, Any], turn: Turn) -> Any:
        state["turns"] += 1
        said = f"{turn.text}{state['draws'].random():.6f}?"
        if state["turns"] == 1 and state["kind"] == "fickle":
            return f"I am {os.getpid()}"
        if state["turns"] == 2:
            answer = getattr(self, f"_{state['kind']}")(state)
            if answer is not None:
                return answer
        return Observation(said, reward=0.25) if state["turns"] < TURNS else 1.0

    def close(self, state: dict[str, Any]) -> None:
        self.note("closed", state)
        if state["kind"] == "unclosed":
            raise OSError("cannot be closed")
        if state["kind"] == "closes_never":
            time.sleep(600)

    def note(self, what: str, state: dict[str, Any]) -> None:
        line = f"{what} {state['episode']} {state['uid']}\n".encode()
        file = os.open(self.folder / "notes", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, line)
        os.close(file)

    def notes(self, what: str) -> list[tuple[str, str]]:
        """(episode, state) of what was begun or closed, in order."""
        lines = [line.split() for line in (self.folder / "notes").read_text().splitlines()]
        return [(episode, uid) for said, episode, uid in lines if said == what]

    def _well(self, state: dict[str, Any]) -> None:
        time.sleep(0.01)  # so that others are under way when one fails

    _closes_never = _well

    def _unclosed(self, state: dict[str, Any]) -> None:
        time.sleep(0.5)  # under way when another one kills the worker

    def _raises_behind(self, state: dict[str, Any]) -> None:
        time.sleep(0.5)
        raise RuntimeError("no tool today")

    def _slow(self, state: dict[str, Any]) -> None:
        time.sleep(0.5)

    def _waits(self, state: dict[str, Any]) -> None:
        while not (self.folder / "enough").exists():
            time.sleep(0.01)

    def _raises(self, state: dict[str, Any]) -> None:
        raise RuntimeError("no tool today")

    def _exits(self, state: dict[str, Any]) -> None:
        raise SystemExit(3)

    def _hangs(self, state: dict[str, Any]) -> None:
        time.sleep(600)

    def _holds(self, state: dict[str, Any]) -> None:
        ctypes.PyDLL(None).sleep(600)  # and never lets another thread of its process run

    def _eats(self, state: dict[str, Any]) -> int:
        return len(bytearray(4 * 2**30))

    def _huge(self, state: dict[str, Any]) -> str:
        return "x" * 10**7

    def _kills(self, state: dict[str, Any]) -> None:
        os.kill(os.getpid(), 9)

    def _fickle(self, state: dict[str, Any]) -> None:
        mark = self.folder / state["episode"].replace("/", "-")
        if not mark.exists():  # the first time only: then it is played again
            mark.touch()
            os.kill(os.getpid(), 9)
