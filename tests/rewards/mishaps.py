"""What a reward may do to its worker, and rollouts to do it to."""

import os
import signal
import sys
import time
from collections.abc import Callable

from posttrain.rewards.scorer import RewardScorer
from posttrain.types import Prompt, Rollout, Turn

SECONDS = 2.0  # the limit where something hangs: the others have to keep it too
LATE = f"gave no answer within {SECONDS:g} s"
Pooled = Callable[..., RewardScorer]


def rollouts(count: int) -> list[Rollout]:
    return [
        Rollout(
            prompt=Prompt(id=f"p{n}", text="?", columns={"n": n}),
            turns=(
                Turn(tokens=(1,), logprobs=(0.0,), text=f"c{n}", stop_reason="stop", version=0),
            ),
            group=n,
        )
        for n in range(count)
    ]


def _interrupt() -> None:
    raise KeyboardInterrupt


# what a sample may do: its state, and what the reason must say
MISHAPS: dict[str, tuple[Callable[[], object], str, str]] = {
    "raises": (lambda: {}["x"], "invalid", "raised KeyError: 'x'"),
    "exits": (lambda: sys.exit(0), "invalid", "raised SystemExit: 0"),
    "interrupts": (_interrupt, "invalid", "raised KeyboardInterrupt"),
    "not a number": (lambda: float("nan"), "invalid", "returned nan"),
    "nothing": (lambda: None, "invalid", "returned None"),
    "sleeps": (lambda: time.sleep(60), "timeout", LATE),
    "loops": (lambda: sum(0 for _ in iter(int, 1)), "timeout", LATE),  # without taking memory
    "is killed": (
        lambda: os.kill(os.getpid(), signal.SIGKILL),
        "crashed",
        "ended its worker process (SIGKILL)",
    ),
    "leaves": (lambda: os._exit(0), "crashed", "ended its worker process (exit code 0)"),
    "too much memory": (lambda: bytearray(2**33), "invalid", "raised MemoryError"),
    "ignores signals": (
        lambda: [signal.signal(signal.SIGTERM, signal.SIG_IGN), time.sleep(60)],
        "timeout",
        LATE,
    ),
}
