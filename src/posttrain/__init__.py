"""Reinforcement-learning post-training of language models: right, fast, readable.

``posttrain.algorithms`` is the mathematics; ``posttrain explain`` prints it.
"""

from posttrain.types import Batch, Completion, Prompt, Rollout, Score, Terms

__version__ = "0.1.0"

__all__ = ["Batch", "Completion", "Prompt", "Rollout", "Score", "Terms", "__version__"]
