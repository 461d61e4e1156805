"""Rollouts: engines that sample completions, and the step that turns prompts into rollouts."""

from posttrain.rollout.collect import collect
from posttrain.rollout.engines import ENGINES

__all__ = ["ENGINES", "collect"]
