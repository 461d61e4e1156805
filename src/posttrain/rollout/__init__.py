"""Rollouts: engines that sample completions, and the step that turns prompts into rollouts."""

from posttrain.rollout.collect import collect

__all__ = ["collect"]
