"""What the pieces of a section have declared of themselves; asking loads torch."""

from __future__ import annotations

from posttrain.algorithms.advantages import ADVANTAGES
from posttrain.algorithms.losses import POLICY_LOSSES
from posttrain.algorithms.pieces import Facts, facts, needed, smallest_group
from posttrain.config.resolved import RlSection
from posttrain.registry import look_up, resolve


def asked(rl: RlSection) -> frozenset[str]:
    """What the advantage takes from the batch beside rewards and groups."""
    return needed(resolve(rl.advantage, ADVANTAGES, kind="rl.advantage"))


def wants_greedy(rl: RlSection) -> bool:
    """Whether the advantage takes the greedy completion of every prompt for a baseline."""
    return "greedy_rewards" in asked(rl)


def compared(rl: RlSection) -> int:
    """How many completions of a prompt the advantage compares at least."""
    return smallest_group(resolve(rl.advantage, ADVANTAGES, kind="rl.advantage"))


def advantages_that_need(field: str) -> str:
    """The advantages of the table that take a field from the batch, in words."""
    return " or ".join(sorted(name for name in ADVANTAGES if field in needed(ADVANTAGES[name])))


def loss_facts(rl: RlSection) -> Facts:
    """What the policy loss has declared."""
    return facts(look_up(rl.loss["name"], POLICY_LOSSES, kind="rl.loss"))
