"""What the advantage of a section asks for, beyond rollouts and their scores."""

from __future__ import annotations

from posttrain.algorithms.advantages import ADVANTAGES
from posttrain.algorithms.pieces import needed, smallest_group
from posttrain.config.sections import RlSection
from posttrain.registry import resolve


def asked(rl: RlSection) -> frozenset[str]:
    """What the advantage takes from the batch beside rewards and groups."""
    return needed(resolve(rl.advantage, ADVANTAGES, kind="rl.advantage"))


def wants_greedy(rl: RlSection) -> bool:
    """Whether the advantage takes the greedy completion of every prompt for a baseline."""
    return "greedy_rewards" in asked(rl)


def compared(rl: RlSection) -> int:
    """How many completions of a prompt the advantage compares at least."""
    return smallest_group(resolve(rl.advantage, ADVANTAGES, kind="rl.advantage"))
