"""What the pieces that a section names declare about themselves; importing this loads torch."""

from __future__ import annotations

from posttrain.algorithms.advantages import ADVANTAGES
from posttrain.algorithms.losses import POLICY_LOSSES
from posttrain.algorithms.pieces import Facts, facts, needed, smallest_group
from posttrain.config.resolved import RlSection
from posttrain.registry import look_up, resolve


def advantage_needs(rl: RlSection) -> frozenset[str]:
    """The fields of the batch that the advantage needs beside rewards and groups."""
    return needed(resolve(rl.advantage, ADVANTAGES, kind="rl.advantage"))


def wants_greedy(rl: RlSection) -> bool:
    """Whether the advantage takes the greedy completion of every prompt for a baseline."""
    return "greedy_rewards" in advantage_needs(rl)


def min_group_size(rl: RlSection) -> int:
    """How many completions of a prompt the advantage compares at least."""
    return smallest_group(resolve(rl.advantage, ADVANTAGES, kind="rl.advantage"))


def advantages_that_need(field: str) -> str:
    """The advantages of the table that take a field from the batch, in words."""
    return " or ".join(sorted(name for name in ADVANTAGES if field in needed(ADVANTAGES[name])))


def loss_facts(rl: RlSection) -> Facts:
    """The declared facts of the policy loss."""
    return facts(look_up(rl.loss["name"], POLICY_LOSSES, kind="rl.loss"))
