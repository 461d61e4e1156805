"""The log of one run, step by step: every prompt, response, log-probability, reward and delta."""

from __future__ import annotations

from collections.abc import Callable
from typing import TextIO

from posttrain.walkthrough.settings import PROMPTS, Configuration, Schedule
from posttrain.walkthrough.training import Moment, train

# Responses stay the same within an epoch: two entries show how log-probabilities change.
STEPS_BETWEEN_RESPONSES = 5


def write_log(out: TextIO, configuration: Configuration, *, seed: int, schedule: Schedule) -> None:
    """Train one configuration from one seed and write down every step."""
    out.write(f"# {configuration}, seed {seed}\n")
    out.write("# loss and reward are means over all prompts and responses of the step;\n")
    out.write("# log_probs are those of the policy before the step's update\n")
    train([configuration], seeds=[seed], schedule=schedule, watch=_writer(out))


def _writer(out: TextIO) -> Callable[[Moment], None]:
    def write(moment: Moment) -> None:
        rewards = moment.batch.need("rewards")
        out.write(
            f"epoch {moment.epoch:3d}  step {moment.step}  loss {moment.losses[0]:+.3f}  "
            f"mean reward {rewards.mean():.3f}\n"
        )
        if moment.step % STEPS_BETWEEN_RESPONSES == 0:
            out.writelines(_responses(moment))

    return write


def _responses(moment: Moment) -> list[str]:
    batch, size = moment.batch, len(moment.batch.tokens) // len(PROMPTS)
    rows = zip(
        batch.tokens.tolist(),
        moment.logprobs.tolist(),
        batch.need("rewards").tolist(),
        batch.need("advantages")[:, 0].tolist(),
        strict=True,
    )
    lines = []
    for number, (response, logprobs, reward, delta) in enumerate(rows):
        if number % size == 0:
            lines.append(f"  prompt {list(PROMPTS[number // size])}\n")
        numbers = ", ".join(f"{value:+.3f}" for value in logprobs)
        lines.append(
            f"    response {response}  log_probs [{numbers}]  reward {reward:.0f}  "
            f"delta {delta:+.3f}\n"
        )
    return lines
